"""What a load tells those who wait: layers as they end, the first failure at once, the good prefix when all has ended."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest

from headstart.errors import LoadFailed
from headstart.testing.fake_kv import TINY
from headstart.transfer.load import Fault, Load

TIMEOUT_S = 20.0


def make(*sources: tuple[str, int], timeout_s: float = TIMEOUT_S) -> Load:
    return Load(sources, representation=TINY, timeout_s=timeout_s, settle=lambda load: None)


def bad(piece: int, reason: str = "read") -> Fault:
    return Fault(source=0, piece=piece, reason=reason, message="planted")


def test_a_load_of_nothing_is_done_at_once() -> None:
    load = make()
    assert load.done
    assert load.result() == 0
    load.wait(2)


def test_a_layer_is_ready_when_all_its_pieces_have_ended() -> None:
    load = make(("disk", 4))
    load.ended([0], pieces=3)
    with pytest.raises(LoadFailed) as failure:
        load.wait(0, timeout_s=0.0)
    assert failure.value.timed_out
    load.ended([0], pieces=1)
    load.wait(0)
    assert load.usable_tokens == 0
    load.ended([1, 2], pieces=4, nbytes=100)
    assert (load.result(), load.bytes_read, load.tokens_by_tier) == (256, 100, {"disk": 256})


def test_waiters_are_woken_by_the_first_failure_of_any_layer() -> None:
    load = make(("disk", 4))
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(load.wait, layer) for layer in (0, 2)]
        load.ended([1], pieces=1, fault=bad(2))
        for waiter in waiting:
            with pytest.raises(LoadFailed, match="planted") as failure:
                waiter.result(TIMEOUT_S)
            assert (failure.value.timed_out, failure.value.usable_tokens) == (False, 0)
    assert not load.done
    load.ended([0, 2], pieces=4)
    load.ended([1], pieces=3)
    assert load.result() == 128
    with pytest.raises(LoadFailed) as late:
        load.wait(0)
    assert late.value.usable_tokens == 128


def test_usable_is_the_minimum_over_layers_and_is_split_by_tier() -> None:
    load = make(("memory", 2), ("disk", 3), ("memory", 1))
    load.ended([0], pieces=6, fault=bad(5))
    load.ended([1], pieces=6, fault=bad(3))
    load.ended([2], pieces=6, fault=bad(4))
    assert load.result() == 3 * 64
    assert load.tokens_by_tier == {"memory": 128, "disk": 64}


def test_what_lies_behind_a_failure_is_not_wanted_any_more() -> None:
    load = make(("disk", 6))
    assert load.wanted(2, 4) == 4
    load.ended([0], pieces=1, fault=bad(4))
    assert (load.wanted(2, 4), load.wanted(4, 2), load.wanted(0, 3)) == (2, 0, 3)


def test_after_a_cancel_nothing_is_wanted_and_what_was_read_counts() -> None:
    load = make(("disk", 2))
    load.cancel()
    assert load.wanted(1, 1) == 0
    load.ended([0, 1, 2], pieces=2)
    assert load.result() == 64
    assert [fault.reason for fault in load.faults] == ["cancelled"]


def test_past_its_deadline_a_load_reads_no_more() -> None:
    load = make(("disk", 2), timeout_s=0.0)
    with pytest.raises(LoadFailed) as failure:
        load.result()
    assert (failure.value.timed_out, failure.value.usable_tokens) == (True, 0)
    assert load.wanted(0, 2) == 0
    assert [fault.reason for fault in load.faults] == ["timeout"]


def test_a_callers_own_timeout_does_not_end_the_load() -> None:
    load = make(("disk", 2))
    with pytest.raises(LoadFailed):
        load.wait(0, timeout_s=0.0)
    assert load.wanted(0, 2) == 2


def test_callbacks_come_once_after_settling_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []
    load = Load([("disk", 1)], representation=TINY, timeout_s=TIMEOUT_S, settle=lambda load: seen.append("settled"))

    def fail(load: Load) -> None:
        raise RuntimeError("planted")

    load.add_done_callback(fail)
    load.add_done_callback(lambda load: seen.append(f"done {load.done}"))
    with caplog.at_level(logging.CRITICAL):
        load.ended([0, 1, 2], pieces=1)
    load.add_done_callback(lambda load: seen.append("late"))
    assert seen == ["settled", "done True", "late"]


def test_a_load_reads_well_in_a_log() -> None:
    load = make(("disk", 2))
    load.ended([0], pieces=2)
    assert repr(load) == "<Load of 128 tokens, 1 of 3 layers ended>"
    load.ended([1, 2], pieces=2, nbytes=7)
    assert repr(load).startswith("<Load of 128 tokens, 128 usable, 7 bytes in ")
