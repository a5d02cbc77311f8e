"""A folder of its own on the machine's file system in memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def shared_memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headstart-test-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)
