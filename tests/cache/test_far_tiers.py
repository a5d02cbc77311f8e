"""A tier where every request takes long is asked few times, and what comes is taken as it comes: right, or found out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from threading import Event

import numpy as np
import numpy.typing as npt
import pytest
from cache_kit import TIMEOUT_S, SpotTier, cache_of, prompt, spot

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.errors import LoadFailed, StoreError
from headstart.testing.fake_kv import OPAQUE, PAGED, STATEFUL, TINY, UNEVEN, FakeDestination
from headstart.testing.round_trip import load, match, save
from headstart.tier.base import ExtentId, FarTier, ReadRange
from headstart.tier.memory import MemoryTier

PIECES = 6
LARGE = Representation(kind="gqa", layout="fake/1", dtype="float32", layer_bytes=(1 << 20,) * 3)


class Far(SpotTier):
    """`asked`: offset and bytes of every stream. `breaks_at`: offsets of an image from where streams bring nothing more.
    `gate`: what comes from that offset on waits for `opened`."""

    def __init__(self, *, request_bytes: int = 1 << 24, gap_bytes: int = 4096) -> None:
        super().__init__(MemoryTier(16 << 20))
        self.request_bytes = request_bytes
        self.gap_bytes = gap_bytes
        self.asked: list[tuple[int, int]] = []
        self.breaks_at: int | None = None
        self.gate: int | None = None
        self.opened = Event()

    def stream(self, extent: ExtentId, offset: int, nbytes: int) -> Iterator[bytes]:
        self.asked.append((offset, nbytes))
        for at in range(offset, offset + nbytes, 5000):
            if self.breaks_at is not None and at > self.breaks_at:
                raise StoreError("the connection broke", reason="planted")
            if self.gate is not None and at > self.gate:
                assert self.opened.wait(TIMEOUT_S)
            chunk = bytearray(min(5000, offset + nbytes - at))
            self.read([ReadRange(extent, at, [memoryview(chunk)])])
            self.reads.pop()  # it is none of the tier's plain reads
            yield bytes(chunk)


class Strided(FakeDestination):
    """Gives its memory as arrays."""

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:  # type: ignore[override]
        return np.frombuffer(super().buffers(layer, first, sizes)[0], np.uint8).reshape(len(sizes), -1)


def test_what_the_tests_read_from_is_far_and_so_is_an_object_store() -> None:
    from headstart.tier.object import ObjectTier

    assert isinstance(Far(), FarTier)
    assert all(hasattr(ObjectTier, name) for name in ("request_bytes", "gap_bytes", "stream"))


@pytest.mark.parametrize("representation", [TINY, UNEVEN, PAGED, OPAQUE, STATEFUL], ids=lambda one: one.layout + one.kind)
@pytest.mark.parametrize("request_bytes", [5000, 30_000, 1 << 24])
@pytest.mark.parametrize(("shift", "cuts"), [(0, 1), (8, 3)])
def test_every_byte_is_right_however_much_comes_at_once(
    representation: Representation, request_bytes: int, shift: int, cuts: int
) -> None:
    tier, kv = Far(request_bytes=request_bytes), prompt(PIECES * representation.piece_tokens + 1, representation=representation)
    with cache_of(tier, representation=representation) as cache:
        save(cache, kv)
        loaded = load(cache, kv, shift=shift, cuts=cuts)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * representation.piece_tokens, [])
        assert tier.asked[0][0] == 0
        if representation in (TINY, UNEVEN, PAGED):
            assert tier.reads == []
            assert request_bytes < 1 << 24 or len(tier.asked) == 1  # a header, and all that belongs to it


def test_memory_that_is_an_array_is_filled_as_well() -> None:
    tier, kv = Far(), prompt(PIECES * 64 + 1, representation=UNEVEN)
    with cache_of(tier, representation=UNEVEN) as cache:
        save(cache, kv)
        with match(cache, kv) as lease:
            memory = Strided(UNEVEN, PIECES)
            assert lease.load(into=memory).result(TIMEOUT_S) == PIECES * 64
            assert memory.wrong(kv, pieces=PIECES) == []
        assert tier.reads == []


@pytest.mark.parametrize("gap_bytes", [0, 1 << 20])
def test_a_part_of_an_extent_is_asked_for_at_once_where_what_lies_between_costs_less_than_asking(gap_bytes: int) -> None:
    tier, kv = Far(gap_bytes=gap_bytes), prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        shorter = prompt(2 * 64 + 1)
        loaded = load(cache, shorter)
        assert (loaded.usable_tokens, loaded.wrong) == (128, [])
        layout = layout_of(TINY, PIECES)
        apart = [layout.piece_range(layer, 0, 2) for layer in (1, 2)]
        first = (0, layout.header_bytes + 2 * 4096)
        assert sorted(tier.asked) == ([first, *apart] if not gap_bytes else [(0, sum(apart[-1]))])


@pytest.mark.parametrize("layer", [0, 1, -1], ids=["first", "mid", "last"])
@pytest.mark.parametrize("piece", [0, 3, 5])
@pytest.mark.parametrize("request_bytes", [9000, 1 << 24])
@pytest.mark.parametrize("kind", ["flip", "eio"])
def test_what_lies_before_a_bad_piece_is_kept(layer: int, piece: int, request_bytes: int, kind: str) -> None:
    tier, kv = Far(request_bytes=request_bytes), prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        tier.spots[spot(TINY, pieces=PIECES, layer=layer % 3, piece=piece)] = kind
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (piece * 64, [])
        with pytest.raises(LoadFailed):
            loaded.load.wait(0)


@pytest.mark.parametrize("breaks_at", [0, 6000, 20_000, 60_000, 100_000])
def test_what_a_request_did_not_bring_is_asked_for_again(breaks_at: int) -> None:
    tier, kv = Far(), prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        end = layout_of(TINY, PIECES).extent_bytes
        tier.breaks_at = breaks_at
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (PIECES * 64, [])
        assert bool(tier.reads) == (breaks_at < end - 5000)


def test_layers_are_there_before_the_request_that_brings_them_has_ended() -> None:
    tier, kv = Far(), prompt(64 + 1, representation=LARGE)
    with cache_of(tier, representation=LARGE) as cache:
        save(cache, kv)
        tier.gate = layout_of(LARGE, 1).layer_offsets[1] + 10_000
        with match(cache, kv) as lease:
            memory = FakeDestination(LARGE, 1)
            loading = lease.load(into=memory)
            loading.wait(0, TIMEOUT_S)
            assert memory.wrong(kv, pieces=1, layers=[0]) == []
            assert not loading.done
            tier.opened.set()
            assert loading.result(TIMEOUT_S) == 64
        assert len(tier.asked) == 1
