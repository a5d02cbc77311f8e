"""A process whose threads load what is there and save what is not, more than the directory may hold:
`loading_child.py DIRECTORY CAPACITY_BYTES SEED THREADS LOADS`. Says `open`, waits for a line, and ends with a line of JSON."""

import json
import random
import sys
import threading
from collections import Counter
from pathlib import Path

from truth_kit import cache_over, prompt

from headstart.testing.fake_kv import TINY
from headstart.testing.round_trip import load, save
from headstart.tier.disk import DiskTier

CONVERSATIONS, PIECES = 160, 16  # 31 MB of pieces

root, capacity_bytes, seed, threads, loads = Path(sys.argv[1]), *map(int, sys.argv[2:])
tier = DiskTier.open(root, capacity_bytes=capacity_bytes)
kvs = [prompt(number, PIECES, TINY) for number in range(CONVERSATIONS)]
seen: Counter[str] = Counter()
wrong: list[str] = []
counting = threading.Lock()


def work(number: int) -> None:
    choice = random.Random(seed * 100 + number)
    while seen["loads"] < loads and not wrong:
        kv = kvs[int(CONVERSATIONS * choice.random() ** 4)]  # some are asked for much more often than others
        loaded = load(cache, kv)
        with counting:
            seen["loads"] += loaded.usable_tokens > 0
            seen["pieces"] += loaded.usable_tokens // 64 * TINY.layers
            seen["short"] += loaded.usable_tokens < loaded.matched_tokens
            wrong.extend(map(str, loaded.wrong))
        if loaded.usable_tokens < PIECES * 64:
            save(cache, kv)


with cache_over(tier, TINY) as cache:
    print("open", flush=True)
    sys.stdin.readline()
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    problems = [str(problem) for problem in cache.check()]
    faults = {name: n for name, n in cache.statistics().counters.items() if name.startswith("load_failed")}
    counters = tier.statistics().counters
print(json.dumps({**seen, "wrong": wrong, "problems": problems, "faults": faults, "tier": counters}), flush=True)
