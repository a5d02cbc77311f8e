"""Another process on the same directory. Each line of its input is a verb with seeds; each is answered by one line."""

import itertools
import sys
from pathlib import Path

from disk_kit import CAPACITY, extent_of, found, image, read

from headstart.testing.fake_kv import TINY
from headstart.tier.disk import DiskTier

ticks = itertools.count(1000.0)
tier = DiskTier.open(Path(sys.argv[1]), capacity_bytes=CAPACITY, clock=lambda: next(ticks))
leased = {}


def answer(verb: str, seeds: list[int]) -> object:
    match verb:
        case "save":
            return tier.write(image(seeds[0]), TINY).reason
        case "find":
            tier.refresh()
            return " ".join(map(str, sorted(found(tier, seeds))))
        case "lease":
            leased[seeds[0]] = extent_of(tier, seeds[0])
            return tier.lease([leased[seeds[0]]])[0]
        case "read":
            whole = image(seeds[0])
            return "right" if read(tier, leased[seeds[0]], 0, len(whole)) == whole else "wrong"
        case "release":
            tier.release([leased.pop(seeds[0])])
            return "released"
        case "delete":
            return tier.delete([extent_of(tier, seed) for seed in seeds], reason="user")
        case "touch":
            tier.touch([extent_of(tier, seed) for seed in seeds])
            return "touched"
        case "check":
            return len(tier.check())
        case "close":
            tier.close()
            return "closed"


print("open", flush=True)
for line in sys.stdin:
    verb, *seeds = line.split()
    print(answer(verb, [int(seed) for seed in seeds]), flush=True)
