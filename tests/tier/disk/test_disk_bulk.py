"""A journal that is loaded in columns leaves the books as one that is read record by record, whatever stands in it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import xxhash
from disk_kit import CAPACITY, Clock, found, keys, save
from hypothesis import given, settings

from headstart.block.framing import frame
from headstart.testing.fake_kv import TINY
from headstart.tier.disk import DiskTier
from headstart.tier.disk.books import Books
from headstart.tier.disk.bulk import AddedColumns, UsedColumns, decode_bulk
from headstart.tier.disk.journal import JournalTail
from headstart.tier.disk.records import (
    ClassRaised,
    Decoded,
    ExtentAdded,
    ExtentName,
    Pin,
    Pinned,
    Raise,
    Record,
    Removed,
    RepresentationDeclared,
    SegmentName,
    SegmentOpened,
    SegmentSealed,
    Snapshot,
    Touched,
    Unknown,
    decode_records,
    encode_record,
)

WRITER, GENERATION = bytes(range(16)), 3
KEYS = [bytes([number]) * 16 for number in range(12)]

# Few names and few blocks, so that records meet.
NAMES = [SegmentName(WRITER, 0), SegmentName(WRITER, 1), SegmentName(b"w" * 16, 1)]
segments = st.sampled_from(NAMES)
names = st.builds(ExtentName, segments, st.integers(1, 6).map(lambda n: 4096 * n))
uses = st.integers(0, 1000)
blocks = st.lists(st.sampled_from(KEYS), max_size=4).map(b"".join)
fields = st.lists(st.builds(frame, st.sampled_from([3, *range(5, 256)]), st.binary(max_size=8)), max_size=1).map(b"".join)
words = st.sampled_from(["agent", "chat", ""])
added = st.builds(
    ExtentAdded,
    names,
    st.sampled_from([4096, 8192] * 20 + [1 << 50]),
    st.just(4096),
    st.integers(0, 5000),
    uses,
    words,
    st.sampled_from(KEYS),
    blocks,
    st.integers(0, 1),
    fields,
    words,
    st.sampled_from([0] * 8 + [7, 9]),
)
KEY_IDS = frozenset({0, 7})
digests = st.sampled_from([b"r" * 32, b"s" * 32])
records = st.one_of(
    added,
    added,
    added,
    st.builds(SegmentOpened, segments, st.just(4096), st.just(1 << 20), st.just(1), digests),
    st.builds(SegmentOpened, segments, st.just(4096), st.just(1 << 20), st.just(1), st.just(b"r" * 32)),
    st.builds(SegmentSealed, segments, st.just(9 << 12)),
    st.builds(Touched, st.lists(st.tuples(names, uses), max_size=6).map(tuple)),
    st.builds(ClassRaised, uses, st.lists(st.builds(Raise, names, uses, words), max_size=2).map(tuple)),
    st.builds(Pinned, st.lists(st.builds(Pin, names, uses, uses), max_size=2).map(tuple)),
    st.builds(Removed, uses, words, st.lists(st.tuples(names, blocks), max_size=3).map(tuple), st.booleans()),
    st.builds(Snapshot, uses, st.just(0)),
    st.builds(RepresentationDeclared, st.binary(max_size=4)),
    st.builds(Unknown, st.integers(200, 255), st.binary(max_size=20)),
)


opened = st.sets(segments).map(lambda some: [SegmentOpened(name, 4096, 1 << 20, 1, b"r" * 32) for name in sorted(some)])
stretches = st.one_of(st.lists(records, max_size=6), st.lists(added, min_size=3, max_size=12))
journals_of = st.builds(lambda first, others: [*first, *chain.from_iterable(others)], opened, st.lists(stretches, max_size=5))


def journal(written: list[Record]) -> bytearray:
    data = bytearray()
    for record in written:
        data += encode_record(record, writer=WRITER, generation=GENERATION, offset=len(data))
    return data


def what_they_say(books: Books) -> dict[str, object]:
    """Everything that books can be asked, by names instead of rows."""
    located = []
    for representation in (b"r" * 32, b"s" * 32):
        ids, positions = books.locate(representation, KEYS)
        for extent, position in zip(ids.tolist(), positions.tolist(), strict=True):
            row = None if extent < 0 else books.row(extent)
            located.append(None if row is None else (books.name(row), position))
        for extent in [] if (states := books.states(representation, KEYS)) is None else states.tolist():
            row = None if extent < 0 else books.row(extent)
            located.append(None if row is None else (books.name(row), -1))
        located.append(books.hidden(representation, KEYS))
    extents = {}
    for row in books.living().tolist():
        info = books.info(row)
        extents[books.name(row)] = replace(info, id=info.id * 0), books.added_record(row)
    return {
        "extents": extents,
        "located": located,
        "segments": {
            name: (s.end, s.opened, s.sealed, s.stale, s.live_bytes, s.blocks, sorted(s.rows), list(s.dead), s.representation)
            + ((s.check_key, s.hidden) if s.rows else ())
            for name, s in books.segments.items()
            if s.opened or s.rows or s.dead
        },
        "removals": list(books.removals),
        "sums": (books.live_bytes, books.blocks, books.extents, books.counter, books.bytes_by_class(), books.bytes_by_tenant()),
        "snapshot": [record for part in books.snapshot(1000) for record in part if not isinstance(record, Removed)],
    }


@settings(max_examples=300)
@given(st.lists(journals_of, min_size=1, max_size=3), st.data())
def test_books_loaded_in_columns_are_those_read_record_by_record(journals: list[list[Record]], data: st.DataObject) -> None:
    largest_bytes = data.draw(st.sampled_from([None, None, 4096]))
    slow, fast = (Books(key_ids=KEY_IDS, largest_bytes=largest_bytes) for _ in range(2))
    for written in journals:
        encoded = journal(written)
        if encoded and data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(encoded) - 1))
            if data.draw(st.booleans()):
                del encoded[at:]
            else:
                encoded[at] ^= 1 << at % 8
        view, own = memoryview(bytes(encoded)), data.draw(st.booleans())
        wanted, got = Decoded(0), Decoded(0)
        slow.apply(list(decode_records(view, writer=WRITER, generation=GENERATION, offset=0, state=wanted)), own=own)
        fast.apply(decode_bulk(view, writer=WRITER, generation=GENERATION, offset=0, state=got), own=own)
        assert got == wanted
    slow.finish_loading()
    fast.finish_loading()
    assert what_they_say(fast) == what_they_say(slow)
    assert fast.too_large == slow.too_large


GOOD = ExtentAdded(ExtentName(SegmentName(WRITER, 1), 4096), 8192, 4096, 6, 8, "agent", b"o" * 16, b"p" * 32)


def test_which_key_a_segment_was_sealed_with_is_told_by_the_first_extent_that_was_there_at_the_time() -> None:
    """The first one is removed behind the others, and counts all the same: in columns as record by record."""
    segment = SegmentName(WRITER, 1)
    first, second, third = (
        replace(GOOD, extent=ExtentName(segment, at << 12), check_key=key) for at, key in ((1, 0), (3, 7), (5, 0))
    )
    gone = Removed(1, "capacity", ((first.extent, b""),))
    data = memoryview(bytes(journal([SegmentOpened(segment, 4096, 1 << 20, 1, b"r" * 32), first, second, third, gone])))
    slow, fast = (Books(key_ids=KEY_IDS) for _ in range(2))
    slow.apply(list(decode_records(data, writer=WRITER, generation=GENERATION, offset=0, state=Decoded(0))), own=True)
    fast.apply(decode_bulk(data, writer=WRITER, generation=GENERATION, offset=0, state=Decoded(0)), own=True)
    slow.finish_loading()
    fast.finish_loading()
    assert what_they_say(fast) == what_they_say(slow)
    assert list(fast.segments[segment].rows) == [5 << 12]


def test_a_segment_that_is_opened_again_and_again_is_read_in_columns_too() -> None:
    """As only a wrong writer's journal says. Between two of them there may be no extent, and no columns."""
    segment = SegmentName(WRITER, 1)
    again = SegmentOpened(segment, 4096, 1 << 20, 1, b"r" * 32)
    first, second = (replace(GOOD, extent=ExtentName(segment, at << 12)) for at in (1, 3))
    data = memoryview(bytes(journal([again, again, first, again, again, second, again])))
    slow, fast = (Books(key_ids=KEY_IDS) for _ in range(2))
    slow.apply(list(decode_records(data, writer=WRITER, generation=GENERATION, offset=0, state=Decoded(0))), own=True)
    fast.apply(decode_bulk(data, writer=WRITER, generation=GENERATION, offset=0, state=Decoded(0)), own=True)
    slow.finish_loading()
    fast.finish_loading()
    assert what_they_say(fast) == what_they_say(slow)


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 5])
def test_a_record_behind_shorter_ones_is_checked_as_any_other(at: int) -> None:
    """Records of 13 bytes leave no room in front of the next one, where what goes into its check is written."""
    short = Unknown(200, b"")
    written = [short] * at + [GOOD] + [short] * (5 - at) + [GOOD, short, GOOD]
    good = journal(written)
    for wrong in (None, *range(0, len(good), 7)):
        data = bytearray(good)
        if wrong is not None:
            data[wrong] ^= 1
        wanted, got = Decoded(0), Decoded(0)
        records = list(decode_records(memoryview(data), writer=WRITER, generation=GENERATION, offset=0, state=wanted))
        loaded = decode_bulk(memoryview(data), writer=WRITER, generation=GENERATION, offset=0, state=got)
        assert got == wanted
        assert sum(len(one) if isinstance(one, AddedColumns) else 1 for one in loaded) == len(records)


def with_number(record: ExtentAdded, at: int, width: int, number: int) -> bytes:
    """Encode a record with another number in it and a check that holds."""
    data = bytearray(encode_record(record, writer=WRITER, generation=GENERATION, offset=0))
    data[5 + at : 5 + at + width] = number.to_bytes(width, "little")
    place = WRITER + GENERATION.to_bytes(4, "little") + bytes(8)
    data[-8:] = xxhash.xxh3_64_digest(place + bytes(data[:-8]))
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "width", "number"),
    [(20, 8, 1 << 62), (28, 8, 1 << 62), (36, 4, 1 << 31), (40, 8, 1 << 62), (48, 8, 1 << 56), (60, 4, 3), (60, 4, 2**32 - 1)],
)
def test_a_number_that_no_extent_can_have_ends_the_journal_in_columns_too(at: int, width: int, number: int) -> None:
    state = Decoded(0)
    data = with_number(GOOD, at, width, number)
    assert decode_bulk(memoryview(data), writer=WRITER, generation=GENERATION, offset=0, state=state) == []
    assert (state.end, state.stopped) == (0, "unreadable")


def test_most_of_a_journal_is_in_columns(tmp_path: Path) -> None:
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY, clock=Clock())
    for seed in range(40):
        assert save(tier, seed)
    writer, directory, disk = tier._store.writer, tier._store.directory, tier._store.disk
    tail = JournalTail(disk, directory, writer=writer, generation=0)
    loaded = tail.load()
    assert sum(len(one) for one in loaded if isinstance(one, AddedColumns)) == 40
    assert not any(isinstance(one, ExtentAdded) for one in loaded)
    tail.close()
    before = {info.keys: info.last_used for info in tier.scan()}
    tier.close()
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=CAPACITY, clock=Clock())
    assert {info.keys: info.last_used for info in tier.scan()} == before
    assert found(tier, range(40)) == set(range(40))
    assert (tier.locate(TINY.digest, [key for seed in range(40) for key in keys(seed)]).extents >= 0).all()
    assert tier.check() == []
    tier.close()


def test_a_use_that_nobody_can_have_reached_is_refused() -> None:
    written = Touched(((ExtentName(SegmentName(WRITER, 1), 4096), (1 << 56) - 1),))
    data = bytearray(journal([written]))
    data[5 + 28 : 5 + 36] = (1 << 56).to_bytes(8, "little")
    data[-8:] = xxhash.xxh3_64_digest(WRITER + GENERATION.to_bytes(4, "little") + bytes(8) + bytes(data[:-8]))
    state = Decoded(0)
    assert decode_bulk(memoryview(bytes(data)), writer=WRITER, generation=GENERATION, offset=0, state=state) == []
    assert state.stopped == "unreadable"


def test_uses_are_grouped_by_segment() -> None:
    rng = np.random.default_rng(1)
    uses = [(ExtentName(SegmentName(rng.bytes(15) + b"\0", int(n % 3)), int(n)), int(n)) for n in rng.integers(0, 99, 50)]
    loaded = decode_bulk(
        memoryview(bytes(journal([Touched(tuple(uses))]))), writer=WRITER, generation=GENERATION, offset=0, state=Decoded(0)
    )
    [columns] = loaded
    assert isinstance(columns, UsedColumns)
    got = [
        (ExtentName(name, o), u)
        for name, offsets, used in columns.groups()
        for o, u in zip(offsets.tolist(), used.tolist(), strict=True)
    ]
    assert sorted(got) == sorted(uses)
