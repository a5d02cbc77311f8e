"""A pool runs what is most urgent, survives every job, and ends within its bound."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from threading import Event

import pytest

from headstart.errors import StoreError
from headstart.transfer import io_pool
from headstart.transfer.buffers import Staging
from headstart.transfer.io_pool import REQUEST_BYTES, IOPool

TIMEOUT_S = 20.0


class FakeJob:
    def __init__(self, urgency: tuple[int, ...], work: Callable[[], None]) -> None:
        self.urgency = urgency
        self.work = work
        self.abandoned: list[Exception] = []
        self.ended = Event()

    def run(self, staging: Staging) -> None:
        self.work()
        self.ended.set()

    def abandon(self, error: Exception) -> None:
        self.abandoned.append(error)
        self.ended.set()


def test_the_most_urgent_job_runs_first_and_equals_in_order_of_arrival() -> None:
    pool = IOPool("disk", threads=1)
    gate, order = Event(), []
    pool.submit([FakeJob((0,), lambda: gate.wait(TIMEOUT_S) and None)])
    names = [((2, 0, 0), "d"), ((1, 5, 0), "c"), ((1, 0, 7), "a"), ((1, 0, 7), "b")]
    jobs = [FakeJob(urgency, lambda name=name: order.append(name)) for urgency, name in names]
    pool.submit(jobs)
    gate.set()
    assert all(job.ended.wait(TIMEOUT_S) for job in jobs)
    assert order == ["a", "b", "c", "d"]
    assert pool.close() == 0


def running_threads(name: str) -> int:
    return sum(thread.name.startswith(f"{name}-read-") for thread in threading.enumerate())


def test_a_thread_is_started_for_a_job_that_no_idle_one_takes_up_to_so_many() -> None:
    pool = IOPool("lazy", threads=4)
    assert running_threads("lazy") == 1
    gate, together = Event(), threading.Barrier(4)

    def meet() -> None:
        together.wait(TIMEOUT_S)  # only four at once get past it
        gate.wait(TIMEOUT_S)

    jobs = [FakeJob((0,), meet) for _ in range(4)]
    for job in jobs:
        pool.submit([job])
    later = FakeJob((1,), lambda: None)
    pool.submit([later])
    assert running_threads("lazy") == 4
    gate.set()
    assert all(job.ended.wait(TIMEOUT_S) for job in [*jobs, later])
    assert [job.abandoned for job in jobs] == [[]] * 4
    assert pool.close() == 0
    assert running_threads("lazy") == 0


def test_a_pool_goes_on_with_the_threads_that_the_system_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = IOPool("disk", threads=4)
    monkeypatch.setattr(io_pool.Thread, "start", refuse)
    jobs = [FakeJob((0,), lambda: None) for _ in range(8)]
    pool.submit(jobs)
    pool.warm()
    assert all(job.ended.wait(TIMEOUT_S) for job in jobs)
    assert [job.abandoned for job in jobs] == [[]] * 8
    assert pool.close() == 0


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_job_that_raises_is_abandoned_and_the_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    pool = IOPool("disk", threads=1)

    def fail() -> None:
        raise RuntimeError("planted")

    bad, good = FakeJob((0,), fail), FakeJob((1,), lambda: None)
    with caplog.at_level(logging.CRITICAL):
        pool.submit([bad, good])
        assert good.ended.wait(TIMEOUT_S)
    assert [str(error) for error in bad.abandoned] == ["planted"]
    assert good.abandoned == []
    assert pool.counters.get("job_errors") == 1
    pool.close()


def test_closing_abandons_what_is_queued_and_what_comes_later() -> None:
    pool = IOPool("disk", threads=1)
    started, gate = Event(), Event()
    running = FakeJob((0,), lambda: started.set() or (gate.wait(TIMEOUT_S) and None))
    queued, late = FakeJob((1,), lambda: None), FakeJob((1,), lambda: None)
    pool.submit([running, queued])
    assert started.wait(TIMEOUT_S)
    assert pool.stalled_s() > 0
    assert pool.close(timeout_s=0.0) == 1  # one thread is stuck and is left behind
    pool.submit([late])
    assert [type(job.abandoned[0]) for job in (queued, late)] == [StoreError, StoreError]
    gate.set()
    assert running.ended.wait(TIMEOUT_S)
    assert pool.close() == 0
    assert running.abandoned == []


def test_an_idle_pool_is_not_stalled() -> None:
    pool = IOPool("disk", threads=2)
    assert pool.stalled_s() == 0.0
    pool.close()


def test_idle_threads_touch_their_staging_when_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, both = [], Event()
    take = Staging.take

    def noted(self: Staging, nbytes: int) -> memoryview:
        view = take(self, nbytes)
        taken.append(nbytes)
        if len(taken) == 2:
            both.set()
        return view

    monkeypatch.setattr(Staging, "take", noted)
    pool = IOPool("disk", threads=2)
    pool.warm()
    assert both.wait(TIMEOUT_S)
    assert pool.close() == 0
    assert taken == [2 * REQUEST_BYTES] * 2  # once each


def test_a_running_job_sees_whether_others_wait_for_its_thread_and_that_the_pool_closes() -> None:
    pool = IOPool("disk", threads=1)
    started, gate = Event(), Event()
    running = FakeJob((0,), lambda: started.set() or (gate.wait(TIMEOUT_S) and None))
    seen: list[int] = []
    jobs = [FakeJob((1,), lambda: seen.append(int(pool.waiting[0]))) for _ in range(2)]
    pool.submit([running])
    assert started.wait(TIMEOUT_S)
    assert pool.waiting[0] == 0
    pool.submit(jobs)
    assert pool.waiting[0] == 2
    gate.set()
    assert all(job.ended.wait(TIMEOUT_S) for job in jobs)
    assert seen == [1, 0]
    assert pool.close() == 0
    assert pool.waiting[0]
