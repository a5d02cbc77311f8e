"""Tiny GGUF files, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gguf_fixtures import Kind, make_gguf
from headstart.engine.llama.binding import Library


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Kind], Path]:
    made: dict[Kind, Path] = {}
    folder = tmp_path_factory.mktemp("gguf")

    def get(kind: Kind) -> Path:
        if kind not in made:
            made[kind] = make_gguf(folder / f"{kind}.gguf", kind)
        return made[kind]

    return get


@pytest.fixture(scope="session")
def library() -> Library:
    return Library()
