"""Every way in which files of a cache are known to go wrong, one by one, at rest and under a running tier: a miss that is
counted by its reason, tried once, never served, and saved anew."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import second_reader
from truth_kit import open_cache, prompt, until

from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import TINY, FakeKV
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.tier.disk import DiskTier, recovery
from headstart.tier.disk.door import RealDisk

CAPACITY = 16 << 20
PIECES = 4
KVS = [prompt(seed, PIECES, TINY) for seed in range(6)]
VICTIM, OTHER = KVS[1], KVS[3]


@dataclass(frozen=True)
class Harm:
    """What a change of the files does: tokens that are still served, by prompt (all of them where it is not named), and
    counters of cache and tier that must say so, at rest and while the tier is open."""

    served: dict[int, int]
    at_rest: dict[str, int] = field(default_factory=dict)
    running: dict[str, int] | None = field(default_factory=dict)  # None: cannot be done, or is not seen, while a tier has it


Damage = Callable[[Path], Harm]


def place(root: Path, kv: FakeKV) -> tuple[Path, int, int]:
    """Return (segment file, offset, bytes) of the extent that holds a prompt."""
    (extent,) = [e for e in second_reader.read_directory(root).extents if e.keys[0] == kv.keys[0]]
    return second_reader.segment_path(root, *extent.segment), extent.offset, extent.nbytes


def rewrite(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def torn_write(root: Path) -> Harm:
    """The second half of what was written never reached the medium: layer 0 is there, and the rest is not."""
    path, offset, nbytes = place(root, VICTIM)
    rewrite(path, offset + nbytes // 2, bytes(nbytes // 2))
    corrupt = {"load_failed_corrupt": 1, "quarantined_corrupt": 1}
    return Harm({1: 0}, corrupt, corrupt)


def torn_last_piece(root: Path) -> Harm:
    path, offset, nbytes = place(root, VICTIM)
    rewrite(path, offset + nbytes - 512, bytes(512))
    corrupt = {"load_failed_corrupt": 1, "quarantined_corrupt": 1}
    return Harm({1: (PIECES - 1) * 64}, corrupt, corrupt)


def hole(root: Path) -> Harm:
    """The file system lost the blocks, and zeros are read in their place."""
    path, offset, nbytes = place(root, VICTIM)
    disk = RealDisk()
    handle = disk.open(path, "write")
    if not disk.punch(handle, offset, nbytes):
        pytest.skip("no holes on this file system")
    disk.close(handle)
    corrupt = {"load_failed_corrupt": 1, "quarantined_corrupt": 1}
    return Harm({1: 0}, corrupt, corrupt)


def hole_in_a_piece(root: Path) -> Harm:
    path, offset, _ = place(root, VICTIM)
    disk = RealDisk()
    handle = disk.open(path, "write")
    if not disk.punch(handle, offset + 4096 + 4096, 4096):  # piece 1 of layer 0
        pytest.skip("no holes on this file system")
    disk.close(handle)
    corrupt = {"load_failed_corrupt": 1, "quarantined_corrupt": 1}
    return Harm({1: 64}, corrupt, corrupt)


def truncated_in_an_extent(root: Path) -> Harm:
    path, offset, nbytes = place(root, KVS[-1])
    os.truncate(path, offset + nbytes // 2)
    return Harm({5: 0}, {"removed_lost": 1}, {"load_failed_corrupt": 1, "quarantined_corrupt": 1})


def one_byte_short(root: Path) -> Harm:
    path, offset, nbytes = place(root, KVS[-1])
    os.truncate(path, offset + nbytes - 1)
    return Harm({5: (PIECES - 1) * 64}, {"removed_lost": 1}, {"load_failed_corrupt": 1, "quarantined_corrupt": 1})


def truncated_to_its_header(root: Path) -> Harm:
    path, _, _ = place(root, VICTIM)
    os.truncate(path, 4096)
    return Harm(dict.fromkeys(range(len(KVS)), 0), {"removed_lost": len(KVS)}, {"load_failed_corrupt": len(KVS)})


def truncated_to_nothing(root: Path) -> Harm:
    path, _, _ = place(root, VICTIM)
    os.truncate(path, 0)
    return Harm(dict.fromkeys(range(len(KVS)), 0), {"segments_dropped": 1}, {"load_failed_corrupt": len(KVS)})


def one_byte_more(root: Path) -> Harm:
    path, _, _ = place(root, VICTIM)
    rewrite(path, path.stat().st_size, b"x")
    return Harm({}, {"segments_cut": 1}, {})


def extents_exchanged(root: Path) -> Harm:
    path, first, nbytes = place(root, VICTIM)
    _, second, same = place(root, OTHER)
    assert nbytes == same
    data = path.read_bytes()
    rewrite(path, first, data[second : second + nbytes])
    rewrite(path, second, data[first : first + nbytes])
    stale = {"load_failed_stale": 2, "quarantined_corrupt": 2}
    return Harm({1: 0, 3: 0}, stale, stale)


def one_extent_over_another(root: Path) -> Harm:
    """As a journal that is older than its segment would have it: the index says one prompt, another one stands there."""
    path, first, nbytes = place(root, VICTIM)
    _, second, _ = place(root, OTHER)
    rewrite(path, first, path.read_bytes()[second : second + nbytes])
    stale = {"load_failed_stale": 1, "quarantined_corrupt": 1}
    return Harm({1: 0}, stale, stale)


def pieces_exchanged(root: Path) -> Harm:
    path, offset, _ = place(root, VICTIM)
    data, at = path.read_bytes(), offset + 4096  # layer 0
    rewrite(path, at + 4096, data[at + 8192 : at + 12288] + data[at + 4096 : at + 8192])
    corrupt = {"load_failed_corrupt": 1, "quarantined_corrupt": 1}
    return Harm({1: 64}, corrupt, corrupt)


def layers_exchanged(root: Path) -> Harm:
    path, offset, _ = place(root, VICTIM)
    data, at, layer = path.read_bytes(), offset + 4096, PIECES * 4096
    rewrite(path, at, data[at + layer : at + 2 * layer] + data[at : at + layer])
    corrupt = {"load_failed_corrupt": 1, "quarantined_corrupt": 1}
    return Harm({1: 0}, corrupt, corrupt)


def segments_swapped(root: Path) -> Harm:
    """Two files under each other's name; the second one is a writer's that is made here."""
    other = root / "other"
    _fill(other, [prompt(100, PIECES, TINY)])
    (mine,), (theirs,) = root.glob("segments/*/*.seg"), other.glob("segments/*/*.seg")
    shutil.copyfile(theirs, mine)
    shutil.rmtree(other)
    return Harm(dict.fromkeys(range(len(KVS)), 0), {"segments_dropped": 1}, None)


def segment_gone(root: Path) -> Harm:
    place(root, VICTIM)[0].unlink()
    return Harm(dict.fromkeys(range(len(KVS)), 0), {}, {"segments_lost": 1})


def journal_gone(root: Path) -> Harm:
    (path,) = root.glob("journals/*.log")
    path.unlink()
    return Harm({}, {"segments_scanned": 1}, None)


def journal_of_yesterday(root: Path) -> Harm:
    """A journal that was restored, and knows only the first three: what it does not know is cut off, and may be saved anew."""
    (path,) = root.glob("journals/*.log")
    kept, sizes = 0, []
    for kind, payload in second_reader.journal_records(path.read_bytes(), *_name(path)):
        kept += 13 + len(payload)
        sizes += [kept] * (kind == 4)
    os.truncate(path, 80 + sizes[2])
    return Harm({3: 0, 4: 0, 5: 0}, {"segments_cut": 1}, None)


def segment_of_yesterday(root: Path) -> Harm:
    """The journal goes on beyond what the segment has: as without power, when nothing was synced."""
    path, offset, _ = place(root, OTHER)
    os.truncate(path, offset)
    lost = {"removed_lost": 3}
    return Harm({3: 0, 4: 0, 5: 0}, lost, {"load_failed_corrupt": 3, "quarantined_corrupt": 3})


EVERY: Sequence[Damage] = [
    value for value in list(globals().values()) if getattr(value, "__annotations__", {}).get("return") == "Harm"
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    _fill(tmp_path / "kv", KVS)
    return tmp_path / "kv"


@pytest.mark.parametrize("damage", EVERY, ids=lambda damage: damage.__name__)
def test_damaged_at_rest_it_is_a_miss_that_is_counted_once_and_saved_anew(root: Path, damage: Damage) -> None:
    harm = damage(root)
    cache, tier = open_cache(root, TINY, capacity_bytes=CAPACITY)
    with cache:
        # What opening finds is dropped whole; what only loading finds, up to the first bad piece.
        lost = dict.fromkeys(harm.served, 0) if "removed_lost" in harm.at_rest else harm.served
        _check(cache, tier, lost, harm.at_rest)
        assert tier.check() == []
    _check_again(root)


@pytest.mark.parametrize("damage", EVERY, ids=lambda damage: damage.__name__)
def test_damaged_while_it_is_open_it_is_a_miss_that_is_counted_once_and_saved_anew(root: Path, damage: Damage) -> None:
    cache, tier = open_cache(root, TINY, capacity_bytes=CAPACITY)
    with cache:
        assert all(load(cache, kv).usable_tokens == PIECES * 64 for kv in KVS)  # its files are open
        harm = damage(root)
        if harm.running is not None:
            _check(cache, tier, harm.served, harm.running)
    _check_again(root)


def test_where_files_are_many_one_that_was_swapped_is_found_by_whoever_first_reads_in_it(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a thousand files to look at their headers takes longer than all the rest of a start."""
    monkeypatch.setattr(recovery, "_MANY", 1)
    harm = segments_swapped(root)
    cache, tier = open_cache(root, TINY, capacity_bytes=CAPACITY)
    with cache:
        _check(cache, tier, harm.served, {"segments_lost": 1, "segments_dropped": 0})
        assert tier.check() == []
    _check_again(root)


def _check(cache: PrefixCache, tier: DiskTier, served: dict[int, int], counted: dict[str, int]) -> None:
    for n, kv in enumerate(KVS):
        loaded = load(cache, kv)
        assert loaded.wrong == []
        assert loaded.usable_tokens == served.get(n, PIECES * 64), f"prompt {n}"

    def counters() -> dict[str, int]:
        both = {**cache.statistics().counters, **tier.statistics().counters}
        return {name: both.get(name, 0) for name in counted}

    until(lambda: counters() == counted)  # what is bad is quarantined by the thread that saves
    for n in served:  # once: what failed is not offered again
        assert hit_tokens(cache, KVS[n]) == 0
        assert load(cache, KVS[n]).usable_tokens == 0
    assert counters() == counted
    for kv in KVS:
        assert save(cache, kv).stored_tokens == PIECES * 64
        assert load(cache, kv).usable_tokens == PIECES * 64


def _check_again(root: Path) -> None:
    cache, tier = open_cache(root, TINY, capacity_bytes=CAPACITY)
    with cache:
        for kv in KVS:
            save(cache, kv)
            loaded = load(cache, kv)
            if loaded.usable_tokens < PIECES * 64:
                save(cache, kv)
                loaded = load(cache, kv)
            assert loaded.usable_tokens == PIECES * 64
        assert tier.check() == []


def _fill(root: Path, kvs: Sequence[FakeKV]) -> None:
    cache, _ = open_cache(root, TINY, capacity_bytes=CAPACITY)
    with cache:
        for kv in kvs:
            assert save(cache, kv).reason is None


def _name(path: Path) -> tuple[bytes, int]:
    writer, generation = path.stem.split("-")
    return bytes.fromhex(writer), int(generation, 16)
