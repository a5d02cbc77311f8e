"""Writers to be killed. A process that imports once and forks a writer for each line `start SEED` of its input; `reap PID`
waits for one that was killed: `killed_child.py DIRECTORY CAPACITY_BYTES LOGS`.

A writer opens the directory like any server, saves conversations that grow, reads back what it and others saved, notes uses,
keeps, pins, deletes and tends. What must be true afterwards it says in a log of its own, line by line: `saved` once the ticket
said so, and `wrong`, never.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

from truth_kit import CONVERSATION_PIECES as PIECES
from truth_kit import cache_over, conversation

from headstart.testing.fake_kv import TINY
from headstart.testing.round_trip import load, save
from headstart.tier.base import Terms
from headstart.tier.disk import DiskTier

VERBS = {"save": 10, "read": 4, "touch": 6, "keep": 1, "pin": 1, "unpin": 1, "delete": 1, "tend": 8}


def live(root: Path, capacity_bytes: int, log: Path, seed: int) -> None:
    choice = random.Random(seed)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(*words: object) -> None:
        os.write(out, (" ".join(map(str, words)) + "\n").encode())

    def clock() -> float:
        return time.monotonic() * 300  # what waits for a minute waits for a fifth of a second

    tier = DiskTier.open(root, capacity_bytes=capacity_bytes, durability="data", clock=clock)
    cache = cache_over(tier, TINY)
    turns: dict[int, int] = {}  # conversation → pieces so far
    while True:
        verb = choice.choices(list(VERBS), list(VERBS.values()))[0]
        number = choice.choice(list(turns)) if turns and choice.random() < 0.85 else seed * 1000 + len(turns)
        extents = list(dict.fromkeys(e for e in tier.locate(TINY.digest, conversation(number, PIECES).keys).extents if e != -1))
        if verb == "save":
            pieces = min(PIECES, turns.get(number, 0) + choice.randrange(1, 9))
            turns[number] = pieces
            if save(cache, conversation(number, pieces)).stored_tokens == pieces * 64:
                say("saved", number, pieces)
        elif verb == "read":
            others = choice.randrange(max(1, seed - 5), seed + 1) * 1000 + choice.randrange(5)
            loaded = load(cache, conversation(choice.choice([number, others]), PIECES))
            if loaded.wrong:
                say("wrong", number, loaded.wrong[0])
            if any(name.startswith("load_failed_corrupt") for name in cache.statistics().counters):
                say("wrong", number, "a piece was not what was written")
        elif verb == "touch":
            tier.touch(extents)
        elif verb == "keep":
            tier.keep(extents, Terms(retention=choice.choice(["agent", "chat"])))
        elif verb == "pin":
            tier.pin(extents[:1], until_ms=int(time.time() * 1000) + 2000)
        elif verb == "unpin":
            tier.unpin(extents)
        elif verb == "delete" and turns and choice.random() < 0.2:
            tier.delete(extents, reason="user")
        elif verb == "tend":
            tier.tend()


def main() -> None:
    root, capacity_bytes, logs = Path(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for line in sys.stdin:
        verb, argument = line.split()
        if verb == "reap":
            os.waitpid(int(argument), 0)
            print("reaped", flush=True)
            continue
        pid = os.fork()
        if not pid:
            live(root, capacity_bytes, logs / argument, int(argument))
        print(pid, flush=True)


main()
