"""Loading a stored prefix from a tier that machines share: in this process, and in several that begin at the same moment."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.stored import IDENTITY, SMOLLM2, Destination, Prefix, touched
from headstart.cache.prefix_cache import PrefixCache
from headstart.tier.object import ObjectTier
from headstart.tier.pool import PoolTier

TOGETHER = 4


@dataclass(frozen=True, slots=True)
class Read:
    """What one load took. `layer0_s`: until layer 0 was verified for the whole prefix."""

    nbytes: int
    seconds: float
    layer0_s: float
    cpu_s: float

    @property
    def bytes_per_s(self) -> float:
        return self.nbytes / self.seconds


class Reader:
    """Has a tier open, a cache over it, and memory for all of a prefix. `where`: a bucket's URL, or a pool's directory."""

    def __init__(self, where: str, prefix: Prefix, *, read_only: bool = False) -> None:
        self._prefix = prefix
        capacity_bytes = 4 * prefix.nbytes + (1 << 30)
        if "://" in where:
            self.tier: PoolTier = ObjectTier.open_bucket(where, capacity_bytes=capacity_bytes, read_only=read_only)
        else:
            self.tier = PoolTier.open(Path(where), capacity_bytes=capacity_bytes, read_only=read_only)
        self._stack = ExitStack()
        representation = prefix.representation
        cache = PrefixCache([self.tier], identity=IDENTITY, representation=representation, match_timeout_s=20.0)
        self._cache = self._stack.enter_context(cache)
        self._destination = Destination(prefix, touched(prefix.nbytes, "destination"))

    def read(self) -> Read:
        """Load all of the prefix, and make sure that all of it came."""
        self._destination.poison()
        cpu_s, began = time.process_time(), time.perf_counter()
        with self._cache.match(self._prefix.tokens) as lease:
            assert lease.tokens == self._prefix.tokens.size - 1, lease
            load = lease.load(self._destination)
            load.wait(0, timeout_s=120.0)
            layer0_s = time.perf_counter() - began
            load.result(timeout_s=120.0)
            seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
            assert load.usable_tokens == lease.tokens, load.faults[:1]
        return Read(self._prefix.nbytes, seconds, layer0_s, cpu_s)

    def close(self) -> None:
        self._stack.close()


def together(where: str, blocks: int, nbytes: int) -> float:
    """Return the rate of several processes that load at once, in bytes a second."""
    command = [sys.executable, "-m", "benchmarks.readers", where, str(blocks), str(nbytes)]
    readers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(TOGETHER)]
    try:
        for one in readers:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        began = time.perf_counter()
        got = [json.loads(one.communicate("go\n", timeout=300)[0]) for one in readers]
        return sum(nbytes for nbytes, _ in got) / (max(ended for _, ended in got) - began)
    finally:
        for one in readers:
            one.kill()
            one.wait()


def _main(where: str, blocks: int, nbytes: int) -> None:
    reader = Reader(where, Prefix.of(SMOLLM2, blocks, nbytes), read_only=True)
    reader.read()  # once before anything counts
    print("ready", flush=True)
    sys.stdin.readline()
    read = reader.read()
    print(json.dumps([read.nbytes, time.perf_counter()]), flush=True)  # one clock for all processes of a machine
    reader.close()


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
