"""A load that meets bad bytes, a bad medium, or no answer at all keeps its good part, tells at once, and never lies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from threading import Event

import numpy as np
import pytest
from cache_kit import TIMEOUT_S, cache_of, disk, extents, leased_bytes, prompt, spot, until

from headstart.block.extent import layout_of, seal
from headstart.block.representation import Representation
from headstart.cache import extents as extents_module
from headstart.cache import faults as faults_module
from headstart.cache.prefix_cache import SaveResult
from headstart.errors import LoadFailed
from headstart.testing.fake_kv import PAGED, TINY, UNEVEN, FakeDestination, aligned_bytes
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.round_trip import finish, hit_tokens, load, match, save
from headstart.tier.base import ExtentId
from headstart.tier.memory import MemoryTier

PIECES = 6


@pytest.mark.parametrize("representation", [TINY, UNEVEN, PAGED], ids=["tiny", "uneven", "paged"])
@pytest.mark.parametrize("layer", [0, 1, -1], ids=["first", "mid", "last"])
@pytest.mark.parametrize("piece", range(PIECES))
@pytest.mark.parametrize("shift", [0, 8], ids=["direct", "staged"])
@pytest.mark.parametrize("kind", ["flip", "eio"])
def test_what_lies_before_a_bad_piece_is_kept(
    representation: Representation, layer: int, piece: int, shift: int, kind: str
) -> None:
    tier = disk()
    kv = prompt(PIECES * representation.piece_tokens + 1, representation=representation)
    layer %= representation.layers
    with cache_of(tier, representation=representation) as cache:
        save(cache, kv)
        tier.spots[spot(representation, pieces=PIECES, layer=layer, piece=piece)] = kind
        loaded = load(cache, kv, shift=shift)
        good = piece if kind == "flip" else first_met(representation, layer=layer, piece=piece)
        assert loaded.usable_tokens == good * representation.piece_tokens
        assert loaded.wrong == []
        with pytest.raises(LoadFailed) as failure:
            loaded.load.wait(0)
        assert failure.value.usable_tokens == loaded.usable_tokens
        reason = "corrupt" if kind == "flip" else "read"
        assert cache.statistics().counters[f"load_failed_{reason}"] == 1
        if shift and kind == "flip":  # what is not verified never reaches the destination
            assert not [at for at in loaded.destination.touched(first=piece) if at[0] == layer]


def first_met(representation: Representation, *, layer: int, piece: int) -> int:
    """Return the first piece that cannot be read without the OS page in which the bad byte of `piece` lies."""
    layout = layout_of(representation, PIECES * representation.blocks_per_piece)
    page = spot(representation, pieces=PIECES, layer=layer, piece=piece) // 4096
    ranges = [layout.piece_range(layer, p, 1) for p in range(PIECES)]
    return next(p for p, (offset, nbytes) in enumerate(ranges) if (offset + nbytes - 1) // 4096 >= page)


@pytest.mark.parametrize("kind", ["flip", "eio"])
@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "mid", "last"])
def test_a_bad_header_loses_its_extent_and_what_follows(bad: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 2)
    tier = disk()
    kv = prompt(6 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        victim = ExtentId(int(tier.locate(TINY.digest, kv.keys).extents[2 * bad]))
        tier.victim = victim
        tier.spots[100] = kind
        loaded = load(cache, kv)
        assert loaded.usable_tokens == bad * 128
        assert loaded.wrong == []


def test_a_corrupt_extent_is_saved_again_while_leases_are_held() -> None:
    tier = disk()
    kv = prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        with match(cache, kv), match(cache, kv) as lease:
            tier.spots[spot(TINY, pieces=PIECES, layer=1, piece=3)] = "flip"
            assert finish(lease, kv).usable_tokens == 3 * 64
            assert hit_tokens(cache, kv) == 0
            tier.spots.clear()
            result = save(cache, kv)
            assert (result.stored_tokens, result.written_bytes) == (PIECES * 64, kv.image().nbytes)
            assert load(cache, kv).usable_tokens == PIECES * 64
        assert (extents(tier), tier.statistics().counters["deleted_corrupt"]) == (1, 1)
        assert leased_bytes(tier) == 0


def test_a_deletion_that_fails_is_tried_again_by_the_next_save() -> None:
    inner = disk()
    tier = FaultyTier(inner)
    kv = prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        inner.spots[spot(TINY, pieces=PIECES, layer=1, piece=3)] = "flip"
        tier.inject(Fault("delete", "eio", times=1))
        assert load(cache, kv).usable_tokens == 3 * 64
        inner.spots.clear()
        until(lambda: tier.injected["delete", "eio"] == 1)
        assert save(cache, kv).stored_tokens == PIECES * 64
        assert load(cache, kv).usable_tokens == PIECES * 64


def test_while_it_cannot_be_deleted_a_corrupt_extent_is_not_called_stored() -> None:
    inner = disk()
    tier = FaultyTier(inner)
    kv = prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        inner.spots[spot(TINY, pieces=PIECES, layer=1, piece=3)] = "flip"
        tier.inject(Fault("delete", "eio"))
        load(cache, kv)
        assert save(cache, kv) == SaveResult(0, 0, "error")


def test_an_extent_that_could_not_be_read_is_not_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk()
    kv = prompt(PIECES * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        tier.spots[spot(TINY, pieces=PIECES, layer=1, piece=3)] = "eio"
        assert load(cache, kv).usable_tokens == 3 * 64
        tried = len(tier.reads)
        assert load(cache, kv).matched_tokens == 0
        assert len(tier.reads) == tried
        tier.spots.clear()
        monkeypatch.setattr(faults_module, "_AVOID_S", -1.0)
        cache._sources[0].quarantine._until.clear()
        assert load(cache, kv).usable_tokens == PIECES * 64
        assert extents(tier) == 1


def test_avoidance_ends_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_of(disk()) as cache:
        quarantine = cache._sources[0].quarantine
        monkeypatch.setattr(faults_module, "_MAX_ENTRIES", 3)
        for extent in range(5):
            quarantine.avoid(ExtentId(extent), for_good=extent % 2 == 0)
        assert quarantine.avoided() == [2, 3, 4]
        monkeypatch.setattr(faults_module, "_AVOID_S", -1.0)
        quarantine.avoid(ExtentId(9), for_good=False)
        quarantine.avoid(ExtentId(4), for_good=False)
        assert quarantine.avoided() == [3, 4]


def test_equal_keys_with_other_tokens_are_a_miss() -> None:
    tier = MemoryTier(1 << 20)
    mine, theirs = prompt(4 * 64 + 1), prompt(4 * 64 + 1, seed=1)
    layout = layout_of(TINY, 4)
    image = aligned_bytes(layout.extent_bytes).data
    seal(image, TINY, parent=mine.identity.root(), keys=mine.keys, tokens=theirs.tokens[: 4 * 64])
    tier.write(image, TINY)
    with cache_of(tier) as cache:
        loaded = load(cache, mine)
        assert (loaded.matched_tokens, loaded.usable_tokens) == (256, 0)
        assert cache.statistics().counters["load_failed_collision"] == 1
        assert load(cache, mine).matched_tokens == 0


@pytest.mark.parametrize("shift", [0, 8])
def test_bytes_of_another_extent_never_pass(shift: int) -> None:
    inner = MemoryTier(4 << 20)
    tier = FaultyTier(inner)
    kvs = [prompt(8 * 64 + 1, seed=seed) for seed in range(4)]
    with cache_of(tier) as cache:
        for kv in kvs:
            save(cache, kv)
        for start in (1, 2, 3):
            tier.inject(Fault("read", "foreign", every=2, start=start))
            for kv in kvs:
                loaded = load(cache, kv, shift=shift)
                assert loaded.wrong == []
            tier.heal()


@pytest.mark.parametrize("kind", ["eio", "corrupt", "short", "flip"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_disk_that_fails_now_and_then_costs_hits_and_nothing_else(kind: str, every: int) -> None:
    inner = MemoryTier(4 << 20)
    tier = FaultyTier(inner, Fault("read", kind, every=every))  # type: ignore[arg-type]
    with cache_of(tier) as cache:
        for round_ in range(3):
            for seed in range(5):
                kv = prompt(8 * 64 + 1, seed=seed)
                loaded = load(cache, kv, shift=8 * (round_ % 2))
                assert loaded.wrong == []
                save(cache, kv)
        assert tier.injected["read", kind] > 0  # type: ignore[index]
    inner = tier.inner  # type: ignore[assignment]
    assert leased_bytes(inner) == 0


@pytest.mark.parametrize("verb", ["locate", "lease", "touch", "write", "delete"])
def test_no_verb_of_a_failing_tier_reaches_the_engine(verb: str) -> None:
    tier = FaultyTier(MemoryTier(4 << 20))
    kv = prompt(8 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        tier.inject(Fault(verb, "eio"), Fault("read", "flip"))  # type: ignore[arg-type]
        loaded = load(cache, kv)
        assert loaded.wrong == []
        result = save(cache, prompt(8 * 64 + 1, seed=1))
        assert result.reason in (None, "error")
        assert loaded.usable_tokens == 0
        tier.heal()
        assert cache.statistics().counters.get(f"tier_failed_{verb}", 0) > 0


def test_a_destination_of_the_wrong_size_fails_the_load_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Short:
        def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
            return [memoryview(bytearray(sum(sizes) - 1))]

    with cache_of(disk()) as cache, caplog.at_level(logging.CRITICAL):
        save(cache, prompt(300))
        with match(cache, prompt(300)) as lease:
            running = lease.load(into=Short())
            assert running.result() == 0
            with pytest.raises(LoadFailed, match="the destination gave"):
                running.wait(0)
        assert load(cache, prompt(300)).usable_tokens == 256


def test_a_destination_that_ends_its_thread_fails_the_load_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Leaving:
        def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
            raise SystemExit

    with cache_of(disk()) as cache, caplog.at_level(logging.CRITICAL):
        save(cache, prompt(300))
        for _ in range(20):  # more than there are threads
            with match(cache, prompt(300)) as lease:
                assert lease.load(into=Leaving()).result(TIMEOUT_S) == 0
        assert load(cache, prompt(300)).usable_tokens == 256


def test_what_is_gone_when_the_lease_is_taken_shortens_the_match(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 2)
    tier = disk()
    kv = prompt(8 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        placement = tier.locate(TINY.digest, kv.keys)
        tier.delete([ExtentId(int(placement.extents[5]))], reason="user")
        monkeypatch.setattr(tier, "locate", lambda representation, keys: placement, raising=False)
        with match(cache, kv) as lease:
            assert lease.tokens == 4 * 64
            assert finish(lease, kv).wrong == []
        assert leased_bytes(tier) == 0


def test_an_extent_that_vanishes_under_its_lease_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk()
    kv = prompt(8 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        with match(cache, kv) as lease:
            monkeypatch.setattr(tier, "shape", lambda extent: None, raising=False)
            assert finish(lease, kv).usable_tokens == 0


def test_waiting_has_a_deadline_and_a_stalled_read_ends_the_load_late() -> None:
    tier = FaultyTier(MemoryTier(4 << 20))
    kv = prompt(8 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        tier.inject(Fault("read", "stall", times=1))
        with match(cache, kv) as lease:
            destination = FakeDestination(TINY, 8)
            running = lease.load(into=destination)
            assert tier.stalled.wait(TIMEOUT_S)
            for wait in (lambda: running.wait(0, timeout_s=0.0), lambda: running.result(timeout_s=0.0)):
                with pytest.raises(LoadFailed) as failure:
                    wait()
                assert (failure.value.timed_out, failure.value.usable_tokens) == (True, 0)
            assert not running.done
            tier.heal()
            assert running.result(TIMEOUT_S) == 8 * 64
            assert destination.wrong(kv, pieces=8) == []


def test_a_tier_whose_reads_hang_is_left_alone_until_they_end() -> None:
    tier = FaultyTier(MemoryTier(4 << 20))
    kv = prompt(8 * 64 + 1)
    with cache_of(tier, load_timeout_s=0.0) as cache:
        save(cache, kv)
        tier.inject(Fault("read", "stall", times=1))
        with match(cache, kv) as lease:
            running = lease.load(into=FakeDestination(TINY, 8))
            assert tier.stalled.wait(TIMEOUT_S)
            assert hit_tokens(cache, kv) == 0
            assert cache.statistics().counters["match_skipped_memory"] == 1
            ended = Event()
            running.add_done_callback(lambda _: ended.set())
            tier.heal()
            assert ended.wait(TIMEOUT_S)


def test_after_a_cancel_nothing_more_is_read() -> None:
    inner = disk()
    tier = FaultyTier(inner)
    kv = prompt(8 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        tier.inject(Fault("read", "stall", times=1))
        with match(cache, kv) as lease:
            running = lease.load(into=FakeDestination(TINY, 8))
            assert tier.stalled.wait(TIMEOUT_S)
            running.cancel()
            tier.heal()
            assert running.result(TIMEOUT_S) == 0
        assert len(inner.reads) == 1
        assert hit_tokens(cache, kv) == 8 * 64  # a cancel is nobody's fault


def test_loads_that_only_memory_serves_verify_nothing_twice() -> None:
    tier = MemoryTier(4 << 20)
    kv = prompt(8 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        extent = next(iter(tier._extents.values()))
        np.frombuffer(extent.region.view, np.uint8)[-1] ^= 1
        assert load(cache, kv).usable_tokens == 8 * 64


@pytest.mark.parametrize("field", ["header_bytes", "extent_bytes"])
def test_an_extent_of_another_size_than_its_tier_says_is_a_miss_and_is_dropped(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    tier = disk()
    kv = prompt(641)
    with cache_of(tier) as cache:
        save(cache, kv)
        (info,) = tier.scan()
        found = tier.shape(info.id)
        wrong = replace(found, **{field: getattr(found, field) + 4096})
        monkeypatch.setattr(tier, "shape", lambda _: wrong, raising=False)
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (0, [])
        assert [fault.reason for fault in loaded.load.faults] == ["stale"]
        monkeypatch.undo()
        assert save(cache, kv).reason is None  # which deletes it first
        assert load(cache, kv).usable_tokens == 640


@pytest.mark.parametrize("layers", [(2, 3), (3, 2)], ids=str)
def test_of_bad_pieces_in_layers_that_are_read_together_the_first_in_the_prompt_counts(layers: tuple[int, int]) -> None:
    tier = disk()
    representation = replace(TINY, layer_bytes=TINY.layer_bytes[:1] * 4)
    kv = prompt(PIECES * 64 + 1, representation=representation)
    with cache_of(tier, representation=representation) as cache:
        save(cache, kv)
        for layer, piece in zip(layers, (4, 1), strict=True):
            tier.spots[spot(representation, pieces=PIECES, layer=layer, piece=piece)] = "flip"
        loaded = load(cache, kv)
        assert len(tier.reads) == 3  # the header and layer 0, layer 1, layers 2 and 3
        assert (loaded.usable_tokens, loaded.wrong) == (64, [])
