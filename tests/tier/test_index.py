"""The block index against a dict: same answers, bounded bytes, probes that end."""

from __future__ import annotations

import errno
import mmap
from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from headstart.tier import growing
from headstart.tier import index as index_module
from headstart.tier import slots as slots_module
from headstart.tier.index import BlockIndex


def key(number: int) -> bytes:
    return sha256(number.to_bytes(8, "little")).digest()


def colliding(number: int) -> bytes:
    """Return a key of which all have equal first 8 bytes, so that all probe from one slot."""
    return b"\x11" * 8 + number.to_bytes(8, "little") + b"\0" * 16


def at_the_end(number: int) -> bytes:
    """As `colliding`, from the table's last slot: all but one of them are entered past the end, at the front."""
    return b"\xff" * 8 + number.to_bytes(8, "little") + b"\0" * 16


def many(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), dtype=np.uint8)


class IndexAgainstDict(RuleBasedStateMachine):
    """Few keys, so that extents share blocks; a third of the keys share one of two slots. A pass goes on by two rows at a time,
    so that everything also happens in its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in {"_PASS_ROWS": 2, "_PASS_RATE": 1, "_MIN_ROWS": 8, "_BATCH": 5}.items():
            self.patch.setattr(index_module, name, value)
        for name, value in {"_MIN_SLOTS": 8, "_BATCH": 5, "_FILLED": 10}.items():
            self.patch.setattr(slots_module, name, value)
        self.index = BlockIndex()
        self.model: dict[int, list[bytes]] = {}  # extents in the order in which they came

    def teardown(self) -> None:
        self.patch.undo()

    def holder(self, key: bytes) -> tuple[int, int]:
        return next(((extent, keys.index(key)) for extent, keys in self.model.items() if key in keys), (-1, -1))

    keys = st.lists(st.integers(0, 90).map(lambda n: (colliding, key, key, key, at_the_end, key)[n % 6](n)), max_size=40)

    @rule(keys=keys, extent=st.integers(0, 12))
    def insert(self, keys, extent):
        if extent in self.model:
            return
        known = {one for some in self.model.values() for one in some}
        want = [one not in known and one not in keys[:at] for at, one in enumerate(keys)]
        assert self.index.insert(keys, extent).tolist() == want
        if keys:
            self.model[extent] = keys

    @rule(extent=st.integers(0, 12))
    def remove(self, extent):
        assert self.index.remove(extent) == len(self.model.pop(extent, []))

    @rule()
    def begin_a_pass(self):
        self.index._go_on(max(2, self.index._used))
        self.index._begin_pass()

    @rule()
    def load_anew(self):
        self.index = BlockIndex()
        for extents in (list(self.model)[:3], list(self.model)[3:]):
            keys = [one for extent in extents for one in self.model[extent]]
            blocks = np.array([len(self.model[extent]) for extent in extents], np.int64)
            self.index.load(keys, np.array(extents, np.int64), blocks)
        assert self.index.lookup([key(1), colliding(3)])[0].tolist() == [-1, -1]
        self.index.finish_loading()

    @rule(keys=keys)
    def lookup(self, keys):
        extents, positions = self.index.lookup(keys)
        assert list(zip(extents.tolist(), positions.tolist(), strict=True)) == [self.holder(one) for one in keys]

    @invariant()
    def every_extent_has_its_blocks(self):
        for extent in range(13):
            blocks = [one[:16] for one in self.model.get(extent, [])]
            assert [bytes(one) for one in self.index.keys(extent)] == blocks
            assert self.index.count(extent) == len(blocks)

    @invariant()
    def counts_agree(self):
        assert len(self.index) == len({one for keys in self.model.values() for one in keys})

    @invariant()
    def every_probe_ends(self):
        assert np.count_nonzero(self.index._table._slots) == self.index._table.taken <= 0.6 * len(self.index._table._slots)


IndexAgainstDict.TestCase.settings = settings(max_examples=40, stateful_step_count=50)
test_it_answers_as_a_dict_does = IndexAgainstDict.TestCase


def test_many_inserts_and_removes_leave_exactly_what_a_dict_has():
    """Past every threshold: growing rows, longer tables, packing after removes, coming back."""
    source = np.random.default_rng(7)
    keys = many(60_000)
    index, model = BlockIndex(), {}
    passes = 0
    for turn in range(3000):
        if turn % 7 < (5 if turn < 1500 else 3) or not model:
            first, count = int(source.integers(0, len(keys) - 100)), int(source.integers(1, 100))
            extent = next(one for one in range(4000) if one not in model)
            index.insert(keys[first : first + count], extent)
            model[extent] = (first, count)
        else:
            extent = list(model)[int(source.integers(0, len(model)))]
            assert index.remove(extent) == model.pop(extent)[1]
        passes += index._passing
    assert passes > 50
    want = np.full((len(keys), 2), -1)
    for extent, (first, count) in reversed(model.items()):
        want[first : first + count] = np.stack([np.full(count, extent), np.arange(count)], axis=1)
    extents, positions = index.lookup(keys)
    assert (extents == want[:, 0]).all()
    assert (positions == want[:, 1]).all()


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_a_table_is_never_so_full_that_a_probe_cannot_end(count, kept):
    keys = many(count, seed=count)
    index = BlockIndex()
    for at in range(0, count, 70):
        index.insert(keys[at : at + 70], at)
        index.remove(at - kept)
        assert np.count_nonzero(index._table._slots) <= 0.6 * len(index._table._slots)
    extents, _ = index.lookup(many(500, seed=10_000))
    assert (extents == -1).all()


def test_a_full_looking_neighbourhood_ends_its_probe():
    """600 keys that all start at one slot fill a run without a gap; looking up one more walks it to its end."""
    keys = [colliding(number) for number in range(600)]
    index = BlockIndex()
    for extent in (0, 1):
        assert index.insert(keys[extent::2], extent).all()
    extents, positions = index.lookup([*keys, colliding(600)])
    assert extents.tolist() == [0, 1] * 300 + [-1]
    assert positions.tolist() == [at // 2 for at in range(600)] + [-1]
    assert index.remove(0) == 300
    assert index.lookup(keys)[0].tolist() == [-1, 1] * 300


def test_of_equal_keys_in_one_extent_the_first_counts():
    index = BlockIndex()
    assert index.insert([key(1), key(2), key(1)], 7).tolist() == [True, True, False]
    assert index.lookup([key(1)])[1].tolist() == [0]
    assert len(index) == 2
    assert index.insert([key(1)], 8).tolist() == [False]
    assert index.remove(7) == 3
    assert index.lookup([key(1), key(2)])[0].tolist() == [8, -1]
    assert index.remove(8) == 1
    assert len(index) == 0


def test_a_block_is_found_in_the_extent_that_came_first_for_as_long_as_that_is_there():
    index = BlockIndex()
    for extent in (7, 8, 3):
        assert index.insert([key(0), key(extent)], extent).tolist() == [extent == 7, True]
    for extent in (7, 8, 3):
        assert index.lookup([key(0)])[0].tolist() == [extent]
        assert index.remove(extent) == 2
    assert index.lookup([key(0)])[0].tolist() == [-1]
    assert len(index._several) == 0


def test_an_extent_comes_once():
    index = BlockIndex()
    index.insert([key(1)], 7)
    with pytest.raises(ValueError, match="already"):
        index.insert([key(2)], 7)
    with pytest.raises(ValueError, match="already"):
        index.load([key(2), key(3)], np.array([8, 8]), np.array([1, 1]))
    assert index.remove(9) == 0
    assert index.lookup([key(1), key(2)])[0].tolist() == [7, -1]


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
    assert index.insert([], 2).tolist() == index.keys(2).tolist() == []
    assert index.lookup(np.empty((0, 32), np.uint8))[0].tolist() == []


@pytest.mark.parametrize("keys", [[b"short"], [key(1), b"x" * 15], np.zeros((1, 15), np.uint8), np.zeros((1, 32), np.int8)])
def test_what_is_no_key_is_refused(keys):
    with pytest.raises(ValueError, match="key"):
        BlockIndex().lookup(keys)


@pytest.mark.parametrize("extent", [-1, 2**32 - 1])
def test_numbers_that_do_not_fit_a_row_are_refused(extent):
    index = BlockIndex()
    with pytest.raises(ValueError, match="does not fit"):
        index.insert([key(1)], extent)
    assert len(index) == 0
    assert index.remove(extent) == 0


@pytest.mark.parametrize(("extents", "blocks"), [([1], [1]), ([1, 2], [2]), ([], []), ([1, 2], [2, 1])])
def test_extents_and_blocks_that_do_not_cover_the_keys_are_refused(extents, blocks):
    with pytest.raises(ValueError, match="2 keys"):
        BlockIndex().load([key(1), key(2)], np.array(extents, np.int64), np.array(blocks, np.int64))


def test_a_block_takes_at_most_64_bytes_while_growing_and_while_shrinking():
    keys = many(80_000)
    index = BlockIndex()
    worst = 0.0
    for at in range(0, len(keys), 10):
        index.insert(keys[at : at + 10], at // 10)
        if len(index) >= 10_000:
            worst = max(worst, index.nbytes / len(index))
    for at in range(0, len(keys) - 20_000, 10):
        assert index.remove(at // 10) == 10
        worst = max(worst, (index.nbytes - index._firsts.nbytes - index._counts.nbytes) / len(index))
    assert worst <= 64
    assert index.lookup(keys)[0].tolist() == [-1] * 60_000 + [at // 10 for at in range(60_000, 80_000)]


def test_nothing_is_held_twice_while_it_grows_and_while_it_is_packed():
    """A table is at most 9 bytes a block, a row 20, of which an eighth may be dead: a second table would show."""
    keys = many(100_000)
    index = BlockIndex()
    worst = 0.0
    changed = set()
    for at in range(0, len(keys), 10):
        index.insert(keys[at : at + 10], at // 10)
        if len(index) >= 50_000:
            worst = max(worst, (index._table.nbytes + 20 * index._used) / len(index))
            changed.add(index._table.changing)
    for at in range(2000):
        index.remove(at * 4)
        worst = max(worst, (index._table.nbytes + 20 * index._used) / len(index))
        changed.add(("passing", index._passing))
    assert changed == {False, True, ("passing", False), ("passing", True)}
    assert worst <= 9 / 0.875 + 20 / 0.875


def test_memory_is_given_back_when_most_blocks_have_gone_and_what_is_left_is_found():
    keys = many(40_000)
    index = BlockIndex()
    index.load(keys, np.arange(4000), np.full(4000, 10))
    index.finish_loading()
    long = index._table.nbytes
    for extent in range(3800):
        index.remove(extent)
    assert index._table.nbytes < long // 4
    assert index.lookup(keys)[0].tolist() == [-1] * 38_000 + [at // 10 for at in range(38_000, 40_000)]


def test_what_is_loaded_into_an_index_comes_beside_what_it_holds():
    keys = many(3000)
    index = BlockIndex()
    for extent in range(10):
        index.insert(keys[extent * 100 : extent * 100 + 100], extent)
    for extent in range(5):
        index.remove(extent)
    index.load(keys[1000:], np.arange(10, 30), np.full(20, 100))
    index.finish_loading()
    assert index.lookup(keys)[0].tolist() == [-1] * 500 + [at // 100 for at in range(500, 3000)]
    assert len(index) == index._table.taken == np.count_nonzero(index._table._slots) == 2500


def test_an_index_that_cannot_be_made_smaller_for_want_of_memory_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    index, keys = BlockIndex(), np.random.default_rng(3).integers(0, 256, (40, 1000, 16), np.uint8)
    for extent in range(40):
        index.insert(keys[extent], extent)
    looked_at = index._prefixes[:1], index._extents[:1], index._table._slots[:1]  # what is looked at is copied

    def full(*arguments: object, **more: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as without:
        without.setattr(growing.mmap, "mmap", full)
        for extent in range(38):
            index.remove(extent)
        assert (index.lookup(keys[38:].reshape(-1, 16))[0] == np.repeat([38, 39], 1000)).all()
    del looked_at
    for extent in range(40, 80):
        index.insert(keys[extent - 40] ^ 1, extent)
    assert (index.lookup(keys.reshape(-1, 16) ^ 1)[0] == np.repeat(np.arange(40, 80), 1000)).all()
    assert (index.lookup(keys.reshape(-1, 16))[0] == np.repeat([*[-1] * 38, 38, 39], 1000)).all()


def test_it_says_what_it_holds():
    index = BlockIndex()
    index.insert([key(1)], 1)
    assert repr(index) == f"<BlockIndex 1 blocks, {index.nbytes} bytes>"
