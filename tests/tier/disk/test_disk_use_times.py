"""When extents were used last: from notes in journals, never later than it was, and not much earlier."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.testing.fake_kv import TINY, FakeKV
from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import Decoded, UsesTimed, decode_records, encode_record
from headstart.tier.disk.use_times import UseTimes
from headstart.tier.surveying import surveyed

NOW_MS = 10_000_000
CAPACITY = 16 << 20


def times(notes: UseTimes, *uses: int) -> list[int]:
    return [int(ms) for ms in notes.of(np.array(uses, np.int64), now_ms=NOW_MS)]


def test_a_use_is_as_old_as_the_first_note_that_reached_it() -> None:
    notes = UseTimes()
    notes.note([(20, 2000), (10, 1000)])
    assert times(notes, 5, 10, 11, 20, 21) == [1000, 1000, 2000, 2000, NOW_MS]
    assert times(UseTimes(), 1) == [NOW_MS]


def test_a_clock_that_was_ahead_makes_nothing_younger_than_what_came_later() -> None:
    notes = UseTimes()
    notes.note([(10, NOW_MS + 5), (20, 2000)])
    assert times(notes, 10, 20) == [2000, 2000]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=2000))
def test_however_many_notes_are_taken_few_are_kept_and_nothing_gets_older(steps: list[int]) -> None:
    counters = np.cumsum(steps).tolist()
    notes, told = UseTimes(), UseTimes()
    for counter in counters:
        notes.note([(counter, counter * 10)])
    told.note(notes.record().notes)  # type: ignore[union-attr]
    assert len(told) == len(notes) <= 256
    uses = np.array(counters, np.int64)
    found = told.of(uses, now_ms=NOW_MS)
    assert (found >= uses * 10).all()
    assert found[-1] == counters[-1] * 10


def test_notes_are_read_as_they_were_written() -> None:
    record = UsesTimed(((3, 1_800_000_000_000), (9, 1_800_000_005_000)))
    data = encode_record(record, writer=b"w" * 16, generation=2, offset=100)
    state = Decoded(0)
    assert list(decode_records(memoryview(data), writer=b"w" * 16, generation=2, offset=100, state=state)) == [record]


def test_times_outlive_journals_that_are_begun_anew(tmp_path: Path) -> None:
    wall_s = 1_800_000_000.0

    def opened() -> DiskTier:
        return DiskTier.open(tmp_path, capacity_bytes=CAPACITY, clock=lambda: 100.0, wall_clock=lambda: wall_s)

    tier = opened()
    tier.write(FakeKV(TINY, range(640)).image(0, 10), TINY)
    tier._store.upkeep.flush_touches()
    tier._store.upkeep.begin()
    tier.close()
    wall_s += 3600.0
    tier = opened()
    [survey] = surveyed(tier, now_ms=0)
    [info] = tier.scan()
    assert survey.facts.idle_ms.tolist() == [3_600_000]
    assert info.used_ms == 1_800_000_000_000
    assert survey.facts.blocks.tolist() == [10]
    tier.close()
