"""What was saved comes back to the bit: every length, every kind of piece, every way that it may lie."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from cache_kit import cache_of, disk, prompt

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache import extents as extents_module
from headstart.testing.fake_kv import IDENTITY, OPAQUE, PAGED, TINY, UNEVEN, FakeDestination, FakeKV
from headstart.testing.round_trip import finish, load, match, save
from headstart.tier.memory import MemoryTier

KINDS = pytest.mark.parametrize("representation", [TINY, UNEVEN, PAGED, OPAQUE], ids=["tiny", "uneven", "paged", "opaque"])


@pytest.fixture(params=["memory", "disk"])
def tier(request: pytest.FixtureRequest) -> Iterator[object]:
    tier = MemoryTier(64 << 20) if request.param == "memory" else disk(64 << 20)
    yield tier
    assert tier.check() == []


@KINDS
@pytest.mark.parametrize("blocks", [1, 2, 63, 64, 65, 128, 129])
def test_every_block_of_a_prompt_comes_back(tier: MemoryTier, representation: Representation, blocks: int) -> None:
    kv = prompt(blocks * 64 + 1, representation=representation)
    with cache_of(tier, representation=representation) as cache:
        result = save(cache, kv)
        whole = kv.pieces * representation.piece_tokens
        assert (result.stored_tokens, result.reason) == (whole, None)
        loaded = load(cache, kv)
        assert (loaded.matched_tokens, loaded.usable_tokens, loaded.wrong) == (whole, whole, [])
        assert loaded.load.tokens_by_tier == ({tier.name: whole} if whole else {})


@KINDS
@pytest.mark.parametrize(("shift", "cuts"), [(0, 1), (8, 1), (0, 3), (520, 2)])
def test_destinations_need_no_alignment(tier: MemoryTier, representation: Representation, shift: int, cuts: int) -> None:
    kv = prompt(9 * 128 + 1, representation=representation, cuts=cuts)
    with cache_of(tier, representation=representation) as cache:
        save(cache, kv)
        loaded = load(cache, kv, shift=shift, cuts=cuts)
        assert (loaded.usable_tokens, loaded.wrong) == (9 * 128, [])


@KINDS
@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_at_least_one_token_is_left_to_compute(representation: Representation, blocks: int, more: int) -> None:
    piece = representation.piece_tokens
    stored = prompt(8 * piece, representation=representation)
    asked = prompt(blocks * piece + more, representation=representation)
    with cache_of(MemoryTier(8 << 20), representation=representation) as cache:
        save(cache, stored)
        with match(cache, asked) as lease:
            assert lease.tokens == (blocks if more == 1 else blocks - 1) * piece


def test_prompts_that_part_inside_a_piece_are_both_there(tier: MemoryTier) -> None:
    one = prompt(6 * 128, representation=PAGED)
    other = FakeKV(PAGED, [*one.tokens[: 3 * 128 + 64].tolist(), *range(10**6, 10**6 + 400)])
    with cache_of(tier, representation=PAGED) as cache:
        for kv in (one, other):
            assert save(cache, kv).reason is None
        for kv in (one, other):
            loaded = load(cache, kv)
            assert (loaded.usable_tokens, loaded.wrong) == (kv.pieces * 128 - 128 * (len(kv.tokens) % 128 == 0), [])


@KINDS
def test_a_hit_that_ends_inside_an_extent_reads_only_its_part(representation: Representation) -> None:
    tier = disk()
    stored = prompt(20 * 128, representation=representation)
    asked = FakeKV(representation, [*stored.tokens[: 7 * 128].tolist(), *range(10**6, 10**6 + 500)])
    with cache_of(tier, representation=representation) as cache:
        save(cache, stored)
        loaded = load(cache, asked)
        assert (loaded.usable_tokens, loaded.wrong) == (7 * 128, [])


@KINDS
def test_a_prefix_spread_over_tiers_and_extents_comes_back_whole(
    representation: Representation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extents_module, "_MAX_BLOCKS", 6)
    memory, slow = MemoryTier(16 << 20), disk()
    kv = prompt(31 * 128 + 5, representation=representation)
    with cache_of(memory, slow, representation=representation) as cache:
        for tokens in (5 * 128, 12 * 128, 31 * 128):
            save(cache, prompt(tokens, representation=representation))
        infos = sorted(memory.scan(), key=lambda info: info.id)
        assert len(infos) > 5
        assert memory.delete([info.id for info in infos[1::2]], reason="user") == len(infos[1::2])
        loaded = load(cache, kv)
        assert (loaded.usable_tokens, loaded.wrong) == (31 * 128, [])
        by_tier = loaded.load.tokens_by_tier
        assert by_tier["memory"] > 0
        assert by_tier["disk"] > 0
        assert sum(by_tier.values()) == 31 * 128


def test_what_was_read_from_disk_reaches_memory_with_the_next_save() -> None:
    memory, slow = MemoryTier(16 << 20), disk()
    kv = prompt(20 * 64 + 1)
    with cache_of(memory, slow) as cache:
        save(cache, kv)
        memory.delete([info.id for info in memory.scan()], reason="user")
        assert load(cache, kv).load.tokens_by_tier == {"disk": 20 * 64}
        before = slow.statistics().extents
        assert save(cache, kv).stored_tokens == 20 * 64
        assert slow.statistics().extents == before
        assert load(cache, kv).load.tokens_by_tier == {"memory": 20 * 64}


def test_a_longer_prompt_adds_only_what_is_new() -> None:
    tier = disk()
    with cache_of(tier) as cache:
        save(cache, prompt(10 * 64))
        written = save(cache, prompt(14 * 64)).written_bytes
        assert written == prompt(14 * 64).image(10, 4).nbytes
        assert save(cache, prompt(14 * 64)).written_bytes == 0
        assert load(cache, prompt(14 * 64 + 1)).wrong == []


def test_header_and_layer_0_arrive_in_one_read_and_each_layer_in_one_more() -> None:
    tier = disk()
    kv = prompt(6 * 64 + 1)
    with cache_of(tier) as cache:
        save(cache, kv)
        header_bytes = next(tier.scan()).header_bytes
        load(cache, kv)
    assert sorted((offset, nbytes) for _, offset, nbytes in tier.reads) == [
        (0, header_bytes + 6 * 4096),
        (header_bytes + 6 * 4096, 6 * 4096),
        (header_bytes + 12 * 4096, 6 * 4096),
    ]


@pytest.mark.parametrize("shift", [0, 8])
def test_large_layers_are_read_in_bounded_requests(shift: int) -> None:
    representation = Representation(kind="mha", layout="fake/9", dtype="float32", layer_bytes=(700_000, 4096 * 200))
    tier = disk(64 << 20)
    kv = prompt(9 * 64 + 1, representation=representation)
    with cache_of(tier, representation=representation) as cache:
        save(cache, kv)
        loaded = load(cache, kv, shift=shift)
    assert (loaded.usable_tokens, loaded.wrong) == (9 * 64, [])
    assert max(nbytes for _, _, nbytes in tier.reads) <= (2 << 20) + 8192
    assert all(nbytes % 4096 == 0 and offset % 4096 == 0 for _, offset, nbytes in tier.reads)


def test_a_miss_is_an_empty_lease_and_an_empty_load() -> None:
    with cache_of(disk()) as cache, match(cache, prompt(200)) as lease:
        assert (lease.tokens, lease.tokens_by_tier) == (0, {})
        running = lease.load(into=FakeDestination(TINY, 1))
        running.wait(0)
        assert (running.result(), running.tokens_by_tier, running.done) == (0, {}, True)


@pytest.mark.parametrize(("leave", "hit"), [(0, 640), (1, 576), (64, 576), (65, 512), (1000, 0)])
def test_as_many_tokens_are_left_as_the_caller_says(leave: int, hit: int) -> None:
    kv = prompt(640)
    with cache_of(disk()) as cache:
        save(cache, kv)
        with cache.match(kv.tokens, leave=leave) as lease:
            assert lease.tokens == hit
            assert finish(lease, kv).wrong == []
        with pytest.raises(ValueError, match="leave"):
            cache.match(kv.tokens, leave=-1)


def test_salts_and_identities_never_share() -> None:
    other = Identity(weights=b"\x22" * 32, architecture=IDENTITY.architecture)
    kvs = [prompt(640, salt=salt) for salt in (None, "a", "b")] + [prompt(640, identity=other)]
    with cache_of(MemoryTier(8 << 20), disk()) as cache:
        for i, kv in enumerate(kvs):
            assert load(cache, kv).matched_tokens == 0
            assert save(cache, kv).stored_tokens == 640
            assert [load(cache, earlier).wrong for earlier in kvs[: i + 1]] == [[]] * (i + 1)
            assert load(cache, kv).matched_tokens == 640 - 64


def test_a_declared_prefix_is_shared_by_tenants_and_nothing_more() -> None:
    with cache_of(disk()) as cache:
        save(cache, prompt(640, salt="a", shared_tokens=200))
        loaded = load(cache, prompt(640, salt="b", shared_tokens=200))
        assert (loaded.usable_tokens, loaded.wrong) == (192, [])


@pytest.mark.parametrize("make", [list, tuple, lambda ids: np.array(ids, np.uint32), lambda ids: np.array(ids, np.int64)])
def test_tokens_may_come_in_any_sequence(make: object) -> None:
    kv = prompt(300)
    with cache_of(disk()) as cache:
        save(cache, kv)
        with cache.match(make(kv.tokens.tolist())) as lease:  # type: ignore[operator]
            assert lease.tokens == 256


@pytest.mark.parametrize("tokens", [[-1] * 70, [1 << 32] * 70, ["a"] * 70, np.ones(70)])
def test_what_is_no_token_id_is_wrong_use(tokens: list[int]) -> None:
    with cache_of(disk()) as cache:
        with pytest.raises(ValueError, match="token id"):
            cache.match(tokens)
        with pytest.raises(ValueError, match="token id"):
            cache.save(tokens, prompt(64))
