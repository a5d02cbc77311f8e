"""A directory for a pool, and machines on it that are closed at the end, whose books are then looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pool_kit
import pytest


@pytest.fixture
def root() -> Iterator[Path]:
    with pool_kit.folder() as path:
        yield path


@pytest.fixture
def machine(root: Path) -> Iterator[Callable[..., pool_kit.Machine]]:
    machines: list[pool_kit.Machine] = []

    def make(**options: Any) -> pool_kit.Machine:
        machines.append(pool_kit.Machine(root, **options))
        return machines[-1]

    yield make
    for one in machines:
        if not one.tier._closed:
            one.wait(1)
            assert one.tier.check() == []
    for one in machines:
        one.close()
