"""One tokenizer without a model for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.render import Renderer
from model_fixtures import save_tiny_tokenizer


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def renderer(tokenizer_folder: Path) -> Renderer:
    return Renderer.load(tokenizer_folder)
