"""A bucket in memory, and machines on it that are closed at the end, whose books are then looked at."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "pool"))
obstore_store = pytest.importorskip("obstore.store")

import object_kit  # noqa: E402


@pytest.fixture
def store() -> Any:
    return obstore_store.MemoryStore()


@pytest.fixture
def machine(store: Any) -> Iterator[Callable[..., object_kit.Machine]]:
    machines: list[object_kit.Machine] = []

    def make(**options: Any) -> object_kit.Machine:
        machines.append(object_kit.Machine(store, **options))
        return machines[-1]

    yield make
    for one in machines:
        if not one.tier._closed:
            one.wait(1)
            assert one.tier.check() == []
    for one in machines:
        one.close()
