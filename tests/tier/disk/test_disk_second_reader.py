"""docs/format.md is enough: a reader written from it alone, without headstart, reads every block of a real directory."""

from __future__ import annotations

import ast
import itertools
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import second_reader
from disk_kit import CAPACITY, Clock
from second_reader import Contents, blocks_of, read_directory, scan_segments

from headstart.block.extent import layout_of, seal
from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, OPAQUE, PAGED, TINY, UNEVEN, FakeKV, aligned_bytes
from headstart.testing.round_trip import load, save
from headstart.tier.base import ExtentId, Terms
from headstart.tier.disk import DiskTier

STATEFUL = replace(TINY, layout="fake/4", state="required")
Blocks = dict[tuple[bytes, bytes], tuple[FakeKV, int]]  # (representation, key) → the prompt it was saved from, its place there


class Life:
    """A directory with everything in it that this version writes, and what was ever saved there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.saved: Blocks = {}
        self.states: dict[bytes, bytes] = {}  # key of an extent's last block → its boundary state
        self._seeds = itertools.count(1)

    def kv(self, representation: Any, pieces: int, **options: Any) -> FakeKV:
        seed = next(self._seeds)
        tokens = np.arange(pieces * representation.piece_tokens + 1, dtype=np.uint64) * 3 + seed * 100_003
        kv = FakeKV(representation, tokens.tolist(), **options)
        self.saved |= {(representation.digest, key): (kv, block) for block, key in enumerate(kv.keys)}
        return kv

    def turn(self, life: int, pieces: int) -> FakeKV:
        """A conversation that grows."""
        kv = FakeKV(TINY, (np.arange(pieces * 64 + 1, dtype=np.uint64) * 11 + (900 + life) * 1_000_003).tolist())
        self.saved |= {(TINY.digest, key): (kv, block) for block, key in enumerate(kv.keys)}
        return kv

    def run(self) -> None:
        for life in range(3):
            clock = Clock()
            with self._cache(PAGED, clock) as paged:
                for n in range(80 if life else 4):  # more than there is room for
                    save(paged, self.kv(PAGED, 16, salt=f"{n}"))
            with self._cache(TINY, clock) as tiny, self._cache(OPAQUE, clock) as opaque, self._cache(UNEVEN, clock) as uneven:
                kept = [self.kv(TINY, 1 + n % 5, salt=[None, "tenant", "another"][n % 3], shared_tokens=64) for n in range(25)]
                for n, kv in enumerate(kept):
                    terms = {"retention": ("chat", "agent")[n % 2], "tenant": "acme" * (n % 4 == 1)}
                    ticket = tiny.save(kv.tokens, kv, salt=kv.salt, shared_tokens=kv.shared_tokens, **terms)
                    assert ticket.wait(20).stored_tokens > 0
                for pieces in (1, 3, 5):
                    assert save(opaque, self.kv(OPAQUE, pieces)).reason is None
                    assert save(uneven, self.kv(UNEVEN, pieces)).reason is None
                (tier,) = [source.tier for source in tiny._sources]
                self._write_states(tier)
                for _ in range(20 if life else 400):  # many uses make a long journal, most of it dead
                    clock.now += 6
                    tier.touch([info.id for info in tier.scan()])
                tier.keep([info.id for info in tier.scan()][:10], Terms("agent"))
                pinned = [info.id for info in tier.scan()][:6]
                assert all(tier.pin(pinned, until_ms=2**45 + life))
                tier.unpin(pinned[3:])
                for pieces in (30, 60, 90):  # short runs of one chain that is used again, which are joined once it pauses
                    assert save(tiny, self.turn(life, pieces)).reason is None
                    for _ in range(3):
                        tier.touch(self._extents_of(tier, life, pieces))
                clock.now += 61
                while tier.tend():
                    pass
                self._rot(tier, kept[life])
                assert load(tiny, kept[life]).usable_tokens == 0
                save(tiny, kept[life])  # quarantines, and stores anew
            for representation in (PAGED, OPAQUE, UNEVEN):
                with self._cache(representation, clock) as cache:
                    assert save(cache, self.kv(representation, 3), retention="chat").reason is None

    def _cache(self, representation: Any, clock: Clock) -> PrefixCache:
        tier = DiskTier.open(self.root, capacity_bytes=CAPACITY, clock=clock)
        return PrefixCache([tier], identity=IDENTITY, representation=representation, match_timeout_s=20.0)

    def _extents_of(self, tier: DiskTier, life: int, pieces: int) -> list[ExtentId]:
        found = tier.locate(TINY.digest, self.turn(life, pieces).keys).extents.tolist()
        return [ExtentId(extent) for extent in dict.fromkeys(found) if extent >= 0]

    def _write_states(self, tier: DiskTier) -> None:
        for state in (b"the state", bytes(range(256)) * 17):
            kv = self.kv(STATEFUL, 2)
            layout = layout_of(STATEFUL, 2, state_bytes=len(state))
            image = aligned_bytes(layout.extent_bytes)
            for layer in range(STATEFUL.layers):
                offset, nbytes = layout.piece_range(layer, 0, 2)
                image[offset : offset + nbytes] = np.concatenate([kv.piece(layer, piece) for piece in range(2)])
            image[layout.state_offset : layout.state_offset + len(state)] = np.frombuffer(state, np.uint8)
            root = kv.identity.root()
            seal(image.data, STATEFUL, parent=root, keys=kv.keys, tokens=kv.tokens[:128], state_bytes=len(state))
            assert tier.write(image.data, STATEFUL).stored
            self.states[kv.keys[-1]] = state
        kv = self.kv(STATEFUL, 6)  # blocks that lie there already, once more with a state
        for first, pieces in ((0, 6), (2, 1), (1, 1)):
            state_bytes = 100 * (first + pieces)
            assert tier.write(kv.image(first, pieces, state_bytes=state_bytes), STATEFUL).reason == "written"
            self.states[kv.keys[first + pieces - 1]] = bytes(kv.state(first + pieces, nbytes=state_bytes))

    def _rot(self, tier: DiskTier, kv: FakeKV) -> None:
        """Change a byte of the prompt's first piece where it lies."""
        content = kv.piece(0, 0).tobytes()
        for path in self.root.glob("segments/*/*.seg"):
            if (at := path.read_bytes().find(content)) >= 0:
                with path.open("r+b") as file:
                    file.seek(at)
                    file.write(bytes([content[0] ^ 1]))


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    life = Life(tmp_path_factory.mktemp("life") / "kv")
    life.run()
    return life


@pytest.fixture
def tier(life: Life) -> Iterator[DiskTier]:
    tier = DiskTier.open(life.root, capacity_bytes=CAPACITY)
    yield tier
    assert tier.check() == []
    tier.close()


def test_the_second_reader_knows_nothing_of_headstart() -> None:
    tree = ast.parse(Path(second_reader.__file__).read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    roots = {str(name).split(".")[0] for name in imported}
    assert roots - set(sys.stdlib_module_names) == {"blake3", "xxhash"}


def test_the_directory_holds_everything_that_is_written(life: Life) -> None:
    """Or else the tests beside this one show less than they say."""
    contents = read_directory(life.root)
    there = {extent.representation.digest for extent in contents.extents}
    assert there == {r.digest for r in (TINY, UNEVEN, OPAQUE, PAGED, STATEFUL)}
    journals = list((life.root / "journals").iterdir())
    assert len(journals) >= 3
    assert any(not path.name.endswith("-00000000.log") for path in journals), "no journal was ever renewed"
    reasons = set(contents.journals.removed.values())
    assert {"capacity", "corrupt", "joined"} <= reasons
    assert contents.journals.quarantined
    assert {extent.retention for extent in contents.extents} == {"default", "chat", "agent"}
    assert {extent.tenant for extent in contents.extents} == {"", "acme"}
    assert {extent.pinned_until_ms > 0 for extent in contents.extents} == {True, False}
    assert any(len(extent.classes) > 1 for extent in contents.extents)
    assert any(any(extent.extras) for extent in contents.extents)


def test_every_block_that_the_reader_finds_is_what_was_saved(life: Life) -> None:
    contents = read_directory(life.root)
    assert contents.refused == []
    _compare(life, contents)


def test_the_reader_finds_exactly_what_the_tier_finds(life: Life, tier: DiskTier) -> None:
    contents = read_directory(life.root)
    theirs = {
        (e.representation.digest, e.keys[0][:16]): (len(e.keys), e.nbytes, e.last_used, e.tenant, e.pinned_until_ms)
        for e in contents.extents
    }
    ours = {
        (i.representation, i.keys[0]): (i.blocks, i.extent_bytes, i.last_used, i.tenant, i.pinned_until_ms or 0)
        for i in tier.scan()
    }
    assert theirs == ours
    classes = {(e.representation.digest, e.keys[0][:16]): e.classes for e in contents.extents}
    assert all(info.retention in classes[info.representation, info.keys[0]] for info in tier.scan())
    found = contents.blocks()
    for (representation, key), (kv, _) in life.saved.items():
        located = int(tier.locate(representation, [key]).extents[0])
        assert (located != -1) == ((representation, key) in found), f"a block of prompt {kv.tokens[:2]}"


def test_a_directory_in_use_is_read_as_well(life: Life, tier: DiskTier) -> None:
    kv = life.kv(TINY, 3)
    assert tier.write(kv.image(), TINY).stored
    contents = read_directory(life.root)
    assert contents.refused == []
    assert (TINY.digest, kv.keys[2]) in contents.blocks()
    _compare(life, contents)


def test_segments_are_read_without_their_journals(life: Life) -> None:
    """Nothing that is alive is missed; what is removed may still stand there, and is right too."""
    alive = {(extent.segment, extent.offset): extent for extent in read_directory(life.root).extents}
    scanned = scan_segments(life.root)
    assert alive.keys() <= {(extent.segment, extent.offset) for extent in scanned}
    for (representation, key), places in blocks_of(scanned).items():
        kv, block = life.saved[representation, key]
        for extent, position in places:
            _compare_block(kv, block, extent, position)


def test_a_directory_rebuilt_without_journals_is_what_the_reader_scans(life: Life, tmp_path: Path) -> None:
    for path in life.root.rglob("*"):
        if path.is_file() and path.suffix != ".log":
            copy = tmp_path / "kv" / path.relative_to(life.root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    with_rot = {(e.segment, e.offset) for e in scan_segments(tmp_path / "kv")}
    tier = DiskTier.open(tmp_path / "kv", capacity_bytes=2 * CAPACITY)
    ours = {(info.representation, info.keys[0], info.blocks) for info in tier.scan()}
    theirs = {(e.representation.digest, e.keys[0][:16], len(e.keys)) for e in scan_segments(tmp_path / "kv")}
    assert theirs <= ours  # the tier takes a header's word for its pieces until they are read
    assert with_rot
    tier.close()


def _compare(life: Life, contents: Contents) -> None:
    blocks = contents.blocks()
    assert blocks
    for (representation, key), places in blocks.items():
        kv, block = life.saved[representation, key]
        for extent, position in places:
            _compare_block(kv, block, extent, position)
    for extent in contents.extents:
        assert extent.state == life.states.get(extent.keys[-1], b"")


def _compare_block(kv: FakeKV, block: int, extent: second_reader.Extent, position: int) -> None:
    per_piece = kv.representation.blocks_per_piece
    assert extent.tokens[position] == tuple(kv.tokens[64 * block : 64 * block + 64].tolist())
    for layer in range(kv.representation.layers):
        want = kv.piece(layer, block // per_piece).tobytes()
        assert extent.pieces[layer][position // per_piece] == want, f"block {block}, layer {layer}"
