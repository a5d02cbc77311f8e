"""S1 Truth: a read gives the bytes saved under that key, or a miss. Never anything else, whatever the medium holds."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from headstart.block.representation import Representation
from headstart.testing.fake_kv import OPAQUE, PAGED, STATEFUL, TINY, UNEVEN, FakeKV
from headstart.testing.faults import Fault
from headstart.testing.round_trip import hit_tokens, load, match, save
from headstart.testing.tier_contract import together

SMALL = replace(TINY, layer_bytes=(256, 256))
REPRESENTATIONS = {"tiny": TINY, "uneven": UNEVEN, "paged": PAGED, "opaque": OPAQUE, "stateful": STATEFUL}


def tokens(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32).tolist()


@pytest.mark.parametrize("tiers", ["memory", "disk", "both"])
@pytest.mark.parametrize("representation", REPRESENTATIONS.values(), ids=list(REPRESENTATIONS))
@pytest.mark.parametrize(("shift", "cuts"), [(0, 1), (8, 1), (0, 2), (1, 3)], ids=str)
def test_what_was_saved_comes_back(shelf, tiers: str, representation: Representation, shift: int, cuts: int) -> None:
    """Into aligned memory and past it, in one buffer a run or several a piece."""
    kv = FakeKV(representation, tokens(700), cuts=cuts)
    cache = shelf.open(tiers, representation=representation)
    assert save(cache, kv).stored_tokens == 640
    for _ in range(2):
        found = load(cache, kv, shift=shift, cuts=cuts)
        assert (found.matched_tokens, found.usable_tokens, found.wrong) == (640, 640, [])
        if tiers != "memory":
            cache = shelf.reopen(tiers, representation=representation)


@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 65, 113, 114, 127, 128, 129, 255, 256, 1023, 1024, 4097])
def test_every_length_comes_back(shelf, blocks: int) -> None:
    """Across every limit of batch, segment and queue, where other caches went wrong past some hundred blocks."""
    kv = FakeKV(SMALL, tokens(blocks * 64 + 1))
    cache = shelf.open("disk", representation=SMALL)
    assert save(cache, kv).stored_tokens == blocks * 64
    found = load(shelf.reopen("disk", representation=SMALL), kv)
    assert (found.usable_tokens, found.wrong) == (blocks * 64, [])


@pytest.mark.parametrize("other", ["bfloat16", "float8_e4m3", "int8"])
def test_another_dtype_is_never_read_as_this_one(shelf, other: str) -> None:
    kv = FakeKV(replace(TINY, dtype="float16"), tokens(300))
    save(shelf.open("disk", representation=kv.representation), kv)
    theirs = FakeKV(replace(TINY, dtype=other), tokens(300))
    assert hit_tokens(shelf.reopen("disk", representation=theirs.representation), theirs) == 0
    assert hit_tokens(shelf.reopen("disk", representation=kv.representation), kv) == 256


@pytest.mark.parametrize(
    "change",
    [{"layout": "fake/other"}, {"shard": "0/2"}, {"quantisation": "q8_0"}, {"layer_bytes": (4096,)}, {"piece_tokens": 128}],
    ids=lambda change: next(iter(change)),
)
def test_another_layout_is_never_read_as_this_one(shelf, change: dict) -> None:
    kv = FakeKV(TINY, tokens(300))
    save(shelf.open("disk"), kv)
    other = replace(TINY, **change)
    assert hit_tokens(shelf.reopen("disk", representation=other), FakeKV(other, tokens(300))) == 0


def test_a_key_that_stands_over_other_tokens_is_a_miss(shelf) -> None:
    """Two prompts whose hashes collide: the stored token ids tell them apart."""
    mine, theirs = FakeKV(TINY, tokens(300, seed=1)), FakeKV(TINY, tokens(300, seed=2))
    for tiers in ("memory", "disk"):
        cache = shelf.open(tiers)
        assert shelf.tiers[-1].write(theirs.image(keys=mine.keys), TINY).stored
        for _ in range(2):  # that it may stay a miss is the price of a collision, which SHA-256 does not have
            assert load(cache, mine).usable_tokens == 0
            save(cache, mine)
        assert load(cache, mine).wrong == []
        shelf.close()


def test_a_view_with_buffers_of_the_wrong_size_is_refused_and_others_are_served(shelf) -> None:
    class TooSmall:
        def buffers(self, layer: int, first: int, sizes: list[int]) -> list[memoryview]:
            return [memoryview(bytearray(sum(sizes) - 1))]

    kv = FakeKV(TINY, tokens(300))
    cache = shelf.open("both")
    save(cache, kv)
    with match(cache, kv) as lease:
        try:
            usable = lease.load(into=TooSmall()).result(10)
        except ValueError:
            usable = 0
    assert usable == 0
    assert load(cache, kv).usable_tokens == 256


@pytest.mark.parametrize("kind", ["flip", "foreign", "short"])
@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_tier_that_lies_is_caught(shelf, kind: str, every: int) -> None:
    kvs = [FakeKV(TINY, tokens(64 * 8 + 5, seed=s)) for s in range(3)]
    cache = shelf.open("disk", faulty=True)
    for kv in kvs:
        save(cache, kv)
    shelf.faulty.inject(Fault("read", kind, every=every))
    for kv in kvs * 2:
        assert load(cache, kv).wrong == []
    assert sum(shelf.faulty.injected.values()) > 0
    shelf.faulty.heal()
    for kv in kvs:
        save(cache, kv)
        found = load(cache, kv)
        assert found.wrong == []
        if kind == "flip":  # what was found to be wrong is replaced at once; what could not be read is left alone for a while
            assert found.usable_tokens == 512


@pytest.mark.parametrize("at", [0.0, 0.25, 0.5, 0.99])
def test_a_changed_byte_anywhere_is_a_miss_from_there_and_spoils_nothing_else(shelf, at: float) -> None:
    kv, other = FakeKV(TINY, tokens(64 * 8 + 5)), FakeKV(TINY, tokens(64 * 8 + 5, seed=1))
    cache = shelf.open("disk")
    save(cache, kv)
    save(cache, other)
    shelf.close()
    shelf.damage(kv, at=at)
    cache = shelf.open("disk")
    found = load(cache, kv)
    assert found.wrong == []
    assert found.usable_tokens < 512
    found = load(cache, other)
    assert (found.usable_tokens, found.wrong) == (512, [])
    save(cache, kv)
    found = load(cache, kv)
    assert (found.usable_tokens, found.wrong) == (512, [])


def test_a_second_reader_never_sees_half_of_what_a_writer_is_writing(shelf) -> None:
    kv = FakeKV(TINY, tokens(64 * 8 + 5))
    cache = shelf.open("disk", faulty=True)
    shelf.faulty.inject(Fault("write", "stall", times=1))
    ticket = cache.save(kv.tokens.tolist(), kv)
    assert shelf.faulty.stalled.wait(10)
    found = load(cache, kv)
    assert (found.usable_tokens, found.wrong) == (0, [])
    shelf.faulty.heal()
    assert ticket.wait(10).stored_tokens == 512
    found = load(cache, kv)
    assert (found.usable_tokens, found.wrong) == (512, [])


def test_returning_sessions_get_their_own_content(shelf) -> None:
    """Eight threads, sessions that share heads and come back after being pushed out of a small memory tier to disk."""
    cache = shelf.open("both", memory_bytes=1 << 20)
    head = tokens(64 * 3)
    sessions = [head[: 64 * (s % 4)] + tokens(64 * 12, seed=1000 + s) for s in range(40)]
    wrong: list[object] = []
    loads = [0] * 8

    def serve(thread: int) -> None:
        choice = random.Random(thread)
        for _ in range(60):
            session = choice.choice(sessions)
            kv = FakeKV(TINY, session[: choice.randrange(65, len(session))])
            found = load(cache, kv)
            wrong.extend(found.wrong)
            loads[thread] += found.usable_tokens // 64
            save(cache, kv)

    together(serve, count=8)
    assert wrong == []
    assert min(loads) > 0


@pytest.mark.parametrize("at", [0.0, 0.3, 0.999], ids=str)
def test_a_state_is_what_was_saved_or_the_prefix_ends_at_an_earlier_one(shelf, at: float) -> None:
    """Each byte of it counts: a changed one costs the load, and the state before it is the next hit."""
    kv = FakeKV(STATEFUL, tokens(700))
    cache = shelf.open("disk", representation=STATEFUL)
    assert save(cache, kv, states=kv.states(4, 10)).stored_tokens == 640
    shelf.damage_state(kv, behind=10, at=at)
    found = load(cache, kv)
    assert (found.matched_tokens, found.usable_tokens, found.wrong) == (640, 0, [])
    found = load(cache, kv)
    assert (found.matched_tokens, found.usable_tokens, found.wrong) == (256, 256, [])
    save(cache, kv, states=kv.states(10))
    assert load(cache, kv).usable_tokens == 640
