"""Processes on one memory tier, of which one after the other is killed; run by a test, which reads the JSON that this prints.

    python node_crowd.py DIRECTORY PROCESSES KILLS STEPS SECONDS

PROCESSES workers find, load, compare and save prompts. Whenever they have taken STEPS steps together, and SECONDS have passed,
one of them is killed at random and another one takes its place, KILLS times. Meanwhile this process, which has no tier open,
adds up what the file system charges for the directory. Steps are told by place.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np

from headstart.cache.prefix_cache import PrefixCache
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.round_trip import load, save
from headstart.tier.node import open_node_tier

CAPACITY = 4 << 20
PROMPTS, BLOCKS = 60, 24  # some 18 MiB, of which a fifth has room
_SHARED = 8 * 64  # tokens that all prompts of a kind begin with
HIT, COMPUTED, WRONG = b"h", b"c", b"w"


def prompt(number: int) -> FakeKV:
    tokens = np.arange(BLOCKS * 64 + 1, dtype=np.uint32)
    tokens[_SHARED:] += np.uint32(1 + number * 1_000_003)
    tokens[:_SHARED] += np.uint32(number % 3 * 7_000_001)
    return FakeKV(TINY, tokens.tolist())


def work(directory: Path, told: int, place: int, seed: int) -> None:
    """Serve prompts until killed; popular ones more often, as real ones are. Each step is told as two bytes."""
    choice = random.Random(seed)
    tier = open_node_tier(directory, capacity_bytes=CAPACITY)
    with PrefixCache([tier], identity=IDENTITY, representation=TINY, match_timeout_s=20.0) as cache:
        while True:
            kv = prompt(min(choice.randrange(PROMPTS), choice.randrange(PROMPTS)))
            loaded = load(cache, kv)
            if loaded.wrong:
                os.write(told, WRONG + bytes([place]))
            if loaded.usable_tokens < BLOCKS * 64:
                save(cache, kv)
            os.write(told, (HIT if loaded.usable_tokens > _SHARED else COMPUTED) + bytes([place]))


def charged(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total


def main(directory: Path, processes: int, kills: int, steps: int, seconds: float) -> None:
    choice, seeds = random.Random(0), itertools.count()
    reading, told = os.pipe()

    def start(place: int) -> int:
        child = os.fork()
        if not child:
            try:
                work(directory, told, place, next(seeds))
            finally:
                os._exit(1)
        next(seeds)
        return child

    workers = [start(place) for place in range(processes)]
    seen, most, died = Counter[tuple[bytes, int]](), 0, 0
    try:
        for _ in range(kills + 1):
            due_s, wanted = time.monotonic() + seconds, seen.total() + steps
            while seen.total() < wanted or time.monotonic() < due_s:
                if select.select([reading], [], [], 0.05)[0]:
                    steps_told = os.read(reading, 4096)  # whole ones: a pipe takes so few bytes at once or not at all
                    seen.update((steps_told[at : at + 1], steps_told[at + 1]) for at in range(0, len(steps_told), 2))
                most = max(most, charged(directory))
            victim = choice.randrange(processes)
            os.kill(workers[victim], signal.SIGKILL)
            died += os.waitstatus_to_exitcode(os.waitpid(workers[victim], 0)[1]) != -signal.SIGKILL
            workers[victim] = start(victim)
    finally:
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            died += os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) != -signal.SIGKILL
    counted = {
        name: [seen[kind, place] for place in range(processes)]
        for name, kind in (("hits", HIT), ("computed", COMPUTED), ("wrong", WRONG))
    }
    print(json.dumps({**counted, "most_bytes": most, "died_by_themselves": died}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5]))
