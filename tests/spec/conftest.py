"""The shelf that every promise is tried on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shelf import Shelf


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Shelf]:
    with Shelf(tmp_path / "kv") as shelf:
        yield shelf
