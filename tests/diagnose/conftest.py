"""The three families of tokenizers, each loaded once."""

from __future__ import annotations

import pytest

from diagnose.families import FAMILIES
from headstart.render import Renderer


@pytest.fixture(scope="session")
def renderers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Renderer]:
    return {name: Renderer.load(make(tmp_path_factory.mktemp(name)), light=True) for name, make in FAMILIES.items()}
