"""A fleet on a virtual clock: nothing is lost, nothing takes less than it must, and the rule decides what it should."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from headstart.cli.simulate import simulate as command
from headstart.errors import RequestError
from headstart.policy.planning import Delays, Limits, Targets
from headstart.policy.routing.estimate import Speeds
from headstart.policy.speed import Speed
from headstart.simulate.fleet import LARGE_GPU, NAMES, Fleet, Run, read_speeds, simulate
from headstart.simulate.planned import Planned, simulate_planned
from headstart.simulate.result import result_of
from headstart.simulate.trace import Ask, Trace, day, hot_prefix, read, repeated, tokens_of
from headstart.simulate.worker import Job, KeptBlocks, Worker

SPEEDS = Speeds(prefill=Speed((1e-3, 0.0)), step=Speed((1e-2, 1e-3, 0.0)), pool=Speed((1e-4, 0.0)), chunk_tokens=1000)


def trace_of(seed: int, requests: int = 60) -> Trace:
    """Sessions of some turns, each behind all before it."""
    random = Random(seed)
    sessions = []
    for _ in range(requests // 3):
        tokens, turns = random.randrange(100, 4000), []
        own = np.array([random.getrandbits(60) + 1 for _ in range(40)], np.uint64)
        for _ in range(3):
            wait_s = random.random() * 20
            turns.append(Ask(wait_s, tokens, random.randrange(1, 80), own[: tokens // 512]))
            tokens += random.randrange(1, 3000)
        sessions.append(turns)
    return Trace(sessions, 512)


@given(st.integers(0, 2**32), st.sampled_from(NAMES), st.sampled_from((None, 50_000)))
def test_every_request_ends_and_takes_at_least_what_it_must(seed: int, rule: str, pool: int | None) -> None:
    trace = trace_of(seed)
    run = simulate(trace, Fleet(3, SPEEDS, kv_tokens=20_000, pool_tokens=pool), rule, seed=seed)
    assert len(run.jobs) == sum(len(session) for session in trace.sessions) == sum(run.requests)
    for job in run.jobs:
        assert 0 <= job.reused_memory <= job.reused < job.ask.tokens
        least_s = SPEEDS.prefill_s(job.reused, job.ask.tokens)
        assert job.first_s - job.sent_s >= least_s - 1e-6
        assert job.end_s - job.first_s >= (job.ask.answer - 1) * 1.1e-2 - 1e-6
    for session in range(len(trace.sessions)):
        turns = sorted((job for job in run.jobs if job.session == session), key=lambda job: job.turn)
        for before, after in pairwise(turns):
            assert after.sent_s == pytest.approx(before.end_s + after.ask.wait_s)
    span_s = max(job.end_s for job in run.jobs)
    assert all(busy_s <= span_s + 1e-6 for busy_s in run.busy_s)
    if pool is None:
        assert all(job.reused == job.reused_memory for job in run.jobs)


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [
        [(job.name, job.end_s) for job in simulate(trace_of(5), Fleet(3, SPEEDS), "headstart", seed=9).jobs] for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_one_worker_alone_takes_exactly_what_the_speeds_say() -> None:
    worker = Worker(SPEEDS, kv_tokens=10_000, block_tokens=512, pool=None)
    job = Job("a", Ask(0.0, 1500, 11, np.array([1, 2], np.uint64)), [1, 2], sent_s=0.0)
    worker.take(job, 0.0)
    assert worker.next_s() == pytest.approx(1.5)
    assert worker.advance(1.5).first == [job]
    assert worker.advance(10.0).ended == [job]
    assert job.end_s == pytest.approx(1.5 + 10 * 0.011)
    assert worker.busy_s == pytest.approx(job.end_s)


def test_decoding_goes_on_beside_a_prompt_and_both_are_slower() -> None:
    worker = Worker(SPEEDS, kv_tokens=10_000, block_tokens=512, pool=None)
    first = Job("a", Ask(0.0, 1000, 100, np.array([], np.uint64)), [], sent_s=0.0)
    second = Job("b", Ask(0.0, 2000, 1, np.array([], np.uint64)), [], sent_s=1.0)
    worker.take(first, 0.0)
    worker.advance(1.0)
    worker.take(second, 1.0)
    worker.advance(100.0)
    assert second.first_s == pytest.approx(1.0 + 2 * (1.0 + 0.011))  # two chunks, each with a step of the other's
    assert first.end_s == pytest.approx(second.first_s + 97 * 0.011)


def test_memory_bounds_how_many_run_and_nobody_overtakes() -> None:
    worker = Worker(SPEEDS, kv_tokens=3000, block_tokens=512, pool=None)
    jobs = [
        Job(name, Ask(0.0, tokens, 100, np.array([], np.uint64)), [], sent_s=0.0)
        for name, tokens in (("a", 2000), ("b", 2500), ("c", 100))
    ]
    for job in jobs:
        worker.take(job, 0.0)
    worker.advance(1000.0)
    a, b, c = jobs
    assert b.first_s >= a.end_s
    assert c.first_s >= b.first_s


def test_what_is_read_from_the_pool_arrives_before_it_is_used() -> None:
    pool = KeptBlocks(100)
    pool.keep([1, 2])
    worker = Worker(SPEEDS, kv_tokens=10_000, block_tokens=512, pool=pool)
    job = Job("a", Ask(0.0, 1100, 1, np.array([1, 2], np.uint64)), [1, 2], sent_s=0.0)
    worker.take(job, 0.0)
    worker.advance(100.0)
    assert (job.reused_memory, job.reused) == (0, 1024)
    assert job.first_s == pytest.approx(1024e-4 + 76e-3)


def shares(run: Run) -> float:
    return result_of("x", run).largest_share


@pytest.mark.parametrize("per_s", [0.5, 20.0])
def test_one_hot_prefix_does_not_gather_on_one_worker(per_s: float) -> None:
    trace = hot_prefix(requests=300, per_s=per_s, shared=4096, own=512, answer=20, random=Random(2))
    assert shares(simulate(trace, Fleet(8), "headstart")) <= 2.0
    assert shares(simulate(trace, Fleet(8), "prefix-only")) > 2.0


def test_sessions_find_what_they_left(tmp_path: Path) -> None:
    trace = repeated(trace_of(3, 30), times=4, over_s=300.0, random=Random(0))
    ours = result_of("headstart", simulate(trace, Fleet(4, SPEEDS), "headstart"))
    blind = result_of("round-robin", simulate(trace, Fleet(4, SPEEDS), "round-robin"))
    assert ours.hit_memory > 1.5 * blind.hit_memory


def test_an_unknown_rule_and_an_empty_run_are_refused() -> None:
    with pytest.raises(ValueError, match="no rule 'best'"):
        simulate(trace_of(1), Fleet(1), "best")
    with pytest.raises(ValueError, match="no requests"):
        result_of("x", Run([], [], []))


# Files


def mooncake(folder: Path, count: int = 20) -> Path:
    lines = [
        json.dumps({"timestamp": 400 * n, "input_length": 1030 + n, "output_length": 9, "hash_ids": [0, n + 1, n + 1000]})
        for n in range(count)
    ]
    path = folder / "trace.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_both_formats_are_read_and_only_full_blocks_have_keys(tmp_path: Path) -> None:
    asks = [session[0] for session in read(mooncake(tmp_path)).sessions]
    assert [(ask.wait_s, ask.tokens, ask.answer, len(ask.keys)) for ask in asks[:2]] == [(0.0, 1030, 9, 2), (0.4, 1031, 9, 2)]
    assert asks[0].keys[0] == asks[1].keys[0] != asks[0].keys[1]
    folder = tmp_path / "sessions"
    folder.mkdir()
    for name in ("a", "b"):
        with gzip.open(folder / f"{name}.json.gz", "wt") as stream:
            turns = [
                {"t": 3.0, "in": 1100, "out": 5, "hash_ids": list(range(18)), "think_time": 0.0},
                {"t": 5.0, "type": "subagent"},
                {"t": 9.0, "in": 1700, "out": 5, "hash_ids": list(range(27)), "think_time": 2.5},
            ]
            json.dump({"block_size": 64, "requests": turns}, stream)
    first, second = read(folder).sessions
    assert [(ask.wait_s, ask.tokens, len(ask.keys)) for ask in first] == [(3.0, 1100, 2), (2.5, 1700, 3)]
    assert first[1].keys[:2].tolist() == first[0].keys.tolist()
    assert not set(first[1].keys.tolist()) & set(second[1].keys.tolist())
    assert read(folder).faster(3).sessions[0][0].wait_s == 1.0


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.jsonl", '{"timestamp": 1}\n', "line 1: not a request of a trace"),
        ("a.jsonl", "no json\n", "line 1: not a request of a trace"),
        ("a.json", "{}", "is no agent session"),
        ("a.json", '{"block_size": 64, "requests": []}', "no request with block ids"),
        ("a.json.gz", "not gzip", "is no agent session"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_place(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(RequestError, match=says):
        read(tmp_path / name)


@pytest.mark.parametrize("text", ["", "K", "-1", "nan", "1e400", "x"])
def test_a_number_of_tokens_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is no number of tokens"):
        tokens_of(text)


@pytest.mark.parametrize(
    "text",
    ["[]", '{"prefil": [1, 2]}', '{"prefill": [1]}', '{"pool": [0, 0]}', '{"step": [1, -1, 0]}', '{"chunk_tokens": 0}', "no"],
)
def test_speeds_that_are_none_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "speeds.json").write_text(text)
    with pytest.raises(RequestError, match="is no file of speeds"):
        read_speeds(tmp_path / "speeds.json")


def test_speeds_of_a_file_are_taken_and_what_it_leaves_out_stays(tmp_path: Path) -> None:
    (tmp_path / "speeds.json").write_text('{"prefill": [0.001, 0], "chunk_tokens": 512}')
    found = read_speeds(tmp_path / "speeds.json")
    assert (found.prefill.costs, found.chunk_tokens, found.step) == ((0.001, 0.0), 512, LARGE_GPU.step)


def test_the_command_prints_every_rule_and_draws(tmp_path: Path) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(command, [str(mooncake(tmp_path)), "--workers", "2", *arguments], standalone_mode=False)
        assert result.exception is None, result.output
        return result.stdout

    found = json.loads(said("--json", "--plot", str(tmp_path / "a.svg")))
    assert [one["rule"] for one in found["rules"]] == list(NAMES)
    assert all(name in CliRunner().invoke(command, ["--help"]).output for name in NAMES)
    assert {one["requests"] for one in found["rules"]} == {20}
    assert (tmp_path / "a.svg").read_text().lstrip().startswith("<?xml")
    assert said("--rule", "dynamo", "--requests", "5", "--pool-tokens", "1M").count("\n") == 2


def planned(trace: Trace, fleet: Fleet, **more: float) -> Planned:
    limits = Limits(1, int(more.pop("maximum", 6)))
    return simulate_planned(
        trace, fleet, targets=Targets(3.0, 0.1), limits=limits, delays=Delays(20.0, 30.0, 120.0), look_s=5.0
    )


def test_under_a_planner_every_request_ends_and_nobody_is_paid_for_twice() -> None:
    trace = day(trace_of(3, 300), copies=3, peak=6.0, random=Random(2), span_s=7200.0)
    made = planned(trace, Fleet(1, SPEEDS, kv_tokens=40_000))
    assert len(made.run.jobs) == sum(len(session) for session in trace.sessions) == sum(made.run.requests)
    assert all(job.end_s >= job.first_s >= job.sent_s for job in made.run.jobs)
    verbs = [action.verb for _, action in made.actions]
    assert verbs.count("start") >= 1
    assert verbs.count("drain") >= 1
    assert 1 < made.most <= 6
    span_s = max(job.end_s for job in made.run.jobs)
    assert sum(made.run.busy_s) <= made.worker_s < made.most * span_s
    again = planned(trace, Fleet(1, SPEEDS, kv_tokens=40_000))
    assert again.actions == made.actions


def test_a_started_worker_gets_nothing_before_it_is_ready_and_a_drained_one_nothing_new() -> None:
    trace = day(trace_of(4, 300), copies=3, peak=6.0, random=Random(2), span_s=7200.0)
    made = planned(trace, Fleet(2, SPEEDS, kv_tokens=40_000))
    assert len(made.run.requests) == 2 + sum(action.verb == "start" for _, action in made.actions)


def test_a_day_has_its_peak_in_the_afternoon_and_loses_nothing() -> None:
    trace = Trace([[Ask(3.0 * (number // 10), 1000, 10, np.array([number + 1], np.uint64))] for number in range(1000)], 512)
    long = day(trace, copies=5, peak=4.0, random=Random(1))
    starts = np.array([session[0].wait_s for session in long.sessions])
    assert len(starts) == 5000
    assert (np.diff(starts) >= 0).all()
    assert 0 <= starts[0] <= starts[-1] <= 86_400
    hours = np.histogram(starts, bins=24, range=(0, 86_400))[0]
    assert 15 <= hours.argmax() <= 16
    assert 3.5 <= hours.max() / hours.min() <= 4.5
    assert len({int(session[0].keys[0]) for session in long.sessions}) == 5000


def test_the_command_tells_what_the_planner_did(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text("[planner]\nfirst_token_s = 0.5\nstart_s = 5\nmaximum = 4\nevery_s = 5")
    trace = tmp_path / "trace.jsonl"
    asks = ({"timestamp": 200 * n, "input_length": 9000, "output_length": 40, "hash_ids": [n]} for n in range(300))
    trace.write_text("\n".join(json.dumps(ask) for ask in asks))
    options = [str(trace), "--workers", "1", "--rule", "headstart", "--plan", str(tmp_path / "cluster.toml")]
    told = CliRunner().invoke(command, options, standalone_mode=False)
    assert "start a worker (both)" in told.output
    assert "worker hours, up to" in told.output
    found = json.loads(CliRunner().invoke(command, [*options, "--json"], standalone_mode=False).stdout)
    assert [rule["rule"] for rule in found["rules"]] == ["headstart", "planner"]
    assert found["planner"]["most"] > 1
    assert found["rules"][1]["first_token_p90_s"] < found["rules"][0]["first_token_p90_s"]
