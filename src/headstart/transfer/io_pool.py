"""Worker threads that run read jobs of one tier in order of urgency. One pool a tier: a stuck device cannot take all threads.

A job reads at most some 1 MiB at a time, so bytes in flight are bounded by threads × request size, 16 MiB: enough depth for
the device, and a layer that is wanted first never waits behind tens of megabytes. Of a far tier a job brings more, and hands it
on as it comes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count
from threading import Condition, Thread
from typing import Protocol

import numpy as np

from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.transfer.buffers import Staging

REQUEST_BYTES = 1 << 20  # larger reads are split, at piece edges; smaller ones of one extent are joined

_log = logging.getLogger(__name__)


class Job(Protocol):
    """Exactly one of `run` and `abandon` is the end of a job; an exception out of `run` is followed by `abandon`."""

    @property
    def urgency(self) -> tuple[int, ...]:
        """Lower runs first: the load's turn, then the layer, then the place in the prompt."""
        ...

    def run(self, staging: Staging) -> None: ...

    def abandon(self, error: BaseException) -> None: ...


class IOPool:
    """Up to `threads` daemon threads named after the tier, each started when there is a job that no idle one takes. Safe from
    many threads; `close` twice is fine."""

    def __init__(self, name: str, *, threads: int = 8) -> None:
        if threads < 1:
            raise ValueError(f"pool {name!r} needs at least one thread, got {threads}")
        self.name = name
        self.threads = threads
        self.counters = Counters()
        self._condition = Condition()
        self.waiting = np.zeros(1, np.int64)  # jobs that no thread has taken yet, for a job that can make room for them
        self._queue: list[tuple[tuple[int, ...], int, Job]] = []  # a heap; the number breaks ties in order of arrival
        self._arrivals = count()
        self._closed = False
        self._warm_bytes = 0
        self._since: list[float | None] = [None] * threads  # when each thread's running job began
        self._idle = 0
        self._threads: list[Thread] = []
        self._start(1)  # where that is impossible it is said now; any further one is only missed

    def submit(self, jobs: Iterable[Job]) -> None:
        """Queue jobs. After `close` they are abandoned at once."""
        entries = [(job.urgency, next(self._arrivals), job) for job in jobs]
        with self._condition:
            accepted = not self._closed
            if accepted:
                for entry in entries:
                    heappush(self._queue, entry)
                self.waiting[0] = len(self._queue)
                self._condition.notify(len(entries))
                with suppress(RuntimeError):
                    self._start(len(self._queue) - self._idle)
        if not accepted:
            self._abandon([job for _, _, job in entries])

    def warm(self) -> None:
        """Start all threads, and let idle ones touch their staging memory now, so that the first load does not pay for that."""
        with self._condition:
            if self._closed:
                return
            with suppress(RuntimeError):
                self._start(self.threads)
            self._warm_bytes = 2 * REQUEST_BYTES  # a disk's request, and the edges of the OS pages that it begins and ends in
            self._condition.notify_all()

    def stalled_s(self) -> float:
        """Return for how long the oldest running job has been running: a device that answers no more shows here."""
        began = [since for since in self._since if since is not None]
        return time.monotonic() - min(began) if began else 0.0

    def close(self, timeout_s: float = 5.0) -> int:
        """Abandon what is queued, wait for what runs; return how many threads are stuck in a read and were left behind."""
        with self._condition:
            self._closed = True
            dropped = [job for _, _, job in self._queue]
            self._queue.clear()
            self.waiting[0] = 1  # for good: what runs gives its thread back soon, and is abandoned
            self._condition.notify_all()
        self._abandon(dropped)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = sum(thread.is_alive() for thread in self._threads)
        if stuck:
            _log.warning("tier %r: %d read threads did not end within %.1f s and were left behind", self.name, stuck, timeout_s)
        return stuck

    def _start(self, wanted: int) -> None:
        """Start so many threads, as far as there are fewer than there may be. Raises RuntimeError where the system refuses."""
        for number in range(len(self._threads), min(len(self._threads) + wanted, self.threads)):
            thread = Thread(target=self._work, args=(number,), name=f"{self.name}-read-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self, number: int) -> None:
        staging = Staging(f"{self.name} staging")
        while True:
            with self._condition:
                while not (self._queue or self._closed or staging.nbytes < self._warm_bytes):
                    self._idle += 1
                    self._condition.wait()  # idle: bounded by close(), which every owner calls
                    self._idle -= 1
                if self._closed:
                    return
                job = heappop(self._queue)[2] if self._queue else None
                self.waiting[0] = len(self._queue)
            if job is None:
                staging.take(self._warm_bytes)
                continue
            self._since[number] = time.monotonic()
            try:
                job.run(staging)
            except BaseException as error:  # noqa: BLE001 - the thread's outer edge: a job must not take the thread with it
                self.counters.add("job_errors")
                _log.exception("tier %r: a read job failed unexpectedly", self.name)
                job.abandon(error)
            self._since[number] = None
            del job  # an idle thread keeps no destination alive

    def _abandon(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            job.abandon(StoreError(f"tier {self.name!r} is closed", tier=self.name, reason="closed"))
