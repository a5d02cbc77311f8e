"""Arrays that grow keep what is in them, are zero beyond it, and never change under somebody who still looks at the old one."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from headstart.tier.growing import Maps


class Owner:
    def __init__(self) -> None:
        self.maps = Maps()
        self.numbers = np.arange(10, dtype=np.int64)
        self.pairs = np.arange(20, dtype=np.uint8).reshape(10, 2)

    def resize(self, rows: int) -> None:
        self.maps.resize(self, ("numbers", "pairs"), rows)


@pytest.mark.parametrize("lengths", [[11, 5000, 70_000], [5000, 20, 9000], [3, 10]])
def test_what_was_there_stays_and_what_is_new_is_zero(lengths):
    owner = Owner()
    kept = 10
    for length in lengths:
        owner.resize(length)
        kept = min(kept, length)
        assert owner.numbers.shape == (length,)
        assert owner.pairs.shape == (length, 2)
        assert owner.numbers[:kept].tolist() == list(range(kept))
        assert owner.pairs[:kept].tolist() == [[2 * at, 2 * at + 1] for at in range(kept)]
        assert not owner.numbers[kept:].any()
        assert not owner.pairs[kept:].any()
        owner.numbers[kept:] = 7
        owner.numbers[kept:] = 0
    owner.numbers[:] = 1


def test_a_part_of_a_page_that_was_cut_does_not_come_back():
    owner = Owner()
    owner.resize(100)
    owner.numbers[:] = 7
    owner.resize(50)
    owner.resize(100)
    assert owner.numbers.tolist() == [7] * 50 + [0] * 50


def test_who_still_looks_at_the_old_array_keeps_it_as_it_was():
    owner = Owner()
    owner.resize(1000)
    old = owner.numbers[:10]
    owner.resize(100_000)
    owner.numbers[:10] = 5
    assert old.tolist() == list(range(10))
    assert len(owner.numbers) == 100_000


def test_without_memory_the_old_array_stays(monkeypatch):
    owner = Owner()

    def refuse(*_arguments: object, **_more: object) -> mmap.mmap:
        raise OSError(12, "no memory")

    monkeypatch.setattr("headstart.tier.growing.mmap.mmap", refuse)
    with pytest.raises(MemoryError, match="numbers"):
        owner.resize(1000)
    assert owner.numbers.tolist() == list(range(10))
