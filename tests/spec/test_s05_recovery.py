"""S5 Recovery: after any crash, reopening gives a subset of what was saved, no litter stays, `check()` is clean."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest
from shelf import Shelf

from headstart.errors import TierUnavailable
from headstart.testing.fake_kv import STATEFUL, FakeKV
from headstart.testing.faulty_disk import ProcessDied
from headstart.testing.round_trip import hit_tokens, load, save
from headstart.testing.tier_contract import prompt

KVS = [prompt(1 + s % 9, seed=s) for s in range(12)]
FEW = KVS[:5]  # where every call to the disk is the last one once


def serves_truth(cache, kvs: list[FakeKV]) -> int:
    """Load everything; return how many prompts were there as a whole."""
    found = [load(cache, kv) for kv in kvs]
    assert [f.wrong for f in found] == [[]] * len(kvs)
    return sum(f.usable_tokens == kv.pieces * 64 for f, kv in zip(found, kvs, strict=True))


def serves_again(cache, kvs: list[FakeKV]) -> None:
    for kv in kvs:
        save(cache, kv)
    assert serves_truth(cache, kvs) == len(kvs)


def test_a_clean_restart_finds_everything_and_writes_nothing_again(shelf) -> None:
    cache = shelf.open("disk")
    for kv in KVS:
        save(cache, kv)
    cache = shelf.reopen("disk")
    assert serves_truth(cache, KVS) == len(KVS)
    assert [save(cache, kv).written_bytes for kv in KVS] == [0] * len(KVS)


def test_a_killed_process_loses_nothing_that_a_ticket_confirmed(shelf) -> None:
    cache = shelf.open("disk", crashable=True)
    for kv in KVS:
        assert save(cache, kv).reason is None
    shelf.crash()
    assert serves_truth(shelf.open("disk", crashable=True), KVS) == len(KVS)


@pytest.mark.parametrize("after", [False, True], ids=["half-done", "done"])
@pytest.mark.parametrize("full", [False, True], ids=["into-free-space", "by-evicting"])
def test_dying_in_any_call_of_a_save_leaves_what_was_there_and_no_litter(shelf, full: bool, after: bool) -> None:
    """Every single call to the disk is the last one once."""
    before = [prompt(12, seed=s) for s in range(100, 108)] if full else KVS[:3]
    during = [prompt(9, seed=200), prompt(6, seed=201)] if full else KVS[3:5]
    for call in itertools.count(1):
        shelf.new_disk()
        cache = shelf.open("disk", crashable=True, disk_bytes=1 << 20)
        for kv in before:
            save(cache, kv)
        shelf.faulty_disk.die_at(call, after=after)
        tickets = [cache.save(kv.tokens.tolist(), kv) for kv in during]
        survived = shelf.wait_for_death_or(tickets)
        shelf.crash()
        cache = shelf.open("disk", crashable=True, disk_bytes=1 << 20)
        assert cache.check() == []
        whole = serves_truth(cache, before)
        if not full:
            assert whole == len(before)
        serves_again(cache, during)
        assert shelf.disk.allocated_bytes() <= shelf.tiers[0].statistics().capacity_bytes
        assert [path for path in shelf.disk.files() if path.suffix == ".tmp"] == []
        shelf.close()
        if survived:
            break
    assert call > 4


@pytest.mark.parametrize("after", [False, True], ids=["half-done", "done"])
@pytest.mark.parametrize("saved", [0, 4], ids=["a-new-directory", "a-used-directory"])
def test_dying_in_any_call_of_opening_and_closing_is_made_good_by_the_next_start(shelf, saved: int, after: bool) -> None:
    for call in itertools.count(1):
        shelf.new_disk()
        cache = shelf.open("disk", crashable=True)
        for kv in FEW[:saved]:
            save(cache, kv)
        shelf.crash()
        if not saved:
            shelf.new_disk()
        shelf.revive()
        shelf.faulty_disk.die_at(call, after=after)
        with suppress(ProcessDied):
            shelf.open("disk", crashable=True).close()
        survived = not shelf.faulty_disk.died.is_set()
        shelf.crash()
        cache = shelf.open("disk", crashable=True)
        assert cache.check() == []
        assert serves_truth(cache, FEW[:saved]) == saved
        serves_again(cache, FEW)
        assert [path for path in shelf.disk.files() if path.suffix == ".tmp"] == []
        shelf.close()
        if survived:
            break
    assert call > 10


@pytest.mark.parametrize("durability", ["none", "data"])
def test_a_power_cut_loses_but_never_lies(shelf, durability: str) -> None:
    for seed in range(25):
        shelf.new_disk()
        cache = shelf.open("disk", crashable=True, durability=durability)
        for kv in KVS:
            save(cache, kv)
        shelf.crash(power_cut=seed)
        cache = shelf.open("disk", crashable=True, durability=durability)
        assert cache.check() == []
        whole = serves_truth(cache, KVS)
        if durability == "data":
            assert whole == len(KVS)
        serves_again(cache, KVS)
        shelf.close()


def test_crashes_one_after_another_do_not_add_up(shelf) -> None:
    shelf.new_disk()
    for seed in range(12):
        cache = shelf.open_small("disk", crashable=True)
        serves_truth(cache, KVS)
        for number in range(10):
            save(cache, prompt(6, seed=100 * seed + number))
        assert shelf.disk.allocated_bytes() <= shelf.tiers[0].statistics().capacity_bytes
        if seed % 2:
            shelf.crash(power_cut=seed)
        else:
            shelf.crash()


def test_without_journals_the_index_comes_back_from_the_segments(shelf) -> None:
    cache = shelf.open("disk")
    for kv in KVS:
        save(cache, kv)
    shelf.close()
    journals = list(shelf.directory.rglob("*.log"))
    assert journals
    for path in journals:
        path.unlink()
    assert serves_truth(shelf.open("disk"), KVS) == len(KVS)


def _flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :] if data else data


_DAMAGE = {
    "cut by 1 byte": lambda data: data[:-1],
    "cut by a page": lambda data: data[:-4096],
    "cut to a header": lambda data: data[:4096],
    "cut to nothing": lambda data: b"",
    "one byte longer": lambda data: data + b"\0",
    "a bit flipped at the front": lambda data: _flip(data, 20),
    "a bit flipped in the middle": lambda data: _flip(data, len(data) // 2),
    "a bit flipped at the end": lambda data: _flip(data, len(data) - 1),
    "zeros from the middle": lambda data: data[: len(data) // 2] + bytes(len(data) - len(data) // 2),
    "pages swapped": lambda data: data[:8192] + data[12288:16384] + data[8192:12288] + data[16384:],
    "replaced by nonsense": lambda data: b"nonsense" * (len(data) // 8),
}


@pytest.mark.parametrize("damage", _DAMAGE.values(), ids=list(_DAMAGE))
@pytest.mark.parametrize("which", [[".seg"], [".log"], [".seg", ".log"]], ids=["segments", "journals", "both"])
@pytest.mark.parametrize("alive", [False, True], ids=["at-rest", "while-open"])
def test_a_damaged_file_gives_misses_never_other_bytes(shelf, damage, which: list[str], alive: bool) -> None:
    cache = shelf.open("disk")
    for kv in FEW:
        save(cache, kv)
    if not alive:
        shelf.close()
    damaged = [path for path in shelf.directory.rglob("*") if path.suffix in which]
    assert damaged
    for path in damaged:
        data = path.read_bytes()
        with path.open("r+b") as file:
            file.write(damage(data))
            file.truncate()
    if not alive:
        cache = shelf.open("disk")
    serves_truth(cache, FEW)
    shelf.expect_problems()  # that the medium is not as it was left is for `check` to say
    serves_again(shelf.reopen("disk"), FEW)


def test_a_foreign_file_in_the_directory_is_left_alone(shelf) -> None:
    shelf.open("disk")
    shelf.close()
    stranger = shelf.directory / "notes.txt"
    stranger.write_text("mine")
    serves_again(shelf.open("disk"), KVS)
    assert stranger.read_text() == "mine"
    shelf.expect_problems()


def test_a_directory_that_is_not_ours_is_refused_and_left_alone(shelf) -> None:
    shelf.open("disk")
    shelf.close()
    marker = shelf.directory / "headstart.json"
    marker.write_text("something else")
    with pytest.raises(TierUnavailable, match="marker"):
        shelf.open("disk")
    assert marker.read_text() == "something else"


def save_until_killed(directory: Path, start: int, out: int) -> None:
    """What the child does: it says which prompts were stored, one a line."""
    with Shelf(directory) as shelf:
        cache = shelf.open_small("disk")
        os.write(out, b"open\n")
        for seed in itertools.count(start):
            result = save(cache, prompt(1 + seed % 9, seed=seed))
            assert result.reason is None, result
            os.write(out, b"%d\n" % seed)


@pytest.mark.parametrize("rounds", [6, pytest.param(200, marks=pytest.mark.soak)])
def test_a_process_killed_while_saving_is_succeeded_by_the_next_without_a_clean_up(shelf, rounds: int) -> None:
    """Real processes, a real file system, SIGKILL: what was confirmed last is there, whatever is there is right."""
    start = 0
    for number in range(rounds):
        said, out = os.pipe()
        child = os.fork()  # a new interpreter would spend most of its time importing
        if not child:
            try:
                save_until_killed(shelf.directory, start, out)
            finally:
                os._exit(1)
        os.close(out)
        with os.fdopen(said) as lines:
            assert lines.readline() == "open\n"
            for _ in range(2 + number * 7 % 40):
                start = int(lines.readline()) + 1
            os.kill(child, signal.SIGKILL)
            start = max([start, *(int(line) + 1 for line in lines.read().split("\n")[:-1])])
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        cache = shelf.open_small("disk")
        assert cache.check() == []
        serves_truth(cache, [prompt(1 + s % 9, seed=s) for s in range(max(0, start - 40), start + 1)])
        last = prompt(1 + (start - 1) % 9, seed=start - 1)
        assert hit_tokens(cache, last) == last.pieces * 64
        shelf.close()


@pytest.mark.parametrize("after", [False, True], ids=["half-done", "done"])
def test_dying_in_any_call_of_a_save_with_states_leaves_prefixes_that_end_at_one(shelf, after: bool) -> None:
    kv = prompt(9, representation=STATEFUL)
    asked = FakeKV(STATEFUL, [*kv.tokens.tolist()[: 9 * 64], 1])
    for call in itertools.count(1, 2):
        shelf.new_disk()
        cache = shelf.open("disk", crashable=True, representation=STATEFUL)
        assert save(cache, kv, states=kv.states(4)).stored_tokens == 256
        shelf.faulty_disk.die_at(call, after=after)
        tickets = [cache.save(kv.tokens, kv, states=kv.states(*behind)) for behind in ((2,), (6, 9))]
        lived = shelf.wait_for_death_or(tickets)
        shelf.crash()
        cache = shelf.open("disk", crashable=True, representation=STATEFUL)
        found = load(cache, asked)
        assert found.wrong == []
        assert found.usable_tokens in ({9 * 64} if lived else {4 * 64, 6 * 64, 9 * 64})
        assert save(cache, kv, states=kv.states(2, 6, 9)).stored_tokens == 9 * 64
        for pieces in (2, 4, 6, 9):
            part = FakeKV(STATEFUL, asked.tokens[: pieces * 64 + 1].tolist())
            assert (load(cache, part).usable_tokens, load(cache, part).wrong) == (pieces * 64, [])
        shelf.close()
        if lived:
            return
