"""Hugging Face decoders through our own attention and KV memory, with continuous batching and the prefix cache below.

`open_engine(folder, config, on_progress=…)` is the door. Needs the extra `headstart[torch]`; nothing is imported before.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.config import Config, prefer_sleeping_threads
from headstart.errors import MissingExtra

if TYPE_CHECKING:
    from headstart.engine.torch.engine import TorchEngine

__all__ = ["open_engine"]


def open_engine(folder: Path, config: Config, *, on_progress: Callable[[str, float | None], None]) -> TorchEngine:
    """Return an engine that serves the checked model in `folder`, warmed up. `on_progress(stage, fraction)` is told on the way.

    Raises ModelError for a model that cannot be read or served, MissingExtra, ConfigError. A cache that cannot be opened is
    no error: the engine serves without and `info.cache` says why."""
    prefer_sleeping_threads()
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtra(
            f"running a model needs {error.name or 'torch'}; install it with: pip install 'headstart[torch]'", extra="torch"
        ) from error
    from headstart.engine.torch.opening import open_engine

    return open_engine(folder, config, on_progress=on_progress)
