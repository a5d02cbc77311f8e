"""The renderer of a model whose weights are not needed: of a folder with tokenizer.json, or of a GGUF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headstart.cli.progress import OnProgress
from headstart.config import Config

if TYPE_CHECKING:
    from headstart.render import Renderer


def renderer_of(config: Config, *, on_progress: OnProgress) -> Renderer:
    """Return the renderer of the configured model. Raises ModelError or MissingExtra."""
    from headstart.engine.models import resolve_tokenizer
    from headstart.render import Renderer

    found = resolve_tokenizer(config.model, config.models_directory, on_progress=on_progress)
    return _of_gguf(found, config) if found.is_file() else Renderer.load(found, light=True)


def _of_gguf(file: Path, config: Config) -> Renderer:
    from headstart.engine.llama.binding import Library
    from headstart.engine.llama.weights import Weights
    from headstart.render import GGUFRenderer

    library = Library(Path(config.engine.libllama).expanduser() if config.engine.libllama else None)
    weights = Weights(library, file, vocabulary_only=True)
    try:
        return GGUFRenderer(weights.vocabulary, template=weights.chat_template)  # which keeps what it needs of them
    finally:
        weights.close()
