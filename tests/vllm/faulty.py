"""HeadstartConnector over a disk whose faults a test switches while vLLM runs: what stands in the file that FAULTS names.

{"read": ["eio", 10]}            every tenth read fails
{"write": ["enospc", 1]}         the disk is full
{"read_delay_s": 0.5}            every read takes half a second
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig, parse_size
from headstart.connect.vllm import HeadstartConnector, scheduler, worker
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import Handle, RealDisk


class SwitchedDisk(FaultyDisk):
    def __init__(self, switch: Path) -> None:
        super().__init__(RealDisk())
        self._switch = switch
        self._switching = Lock()
        self._seen: bytes = b""
        self._delay_s = 0.0

    def read(self, handle: Handle, buffers: Sequence[memoryview], offset: int) -> int:
        time.sleep(self._delay_s)
        return super().read(handle, buffers, offset)

    def _strike(self, name: str) -> Any:
        with self._switching:
            said = self._switch.read_bytes()
            if said != self._seen:
                self._seen = said
                faults = json.loads(said)
                self._delay_s = faults.pop("read_delay_s", 0.0)
                self.heal()
                self.inject(*(DiskFault(call, kind, every=every) for call, (kind, every) in faults.items()))
        return super()._strike(name)


def open_caches(
    config: CacheConfig, *, identity: Identity, representations: Sequence[Representation], match_timeout_s: float = 0.2
) -> list[PrefixCache]:
    tier = DiskTier.open(
        config.directories[0], capacity_bytes=parse_size(config.capacity), disk=SwitchedDisk(Path(os.environ["FAULTS"]))
    )
    return [
        PrefixCache(
            [tier],
            identity=identity,
            representation=one,
            load_timeout_s=config.load_timeout_s,
            match_timeout_s=match_timeout_s,
        )
        for one in representations
    ]


def open_cache(
    config: CacheConfig, *, identity: Identity, representation: Representation, match_timeout_s: float = 0.2
) -> PrefixCache:
    return open_caches(config, identity=identity, representations=[representation], match_timeout_s=match_timeout_s)[0]


worker.open_cache = open_cache  # type: ignore[assignment]
scheduler.open_caches = open_caches  # type: ignore[assignment]

__all__ = ["HeadstartConnector"]
