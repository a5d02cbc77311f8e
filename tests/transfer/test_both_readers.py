"""The C reader and the portable one bring the same: right bytes, the same good prefix under each fault, nothing left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from threading import Condition, Event, Thread
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, OPAQUE, PAGED, STATEFUL, TINY, UNEVEN, FakeDestination, FakeKV
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.testing.round_trip import finish, load, match, save
from headstart.tier.base import ExtentId, RawExtents
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import RealDisk
from headstart.transfer import batch, native
from headstart.transfer.batch import Batch
from headstart.transfer.load import Load
from headstart.transfer.native import Outcome

TIMEOUT_S = 20.0
LENGTHS = (1, 3, 1, 6, 2)  # of the extents, in pieces
PIECES = sum(LENGTHS)
WIDE = Representation(kind="mha", layout="fake/1", dtype="float32", layer_bytes=(65_536,) * 12)
REPRESENTATIONS = {"tiny": TINY, "uneven": UNEVEN, "paged": PAGED, "wide": WIDE}


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(native, "reader", lambda: None)
    elif native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    return str(request.param)


@pytest.fixture
def through_tier(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The reads that the disk tier was asked for."""
    asked: list[int] = []
    read = DiskTier.read

    def noted(self: DiskTier, reads: Sequence[Any]) -> int:
        asked.append(len(reads))
        return read(self, reads)

    monkeypatch.setattr(DiskTier, "read", noted)
    return asked


class Rows:
    """A destination whose pieces lie in several rows each, as an engine's heads do, and are given as one array."""

    def __init__(self, representation: Representation, pieces: int, rows: int) -> None:
        self.memory = [np.full((rows, pieces, (size or 0) // rows), 0xAA, np.uint8) for size in representation.layer_bytes]

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.memory[layer][:, first : first + len(sizes)].transpose(1, 0, 2)


def opened(directory: Path, representation: Representation, **options: Any) -> PrefixCache:
    tier = DiskTier.open(directory, capacity_bytes=64 << 20, **options)
    return PrefixCache([tier], identity=IDENTITY, representation=representation, match_timeout_s=TIMEOUT_S)


def stored(cache: PrefixCache, representation: Representation, *, lengths: Sequence[int] = LENGTHS) -> FakeKV:
    """Save a prompt so that it lies in extents of the given lengths; return it."""
    tokens = list(range(sum(lengths) * representation.piece_tokens + 1))
    for end in np.cumsum(lengths).tolist():
        kv = FakeKV(representation, tokens[: end * representation.piece_tokens + 1])
        assert save(cache, kv).reason is None
    return kv


def segment_bytes(directory: Path) -> Path:
    (segment,) = directory.rglob("*.seg")
    return segment


def place(cache: PrefixCache, kv: FakeKV, extent: int) -> int:
    """Return where the extent with that number in the prompt begins in its file."""
    with match(cache, kv) as lease:
        run = lease._runs[extent]
        raw = lease._sources[0].tier.raw([run.extent])  # type: ignore[attr-defined]
        lease._sources[0].tier.let_go_raw(raw, bytes_read=0)  # type: ignore[attr-defined]
        return int(raw.offsets[0])


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(at)
        byte = opened_file.read(1)[0]
        opened_file.seek(at)
        opened_file.write(bytes([byte ^ 0x10]))


@pytest.mark.parametrize("representation", REPRESENTATIONS.values(), ids=REPRESENTATIONS)
@pytest.mark.parametrize(("shift", "cuts"), [(0, 1), (8, 1), (0, 3)], ids=["direct", "unaligned", "cut"])
def test_every_byte_is_right_wherever_a_hit_ends(
    tmp_path: Path, way: str, through_tier: list[int], representation: Representation, shift: int, cuts: int
) -> None:
    with opened(tmp_path, representation) as cache:
        kv = stored(cache, representation)
        for pieces in (PIECES, 7, 1):
            part = FakeKV(representation, kv.tokens[: pieces * representation.piece_tokens + 1].tolist())
            loaded = load(cache, part, shift=shift, cuts=cuts)
            assert (loaded.usable_tokens, loaded.wrong) == (pieces * representation.piece_tokens, [])
            assert loaded.load.bytes_read >= pieces * sum(size or 0 for size in representation.layer_bytes)
    assert (not through_tier) == (way == "C" and cuts == 1)


@pytest.mark.parametrize("representation", REPRESENTATIONS.values(), ids=REPRESENTATIONS)
@pytest.mark.parametrize("shift", [0, 8], ids=["direct", "unaligned"])
def test_every_byte_is_right_wherever_ranges_begin_and_end(
    tmp_path: Path, way: str, through_tier: list[int], representation: Representation, shift: int
) -> None:
    step = representation.piece_tokens
    with opened(tmp_path, representation) as cache:
        kv = stored(cache, representation)
        for edges in ([0, 1, PIECES], [0, 2, 3, 7, 8, PIECES], [0, 6, 7, 12, PIECES]):  # most of them inside an extent
            destination = FakeDestination(representation, PIECES, shift=shift)
            with match(cache, kv) as lease:
                loads = [
                    lease.load(into=destination, first_tokens=a * step, end_tokens=b * step)
                    for a, b in reversed([*pairwise(edges)])
                ]
                assert sum(running.result(TIMEOUT_S) for running in loads) == PIECES * step
            assert destination.wrong(kv, pieces=PIECES) == []
    assert (not through_tier) == (way == "C")
    assert open_segments(tmp_path) == 0


@pytest.mark.parametrize("shift", [0, 8], ids=["direct", "unaligned"])
def test_extents_with_states_are_read_as_well(tmp_path: Path, way: str, through_tier: list[int], shift: int) -> None:
    with opened(tmp_path, STATEFUL) as cache:
        kv = stored(cache, STATEFUL)  # each extent ends with one
        save(cache, kv, states=kv.states(5, 9, nbytes=(2 << 20) + 1))  # and two stand inside
        for pieces in (PIECES, 10, 9, 6, 4):
            part = FakeKV(STATEFUL, kv.tokens[: pieces * 64 + 1].tolist())
            loaded = load(cache, part, shift=shift)
            end = max(end for end in (1, 4, 5, 9, 11, PIECES) if end <= pieces)
            assert (loaded.usable_tokens, loaded.wrong) == (end * 64, [])
    assert len(through_tier) < 40 or way == "Python"  # headers and parts of states alone
    assert open_segments(tmp_path) == 0


def test_sizes_that_vary_are_read_the_portable_way(tmp_path: Path, way: str, through_tier: list[int]) -> None:
    with opened(tmp_path, OPAQUE) as cache:
        kv = stored(cache, OPAQUE)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * OPAQUE.piece_tokens, [])
    assert through_tier


class LaterInParts:
    """A destination of one buffer for layer 0, and of one for each piece for the others. `raises`: or of none for them."""

    def __init__(self, representation: Representation, pieces: int, *, raises: bool) -> None:
        self.memory = [np.full((pieces, size or 0), 0xAA, np.uint8) for size in representation.layer_bytes]
        self._raises = raises

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> Sequence[memoryview]:
        rows = self.memory[layer][first : first + len(sizes)]
        if layer and self._raises:
            raise RuntimeError("this layer has no memory")
        return [row.data for row in rows] if layer else [rows.reshape(-1).data]


@pytest.mark.parametrize("representation", [WIDE, UNEVEN], ids=["wide", "uneven"])
def test_layers_that_do_not_suit_the_c_reader_are_read_the_portable_way_behind_the_heads(
    tmp_path: Path, way: str, through_tier: list[int], representation: Representation
) -> None:
    with opened(tmp_path, representation) as cache:
        kv = stored(cache, representation)
        for _ in range(5):
            destination = LaterInParts(representation, PIECES, raises=False)
            with match(cache, kv) as lease:
                loaded = lease.load(into=destination)
                assert loaded.result(TIMEOUT_S) == lease.tokens
            for layer in range(representation.layers):
                for piece in range(PIECES):
                    assert destination.memory[layer][piece].tobytes() == kv.piece(layer, piece).tobytes()
        assert leased(cache) == 0
    assert through_tier
    assert open_segments(tmp_path) == 0


def test_a_view_that_fails_for_a_later_layer_ends_the_load_and_nothing_else(tmp_path: Path, way: str) -> None:
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        with match(cache, kv) as lease:
            loaded = lease.load(into=LaterInParts(WIDE, PIECES, raises=True))
            assert loaded.result(TIMEOUT_S) == 0
            assert {fault.reason for fault in loaded.faults} == {"error"}
        assert load(cache, kv).usable_tokens == PIECES * WIDE.piece_tokens
    assert open_segments(tmp_path) == 0


def test_nothing_is_told_while_it_is_counted_what_the_portable_way_will_read() -> None:
    """Another thread may tell at any moment; here it does so amid the counting, when one head is still to be read."""
    one: Any = object.__new__(Batch)

    class Plan:
        counts = np.ones(3, np.int64)

        @property
        def together(self) -> int:
            one._tell()
            return 1

    one._changed, one._told, one._left = Condition(), np.zeros(3, np.bool_), np.ones(3, np.int64)
    one._never_read, one._closing, one._ended = np.zeros(3, np.int64), np.zeros(1, np.int64), np.zeros(3, np.int64)
    one._plans, one._heads, one._error, one._batch = [Plan()], [object()], None, native.Batch()
    one._leave_rest(None)
    assert not one._told.any()
    one._tell()
    assert one._told.tolist() == [False, True, True]  # the head is still to be told of


@pytest.mark.parametrize(("representation", "rows"), [(WIDE, 4), (UNEVEN, 2)], ids=["direct", "staged"])
def test_pieces_in_rows_are_filled_row_by_row(
    tmp_path: Path, way: str, through_tier: list[int], representation: Representation, rows: int
) -> None:
    with opened(tmp_path, representation) as cache:
        kv = stored(cache, representation)
        destination = Rows(representation, PIECES, rows)
        with match(cache, kv) as lease:
            assert lease.load(into=destination).result(TIMEOUT_S) == lease.tokens
    for layer in range(representation.layers):
        for piece in range(PIECES):
            found = destination.buffers(layer, piece, [0]).tobytes()
            assert found == kv.piece(layer, piece).tobytes()
    assert (not through_tier) == (way == "C")


@pytest.mark.parametrize("representation", [UNEVEN, WIDE], ids=["uneven", "wide"])
@pytest.mark.parametrize("layer", [0, 1, -1], ids=["first", "mid", "last"])
@pytest.mark.parametrize("extent", [0, 1, 3])
@pytest.mark.parametrize("shift", [0, 8], ids=["direct", "unaligned"])
def test_what_lies_before_a_rotten_piece_is_kept(
    tmp_path: Path, way: str, representation: Representation, layer: int, extent: int, shift: int
) -> None:
    with opened(tmp_path, representation) as cache:
        kv = stored(cache, representation)
        last = LENGTHS[extent] - 1
        layout = layout_of(representation, LENGTHS[extent] * representation.blocks_per_piece)
        offset, nbytes = layout.piece_range(layer % representation.layers, last, 1)
        flip(segment_bytes(tmp_path), place(cache, kv, extent) + offset + nbytes // 2)
        loaded = load(cache, kv, shift=shift)
        good = sum(LENGTHS[:extent]) + last
        assert (loaded.usable_tokens, loaded.wrong) == (good * representation.piece_tokens, [])
        assert [fault.reason for fault in loaded.load.faults] == ["corrupt"]
        assert cache.statistics().counters["load_failed_corrupt"] == 1


@pytest.mark.parametrize("at", [40, 200, 600], ids=["fixed part", "layer table", "tokens"])
def test_an_extent_whose_header_rotted_ends_the_prefix(tmp_path: Path, way: str, at: int) -> None:
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        flip(segment_bytes(tmp_path), place(cache, kv, 2) + at)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (4 * 64, [])
        assert {fault.reason for fault in loaded.load.faults} == {"corrupt"}


def test_blocks_with_the_keys_but_not_the_tokens_of_the_prompt_are_a_miss(tmp_path: Path, way: str) -> None:
    kv, other = (FakeKV(WIDE, list(range(start, start + 6 * 64 + 1))) for start in (0, 1000))
    with opened(tmp_path, WIDE) as cache:
        tier = cache._sources[0].tier
        assert tier.write(kv.image(0, 2), WIDE).stored
        assert tier.write(other.image(2, 4, keys=kv.keys), WIDE).stored
        loaded = load(cache, kv)
        assert (loaded.matched_tokens, loaded.usable_tokens, loaded.wrong) == (6 * 64, 2 * 64, [])
        assert {fault.reason for fault in loaded.load.faults} == {"collision"}


@pytest.mark.parametrize(
    ("salt", "retention", "decoded"),
    [(None, "chat", 0), ("tenant", "default", 0), (None, "a class with a long name", len(LENGTHS))],
    ids=["another class", "a salt", "a long class"],
)
def test_headers_are_parsed_in_python_only_where_they_are_unusual(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, salt: str | None, retention: str, decoded: int
) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    heads: list[int] = []
    head = Batch._head

    def noted(self: Batch, number: int, *args: Any) -> None:
        heads.append(number)
        head(self, number, *args)

    monkeypatch.setattr(Batch, "_head", noted)
    with opened(tmp_path, UNEVEN) as cache:
        tokens = list(range(PIECES * 64 + 1))
        for end in np.cumsum(LENGTHS).tolist():
            kv = FakeKV(UNEVEN, tokens[: end * 64 + 1], salt=salt)
            assert save(cache, kv, retention=retention).reason is None
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong, len(heads)) == (PIECES * 64, [], decoded)


def test_a_file_cut_under_the_reader_ends_the_prefix(tmp_path: Path, way: str) -> None:
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        os.truncate(segment_bytes(tmp_path), place(cache, kv, 3) + 8192)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (5 * 64, [])
        assert {fault.reason for fault in loaded.load.faults} == {"corrupt"}


LIES: dict[str, tuple[str, Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]]] = {
    "a descriptor that is closed": ("descriptors", lambda true: np.full_like(true, 1 << 20)),
    "another offset": ("offsets", lambda true: true + 4096),
    "an offset that no direct read takes": ("offsets", lambda true: true + 8),
    "a longer header": ("header_bytes", lambda true: true + 4096),
    "more blocks": ("blocks", lambda true: true + 1),
    "another length": ("extent_bytes", lambda true: true + 4096),
}


@pytest.mark.parametrize(("column", "lie"), LIES.values(), ids=LIES)
@pytest.mark.parametrize("every", [1, 2], ids=["all", "every second"])
def test_where_the_c_reader_is_told_wrong_the_portable_one_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, column: str, lie: Callable[[Any], Any], every: int
) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    raw = DiskTier.raw
    lies = 0

    def lying(self: DiskTier, extents: Any) -> RawExtents | None:
        nonlocal lies
        found = raw(self, extents)
        assert found is not None
        told = getattr(found, column).copy()
        told[every - 1 :: every] = lie(told[every - 1 :: every])
        lies += len(told[every - 1 :: every])
        return replace(found, **{column: told})

    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        monkeypatch.setattr(DiskTier, "raw", lying)
        loaded = load(cache, kv)
        assert lies
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * 64, [])
        assert load(cache, kv, shift=8).wrong == []


def test_without_direct_io_the_portable_way_reads(
    tmp_path: Path, way: str, through_tier: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    with opened(tmp_path, UNEVEN) as cache:
        loaded = load(cache, stored(cache, UNEVEN))
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * 64, [])
    assert through_tier


def test_nobody_goes_round_a_door_with_faults(tmp_path: Path, way: str) -> None:
    disk = FaultyDisk(RealDisk())
    with opened(tmp_path, WIDE, disk=disk) as cache:
        kv = stored(cache, WIDE)
        disk.inject(DiskFault("read", "flip", start=3))
        loaded = load(cache, kv)
        assert loaded.wrong == []
        assert loaded.usable_tokens < PIECES * 64


@pytest.fixture
def gate(way: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Event, Event]]:
    """(reached, go): one read comes back, of more than are needed; until `go` neither it nor any other goes on."""
    reached, go = Event(), Event()
    turns = count()

    def one(act: Callable[[], Any]) -> Any:
        if next(turns):
            go.wait(TIMEOUT_S)
            return act()
        found = act()
        reached.set()
        go.wait(TIMEOUT_S)
        return found

    work, read = native.Reader.work, DiskTier.read
    if way == "C":
        monkeypatch.setattr(native.Reader, "work", lambda *args: one(lambda: work(*args)))
    else:
        monkeypatch.setattr(DiskTier, "read", lambda *args: one(lambda: read(*args)))
    yield reached, go
    go.set()


def test_a_cancelled_load_ends_and_brings_no_more_than_it_verified(tmp_path: Path, gate: tuple[Event, Event]) -> None:
    reached, go = gate
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE, lengths=[64])  # more requests than threads
        with match(cache, kv) as lease:
            destination = FakeDestination(WIDE, 64)
            running = lease.load(into=destination)
            assert reached.wait(TIMEOUT_S)
            running.cancel()
            go.set()
            usable = running.result(TIMEOUT_S)
            assert usable < lease.tokens
            assert destination.wrong(kv, pieces=usable // 64) == []
            assert {fault.reason for fault in running.faults} == {"cancelled"}
        assert load(cache, kv).usable_tokens == 64 * 64  # and nothing is avoided for it


def test_an_extent_that_is_taken_out_while_the_load_is_cancelled_is_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    leave = Batch._leave_to_portable

    def late(self: Batch, number: int) -> None:
        """Let everybody else come by first, who see that nothing is wanted any more."""
        if number:
            until(lambda: not self.load.wanted_before[0] and self._batch.next >= self._batch.request_count)
        leave(self, number)

    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE, lengths=[2, 30])  # with more requests than threads
        monkeypatch.setattr(Batch, "_leave_to_portable", late)
        with match(cache, kv) as lease, monkeypatch.context() as patched:
            patched.setattr(Load, "__init__", cancelled_at_once(Load.__init__))
            running = lease.load(into=FakeDestination(WIDE, 32))
            assert running.result(TIMEOUT_S) == 0
            assert {fault.reason for fault in running.faults} == {"cancelled"}


def cancelled_at_once(init: Callable[..., None]) -> Callable[..., None]:
    def started(self: Load, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        self.cancel()

    return started


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_whenever_a_load_is_cancelled_every_piece_ends_once(tmp_path: Path, way: str) -> None:
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE, lengths=[1, 2, 9, 1, 4, 1])
        destination = FakeDestination(WIDE, 18)
        for turn in range(150):
            with match(cache, kv) as lease:
                running = lease.load(into=destination)
                for layer in range(turn % 13):  # up to all of them
                    running.wait(layer, TIMEOUT_S)
                running.cancel()
                usable = running.result(TIMEOUT_S)
            assert {fault.reason for fault in running.faults} <= {"cancelled"}
            assert destination.wrong(kv, pieces=usable // 64) == [] if turn % 10 == 0 else usable >= 0
            assert leased(cache) == 0


def test_whenever_a_cache_is_closed_every_piece_ends_once(tmp_path: Path, way: str) -> None:
    for turn in range(12):
        cache = opened(tmp_path, WIDE)
        kv = stored(cache, WIDE, lengths=[1, 2, 9, 1, 4, 1])
        running = match(cache, kv).load(into=FakeDestination(WIDE, 18))
        if turn % 4:
            running.wait(turn - 1, TIMEOUT_S)
        cache.close()
        running.result(TIMEOUT_S)
        assert {fault.reason for fault in running.faults} <= {"closed"}
        assert open_segments(tmp_path) == 0


def test_a_load_that_is_overtaken_by_its_deadline_ends(tmp_path: Path, gate: tuple[Event, Event]) -> None:
    reached, go = gate
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE, lengths=[64])
        with match(cache, kv) as lease:
            lease._timeout_s = 0.0
            running = lease.load(into=FakeDestination(WIDE, 64))
            assert reached.wait(TIMEOUT_S)
            with pytest.raises(Exception, match="within"):
                running.result()
            go.set()
            done = Event()
            running.add_done_callback(lambda _: done.set())
            assert done.wait(TIMEOUT_S)
            assert {fault.reason for fault in running.faults} == {"timeout"}


def test_closing_ends_a_load_that_is_under_way(tmp_path: Path, gate: tuple[Event, Event]) -> None:
    reached, go = gate
    cache = opened(tmp_path, WIDE)
    kv = stored(cache, WIDE, lengths=[1] * 40)
    lease = match(cache, kv)
    destination = FakeDestination(WIDE, 40)
    running = lease.load(into=destination)
    assert reached.wait(TIMEOUT_S)
    closing = Thread(target=cache.close)
    closing.start()
    go.set()
    closing.join(TIMEOUT_S)
    usable = running.result(TIMEOUT_S)
    assert destination.wrong(kv, pieces=usable // 64) == []
    assert {fault.reason for fault in running.faults} <= {"closed"}
    assert open_segments(tmp_path) == 0


def test_loads_leave_no_descriptor_and_no_hold_behind(tmp_path: Path, way: str) -> None:
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        load(cache, kv)
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            assert load(cache, kv).wrong == []
        assert len(os.listdir("/proc/self/fd")) == before
    assert open_segments(tmp_path) == 0


def test_loads_side_by_side_do_not_mix(tmp_path: Path, way: str) -> None:
    with opened(tmp_path, UNEVEN) as cache, ThreadPoolExecutor(6) as threads:
        kv = stored(cache, UNEVEN)
        with match(cache, kv) as lease:
            assert lease.tokens == PIECES * 64

        def once(number: int) -> bool:
            pieces = 1 + number % PIECES
            part = FakeKV(UNEVEN, kv.tokens[: pieces * 64 + 1].tolist())
            with match(cache, part) as held:
                loaded = finish(held, part, shift=8 * (number % 2))
                return (loaded.usable_tokens, loaded.wrong) == (pieces * 64, [])

        assert all(threads.map(once, range(48)))


def test_layer_0_of_everything_is_asked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    tables: list[dict[str, Any]] = []
    work = Batch.work

    def noted(self: Batch, staging: Any) -> bool:
        tables.append(self._tables)
        return work(self, staging)

    monkeypatch.setattr(Batch, "work", noted)
    with opened(tmp_path, WIDE) as cache:
        assert load(cache, stored(cache, WIDE)).wrong == []
    requests, parts = tables[0]["requests"], tables[0]["parts"]
    assert (requests["head_bytes"][: len(LENGTHS)] > 0).all()
    assert not requests["head_bytes"][len(LENGTHS) :].any()
    turns = [(int(parts["layer"][r["first_part"]]), int(r["start"])) for r in requests]
    assert turns == sorted(turns)


def test_a_load_that_cannot_be_laid_out_ends_at_once_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lay_out = batch.lay_out

    def fails(*arguments: Any, rest: bool, **options: Any) -> Any:
        if rest:
            raise MemoryError("no memory for the tables")
        return lay_out(*arguments, rest=rest, **options)

    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        monkeypatch.setattr(batch, "lay_out", fails)
        loaded = load(cache, kv)
        assert loaded.usable_tokens == 0
        assert {fault.reason for fault in loaded.load.faults} == {"error"}
        monkeypatch.undo()
        assert load(cache, kv).usable_tokens == PIECES * WIDE.piece_tokens
    assert "could not be laid out" in caplog.text
    assert open_segments(tmp_path) == 0


def test_a_reader_that_is_not_whole_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    fresh = native.reader.__wrapped__  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        patched.setattr(native, "_HASH", (*native._HASH[:-1], "XXH3_no_such_function"))
        assert fresh() is None
    with monkeypatch.context() as patched:  # another hash than Python's
        patched.setattr(native, "_HASH", (*native._HASH[:-1], "XXH3_64bits_digest"))
        assert fresh() is None
    assert fresh() is not None


def test_a_thread_stays_with_the_c_reader_until_somebody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    monkeypatch.setattr(batch, "_SLICE_S", 1e-9)  # over after every request
    outcomes: list[Outcome] = []
    work = native.Reader.work

    def watched(self: native.Reader, *args: Any) -> tuple[Outcome, int]:
        found = work(self, *args)
        outcomes.append(found[0])
        return found

    monkeypatch.setattr(native.Reader, "work", watched)
    with opened(tmp_path, WIDE) as cache:
        kv = stored(cache, WIDE)
        assert load(cache, kv).usable_tokens == PIECES * 64
        alone, waiting = outcomes.count(Outcome.TIME_IS_UP), cache._sources[0].pool_of(ExtentId(0)).waiting
        outcomes.clear()
        monkeypatch.setattr(batch, "_ALONE_S", 1e-9)
        assert load(cache, kv).usable_tokens == PIECES * 64
        assert waiting[0] == 0
    assert alone < outcomes.count(Outcome.TIME_IS_UP)


def leased(cache: PrefixCache) -> int:
    return sum(info.leased for source in cache._sources for info in source.tier.scan())


def open_segments(directory: Path) -> int:
    links = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]
    return sum(link.startswith(str(directory)) and link.endswith(".seg") for link in links)


@pytest.mark.parametrize("table", ["LAYER", "PART", "REQUEST", "EXTENT"])
def test_a_reader_whose_tables_are_another_headstarts_is_not_used(monkeypatch: pytest.MonkeyPatch, table: str) -> None:
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    ours = getattr(native, table)
    monkeypatch.setattr(native, table, np.dtype([*ours.descr, ("added", "<i8")]))
    native.reader.cache_clear()
    try:
        assert native.reader() is None
    finally:
        native.reader.cache_clear()
