"""A process that saves prompts until it is killed, and says which it has saved: `saving_child.py DIRECTORY FIRST_SEED`."""

import sys
from pathlib import Path

from headstart.testing.fake_kv import TINY
from headstart.testing.tier_contract import prompt
from headstart.tier.disk import DiskTier

tier = DiskTier.open(Path(sys.argv[1]), capacity_bytes=64 << 20)
first = int(sys.argv[2])
images = [prompt(4, seed=first + n).image() for n in range(150)]
for n, image in enumerate(images):
    if tier.write(image, TINY).stored:
        print(first + n, flush=True)
sys.stdin.read()
