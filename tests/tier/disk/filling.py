"""A process that fills a directory until it is killed. It is imported by a fork server, so that it starts in no time."""

from __future__ import annotations

import random
from pathlib import Path

from disk_kit import image

from headstart.testing.fake_kv import TINY
from headstart.tier.disk import DiskTier


def fill(root: str, capacity_bytes: int, min_free_bytes: int, seed: int) -> None:
    sizes = random.Random(seed)
    tier = DiskTier.open(Path(root), capacity_bytes=capacity_bytes, min_free_bytes=min_free_bytes)
    while True:
        seed += 1
        tier.write(image(seed % 4096, sizes.choice((1, 3, 9))), TINY)
        if sizes.random() < 0.02:
            tier.touch([info.id for info in tier.scan()])
        if sizes.random() < 0.01:
            tier.close()
            tier = DiskTier.open(Path(root), capacity_bytes=capacity_bytes, min_free_bytes=min_free_bytes)
