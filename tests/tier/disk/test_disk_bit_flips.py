"""Ten thousand random bits are changed in every kind of file, at rest and under a running tier. No wrong byte is served; what
mattered is counted by its reason, is quarantined, is not tried again, and its blocks can be saved anew. What did not matter is
padding, or a member of the marker that means nothing (`truth_kit.HARMLESS` says which and why)."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
import second_reader
from disk_kit import Clock
from truth_kit import HARMLESS, Part, cache_over, flip, open_cache, parts, prompt, until

from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.errors import FormatMismatch
from headstart.testing.fake_kv import OPAQUE, PAGED, STATEFUL, TINY, UNEVEN, FakeKV
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.tier.disk import DiskTier
from headstart.transfer import native

CAPACITY = 24 << 20
EXTENTS, PIECES = 300, 3
AGAIN = 6  # of what was lost in a round: asked for once more, and saved anew
WRITERS, EACH = 12, 6
MANY = [prompt(n, PIECES, TINY) for n in range(WRITERS * EACH)]
open_it = partial(open_cache, capacity_bytes=CAPACITY)
REPRESENTATIONS = {"tiny": TINY, "uneven": UNEVEN, "paged": PAGED, "opaque": OPAQUE, "stateful": STATEFUL}
ROUNDS = {"tiny": 8, "uneven": 8, "paged": 6, "opaque": 6, "stateful": 4}  # 9,600 bits; some thousand more are below


def choose(choice: random.Random, ranges: Sequence[Part]) -> Part:
    """Choose a kind, then a part: what is small is met as often as what is large."""
    kind = choice.choice(sorted({part.kind for part in ranges}))
    return choice.choice([part for part in ranges if part.kind == kind])


def flip_in(choice: random.Random, part: Part) -> None:
    flip(part.path, choice.randrange(part.start, part.end), choice.randrange(8))


def by_extent(root: Path) -> dict[bytes, list[Part]]:
    """Return the parts of each extent, by its first key."""
    found: dict[bytes, list[Part]] = {}
    last: bytes | None = None
    for part in parts(root):
        last = part.extent.keys[0] if part.extent else last if part.kind == "layer padding" else None
        if last is not None:
            found.setdefault(last, []).append(part)
    return found


def usable(part: Part, kv: FakeKV) -> int:
    """How many tokens of a prompt in one extent must still be served after a change in that part, and no more."""
    if part.kind in HARMLESS:
        return kv.pieces * kv.representation.piece_tokens
    if kv.representation.state == "required":  # good as a whole or not at all
        return 0
    return part.piece * kv.representation.piece_tokens if part.kind == "piece" else 0


def there(tier: DiskTier, kvs: Sequence[FakeKV]) -> list[bool]:
    """Whether a block of each prompt is found; of each all are, or none."""
    found = []
    for kv in kvs:
        extents = tier.locate(kv.representation.digest, kv.keys).extents
        assert (extents >= 0).all() or (extents < 0).all()
        found.append(bool(extents[0] >= 0))
    return found


def check_flipped(cache: PrefixCache, tier: DiskTier, flipped: dict[int, Part], kvs: Sequence[FakeKV]) -> list[FakeKV]:
    """Load every prompt after one bit of each was changed: served is what is before it; the loss is counted, and happens once.
    Returns what was lost."""
    before = cache.statistics().counters.get("load_failed_corrupt", 0)
    gone = tier.statistics().counters.get("quarantined_corrupt", 0)
    bad = [kvs[n] for n, part in flipped.items() if part.kind not in HARMLESS]
    for n, part in flipped.items():
        loaded = load(cache, kvs[n])
        assert loaded.wrong == [], f"a changed bit in {part} was served"
        assert loaded.usable_tokens == usable(part, kvs[n]), part
    counters = cache.statistics().counters
    assert counters.get("load_failed_corrupt", 0) - before == len(bad)
    until(lambda: tier.statistics().counters.get("quarantined_corrupt", 0) - gone == len(bad))
    assert not any(there(tier, bad))
    for kv in bad[:AGAIN]:  # not tried again
        loaded = load(cache, kv)
        assert (loaded.matched_tokens, loaded.usable_tokens) == (0, 0)
    assert cache.statistics().counters.get("load_failed_corrupt", 0) - before == len(bad)
    return bad


def flips_at_rest(root: Path, representation: Representation, *, rounds: int, seed: int) -> None:
    choice = random.Random(seed)
    kvs = [prompt(n, PIECES, representation) for n in range(EXTENTS)]
    cache, _ = open_it(root / "pristine", representation)
    with cache:
        for kv in kvs:
            assert save(cache, kv).reason is None
    pristine = by_extent(root / "pristine")
    numbers = {kv.keys[0]: n for n, kv in enumerate(kvs)}
    for round_ in range(rounds):
        kv_root = root / f"{round_}"
        shutil.copytree(root / "pristine", kv_root)
        flipped = {}
        for key, ranges in pristine.items():
            part = choose(choice, ranges)
            flip_in(choice, Part(kv_root / part.path.relative_to(root / "pristine"), part.start, part.end, part.kind))
            flipped[numbers[key]] = part
        assert len(flipped) == EXTENTS
        cache, tier = open_it(kv_root, representation)
        with cache, pytest.MonkeyPatch.context() as patch:
            if round_ % 2:
                patch.setattr(native, "reader", lambda: None)  # both readers, in turn
            bad = check_flipped(cache, tier, flipped, kvs)
            assert bad
            assert tier.check() == []
            for kv in bad[:AGAIN]:
                assert save(cache, kv).stored_tokens == PIECES * representation.piece_tokens
                assert load(cache, kv).usable_tokens == PIECES * representation.piece_tokens
        cache, tier = open_it(kv_root, representation)
        with cache:
            assert there(tier, bad) == [True] * len(bad[:AGAIN]) + [False] * len(bad[AGAIN:])
            assert all(hit_tokens(cache, kv) for kv in bad[:AGAIN])
            assert tier.check() == []
        shutil.rmtree(kv_root)


@pytest.mark.parametrize("name", REPRESENTATIONS)
def test_a_bit_changed_at_rest_in_any_extent_is_never_served_and_costs_one_load(tmp_path: Path, name: str) -> None:
    flips_at_rest(tmp_path, REPRESENTATIONS[name], rounds=ROUNDS[name], seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", REPRESENTATIONS)
def test_many_more_bits_changed_at_rest_are_never_served(tmp_path: Path, name: str, seed: int) -> None:
    flips_at_rest(tmp_path, REPRESENTATIONS[name], rounds=4 * ROUNDS[name], seed=1000 + seed)


@pytest.fixture(scope="module")
def by_many_writers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which each writer, now dead, has a journal and a segment of its own, with EACH of `MANY` in it."""
    root = tmp_path_factory.mktemp("many") / "kv"
    with ExitStack() as stack:
        tiers = [DiskTier.open(root, capacity_bytes=CAPACITY) for _ in range(WRITERS)]
        caches = [stack.enter_context(cache_over(tier, TINY)) for tier in tiers]
        for n, kv in enumerate(MANY):
            assert save(caches[n % WRITERS], kv).reason is None
    assert len(list(root.glob("journals/*.log"))) == WRITERS == len(list(root.glob("segments/*/*.seg")))
    return root


def check_rest(root: Path, expected: set[bytes], counted: dict[str, int]) -> None:
    """Open a damaged directory: there is what is expected, rightly; the damage is counted; all the rest can be saved anew."""
    cache, tier = open_it(root, TINY)
    with cache:
        found = set()
        for kv in MANY:
            loaded = load(cache, kv)
            assert loaded.wrong == []
            assert loaded.usable_tokens in (0, PIECES * 64)
            found |= {kv.keys[0]} if loaded.usable_tokens else set()
        assert found == expected
        counters = tier.statistics().counters
        assert {name: counters.get(name, 0) for name in counted} == counted
        for kv in MANY:
            assert save(cache, kv).stored_tokens == PIECES * 64
        assert tier.check() == []
    cache, tier = open_it(root, TINY)
    with cache:
        assert all(load(cache, kv).usable_tokens == PIECES * 64 for kv in MANY)
        assert tier.check() == []


@pytest.mark.parametrize("seed", range(10))
def test_a_bit_changed_in_any_journal_at_rest_costs_what_stands_behind_it_and_is_counted(
    tmp_path: Path, by_many_writers: Path, seed: int
) -> None:
    choice = random.Random(seed)
    shutil.copytree(by_many_writers, tmp_path, dirs_exist_ok=True)
    torn = unreadable = 0
    journals = [part for part in parts(tmp_path) if part.path.suffix == ".log"]
    for path in sorted(tmp_path.glob("journals/*.log")):
        part = choose(choice, [part for part in journals if part.path == path])
        flip_in(choice, part)
        torn += part.kind == "journal records"
        unreadable += part.kind == "journal header"
    contents = second_reader.read_directory(tmp_path)
    expected = {extent.keys[0] for extent in contents.extents}
    # Segments that no journal speaks of any more are read by themselves.
    expected |= {e.keys[0] for e in second_reader.scan_segments(tmp_path) if e.segment not in contents.journals.opened}
    check_rest(tmp_path, expected, {"journals_torn": torn, "journals_unreadable": unreadable})


@pytest.mark.parametrize("seed", range(6))
def test_a_bit_changed_in_a_segments_header_costs_that_segment_and_is_counted(
    tmp_path: Path, by_many_writers: Path, seed: int
) -> None:
    choice = random.Random(seed)
    shutil.copytree(by_many_writers, tmp_path, dirs_exist_ok=True)
    extents = second_reader.read_directory(tmp_path).extents
    lost, dropped = set(), 0
    headers = [part for part in parts(tmp_path) if part.kind in ("segment header", "segment padding")]
    for path in sorted(tmp_path.glob("segments/*/*.seg")):
        ranges = [part for part in headers if part.path == path]
        segment = second_reader.segment_name(path)
        inside = {extent.keys[0] for extent in extents if extent.segment == segment}
        part = choose(choice, ranges)
        flip_in(choice, part)
        if part.kind not in HARMLESS:
            lost |= inside
            dropped += 1
    check_rest(tmp_path, {extent.keys[0] for extent in extents} - lost, {"segments_dropped": dropped})


def is_marker(data: bytes) -> bool:
    try:
        return json.loads(data)["format"] == "headstart" and "version" in json.loads(data)
    except (ValueError, KeyError):
        return False


def test_a_bit_changed_in_the_marker_costs_nothing_or_the_directory_is_refused_in_words(tmp_path: Path) -> None:
    """It names a version; a changed version is refused as one. Everything else in it is written anew, or means nothing."""
    root, kv = tmp_path / "kv", prompt(1, PIECES, TINY)
    cache, _ = open_it(root, TINY)
    with cache:
        save(cache, kv)
    marker = root / "headstart.json"
    text = marker.read_bytes()
    refused = rewritten = 0
    for at in range(len(text)):
        flip(marker, at, bit := at % 8)
        damaged = marker.read_bytes()
        try:
            cache, tier = open_it(root, TINY)
        except FormatMismatch:
            assert json.loads(damaged)["version"] != 1 or json.loads(damaged)["features"]
            refused += 1
        else:
            with cache:
                assert load(cache, kv).usable_tokens == PIECES * 64, f"bit {bit} of byte {at}"
                counted = tier.statistics().counters.get("marker_rewritten", 0)
                assert counted == (not is_marker(damaged))
                assert is_marker(marker.read_bytes())
                rewritten += counted
        marker.write_bytes(text)
    assert rewritten > 20
    assert refused < 10


def test_a_bit_changed_under_a_running_tier_costs_one_load_and_is_saved_anew(tmp_path: Path) -> None:
    choice = random.Random(7)
    kvs = [prompt(n, PIECES, UNEVEN) for n in range(60)]
    numbers = {kv.keys[0]: n for n, kv in enumerate(kvs)}
    cache, tier = open_it(tmp_path, UNEVEN)
    with cache:
        for kv in kvs:
            assert save(cache, kv).reason is None
        for _ in range(8):
            flipped = {}
            for key, ranges in by_extent(tmp_path).items():
                flipped[numbers[key]] = part = choose(choice, ranges)
                flip_in(choice, part)
            assert len(flipped) == len(kvs)
            for kv in check_flipped(cache, tier, flipped, kvs):
                assert save(cache, kv).stored_tokens == PIECES * 64
        assert all(load(cache, kv).usable_tokens == PIECES * 64 for kv in kvs)
        assert tier.check() == []
    cache, tier = open_it(tmp_path, UNEVEN)
    with cache:
        assert all(load(cache, kv).usable_tokens == PIECES * 64 for kv in kvs)
        assert tier.check() == []


def test_a_bit_changed_in_the_journal_of_a_running_tier_is_noticed_and_written_anew(tmp_path: Path) -> None:
    choice, clock = random.Random(8), Clock()
    kvs = [prompt(n, 1, TINY) for n in range(80)]
    cache, tier = open_it(tmp_path, TINY, clock=clock)
    with cache:
        for number, kv in enumerate(kvs, start=1):
            assert save(cache, kv).reason is None
            (path,) = tmp_path.glob("journals/*.log")
            flip(path, choice.randrange(path.stat().st_size), choice.randrange(8))
            clock.now += 11
            tier.touch([info.id for info in tier.scan()])
            assert tier.statistics().counters["journal_damaged"] == number
        assert tier.check() == []
    cache, tier = open_it(tmp_path, TINY)
    with cache:
        assert all(load(cache, kv).usable_tokens == 64 for kv in kvs)
        assert tier.check() == []
