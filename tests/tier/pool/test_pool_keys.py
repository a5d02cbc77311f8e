"""A pool whose checks are made with a key: whoever may write to it but has no key makes others miss, and no more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pool_kit import TIMING, Machine, image, keys, prompt

from headstart.block.checks import XXH3, Sealing, keyed
from headstart.block.extent import decode_header
from headstart.block.whole import examine
from headstart.cache.explaining import fates_of
from headstart.cache.history import SaveHistory
from headstart.errors import ExtentCorrupt
from headstart.metrics import Counters
from headstart.testing.fake_kv import TINY
from headstart.tier.base import ExtentId, ReadRange, Terms
from headstart.tier.pool import PoolTier

pytest.importorskip("blake3")
SECRET = bytes(range(32))
KEY, OTHER = keyed(SECRET), keyed(bytes(32))
KEYED = Sealing((KEY,))
Make = Callable[..., Machine]


def whole(machine: Machine, extent: ExtentId) -> memoryview:
    """Return an extent's image, verified as the machine verifies."""
    info = machine.tier.info(extent)
    assert info is not None
    got = memoryview(bytearray(info.extent_bytes))
    assert machine.tier.lease([extent]) == [True]
    try:
        machine.tier.read([ReadRange(extent, 0, [got])])
    finally:
        machine.tier.release([extent])
    examine(got, TINY, machine.tier.sealing)
    return got


def reads(machine: Machine, seed: int) -> bool:
    """Whether a prompt is found, every byte of it what was saved."""
    extent = machine.extent(seed)
    if extent < 0:
        return False
    got, saved = whole(machine, extent), image(seed)
    edge = decode_header(saved, TINY).layout(TINY).header_bytes
    assert got[edge:] == saved[edge:]
    return True


def poke(root: Path, change: Callable[[bytearray], None]) -> None:
    """Change the only segment that has anything in it, behind its header."""
    (segment,) = root.rglob("*.seg")
    data = bytearray(segment.read_bytes())
    begin = data.index(b"HSEXTENT")
    extent = data[begin:]
    change(extent)
    segment.write_bytes(data[:begin] + extent)


def test_what_one_sealed_another_with_the_key_reads(machine: Make) -> None:
    a, b = machine(sealing=KEYED), machine(sealing=KEYED)
    assert a.save(1) == "written"
    b.wait(0.2)
    assert reads(b, 1)
    assert b.save(1) == "present"
    assert decode_header(whole(b, b.extent(1)), TINY, KEYED).algorithm == KEY
    info = b.tier.info(b.extent(1))
    assert info is not None
    assert info.check_key == KEY.key_id


@pytest.mark.parametrize("sealing", [Sealing(), Sealing((OTHER,))], ids=["no key", "another key"])
def test_why_says_that_what_is_there_was_sealed_otherwise(machine: Make, sealing: Sealing) -> None:
    theirs = machine(sealing=sealing)
    theirs.save(1)
    mine = machine(sealing=KEYED)

    def fates(at_s: float) -> set[tuple[str, str]]:
        asked: dict[str, Any] = {"representation": TINY.digest, "tiers": [mine.tier], "counters": Counters()}
        return {(fate.absence, fate.tier) for fate in fates_of(keys(1), at_s=at_s, history=SaveHistory(), **asked)}

    assert fates(mine.wall.now + 1.0) == {("other-key", "pool")}
    assert fates(mine.wall.now - 60.0) == {("unknown", "")}  # it was not there yet


def test_what_has_the_tiers_checks_already_is_stored_as_it_is(machine: Make) -> None:
    a, b = machine(sealing=KEYED), machine(sealing=KEYED)
    a.save(1)
    again = whole(a, a.extent(1))
    a.tier.delete([a.extent(1)], reason="user")
    assert b.tier.write(again, TINY).reason == "written"
    assert whole(b, b.extent(1)) == again


@pytest.mark.parametrize("sealing", [Sealing(), Sealing((OTHER,))], ids=["no key", "another key"])
def test_what_was_sealed_otherwise_is_a_counted_miss_stays_where_it_is_and_is_saved_anew(
    machine: Make, sealing: Sealing, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = machine(sealing=sealing)
    theirs.save(1)
    mine = machine(sealing=KEYED)
    assert mine.extent(1) == -1
    assert mine.counter("locate_refused_key") == 4
    assert sum("none of it is read" in one.message for one in caplog.records) == 1
    assert mine.save(1) == "written"
    theirs.wait(0.2)
    assert (reads(mine, 1), reads(theirs, 1)) == (True, True)
    assert mine.tier.statistics().extents == 2
    assert mine.tier.check() == theirs.tier.check() == []


def test_who_has_no_key_misses_is_told_which_setting_and_takes_nothing_away(
    machine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    mine, theirs = machine(sealing=KEYED), machine()
    assert "keyed" not in caplog.text
    mine.save(1)
    theirs.wait(0.2)
    theirs.wait(0.2)
    assert theirs.extent(1) == -1
    assert theirs.counter("locate_refused_key") == 4
    assert sum("cache.check_key_file" in one.message for one in caplog.records) == 1
    [info] = theirs.tier.scan()
    assert theirs.tier.delete([info.id], reason="corrupt") == 0  # as a check that it cannot make would have it
    mine.wait(0.2)
    assert reads(mine, 1)


def test_older_keys_are_believed_and_the_first_one_seals(machine: Make) -> None:
    old, new = machine(sealing=Sealing((OTHER,))), machine(sealing=Sealing((KEY, OTHER)))
    old.save(1)
    new.wait(0.2)
    assert reads(new, 1)
    assert new.save(2) == "written"
    old.wait(0.2)
    assert old.extent(2) == -1
    assert reads(machine(sealing=KEYED), 2)


@pytest.mark.parametrize(
    ("forge", "reason"),
    [
        (lambda extent: extent.__setitem__(slice(0, image(1).nbytes), image(1)), "key"),  # right, but for the key
        (lambda extent: extent.__setitem__(slice(200, 210), b"0123456789"), "header-check"),
        (lambda extent: extent.__setitem__(slice(-4096, None), image(2)[-4096:]), "piece"),  # another prompt's bytes
    ],
    ids=["no key", "header", "bytes"],
)
def test_what_was_put_in_place_of_a_sealed_extent_is_never_read(
    machine: Make, root: Path, forge: Callable[[bytearray], None], reason: str
) -> None:
    a = machine(sealing=KEYED)
    a.save(1)
    a.close()
    poke(root, forge)
    b = machine(sealing=KEYED)
    with pytest.raises(ExtentCorrupt) as caught:
        whole(b, b.extent(1))
    assert caught.value.facts["reason"] == reason
    assert b.tier.delete([b.extent(1)], reason="corrupt") == 1  # the journal calls it ours, and it is not
    assert b.save(1) == "written"
    assert reads(b, 1)


def test_a_writer_without_the_key_that_calls_its_own_keyed_poisons_nothing(machine: Make) -> None:
    forger = machine(sealing=Sealing((XXH3,)))
    store, record = forger.tier._store, forger.tier._store.write_extent
    store.write_extent = lambda image, representation, added, **how: record(  # type: ignore[method-assign]
        image, representation, _called(added, KEY.key_id), **how
    )
    forger.save(1)
    mine = machine(sealing=KEYED)
    extent = mine.extent(1)
    assert extent >= 0  # as its journal says
    with pytest.raises(ExtentCorrupt):
        whole(mine, extent)
    assert mine.tier.delete([extent], reason="corrupt") == 1
    assert mine.save(1) == "written"
    assert reads(mine, 1)


def _called(added, key_id: int):  # type: ignore[no-untyped-def]
    return replace(added, check_key=key_id)


def test_a_collector_without_the_key_carries_what_it_cannot_verify_as_it_is(machine: Make) -> None:
    collector, writer = machine(), machine(sealing=KEYED)
    writer.save(1)
    collector.wait(1)
    [info] = collector.tier.scan()
    with collector.tier._store.turn() as mine:
        assert mine
        assert collector.tier._collector._carry(info.id)
    writer.wait(0.2)
    assert reads(writer, 1)
    assert [one.check_key for one in collector.tier.scan()] == [KEY.key_id]
    late = machine(sealing=KEYED)
    assert reads(late, 1)


def test_a_journal_that_begins_anew_and_one_that_is_taken_in_still_say_which_key(machine: Make) -> None:
    writer, collector = machine(sealing=KEYED), machine()
    collector.wait(1)
    writer.save(1)
    with writer.tier._store.turn():
        writer.tier._store.renew()
    assert reads(machine(sealing=KEYED), 1)
    writer.tier._closed = True  # it is gone without a word
    for _ in range(3):
        collector.wait(TIMING.dead_s + 1)
    late = machine(sealing=KEYED)
    assert reads(late, 1)
    writer.tier._closed = False


def test_what_nobody_believes_gives_way_like_anything_that_nobody_uses(machine: Make) -> None:
    old = machine()
    for seed in range(3):
        old.save(seed)
    old.close()
    new = machine(sealing=KEYED, timing=TIMING.__class__(grace_s=0.0))
    for seed in range(100, 260):
        assert new.save(seed) == "written"
        new.wait(0.5)
    assert not [one for one in new.tier.scan() if not one.check_key]


def test_a_machine_of_an_older_version_is_refused_by_the_marker(machine: Make, root: Path) -> None:
    machine()
    assert '"keyed"' not in (root / "headstart.json").read_text()
    machine(sealing=KEYED)
    machine(sealing=KEYED)
    assert (root / "headstart.json").read_text().count('"keyed"') == 1


def test_several_written_at_once_are_sealed_too(machine: Make) -> None:
    a = machine(sealing=KEYED)
    outcomes = a.tier.write_all([image(1), image(2)], TINY, terms=[Terms(), Terms()])
    assert [one.reason for one in outcomes] == ["written", "written"]
    assert (reads(a, 1), reads(a, 2)) == (True, True)
    assert isinstance(a.tier, PoolTier)


def test_the_second_reader_reads_it_with_the_key_and_refuses_it_without(machine: Make, root: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "disk"))
    try:
        from second_reader import read_directory
    finally:
        del sys.path[0]
    a = machine(sealing=KEYED)
    a.save(1)
    found = read_directory(root, key=SECRET, features=("keyed", "pool"))
    assert [extent.keys for extent in found.extents] == [tuple(keys(1))]
    assert found.extents[0].pieces[1][2] == prompt(4, seed=1).piece(1, 2).tobytes()
    assert [one.check_key for one in found.journals.added.values()] == [KEY.key_id]
    for wrong in (b"", bytes(32)):
        without = read_directory(root, key=wrong, features=("keyed", "pool"))
        assert without.extents == []
        assert "key" in without.refused[0][1]
