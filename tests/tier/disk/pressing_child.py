"""A process that saves more than a directory may hold: `pressing_child.py DIRECTORY CAPACITY FIRST_SEED`."""

import sys
from pathlib import Path

from disk_kit import image

from headstart.testing.fake_kv import TINY
from headstart.tier.disk import DiskTier

tier = DiskTier.open(Path(sys.argv[1]), capacity_bytes=int(sys.argv[2]))
first = int(sys.argv[3])
images = [image(first + n, 8) for n in range(100)]
print("open", flush=True)
sys.stdin.readline()
for one in images:
    print(tier.write(one, TINY).reason, flush=True)
print(len(tier.check()), flush=True)
tier.close()
