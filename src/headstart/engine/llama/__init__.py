"""GGUF models through libllama, with continuous batching and the prefix cache below.

`open_engine(file, config, on_progress=…)` is the door. Needs the extra `headstart[llama]`, or `engine.libllama`; torch is not
needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.config import Config

if TYPE_CHECKING:
    from headstart.engine.llama.engine import LlamaEngine

__all__ = ["open_engine"]


def open_engine(file: Path, config: Config, *, on_progress: Callable[[str, float | None], None]) -> LlamaEngine:
    """Return an engine that serves the GGUF `file`, warmed up. `on_progress(stage, fraction)` is told on the way.

    Raises ModelError for a file that cannot be read or served, MissingExtra, ConfigError. A cache that cannot be opened is no
    error: the engine serves without and `info.cache` says why."""
    from headstart.engine.llama.opening import open_engine

    return open_engine(file, config, on_progress=on_progress)
