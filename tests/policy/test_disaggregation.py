"""A prompt is computed apart only where that is worth the way; and what a router does with two workers, played."""

from __future__ import annotations

import pytest

from headstart.policy.routing.disaggregation import LEAST_TOKENS, Wire, part
from headstart.policy.routing.estimate import Speeds, View
from headstart.policy.speed import Speed

SPEEDS = Speeds(prefill=Speed((1e-4, 0.0)), step=Speed((1e-2, 1e-4, 0.0)))  # 10,000 tokens a second
FAST = Wire(Speed((1e-6, 1e-3)))
BUSY = View(0, SPEEDS, running=8, context=8000)
IDLE = View(1, SPEEDS)


def test_a_busy_decoding_worker_has_long_prompts_computed_elsewhere() -> None:
    parting = part(BUSY, [IDLE], tokens=8000, wire=FAST)
    assert parting is not None
    assert parting.worker == 1
    assert parting.first_token_s == pytest.approx(0.8)
    assert parting.next_token_s < 0.02
    assert parting.cost_s < parting.together_s


def test_equal_workers_with_nothing_to_do_stay_together() -> None:
    assert part(IDLE._replace(worker=0), [IDLE], tokens=8000, wire=FAST) is None


def test_a_short_rest_is_not_worth_the_way() -> None:
    assert part(BUSY, [IDLE], tokens=LEAST_TOKENS - 1, wire=FAST) is None
    assert part(BUSY._replace(memory=7900), [IDLE], tokens=8000, wire=FAST) is None
    assert part(BUSY._replace(pool=7900), [IDLE], tokens=8000, wire=FAST) is None


def test_a_slow_wire_is_not_worth_it() -> None:
    assert part(BUSY, [IDLE], tokens=8000, wire=Wire(Speed((2e-3, 0.0)))) is None


def test_a_long_queue_there_is_not_worth_it() -> None:
    assert part(BUSY, [IDLE._replace(queued_s=60.0)], tokens=8000, wire=FAST) is None


def test_the_one_that_has_the_prompt_is_taken() -> None:
    warm = View(2, SPEEDS, memory=7000)
    parting = part(BUSY, [IDLE, warm], tokens=8000, wire=FAST)
    assert parting is not None
    assert parting.worker == 2


def test_a_worker_is_not_asked_to_compute_for_itself() -> None:
    assert part(BUSY, [BUSY._replace(running=0)], tokens=8000, wire=FAST) is None
    assert part(BUSY, [], tokens=8000, wire=FAST) is None
