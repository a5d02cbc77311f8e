"""Several writers on one directory, killed at random points: no wrong byte, nothing lost whose ticket said that it is stored
(unless a record says why it went), nothing left behind that somebody would have to clean up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import second_reader
from disk_kit import charged
from truth_kit import CONVERSATION_PIECES, cache_over, conversation

from headstart.testing.fake_kv import TINY
from headstart.testing.round_trip import load
from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import PREFIX_BYTES

CAPACITY = 3 << 20
WRITERS = 3
KILLS_BETWEEN_LOOKS = 10
BLOCKS_BETWEEN_LOOKS = 100
WENT = {"capacity", "full", "expired", "quota", "user"}  # why something may be gone that was acknowledged
CHILD = Path(__file__).with_name("killed_child.py")


class Herd:
    """Writers that are killed and replaced. `seed` of the next one counts up, so no two save the same conversation."""

    def __init__(self, nursery: subprocess.Popen[str], choice: random.Random, life_s: float) -> None:
        self._nursery = nursery
        self._choice = choice
        self._life_s = life_s
        self._alive: list[int] = []
        self._seed = 0
        self.kills = 0

    def fill(self) -> None:
        while len(self._alive) < WRITERS:
            self._seed += 1
            self._alive.append(int(self._ask("start", self._seed)))

    def kill_one(self) -> None:
        """Kill any of them: one that works, or one that is still opening the directory."""
        time.sleep(self._choice.choice([0.03, 0.3, 1.0]) * self._life_s * self._choice.random())
        pid = self._alive.pop(self._choice.randrange(len(self._alive)))
        os.kill(pid, signal.SIGKILL)
        self._ask("reap", pid)
        self.kills += 1

    def kill_all(self) -> None:
        while self._alive:
            self.kill_one()

    def _ask(self, verb: str, argument: int) -> str:
        assert self._nursery.stdin is not None
        assert self._nursery.stdout is not None
        self._nursery.stdin.write(f"{verb} {argument}\n")
        self._nursery.stdin.flush()
        return self._nursery.stdout.readline()


@contextmanager
def herd(root: Path, logs: Path, choice: random.Random, *, life_s: float) -> Iterator[Herd]:
    arguments = [sys.executable, str(CHILD), str(root), str(CAPACITY), str(logs)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as nursery:
        writers = Herd(nursery, choice, life_s)
        try:
            yield writers
        finally:
            writers.kill_all()
            assert nursery.stdin is not None
            nursery.stdin.close()


def kill_writers(tmp_path: Path, *, kills: int, seed: int, life_s: float) -> None:
    """`life_s`: how long a writer is left alone at most, before one of them is killed."""
    root, logs = tmp_path / "kv", tmp_path / "logs"
    logs.mkdir()
    choice = random.Random(seed)
    acknowledged = evicted = 0
    with herd(root, logs, choice, life_s=life_s) as writers:
        while writers.kills < kills:
            for _ in range(KILLS_BETWEEN_LOOKS - WRITERS):
                writers.fill()
                writers.kill_one()
            writers.fill()
            deadline = time.monotonic() + 120
            while sum(saved(lines_of(logs)).values()) < BLOCKS_BETWEEN_LOOKS:  # however long that takes here
                assert time.monotonic() < deadline, "the writers store nothing"
                time.sleep(0.02)
            time.sleep(life_s * choice.random())
            writers.kill_all()
            told = look_at(root, logs)
            acknowledged, evicted = acknowledged + told[0], evicted + told[1]
    assert acknowledged >= kills // KILLS_BETWEEN_LOOKS * BLOCKS_BETWEEN_LOOKS
    assert evicted > 0, "the directory was never full"


def lines_of(logs: Path) -> list[list[str]]:
    """Return what the writers said so far, whole lines."""
    return [line.split() for log in sorted(logs.iterdir()) for line in log.read_text().split("\n")[:-1]]


def saved(said: list[list[str]]) -> dict[int, int]:
    """Return of each conversation how many of its blocks were told to be stored."""
    return {int(words[1]): int(words[2]) for words in said if words[0] == "saved"}


def look_at(root: Path, logs: Path) -> tuple[int, int]:
    """Open what they left, alone: every promise, then everything that is there, loaded. Returns how many blocks were told to be
    stored since the last look, and how many gave way, as far back as is remembered."""
    said = lines_of(logs)
    for log in logs.iterdir():
        log.unlink()
    assert [words for words in said if words[0] == "wrong"] == []
    # Read before the directory is opened: whoever opens it may begin a journal anew, with the latest removals only.
    gone = {prefix for reason, prefixes in second_reader.read_journals(root).removals if reason in WENT for prefix in prefixes}
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    with cache_over(tier, TINY) as cache:
        assert tier.check() == []
        assert charged(root) <= CAPACITY
        blocks = 0
        for number, pieces in saved(said).items():
            kv = conversation(number, pieces)
            extents = tier.locate(TINY.digest, kv.keys).extents
            for key, extent in zip(kv.keys, extents, strict=True):
                blocks += 1
                if extent == -1:
                    assert key[:PREFIX_BYTES] in gone, f"a block of conversation {number} is lost"
            loaded = load(cache, conversation(number, CONVERSATION_PIECES))
            assert loaded.wrong == []
            assert loaded.usable_tokens == loaded.matched_tokens
        theirs = {extent.keys[0][:PREFIX_BYTES] for extent in second_reader.read_directory(root).extents}
        assert theirs == {info.keys[0] for info in tier.scan()}
    assert not [path for path in root.rglob("*") if path.is_file() and path.suffix not in (".log", ".seg", ".json")]
    contents = second_reader.read_directory(root)
    assert contents.refused == []
    known = {second_reader.segment_path(root, *segment) for segment in contents.journals.opened}
    assert set(root.glob("segments/*/*.seg")) <= known, "a segment that no journal explains"
    return blocks, len(gone)


def test_writers_killed_at_random_points_lose_nothing_that_was_acknowledged_and_leave_no_litter(tmp_path: Path) -> None:
    kill_writers(tmp_path, kills=50, seed=1, life_s=0.4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_kills_lose_nothing_that_was_acknowledged_and_leave_no_litter(tmp_path: Path, seed: int) -> None:
    kill_writers(tmp_path, kills=100, seed=1000 + seed, life_s=1.0)
