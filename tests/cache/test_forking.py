"""A forked child leaves the parent's cache alone: it misses, saves nothing, waits for nothing and unlocks nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PARENT = """
import os, signal, sys
from contextlib import ExitStack
from pathlib import Path

from headstart.cache.prefix_cache import PrefixCache
from headstart.errors import LoadFailed
from headstart.testing.fake_kv import IDENTITY, TINY, FakeDestination, FakeKV
from headstart.testing.faults import Fault, FaultyTier
from headstart.tier.disk import DiskTier

kv = FakeKV(TINY, list(range(641)))
tier = FaultyTier(DiskTier.open(Path(sys.argv[1]), capacity_bytes=64 << 20))
cache = PrefixCache([tier], identity=IDENTITY, representation=TINY, match_timeout_s=20.0)
assert cache.save(kv.tokens, kv).wait().stored_tokens == 640
lease = cache.match(kv.tokens)
reading = cache.match(kv.tokens)
tier.inject(Fault("read", "stall"))
loading = reading.load(into=FakeDestination(TINY, 10))
tier.stalled.wait(20)
ticket = cache.save(kv.tokens[:64], kv)
ticket.wait()
with ExitStack() as held:  # what another thread may hold at that moment
    for lock in (cache._counters._lock, cache._saver._condition, cache._sources[0]._lookups._lock, loading._condition):
        held.enter_context(lock)
    child = os.fork()
    if not child:
        signal.alarm(20)  # a child that hangs is killed
        with cache, lease, reading:
            assert cache.match(kv.tokens).tokens == 0
            assert cache.match(kv.tokens).load(into=FakeDestination(TINY, 10)).result() == 0
            assert cache.save(kv.tokens, kv).wait(0.0).reason == "forked"
            lost = lease.load(into=FakeDestination(TINY, 10))
            assert lost.done and lost.result() == 0
            for load in (lost, loading):
                try:
                    load.wait(0)
                except LoadFailed as error:
                    assert error.facts["reason"] == "forked", error
                else:
                    raise AssertionError("a load in a child was called ready")
            assert ticket.wait(0.0).reason in (None, "forked")
            assert cache.statistics().tiers == () and cache.check() == []
        os._exit(0)
_, status = os.waitpid(child, 0)
assert status == 0, status
tier.heal()
assert loading.result() == 640
reading.release()

# The child has unlocked nothing: another process still cannot take what the parent's lease protects.
other = DiskTier.open(Path(sys.argv[1]), capacity_bytes=64 << 20)
extents = [info.id for info in other.scan()]
assert other.delete(extents, reason="user") == 0
lease.release()
assert other.delete(extents, reason="user") == len(extents) > 0
other.close()
cache.close()
print("well")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_forked_child_neither_waits_nor_unlocks(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path / "kv")], env=environment, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "well\n"), done.stderr
