"""A machine of its own: a process that has a pool open. Each line of its input is a verb with numbers; each is answered by
one line.

pool_child.py PATH|URL CAPACITY_BYTES TIMING(JSON) [ahead_s]
"""

import itertools
import json
import random
import sys
import time
from pathlib import Path

from pool_kit import image, keys

from headstart.errors import StoreError
from headstart.testing.fake_kv import TINY
from headstart.tier.base import ExtentId, ReadRange
from headstart.tier.object import ObjectTier
from headstart.tier.pool import PoolTier, Timing

path, capacity_bytes, timing = sys.argv[1], int(sys.argv[2]), Timing(**json.loads(sys.argv[3]))
ahead_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0


def wall_clock() -> float:
    return time.time() + ahead_s


if "://" in path:
    tier: PoolTier = ObjectTier.open_bucket(path, capacity_bytes=capacity_bytes, timing=timing, wall_clock=wall_clock)
else:
    tier = PoolTier.open(Path(path), capacity_bytes=capacity_bytes, timing=timing, wall_clock=wall_clock)
numbers = itertools.count()


def reads(seed: int) -> bool:
    """Whether a prompt is there; every byte of it is compared, and a wrong one ends the process."""
    extent = ExtentId(int(tier.locate(TINY.digest, keys(seed)).extents[0]))
    if extent < 0 or tier.lease([extent]) != [True]:
        return False
    try:
        whole, got = image(seed), bytearray(image(seed).nbytes)
        tier.read([ReadRange(extent, 0, [memoryview(got)])])
        if got == whole:
            return True
        if tier.delete([extent], reason="corrupt"):  # what a cache does whose checks found it
            print("wrong", seed, flush=True)
            sys.exit("wrong bytes")
        return False
    except (StoreError, OSError):
        return False
    finally:
        tier.release([extent])


def wait_for(seed: int, seconds: float) -> float:
    """Return when a prompt was found, by the machine's own monotonic clock; 0 if never."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if reads(seed):
            return time.monotonic()
        time.sleep(0.005)
    return 0.0


def live(seconds: int, seed: int, prompts: int) -> dict[str, int]:
    """Save and read at random for a while; return what came of it."""
    choice, done = random.Random(seed), {"saved": 0, "read": 0, "missed": 0, "refused": 0}
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        number = choice.randrange(prompts)
        if choice.random() < 0.4:
            done["saved" if tier.write(image(number), TINY).stored else "refused"] += 1
        else:
            done["read" if reads(number) else "missed"] += 1
    return done


def answer(verb: str, rest: list[int]) -> object:
    match verb:
        case "large":  # one that is put in parts, and takes some time
            return tier.write(image(rest[0], rest[1]), TINY).reason
        case "save":
            outcomes = [tier.write(image(seed), TINY).reason for seed in rest]
            return f"{time.monotonic()} {' '.join(outcomes)}"
        case "find":
            return " ".join(str(seed) for seed in rest if reads(seed))
        case "wait":
            return wait_for(rest[0], rest[1])
        case "live":
            return json.dumps(live(*rest))
        case "count":
            return json.dumps(
                tier.statistics().counters | {"collects": int(tier.collects), "extents": tier.statistics().extents}
            )
        case "check":
            problems = tier.check()
            print(*problems, sep="\n", file=sys.stderr, flush=True)
            return len(problems)
        case "corrupt":  # what a cache does whose checks refused them
            extents = [ExtentId(int(tier.locate(TINY.digest, keys(seed)).extents[0])) for seed in rest]
            return tier.delete([extent for extent in extents if extent >= 0], reason="corrupt")
        case "close":
            tier.close()
            return "closed"


print("open", flush=True)
for line in sys.stdin:
    word, *arguments = line.split()
    print(answer(word, [int(argument) for argument in arguments]), flush=True)
