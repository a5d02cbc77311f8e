"""From a pool and from an object store, too, the C reader and the portable one bring the same, and under the same promises."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import obstore
import obstore.store
import pytest

from headstart.block.checks import Sealing, keyed
from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.testing.fake_kv import IDENTITY, OPAQUE, PAGED, STATEFUL, TINY, UNEVEN, FakeKV
from headstart.testing.round_trip import load, match, save
from headstart.tier.base import ExtentId, RawExtents
from headstart.tier.object import Bucket, ObjectTier
from headstart.tier.pool import PoolTier
from headstart.tier.pool.reading import PoolReading
from headstart.transfer import native, taking

TIMEOUT_S = 20.0
LENGTHS = (1, 3, 1, 6, 2)  # of the extents, in pieces
PIECES = sum(LENGTHS)
WIDE = Representation(kind="mha", layout="fake/1", dtype="float32", layer_bytes=(65_536,) * 12)
REPRESENTATIONS = {"tiny": TINY, "uneven": UNEVEN, "paged": PAGED, "wide": WIDE}


class Shared:
    """A shared tier with a cache over it, and its bytes within reach. `by_c`: what the C reader was given."""

    def __init__(self, kind: str, folder: Path, **options: Any) -> None:
        self.kind, self._folder = kind, folder
        self._objects = obstore.store.MemoryStore()
        if kind == "pool":
            self.tier: PoolTier = PoolTier.open(folder, capacity_bytes=64 << 20, background=False, **options)
        else:
            bucket = Bucket(self._objects, where="bucket", counters=Counters())
            self.tier = ObjectTier.open_bucket(bucket, capacity_bytes=64 << 20, background=False, **options)
        self.by_c = 0

    def cache(self, representation: Representation) -> PrefixCache:
        return PrefixCache([self.tier], identity=IDENTITY, representation=representation, match_timeout_s=TIMEOUT_S)

    def flip(self, extent: ExtentId, at: int) -> None:
        """Change a byte of an extent's image."""
        store = self.tier._store
        segment, offset, _ = store.books.place(store.books.row(extent) or 0)
        path = store.directory.segment_path(segment.name)
        if self.kind == "pool":
            with path.open("r+b") as file:
                file.seek(offset + at)
                byte = file.read(1)[0]
                file.seek(offset + at)
                file.write(bytes([byte ^ 0x10]))
            return
        key = path.relative_to(store.directory.root).as_posix()
        data = bytearray(obstore.get(self._objects, key).bytes())
        data[offset + at] ^= 0x10
        obstore.put(self._objects, key, bytes(data))


@pytest.fixture(params=["C", "Python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "Python":
        monkeypatch.setattr(native, "reader", lambda: None)
    elif native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    return str(request.param)


@pytest.fixture(params=["pool", "object"])
def shared(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Shared]]:
    made: list[Shared] = []

    def make(**options: Any) -> Shared:
        made.append(Shared(request.param, tmp_path, **options))
        return made[-1]

    work, take = native.Reader.work, native.Reader.take

    def working(self: native.Reader, *args: Any) -> Any:
        made[-1].by_c += 1
        return work(self, *args)

    def taking_chunks(self: native.Reader, *args: Any) -> Any:
        made[-1].by_c += 1
        return take(self, *args)

    monkeypatch.setattr(native.Reader, "work", working)
    monkeypatch.setattr(native.Reader, "take", taking_chunks)
    yield make
    for one in made:
        one.tier.close()


def stored(cache: PrefixCache, representation: Representation, *, lengths: Sequence[int] = LENGTHS) -> FakeKV:
    """Save a prompt so that it lies in extents of the given lengths; return it."""
    tokens = list(range(sum(lengths) * representation.piece_tokens + 1))
    for end in np.cumsum(lengths).tolist():
        kv = FakeKV(representation, tokens[: end * representation.piece_tokens + 1])
        assert save(cache, kv).reason is None
    return kv


@pytest.mark.parametrize("representation", REPRESENTATIONS.values(), ids=REPRESENTATIONS)
@pytest.mark.parametrize(("shift", "cuts"), [(0, 1), (8, 1), (0, 3)], ids=["direct", "unaligned", "cut"])
def test_every_byte_is_right_wherever_a_hit_ends(
    shared: Callable[..., Shared], way: str, representation: Representation, shift: int, cuts: int
) -> None:
    one = shared()
    with one.cache(representation) as cache:
        kv = stored(cache, representation)
        for pieces in (PIECES, 7, 1):
            part = FakeKV(representation, kv.tokens[: pieces * representation.piece_tokens + 1].tolist())
            loaded = load(cache, part, shift=shift, cuts=cuts)
            assert (loaded.usable_tokens, loaded.wrong) == (pieces * representation.piece_tokens, [])
    assert bool(one.by_c) == (way == "C" and cuts == 1)


@pytest.mark.parametrize("representation", [OPAQUE, STATEFUL], ids=["opaque", "with states"])
def test_what_varies_and_what_has_states_is_read_as_well(
    shared: Callable[..., Shared], way: str, representation: Representation
) -> None:
    with shared().cache(representation) as cache:
        kv = stored(cache, representation)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * representation.piece_tokens, [])


@pytest.mark.parametrize("representation", [UNEVEN, WIDE], ids=["uneven", "wide"])
@pytest.mark.parametrize("layer", [0, 1, -1], ids=["first", "mid", "last"])
@pytest.mark.parametrize("extent", [0, 1, 3])
def test_what_lies_before_a_rotten_piece_is_kept(
    shared: Callable[..., Shared], way: str, representation: Representation, layer: int, extent: int
) -> None:
    one = shared()
    with one.cache(representation) as cache:
        kv = stored(cache, representation)
        last = LENGTHS[extent] - 1
        layout = layout_of(representation, LENGTHS[extent] * representation.blocks_per_piece)
        offset, nbytes = layout.piece_range(layer % representation.layers, last, 1)
        with match(cache, kv) as lease:
            name = lease._runs[extent].extent
        one.flip(name, offset + nbytes // 2)
        loaded = load(cache, kv)
        good = sum(LENGTHS[:extent]) + last
        assert (loaded.usable_tokens, loaded.wrong) == (good * representation.piece_tokens, [])
        assert [fault.reason for fault in loaded.load.faults] == ["corrupt"]


@pytest.mark.parametrize("at", [40, 200, 600], ids=["fixed part", "layer table", "tokens"])
def test_an_extent_whose_header_rotted_ends_the_prefix(shared: Callable[..., Shared], way: str, at: int) -> None:
    one = shared()
    with one.cache(WIDE) as cache:
        kv = stored(cache, WIDE)
        with match(cache, kv) as lease:
            name = lease._runs[2].extent
        one.flip(name, at)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (4 * 64, [])


def test_checks_with_a_key_are_never_left_to_the_reader_that_knows_none(shared: Callable[..., Shared], way: str) -> None:
    pytest.importorskip("blake3")
    one = shared(sealing=Sealing((keyed(b"k" * 32),)))
    with one.cache(WIDE) as cache:
        kv = stored(cache, WIDE)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * 64, [])
    assert not one.by_c


def chunked(tier: ObjectTier, monkeypatch: pytest.MonkeyPatch, *, nbytes: int, breaks_at: int | None = None) -> None:
    """Have streams come in chunks of `nbytes`, and the first one break off."""
    stream, broken = ObjectTier.stream, []

    def small(self: ObjectTier, extent: ExtentId, offset: int, count: int) -> Iterator[bytes]:
        whole = b"".join(stream(self, extent, offset, count))
        for at in range(0, len(whole), nbytes):
            if breaks_at is not None and at > breaks_at and not broken:
                broken.append(at)
                raise StoreError("it breaks off", reason="read")
            yield whole[at : at + nbytes]

    monkeypatch.setattr(ObjectTier, "stream", small)


@pytest.mark.parametrize("nbytes", [1, 333, 4096, 70_000, 200_000])
@pytest.mark.parametrize("representation", [UNEVEN, PAGED, WIDE], ids=["uneven", "paged", "wide"])
def test_chunks_may_begin_and_end_anywhere(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, representation: Representation, nbytes: int
) -> None:
    if nbytes == 1 and representation is WIDE:
        pytest.skip("millions of chunks")
    one = Shared("object", tmp_path)
    assert isinstance(one.tier, ObjectTier)
    with one.cache(representation) as cache:
        kv = stored(cache, representation, lengths=(3, 2))
        chunked(one.tier, monkeypatch, nbytes=nbytes)
        for pieces in (5, 4, 2):  # the whole, and parts of the last extent
            part = FakeKV(representation, kv.tokens[: pieces * representation.piece_tokens + 1].tolist())
            loaded = load(cache, part, shift=8)
            assert (loaded.usable_tokens, loaded.wrong) == (pieces * representation.piece_tokens, [])


class Rows:
    """A destination whose pieces lie in several rows each, which begin `shift` bytes behind a page's edge."""

    def __init__(self, representation: Representation, rows: int, *, shift: int) -> None:
        self.memory = []
        for size in representation.layer_bytes:
            whole = np.full(PIECES * (size or 0) + 4096 + shift, 0xAA, np.uint8)
            begin = -whole.ctypes.data % 4096 + shift
            self.memory.append(whole[begin : begin + PIECES * (size or 0)].reshape(rows, PIECES, -1))

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        return self.memory[layer][:, first : first + len(sizes)].transpose(1, 0, 2)


@pytest.mark.parametrize("shift", [0, 8], ids=["aligned", "unaligned"])
@pytest.mark.parametrize(("representation", "rows"), [(WIDE, 4), (WIDE, 2048), (UNEVEN, 2)], ids=["wide", "short", "uneven"])
def test_pieces_in_rows_are_filled_row_by_row(
    shared: Callable[..., Shared], way: str, representation: Representation, rows: int, shift: int
) -> None:
    one = shared()
    with one.cache(representation) as cache:
        kv = stored(cache, representation)
        destination = Rows(representation, rows, shift=shift)
        with match(cache, kv) as lease:
            assert lease.load(into=destination).result(TIMEOUT_S) == lease.tokens
        for layer in range(representation.layers):
            for piece in range(PIECES):
                assert destination.buffers(layer, piece, [0]).tobytes() == kv.piece(layer, piece).tobytes()
    assert bool(one.by_c) == (way == "C")


@pytest.mark.parametrize("breaks_at", [0, 5000, 200_000])
def test_what_a_stream_did_not_bring_is_read_again(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch, breaks_at: int
) -> None:
    one = Shared("object", tmp_path)
    assert isinstance(one.tier, ObjectTier)
    with one.cache(WIDE) as cache:
        kv = stored(cache, WIDE)
        chunked(one.tier, monkeypatch, nbytes=4096, breaks_at=breaks_at)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * 64, [])


def test_a_view_that_cannot_be_laid_out_is_asked_piece_by_piece(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise TypeError("an engine's mistake")

    monkeypatch.setattr(taking, "destination_of", refuses)
    one = Shared("object", tmp_path)
    with one.cache(WIDE) as cache:
        kv = stored(cache, WIDE)
        assert load(cache, kv).usable_tokens == PIECES * 64


def test_what_the_c_reader_reads_after_its_lease_is_a_counted_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease ends between laying out and reading."""
    if native.reader() is None:
        pytest.skip("headstart was installed without its C reader")
    now = [time.monotonic()]
    one = Shared("pool", tmp_path, clock=lambda: now[0])
    raw = PoolReading.raw

    def late(self: PoolReading, extents: Sequence[ExtentId]) -> RawExtents | None:
        for held in self._held.values():
            held.deadline = now[0] + 1e-6
        found = raw(self, extents)
        now[0] += 1.0
        return found

    with one.cache(WIDE) as cache:
        kv = stored(cache, WIDE)
        monkeypatch.setattr(PoolReading, "raw", late)
        assert load(cache, kv).usable_tokens == 0
        assert one.tier.statistics().counters["lease_outlived"] >= 1


def test_files_are_let_go_when_a_load_ends(tmp_path: Path, way: str) -> None:
    one = Shared("pool", tmp_path)
    with one.cache(WIDE) as cache:
        kv = stored(cache, WIDE)
        held = {name: opened.holds for name, opened in one.tier._store.files._open.items()}
        assert load(cache, kv).usable_tokens == PIECES * 64
        assert {name: opened.holds for name, opened in one.tier._store.files._open.items()} == held
    one.tier.close()
    assert list(one.tier._store.files._open) == []
