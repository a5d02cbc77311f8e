"""Which worker gets a request: who holds what against a dictionary, the estimate, hot prefixes, and the router's books."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headstart.policy.routing.estimate import Speeds, View, estimate
from headstart.policy.routing.holders import DISK, MEMORY, POOL, Holders, Keys, keys_of
from headstart.policy.routing.many import Estimates, costs_of, estimates
from headstart.policy.routing.native import native_choice
from headstart.policy.routing.router import Routing
from headstart.policy.routing.spread import Spread
from headstart.policy.speed import Speed

SPEEDS = Speeds(prefill=Speed((1e-3, 1e-7)), step=Speed((1e-2, 1e-4, 1e-7)), pool=Speed((1e-4, 1e-2)), disk=Speed((2e-4, 1e-2)))
WORKERS = 70  # more than fit into one word of bits


def prompt(*numbers: int) -> Keys:
    return np.array(numbers, np.uint64)


def test_the_choice_in_c_is_there() -> None:
    """It is compiled wherever there is a compiler; what is tested here would else be NumPy's alone."""
    assert native_choice() is not None


@pytest.fixture(params=["C", "NumPy"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are counted in C, and without it."""
    if request.param == "NumPy":
        monkeypatch.setattr("headstart.policy.routing.holders.native_choice", lambda: None)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.usefixtures("either")
@given(st.integers(0, 2**32))
def test_holders_answer_as_a_dictionary_does_while_nothing_was_dropped(seed: int) -> None:
    random = Random(seed)
    holders = Holders(workers=WORKERS, blocks=4096)
    known: dict[tuple[int, int], set[int]] = {}
    for _ in range(60):
        worker, plane = random.randrange(WORKERS), random.choice((MEMORY, DISK, POOL))
        keys = [random.randrange(1, 60) for _ in range(random.randrange(1, 8))]
        held = known.setdefault((plane, 0 if plane == POOL else worker), set())
        if random.random() < 0.7:
            holders.add(worker, prompt(*keys), plane)
            held.update(keys)
        elif random.random() < 0.8:
            holders.remove(worker, prompt(*keys), plane)
            held.difference_update(keys)
        else:
            holders.forget(worker)
            known.pop((MEMORY, worker), None)
            known.pop((DISK, worker), None)
    asked = [random.randrange(1, 60) for _ in range(6)]
    runs = holders.runs(prompt(*asked))
    for worker in range(WORKERS):
        there: set[int] = set()
        for plane in (MEMORY, DISK, POOL):
            there |= known.get((plane, 0 if plane == POOL else worker), set())
            assert runs[plane, worker] == next((n for n, key in enumerate(asked) if key not in there), len(asked))


def test_what_is_asked_for_is_remembered_longest_and_no_more_than_was_allowed() -> None:
    holders = Holders(workers=2, blocks=1000)
    used = prompt(*range(1, 101))
    holders.add(1, used)
    for start in range(1000, 9000, 50):
        holders.add(0, prompt(*range(start, start + 50)))
        assert holders.runs(used)[MEMORY].tolist() == [0, 100]
        assert len(holders) <= 1000
    assert holders.runs(prompt(1000))[MEMORY].tolist() == [0, 0]


def test_more_blocks_at_once_than_are_remembered_do_no_harm() -> None:
    holders = Holders(workers=1, blocks=64)
    long = prompt(*range(1, 1001))
    holders.add(0, long)
    assert len(holders) <= 64
    assert holders.runs(long).max() <= 1000


def test_keys_are_the_first_eight_bytes_of_the_chain() -> None:
    assert keys_of([b"\1" + bytes(31), b"\0\1" + bytes(30)]).tolist() == [1, 256]
    assert keys_of([]).tolist() == []


@given(st.integers(0, 5000), st.integers(0, 5000), st.floats(0, 5), st.integers(0, 30), st.floats(0, 10))
def test_more_of_the_prompt_in_memory_never_costs_more(
    one: int, more: int, queued_s: float, running: int, pressure: float
) -> None:
    def cost(memory: int) -> float:
        view = View(
            0, SPEEDS, memory=memory, disk=memory, pool=memory, queued_s=queued_s, running=running, context=running * 900
        )
        return estimate(view, tokens=5001, answer=100, pressure=pressure).cost

    low, high = sorted((one, more))
    assert cost(high) <= cost(low) + 1e-9


def test_what_is_faster_to_compute_than_to_read_is_computed() -> None:
    slow = Speeds(prefill=Speed((1e-3, 0.0)), step=Speed((1e-2, 0.0, 0.0)), pool=Speed((1e-2, 0.0)))
    found = estimate(View(0, slow, pool=1000), tokens=1001, answer=1, pressure=0.0)
    assert (found.reused, found.read_s) == (0, 0.0)
    found = estimate(View(0, SPEEDS, pool=1000), tokens=1001, answer=1, pressure=0.0)
    assert found.reused == 1000
    assert found.read_s == pytest.approx(0.11)


def test_one_token_is_always_left_to_compute() -> None:
    found = estimate(View(0, SPEEDS, memory=640, disk=640, pool=640), tokens=640, answer=1, pressure=0.0)
    assert found.reused == 639
    assert found.compute_s > 0


def test_reading_goes_on_while_others_are_computed() -> None:
    found = estimate(View(0, SPEEDS, pool=1000, queued_s=5.0), tokens=1001, answer=1, pressure=0.0)
    assert found.first_token_s == pytest.approx(5.0 + found.compute_s)


SLOW = Speeds(prefill=Speed((2e-3, 0.0)), step=Speed((1e-2, 0.0, 0.0)), disk=Speed((5e-3, 1.0)), chunk_tokens=512)


@given(
    st.lists(
        st.tuples(
            st.sampled_from([SPEEDS, SLOW]),
            st.lists(st.integers(0, 94), min_size=3, max_size=3),
            st.floats(2, 10),
            st.integers(0, 20),
            st.none() | st.integers(0, 20_000),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 6000),
    st.floats(0, 20),
    st.booleans(),
)
def test_all_workers_at_once_are_estimated_as_each_alone_is(
    workers: list[tuple[object, ...]], tokens: int, rate: float, in_c: bool
) -> None:
    views = []
    for number, (speeds, held, queued_s, running, room) in enumerate(workers):
        assert isinstance(held, list)
        memory, disk, pool = (64 * blocks for blocks in sorted(held))
        more = {"memory": memory, "disk": disk, "pool": pool, "queued_s": queued_s, "running": running, "room": room}
        views.append(View(number, speeds, context=running * 700, **more))  # type: ignore[arg-type, operator]
    order = Random(tokens).sample(views, len(views))
    infinite = [float("inf") if view.room is None else view.room for view in views]
    with pytest.MonkeyPatch.context() as patch:
        if not in_c:
            patch.setattr("headstart.policy.routing.many.native_choice", lambda: None)
        found = estimates(
            np.array([view.worker for view in order], np.int64),
            np.array([costs_of(view.speeds) for view in views]),
            np.array(
                [
                    (
                        view.queued_s + 1.5,
                        2.0,
                        8.5,
                        view.running,
                        view.context,
                        room,
                    )  # the first one is being computed for 1.5 s
                    for view, room in zip(views, infinite, strict=True)
                ]
            ),
            np.array([[getattr(view, plane) // 64 for view in views] for plane in ("memory", "disk", "pool")], np.int64),
            block_tokens=64,
            tokens=tokens,
            answer=150,
            rate=rate,
            now_s=10.0,
        )
    for at, view in enumerate(order):
        pressure = rate * (view.queued_s + view.speeds.prefill_s(min(view.pool, tokens), tokens))
        alone = estimate(view, tokens=tokens, answer=150, pressure=pressure)
        row = found.row(at)
        assert row.worker == view.worker
        assert row.cost == pytest.approx(alone.cost)
        assert row.wait_s == pytest.approx(alone.wait_s)
        if row.reused == alone.reused:  # else both are as good
            assert (row.compute_s, row.work_s) == pytest.approx((alone.compute_s, alone.work_s))


def test_ties_are_broken_at_random_and_nothing_else_is() -> None:
    nothing, compute_s = np.zeros(4), np.array([1.0, 1.0, 1.0, 2.0])
    cost = np.array([1.0, 1.0001, 1.0002, 2.0])
    found = Estimates(np.arange(4), np.stack([nothing, nothing, nothing, compute_s, compute_s, cost]))
    chosen = [found.cheapest(range(4), Random(seed)) for seed in range(200)]
    assert found.cheapest([3], Random(0)) == 3
    assert {one: chosen.count(one) > 30 for one in range(3)} == {0: True, 1: True, 2: True}
    assert 3 not in chosen


def test_a_session_may_stay_where_it_is_and_a_hot_prefix_may_not() -> None:
    spread = Spread()
    for turn in range(200):
        spread.sent(1000 + turn, 0, of=4)  # each turn ends at another block
        assert 0 in spread.among(1001 + turn, range(4))
    for _ in range(200):
        spread.sent(7, spread.among(7, range(4))[0], of=4)
    assert 0 not in spread.among(7, range(4))
    assert spread.among(7, [0]) == [0]  # where there is nobody else


def test_a_prefix_that_all_ask_for_is_computed_once_on_every_worker_that_has_nothing_to_do() -> None:
    router = routing("a", "b", "c")
    keys = prompt(*range(1, 32))
    router.stored("a", keys)
    went: list[str] = []
    for number in range(60):
        if number == 40:  # "b" is busy from now on with something else, for long
            router.told("b", requests=3, waiting_tokens=100_000)
        decision = router.choose(keys, tokens=2000, now_s=float(number))
        assert decision is not None
        router.sent(str(number), decision, tokens=2000, now_s=float(number))
        router.first_token(str(number), now_s=number + 0.1)
        router.finished(str(number), answer=10, now_s=number + 0.2)
        if decision.worker not in went:
            router.stored(decision.worker, keys)
        went.append(decision.worker)
    assert set(went[:6]) == {"a"}  # before it is asked for often, who has it answers
    assert set(went[6:8]) == {"b", "c"}
    assert len(set(went[8:40])) == 3  # then any of them
    assert "b" not in went[40:]


def routing(*names: str, **more: bool) -> Routing:
    found = Routing(block_tokens=64, random=Random(1), workers=8, blocks=10_000)
    for name in names:
        found.up(name, SPEEDS, now_s=0.0, kv_tokens=100_000, **more)
    return found


def test_a_prompt_goes_where_it_is_held_unless_the_queue_there_is_longer_than_computing_takes() -> None:
    router = routing("a", "b")
    keys = prompt(*range(1, 32))
    router.stored("a", keys)
    first = router.choose(keys, tokens=2000, now_s=0.0)
    assert first is not None
    assert first.worker == "a"
    assert next(iter(first.estimates)) == "a"
    for number in range(40):
        cold = router.choose(prompt(5000 + number), tokens=2000, now_s=0.0, among=["a"])
        assert cold is not None
        router.sent(f"cold {number}", cold, tokens=2000, now_s=0.0)
    later = router.choose(keys, tokens=2000, now_s=0.0)
    assert later is not None
    assert later.worker == "b"
    assert later.estimates["a"].wait_s > later.estimates["b"].compute_s


@given(st.integers(0, 2**32))
def test_the_books_are_empty_when_every_request_has_ended_in_whatever_order(seed: int) -> None:
    random = Random(seed)
    router = routing("a", "b", "c")
    open_: dict[str, bool] = {}
    now_s = 0.0
    for number in range(80):
        now_s += random.random()
        if open_ and random.random() < 0.6:
            name = random.choice(list(open_))
            if not open_[name] and random.random() < 0.5:
                router.first_token(name, now_s=now_s)
                open_[name] = True
            else:
                router.finished(name, answer=random.choice((None, 10)), now_s=now_s)
                del open_[name]
        elif random.random() < 0.1:
            for lost in router.down(gone := random.choice("abc")):
                assert not open_[lost]
            router.up(gone, SPEEDS, now_s=now_s, kv_tokens=100_000)
        else:
            keys = prompt(*range(1, random.randrange(2, 20)))
            decision = router.choose(keys, tokens=2000, now_s=now_s)
            assert decision is not None
            router.sent(str(number), decision, tokens=2000, now_s=now_s)
            open_[str(number)] = False
    for name in open_:
        router.finished(name, answer=5, now_s=now_s)
    views, _ = router.views(prompt(), now_s=now_s)
    for view in views.values():
        assert (view.queued_s, view.waiting, view.waiting_tokens, view.running, view.context) == (0.0, 0, 0, 0, 0)
        assert view.room == 100_000


@given(st.integers(0, 2**32))
def test_a_request_is_chosen_for_by_what_goes_on_now(seed: int) -> None:
    """What is noted of a worker when something happens there is what would be found by looking."""
    random = Random(seed)
    router = routing("a", "b", "c")
    keys = prompt(*range(1, 30))
    now_s = 0.0
    for number in range(40):
        now_s += random.random()
        names = [str(random.randrange(number + 1)) for _ in range(3)]
        router.first_token(names[0], now_s=now_s)
        router.finished(names[1], answer=random.choice((None, 10)), now_s=now_s)
        worker = random.choice("abc")
        what = random.random()
        if what < 0.2:
            router.told(
                worker, requests=random.randrange(6), waiting_tokens=random.randrange(9000), kv_used=random.randrange(9000)
            )
        elif what < 0.3:
            router.measured(worker, random.choice((SPEEDS, SLOW)))
        elif what < 0.35:
            router.down(worker)
            router.up(worker, random.choice((SPEEDS, SLOW)), now_s=now_s, kv_tokens=random.choice((None, 9000)))
        elif what < 0.5:
            router.stored(worker, keys[: random.randrange(30)], random.choice((MEMORY, DISK, POOL)))
        among = random.choice((None, {"a", "b"}, {"b", "c"}, {"c"}))
        decision = router.choose(keys, tokens=2000, now_s=now_s, among=among)
        views, key = router.views(keys, now_s=now_s, among=among)
        assert decision is not None
        assert decision.estimates.keys() == views.keys() == (among or {"a", "b", "c"})
        assert decision.key == key
        for name, found in decision.estimates.items():
            alone = estimate(views[name], tokens=2000, answer=int(router._answer), pressure=0.0)
            assert found.wait_s == pytest.approx(alone.wait_s)
            if found.reused == alone.reused:  # work counts there, and not here
                assert (found.read_s, found.compute_s) == pytest.approx((alone.read_s, alone.compute_s))
        router.sent(str(number), decision, tokens=2000, now_s=now_s)


def test_a_worker_that_starts_anew_holds_nothing_and_its_unanswered_requests_can_go_elsewhere() -> None:
    router = routing("a", "b")
    keys = prompt(1, 2, 3)
    for name in ("answered", "waiting"):
        decision = router.choose(keys, tokens=200, now_s=0.0, among=["a"])
        assert decision is not None
        router.sent(name, decision, tokens=200, now_s=0.0)
    router.stored("a", keys)
    router.first_token("answered", now_s=1.0)
    assert router.down("a") == ["waiting"]
    router.up("a", SPEEDS, now_s=2.0)
    views, key = router.views(keys, now_s=2.0)
    assert key is None
    assert {view.memory for view in views.values()} == {0}
    router.finished("answered", answer=3, now_s=3.0)  # its end is told late


def test_of_a_worker_without_events_what_is_sent_there_counts_as_held() -> None:
    router = routing("a", "b", events=False)
    keys = prompt(*range(1, 32))
    decision = router.choose(keys, tokens=2000, now_s=0.0)
    assert decision is not None
    router.sent("one", decision, tokens=2000, now_s=0.0)
    router.presume(decision.worker, keys)
    router.first_token("one", now_s=1.0)
    router.finished("one", answer=1, now_s=2.0)
    again = router.choose(keys, tokens=2000, now_s=3.0)
    assert again is not None
    assert again.worker == decision.worker
    assert again.estimate.reused == 31 * 64


def test_what_others_sent_there_is_known_by_what_the_worker_says() -> None:
    router = routing("a", "b")
    router.told("a", requests=3, waiting_tokens=300_000, kv_used=300_000)
    router.told("b", requests=10, waiting_tokens=1_000, kv_used=1_000)
    for number in range(4):
        found = router.choose(prompt(number + 1), tokens=100, now_s=float(number))
        assert found is not None
        assert found.worker == "b"
        assert found.estimates["a"].wait_s > 100 * found.estimates["b"].wait_s
    router.sent("own", found, tokens=100, now_s=5.0)
    router.told("b", requests=1, waiting_tokens=100)  # which is our own
    views, _ = router.views(prompt(), now_s=5.0)
    b = next(view for view in views.values() if view.waiting == 1)
    assert b.waiting_tokens == 100


def test_without_workers_there_is_no_choice_and_one_too_many_is_refused() -> None:
    router = routing()
    assert router.choose(prompt(1), tokens=100, now_s=0.0) is None
    full = routing(*"abcdefgh")
    with pytest.raises(ValueError, match="one too many"):
        full.up("i", SPEEDS, now_s=0.0)
