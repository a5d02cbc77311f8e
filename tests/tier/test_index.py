"""The block index against a dict: same answers, bounded bytes, probes that end."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headstart.tier.index import BlockIndex


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def colliding(number: int) -> bytes:
    """Return a key of which all have equal first 8 bytes, so that all probe from one slot."""
    return b"\x11" * 8 + number.to_bytes(8, "little") + b"\0" * 16


def many(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


class IndexAgainstDict(RuleBasedStateMachine):
    """Few keys, so that inserts and removes meet; a third of them share their slot."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex()
        self.model: dict[bytes, tuple[int, int]] = {}

    keys = st.lists(st.integers(0, 90).map(lambda n: colliding(n) if n % 3 == 0 else key(n)), max_size=40)

    @rule(keys=keys, extent=st.integers(0, 5), first_position=st.integers(0, 9))
    def insert(self, keys, extent, first_position):
        want = []
        for position, one in enumerate(keys, first_position):
            want.append(one not in self.model)
            self.model.setdefault(one, (extent, position))
        assert self.index.insert(keys, extent, first_position).tolist() == want

    @rule(runs=st.lists(st.tuples(st.integers(0, 5), keys), max_size=4))
    def insert_extents(self, runs):
        want = []
        for extent, some in runs:
            for position, one in enumerate(some):
                want.append(one not in self.model)
                self.model.setdefault(one, (extent, position))
        extents = np.array([extent for extent, _ in runs], np.int64)
        blocks = np.array([len(some) for _, some in runs], np.int64)
        assert self.index.insert_extents([one for _, some in runs for one in some], extents, blocks).tolist() == want

    @rule(keys=keys, extent=st.integers(0, 5))
    def remove(self, keys, extent):
        want = []
        for one in keys:
            want.append(self.model.get(one, (None,))[0] == extent)
            if want[-1]:
                del self.model[one]
        assert self.index.remove(keys, extent).tolist() == want

    @rule(keys=keys)
    def lookup(self, keys):
        extents, positions = self.index.lookup(keys)
        absent = (-1, -1)
        assert list(zip(extents.tolist(), positions.tolist(), strict=True)) == [self.model.get(one, absent) for one in keys]

    @invariant()
    def counts_agree(self):
        assert len(self.index) == len(self.model)


IndexAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=40)
test_it_answers_as_a_dict_does = IndexAgainstDict.TestCase


def test_many_inserts_and_removes_leave_exactly_what_a_dict_has():
    """Past every threshold: growing rows, doubling tables, packing after removes, coming back."""
    source = np.random.default_rng(7)
    keys = many(30_000)
    index, model = BlockIndex(), {}
    for turn in range(300):
        batch = source.choice(len(keys), source.integers(1, 400), replace=False)
        extent = int(source.integers(0, 40))
        if turn % 5 < (2 if turn < 150 else 3):
            want = []
            for position, at in enumerate(batch.tolist()):
                want.append(at not in model)
                model.setdefault(at, (extent, position))
            assert index.insert(keys[batch], extent).tolist() == want
        else:
            extent = int(source.integers(0, 40))
            batch = np.array([at for at, place in model.items() if place[0] == extent] + batch.tolist()[:50])
            batch = np.unique(batch)
            want = [model.get(at, (None,))[0] == extent for at in batch.tolist()]
            assert index.remove(keys[batch], extent).tolist() == want
            model = {at: place for at, place in model.items() if place[0] != extent or at not in batch}
        assert len(index) == len(model)
    extents, positions = index.lookup(keys)
    assert list(zip(extents.tolist(), positions.tolist(), strict=True)) == [model.get(i, (-1, -1)) for i in range(len(keys))]


@given(st.integers(1, 3000), st.integers(0, 3000))
def test_a_table_is_never_so_full_that_a_probe_cannot_end(count, removed):
    keys = many(count, seed=count)
    index = BlockIndex()
    for at in range(0, count, 700):
        index.insert(keys[at : at + 700], 1)
        index.remove(keys[: min(removed, at)], 1)
        assert np.count_nonzero(index._table) <= 0.6 * len(index._table)
    extents, _ = index.lookup(many(500, seed=10_000))
    assert (extents == -1).all()


def test_a_full_looking_neighbourhood_ends_its_probe():
    """600 keys that all start at one slot fill a run without a gap; looking up one more walks it to its end."""
    keys = [colliding(number) for number in range(600)]
    index = BlockIndex()
    assert index.insert(keys, 3).all()
    extents, positions = index.lookup([*keys, colliding(600)])
    assert extents.tolist() == [3] * 600 + [-1]
    assert positions.tolist() == [*range(600), -1]
    assert index.remove(keys[::2], 3).all()
    assert index.lookup(keys)[0].tolist() == [-1, 3] * 300


def test_of_equal_keys_in_one_batch_the_first_counts():
    index = BlockIndex()
    assert index.insert([key(1), key(2), key(1)], 7).tolist() == [True, True, False]
    assert index.lookup([key(1)])[1].tolist() == [0]
    assert index.remove([key(2), key(2)], 7).tolist() == [True, False]
    assert index.insert([key(2), key(2)], 8, 5).tolist() == [True, False]
    assert index.lookup([key(2)])[1].tolist() == [5]
    assert len(index) == 2


def test_a_known_block_keeps_its_place_and_only_its_extent_can_remove_it():
    index = BlockIndex()
    index.insert([key(1)], 7)
    assert not index.insert([key(1)], 8).any()
    assert not index.remove([key(1)], 8).any()
    assert index.lookup([key(1)])[0].tolist() == [7]
    assert index.remove([key(1)], 7).all()
    assert not index.remove([key(1)], 7).any()
    assert index.insert([key(1)], 8).all()
    assert index.lookup([key(1)])[0].tolist() == [8]


def test_keys_come_as_bytes_of_either_length_or_as_rows():
    index = BlockIndex()
    whole = [key(number) for number in range(10)]
    index.insert(whole, 1)
    rows = np.frombuffer(b"".join(whole), np.uint8).reshape(10, 32)
    for same in (
        whole,
        [one[:16] for one in whole],
        [whole[0][:16], *whole[1:]],
        rows,
        rows[:, :16],
        rows[::-1][::-1],
        tuple(whole),
    ):
        assert index.lookup(same)[1].tolist() == list(range(10))
    assert index.lookup([])[0].tolist() == []
    assert index.insert([], 1).tolist() == index.remove([], 1).tolist() == []
    assert index.lookup(np.empty((0, 32), np.uint8))[0].tolist() == []


@pytest.mark.parametrize("keys", [[b"short"], [key(1), b"x" * 15], np.zeros((1, 15), np.uint8), np.zeros((1, 32), np.int8)])
def test_what_is_no_key_is_refused(keys):
    with pytest.raises(ValueError, match="key"):
        BlockIndex().lookup(keys)


@pytest.mark.parametrize(("extent", "first_position"), [(-1, 0), (2**32 - 1, 0), (0, -1), (0, 2**31)])
def test_numbers_that_do_not_fit_a_row_are_refused(extent, first_position):
    index = BlockIndex()
    with pytest.raises(ValueError, match="does not fit"):
        index.insert([key(1)], extent, first_position)
    assert len(index) == 0


@pytest.mark.parametrize(("extents", "blocks"), [([1], [1]), ([1, 2], [2]), ([], []), ([1, 2], [2, 1])])
def test_extents_and_blocks_that_do_not_cover_the_keys_are_refused(extents, blocks):
    with pytest.raises(ValueError, match="2 keys"):
        BlockIndex().insert_extents([key(1), key(2)], np.array(extents, np.int64), np.array(blocks, np.int64))


def test_the_largest_numbers_come_back():
    index = BlockIndex()
    index.insert([key(1)], 2**32 - 2, 2**31 - 1)
    extents, positions = index.lookup([key(1)])
    assert (extents.tolist(), positions.tolist()) == ([2**32 - 2], [2**31 - 1])
    assert not index.remove([key(1)], 2**32 - 1).any()
    assert not index.remove([key(1)], -1).any()


def test_a_block_takes_at_most_64_bytes_while_growing_and_after_removes():
    keys = many(200_000)
    index = BlockIndex()
    worst = 0.0
    for at in range(0, len(keys), 1000):
        index.insert(keys[at : at + 1000], at // 1000)
        if len(index) >= 10_000:
            worst = max(worst, index.nbytes / len(index))
    for at in range(0, len(keys) - 10_000, 1000):
        assert index.remove(keys[at : at + 1000], at // 1000).all()
        worst = max(worst, index.nbytes / len(index))
    assert worst <= 64
    assert index.lookup(keys)[0].tolist() == [-1] * 190_000 + [at // 1000 for at in range(190_000, 200_000)]


def test_it_says_what_it_holds():
    index = BlockIndex()
    index.insert([key(1)], 1)
    assert repr(index) == f"<BlockIndex 1 blocks, {index.nbytes} bytes>"
