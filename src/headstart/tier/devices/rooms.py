"""How large the file systems are that directories lie on, asked with patience: one that hangs holds nobody up."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from headstart.policy.placement import Room
from headstart.tier.lookup_thread import ask_apart

PATIENCE_S = 5.0


def room_of(directory: Path) -> Room:
    """Return the file system that a directory is or will be on. Raises OSError."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return Room(os.stat(there).st_dev, shutil.disk_usage(there).total)


def rooms_of(directories: Sequence[Path], *, patience_s: float = PATIENCE_S) -> list[Room | None]:
    """As `room_of` for each; None where it cannot be told, or not in time. Raises nothing."""
    answers = ask_apart({path: partial(room_of, path) for path in directories}, patience_s=patience_s)
    return [found if isinstance(found := answers[path], Room) else None for path in directories]
