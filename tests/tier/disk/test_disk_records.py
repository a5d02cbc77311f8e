"""Journal records and segment headers: what is written is read, and nothing else is."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given

from headstart.block.framing import frame
from headstart.errors import ExtentCorrupt
from headstart.testing.fake_kv import OPAQUE, TINY
from headstart.tier.disk.records import (
    HEADER_BYTES,
    MAX_PAYLOAD_BYTES,
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
    decode_journal_header,
    decode_records,
    encode_journal_header,
    encode_record,
    encoded_bytes,
    removed_records,
)
from headstart.tier.disk.segment import SegmentHeader, decode_segment_header, encode_segment_header, segment_capacity

WRITER = bytes(range(16))
GENERATION = 3

u31, u32, u62 = st.integers(0, 2**31 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**62 - 1)
sequences, uses = st.integers(0, 2**30 - 1), st.integers(0, 2**56 - 1)
segments = st.builds(SegmentName, st.binary(min_size=16, max_size=16), sequences)
names = st.builds(ExtentName, segments, u62)
prefixes = st.integers(0, 4).flatmap(lambda n: st.binary(min_size=16 * n, max_size=16 * n))
words = st.text(max_size=20)
fields = st.lists(st.builds(frame, st.sampled_from([3, *range(5, 256)]), st.binary(max_size=8)), max_size=2).map(b"".join)
records = st.one_of(
    st.builds(RepresentationDeclared, st.binary(max_size=50)),
    st.builds(SegmentOpened, segments, u31, u62, u62, st.binary(min_size=32, max_size=32)),
    st.builds(SegmentSealed, segments, u62),
    st.builds(
        ExtentAdded, names, u62, u31, u62, uses, words, st.binary(min_size=16, max_size=16), prefixes, u32, fields, words, u32
    ).map(lambda added: replace(added, header_bytes=min(added.header_bytes, added.extent_bytes, 256 << 20))),
    st.builds(Touched, st.lists(st.tuples(names, uses), max_size=4).map(tuple)),
    st.builds(ClassRaised, u62, st.lists(st.builds(Raise, names, u62, words), max_size=4).map(tuple)),
    st.builds(Pinned, st.lists(st.builds(Pin, names, u62, uses), max_size=4).map(tuple)),
    st.builds(Removed, u62, words, st.lists(st.tuples(names, prefixes), max_size=4).map(tuple), st.booleans()),
    st.builds(Snapshot, uses, sequences),
    st.builds(Unknown, st.integers(200, 255), st.binary(max_size=20)),
)

SAMPLE: list[Record] = [
    Snapshot(7, 2),
    RepresentationDeclared(TINY.encode()),
    SegmentOpened(SegmentName(WRITER, 1), 4096, 1 << 20, 5, TINY.digest),
    ExtentAdded(ExtentName(SegmentName(WRITER, 1), 4096), 8192, 4096, 6, 8, "agent", b"o" * 16, b"p" * 32),
    Touched(((ExtentName(SegmentName(WRITER, 1), 4096), 9),)),
    ClassRaised(7, (Raise(ExtentName(SegmentName(WRITER, 1), 4096), 99, "chat"),)),
    Pinned((Pin(ExtentName(SegmentName(WRITER, 1), 4096), 99, 10),)),
    Removed(10, "capacity", ((ExtentName(SegmentName(WRITER, 1), 4096), b"p" * 32),)),
    SegmentSealed(SegmentName(WRITER, 1), 12288),
]


def journal(written: list[Record], *, offset: int = HEADER_BYTES) -> bytearray:
    data = bytearray()
    for record in written:
        data += encode_record(record, writer=WRITER, generation=GENERATION, offset=offset + len(data))
    return data


def read(data: bytes | bytearray, *, offset: int = HEADER_BYTES, writer: bytes = WRITER) -> tuple[list[Record], Decoded]:
    state = Decoded(0)
    found = list(decode_records(memoryview(data), writer=writer, generation=GENERATION, offset=offset, state=state))
    return found, state


@given(st.lists(records, max_size=6))
def test_records_are_read_as_they_were_written(written: list[Record]) -> None:
    data = journal(written)
    found, state = read(data)
    assert found == written
    assert (state.end, state.stopped) == (HEADER_BYTES + len(data), "")
    assert sum(map(encoded_bytes, written)) == len(data)


def test_a_journal_cut_at_any_byte_gives_the_records_before_the_cut() -> None:
    data = journal(SAMPLE)
    ends = [len(journal(SAMPLE[:n])) for n in range(len(SAMPLE) + 1)]
    for cut in range(len(data)):
        found, state = read(data[:cut])
        whole = max(n for n, end in enumerate(ends) if end <= cut)
        assert found == SAMPLE[:whole]
        assert state.end == HEADER_BYTES + ends[whole]
        assert bool(state.stopped) == (cut not in ends)


def test_a_flipped_bit_anywhere_ends_the_journal_before_its_record() -> None:
    data = journal(SAMPLE)
    ends = [len(journal(SAMPLE[:n])) for n in range(len(SAMPLE) + 1)]
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << at % 8
        found, state = read(damaged)
        assert found == SAMPLE[: max(n for n, end in enumerate(ends) if end <= at)]
        assert state.stopped


def test_a_record_that_lies_elsewhere_is_not_read() -> None:
    data = journal(SAMPLE)
    assert read(data, offset=HEADER_BYTES + 1)[0] == []
    assert read(data, writer=b"another writer..")[0] == []
    assert read(data + data)[0] == SAMPLE


def test_zeros_behind_the_last_record_say_nothing() -> None:
    found, state = read(journal(SAMPLE) + bytes(4096))
    assert found == SAMPLE
    assert state.stopped


@pytest.mark.parametrize(("kind", "passed_over"), [(0x7F, False), (0xFF, True), (0x88, True)])
def test_an_unknown_type_is_passed_over_only_where_it_may_be(kind: int, passed_over: bool) -> None:
    later = Unknown(kind, b"whatever")
    found, state = read(journal([later, Snapshot(1, 1)]))
    assert found == ([later, Snapshot(1, 1)] if passed_over else [])
    assert state.stopped == ("" if passed_over else "unreadable")


def test_an_extent_keeps_fields_of_later_versions() -> None:
    added = SAMPLE[3]
    assert isinstance(added, ExtentAdded)
    later = replace(added, flags=0x8000_0001, fields=frame(3, b"session") + frame(77, b""), tenant="acme")
    assert read(journal([later]))[0] == [later]


@pytest.mark.parametrize(
    "record",
    [
        Snapshot(2**56, 0),
        Snapshot(0, 2**30),
        SegmentOpened(SegmentName(WRITER, 2**30), 4096, 1, 1, bytes(32)),
        SegmentOpened(SegmentName(WRITER, 1), 4096, 2**62, 1, bytes(32)),
        SegmentSealed(SegmentName(WRITER, 1), 2**64 - 1),
        ExtentAdded(ExtentName(SegmentName(WRITER, 1), 2**63), 1, 1, 1, 1, "", bytes(16), b""),
        ExtentAdded(ExtentName(SegmentName(WRITER, 1), 1), 1, 2**31, 1, 1, "", bytes(16), b""),
        ExtentAdded(ExtentName(SegmentName(WRITER, 1), 1), 2**31, (256 << 20) + 1, 1, 1, "", bytes(16), b""),
        ExtentAdded(ExtentName(SegmentName(WRITER, 1), 1), 4096, 8192, 1, 1, "", bytes(16), b""),
        Touched(((ExtentName(SegmentName(WRITER, 1), 1), 2**56),)),
        ClassRaised(2**62, ()),
        ClassRaised(1, (Raise(ExtentName(SegmentName(WRITER, 1), 1), 2**62, "agent"),)),
        Pinned((Pin(ExtentName(SegmentName(WRITER, 1), 1), 2**62, 1),)),
        Pinned((Pin(ExtentName(SegmentName(WRITER, 1), 1), 1, 2**56),)),
        Removed(2**63, "", ()),
        Removed(1, "", ((ExtentName(SegmentName(WRITER, 1), 2**63), b""),)),
    ],
    ids=lambda record: type(record).__name__,
)
def test_numbers_that_no_index_can_hold_end_the_journal(record: Record) -> None:
    found, state = read(journal([Snapshot(1, 1), record]))
    assert (found, state.stopped) == ([Snapshot(1, 1)], "unreadable")


@pytest.mark.parametrize("cut", [1, 7, 9, 20, 44])
def test_a_promise_that_does_not_add_up_ends_the_journal(cut: int) -> None:
    whole = journal([ClassRaised(7, (Raise(ExtentName(SegmentName(WRITER, 1), 4096), 99, "chat"),))])
    payload = bytes(whole[5:-8])
    found, state = read(journal([Unknown(0x86, payload)]))
    assert len(found) == 1
    found, state = read(journal([Snapshot(1, 1), Unknown(0x86, payload[:-cut])]))
    assert (found, state.stopped) == (([Snapshot(1, 1)], "unreadable"))


def test_a_save_without_promises_writes_what_the_version_before_could_read() -> None:
    plain = ExtentAdded(ExtentName(SegmentName(WRITER, 1), 4096), 8192, 4096, 6, 8, "default", b"o" * 16, b"p" * 32)
    assert bytes(journal([plain])[-8 - 5 - len(b"default") : -8]) == frame(1, b"default")
    assert frame(2, b"acme") not in journal([plain])
    assert frame(2, b"acme") in journal([replace(plain, tenant="acme")])


def test_many_removals_are_cut_into_records_of_bounded_size() -> None:
    extents = [(ExtentName(SegmentName(WRITER, 0), 4096 * n), bytes(16 * 1000)) for n in range(1000)]
    cut = removed_records(1, "capacity", extents)
    assert [extent for record in cut for extent in record.extents] == extents
    assert len(cut) > 1
    assert all(len(encode_record(r, writer=WRITER, generation=0, offset=0)) < MAX_PAYLOAD_BYTES // 2 for r in cut)


def test_a_journal_header_with_a_flipped_bit_is_refused() -> None:
    header = encode_journal_header(WRITER, GENERATION, 5, host=bytes(range(16)))
    assert len(header) == HEADER_BYTES
    assert decode_journal_header(header) == (WRITER, GENERATION, 1)
    for at in range(len(header)):
        damaged = bytearray(header)
        damaged[at] ^= 0x10
        with pytest.raises(ValueError, match=r"check|journal"):
            decode_journal_header(bytes(damaged))


@pytest.mark.parametrize("representation", [TINY, OPAQUE], ids=["tiny", "opaque"])
def test_a_segment_header_comes_back_and_no_bit_of_it_may_change(representation: type[TINY]) -> None:
    header = SegmentHeader(SegmentName(WRITER, 9), 1 << 20, 77, representation.encode(), representation.digest)
    encoded = encode_segment_header(header)
    assert len(encoded) == header.header_bytes == 4096
    assert decode_segment_header(encoded) == header
    used = 112 + len(header.representation)
    for at in range(used):
        damaged = bytearray(encoded)
        damaged[at] ^= 0x04
        with pytest.raises(ExtentCorrupt):
            decode_segment_header(bytes(damaged))
    for cut in (0, 100, used - 1):
        with pytest.raises(ExtentCorrupt):
            decode_segment_header(encoded[:cut])


@pytest.mark.parametrize(
    ("capacity_bytes", "segment_bytes"),
    [(8 << 30, 32 << 20), (1 << 30, 8 << 20), (16 << 20, 4 << 20), (1 << 40, 1 << 30), (1 << 20, 256 << 10)],
)
def test_segments_are_a_256th_of_the_capacity_within_bounds(capacity_bytes: int, segment_bytes: int) -> None:
    assert segment_capacity(TINY, capacity_bytes=capacity_bytes) == segment_bytes


def test_a_segment_holds_sixteen_blocks_where_the_capacity_allows() -> None:
    from headstart.block.representation import Representation

    large = Representation(kind="gqa", layout="fake/1", dtype="float32", layer_bytes=(16 << 20,))
    assert segment_capacity(large, capacity_bytes=4 << 30) >= 16 * (16 << 20)
    assert segment_capacity(large, capacity_bytes=100 << 20) == 25 << 20


@pytest.mark.parametrize("at", [36, 92])
def test_a_segment_header_whose_reserved_bytes_are_set_is_refused(at: int) -> None:
    encoded = bytearray(encode_segment_header(SegmentHeader(SegmentName(WRITER, 9), 1 << 20, 77, TINY.encode(), TINY.digest)))
    encoded[at] = 1
    encoded[96:112] = xxhash.xxh3_128_digest(bytes(encoded[:96]) + TINY.encode())
    with pytest.raises(ExtentCorrupt) as caught:
        decode_segment_header(encoded)
    assert caught.value.reason == "fields"


def test_a_journal_header_names_the_machine_that_wrote_it() -> None:
    host = bytes(range(100, 116))
    assert encode_journal_header(WRITER, GENERATION, 5, host=host)[32:48] == host
