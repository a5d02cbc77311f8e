"""Half an hour of many machines on one small pool: collectors killed, machines stopped at random, clocks minutes apart."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from pool_kit import taken_bytes
from pool_process import Process

QUICK = {
    "grace_s": 6.0,
    "lease_s": 2.0,
    "visible_s": 1.0,
    "term_s": 4.0,
    "dead_s": 15.0,
    "beat_s": 0.5,
    "collect_s": 0.3,
    "silent_s": 5.0,
}
CAPACITY = 16 << 20
PROMPTS = 1500  # some 78 MB: more than four times what there is room for
MACHINES = 8


@pytest.mark.soak
def test_half_an_hour_of_everything_at_once(root: Path) -> None:
    soak(root, minutes=30)


def soak(root: Path, *, minutes: float, seed: int = 1) -> dict[str, int]:
    """Return what was counted. A wrong byte ends the process that saw it, and the soak with it."""
    choice, ends = random.Random(seed), time.monotonic() + 60 * minutes
    most, kills, counted = 0, 0, dict[str, int]()
    with ExitStack() as stack:

        def begin(number: int) -> Process:
            return stack.enter_context(Process(root, capacity_bytes=CAPACITY, ahead_s=45.0 * (number - 4), **QUICK))

        machines = [begin(number) for number in range(MACHINES)]
        rounds = 0
        while time.monotonic() < ends:
            rounds += 1
            for number, one in enumerate(machines):
                one.tell(f"live 8 {rounds * 100 + number} {PROMPTS}")
            for _ in range(8):
                stopped = choice.choice(machines)
                stopped.stop()
                time.sleep(choice.random() * 2)
                stopped.go_on()
                most = max(most, taken_bytes(root))
            for one in machines:
                one.answer()
            counts = [one.count() for one in machines]
            for name in ("lease_outlived", "evicted_capacity", "segments_collected", "registered_again", "journals_taken_in"):
                counted[name] = counted.get(name, 0) + sum(count.get(name, 0) for count in counts)
            if rounds % 4 == 0:
                victim = next((n for n, count in enumerate(counts) if count["collects"]), 0)
                machines[victim].kill()
                kills += 1
                machines[victim] = begin(victim)
        assert [one.ask("check") for one in machines] == ["0"] * MACHINES
    segment = CAPACITY // 8
    assert most <= CAPACITY + MACHINES * segment
    assert counted["segments_collected"] > 0
    return counted | {"rounds": rounds, "kills": kills, "most_bytes": most}
