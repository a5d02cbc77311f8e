"""A cache on a shelf: opened over the tiers a test names, closed, reopened, crashed, damaged; checked whenever it closes."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache, Ticket
from headstart.testing.crash_disk import CrashDisk
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.faults import FaultyTier
from headstart.testing.faulty_disk import FaultyDisk, ProcessDied
from headstart.testing.round_trip import TIMEOUT_S
from headstart.tier.base import Tier
from headstart.tier.disk import DiskTier
from headstart.tier.memory import MemoryTier

SMALL_MEMORY, SMALL_DISK = 512 << 10, 4 << 20


class Shelf:
    """`directory` is where disk tiers lie; with `crashable=True` they lie on `disk`, a CrashDisk behind `faulty_disk`.

    `tiers`: the tiers of the cache opened last, fastest first; with `faulty=True` the last one is wrapped in `faulty`."""

    disk: CrashDisk
    faulty_disk: FaultyDisk
    faulty: FaultyTier

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tiers: list[Tier] = []
        self._caches: list[PrefixCache] = []
        self._problems_expected = False
        self._skipped_s = 0.0
        self.new_disk()

    def __enter__(self) -> Shelf:
        self._hook = threading.excepthook
        threading.excepthook = lambda args: None if args.exc_type is ProcessDied else self._hook(args)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self.close()
            else:
                for cache in self._caches:
                    with suppress(ProcessDied):
                        cache.close()
        finally:
            threading.excepthook = self._hook

    def open(
        self,
        tiers: str,
        *,
        memory_bytes: int = 64 << 20,
        disk_bytes: int = 256 << 20,
        representation: Representation = TINY,
        faulty: bool = False,
        crashable: bool = False,
        durability: str = "none",
        **options: Any,
    ) -> PrefixCache:
        """Open a cache over "memory", "disk" or "both"."""
        stack: list[Tier] = []
        if tiers in ("memory", "both"):
            stack.append(MemoryTier(memory_bytes))
        if tiers in ("disk", "both"):
            stack.append(self._disk_tier(disk_bytes, crashable, durability))
        self.tiers = list(stack)
        if faulty:
            self.faulty = FaultyTier(stack[-1])
            stack[-1] = self.faulty
        options = {"match_timeout_s": 20.0} | options  # a busy machine must not turn a hit into a miss
        cache = PrefixCache(stack, identity=IDENTITY, representation=representation, **options)
        self._caches.append(cache)
        return cache

    def open_small(self, tiers: str, **options: Any) -> PrefixCache:
        """Open a cache that some dozen prompts fill."""
        return self.open(tiers, memory_bytes=SMALL_MEMORY, disk_bytes=SMALL_DISK, **options)

    def reopen(self, tiers: str, **options: Any) -> PrefixCache:
        self.close()
        return self.open(tiers, **options)

    def close(self) -> None:
        """Check that every open cache's books are right and close it."""
        caches, self._caches = self._caches, []
        found = [problem for cache in caches for problem in cache.check()]
        problems = [problem for problem in found if not problem.what.endswith(" is closed")]  # by the test itself
        for cache in caches:
            cache.close()
        assert self._problems_expected or problems == []

    def skip(self, seconds: float) -> None:
        """Let time pass for the disk tier, in no time."""
        self._skipped_s += seconds

    def expect_problems(self) -> None:
        """The medium was changed under an open cache: its check may say so."""
        self._problems_expected = True

    def new_disk(self, **options: Any) -> None:
        """Put an empty CrashDisk in the place of the one there was."""
        self.disk = CrashDisk(**options)
        self.faulty_disk = FaultyDisk(self.disk)

    def revive(self) -> None:
        """Let the disk be reached again, by the next process."""
        self.faulty_disk = FaultyDisk(self.disk)

    def crash(self, *, power_cut: int | None = None) -> None:
        """End the process of every open cache at once; with a seed, the machine's power too. Nothing is closed in order."""
        self.faulty_disk.bury()
        if power_cut is None:
            self.disk.kill()
        else:
            self.disk.power_cut(power_cut)
        caches, self._caches = self._caches, []
        for cache in caches:
            with suppress(ProcessDied):
                cache.close()  # joins its threads; whatever it still wants of the disk is refused

    def wait_for_death_or(self, tickets: Sequence[Ticket]) -> bool:
        """Wait until the process died (False) or every ticket is done (True)."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            if self.faulty_disk.died.wait(0.001):
                return False
            if all(ticket.done for ticket in tickets):
                return not self.faulty_disk.died.is_set()  # dying ends tickets as well
        raise AssertionError("neither dead nor done")

    def damage(self, kv: FakeKV, *, at: float) -> None:
        """Change one byte of the extent that holds all of `kv`, at a share of its length; the cache is closed."""
        layout = layout_of(kv.representation, len(kv.keys))
        path, found = self._find(bytes(kv.piece(0, 0)))
        start = found - layout.layer_offsets[0]
        _flip(path, start + int(at * (layout.extent_bytes - 1)))

    def damage_piece(self, kv: FakeKV, *, layer: int, piece: int) -> None:
        path, found = self._find(bytes(kv.piece(layer, piece)))
        _flip(path, found + kv.piece_bytes(layer, piece) // 2)

    def damage_state(self, kv: FakeKV, *, behind: int, at: float) -> None:
        """Change one byte of the state behind so many pieces, at a share of its length."""
        state = kv.state(behind)
        path, found = self._find(bytes(state))
        _flip(path, found + int(at * state.nbytes))

    def _find(self, content: bytes) -> tuple[Path, int]:
        for path in sorted(p for p in self.directory.rglob("*") if p.is_file()):
            at = path.read_bytes().find(content)
            if at >= 0:
                return path, at
        raise AssertionError("no file holds this piece")

    def _disk_tier(self, capacity_bytes: int, crashable: bool, durability: str) -> Tier:
        options: dict[str, Any] = {"capacity_bytes": capacity_bytes, "durability": durability, "clock": self._clock}
        if not crashable:
            return DiskTier.open(self.directory, **options)
        if self.faulty_disk.died.is_set():
            self.revive()
        return DiskTier.open(self.disk.root / "kv", disk=self.faulty_disk, **options)

    def _clock(self) -> float:
        return time.monotonic() + self._skipped_s


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x20]))
