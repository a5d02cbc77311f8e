"""What is found in whole logs: hits of an ideal cache to the token, losses by cause, and that mending gains what it says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diagnose.logs import clock, linted, turns, written
from diagnose.pairs import SYSTEM, TOOLS
from headstart.diagnose.causes import Cause
from headstart.diagnose.known import NOBODY, Known
from headstart.diagnose.lint import Lint, fails
from headstart.diagnose.logs import Log
from headstart.diagnose.mending import best_changes, replayed
from headstart.diagnose.reading import Reading
from headstart.render import Renderer
from headstart.testing import assert_prefix_stable


@pytest.fixture
def renderer(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["byte-level"]


def replay(lint: Lint, path: Path, renderer: Renderer | None = None) -> dict[Cause, int | None]:
    with Log([str(path)], read_stdin=lambda: open(__file__, "rb")) as log:
        changes = replayed(best_changes(lint, 3), log, Reading(renderer), on_request=lambda n, found: None)
    return {change.cause: change.replayed_tokens for change in changes}


def ideal(requests: list[Any], renderer: Renderer) -> int:
    """Hits by comparing every prompt with all before, token by token."""
    prompts = [renderer.chat(body["messages"], tools=body.get("tools")) for body in requests]
    kept = 0
    for n, prompt in enumerate(prompts):
        alike = [
            next((i for i, (x, y) in enumerate(zip(prompt, p, strict=False)) if x != y), min(len(p), len(prompt)))
            for p in prompts[:n]
        ]
        kept += min(max(alike, default=0), len(prompt) - 1) // 64 * 64
    return kept


def test_what_an_ideal_cache_finds_is_exact_to_the_block(tmp_path: Path, renderer: Renderer) -> None:
    requests = [*turns(4), *turns(3, system=clock), *turns(5), {"messages": [{"role": "user", "content": "Short."}]}]
    lint = linted(written(tmp_path / "log.jsonl", requests), renderer=renderer)
    assert lint.exact
    assert lint.all.kept == ideal(requests, renderer)
    assert lint.all.tokens == sum(len(renderer.chat(one["messages"], tools=one.get("tools"))) for one in requests)
    assert lint.all.kept + lint.all.lost + lint.all.unique == lint.all.tokens


def test_a_log_without_faults_has_none(tmp_path: Path, renderer: Renderer) -> None:
    path = written(tmp_path / "log.jsonl", turns(6))
    for one in (linted(path, renderer=renderer), linted(path)):
        assert one.findings == ()
        assert one.all.lost == 0
        assert one.all.kept > one.all.tokens / 2


@pytest.mark.parametrize("exact", [True, False])
def test_a_clock_in_the_system_prompt_is_found_and_mending_it_gains_what_is_told(
    tmp_path: Path, renderer: Renderer, exact: bool
) -> None:
    used = renderer if exact else None
    path = written(tmp_path / "log.jsonl", turns(6, system=clock))
    lint = linted(path, renderer=used)
    (finding,) = lint.findings
    assert (finding.cause, finding.place, finding.requests) == (Cause.TIME, "messages[system].content", 5)
    gained = replay(lint, path, used)[Cause.TIME]
    assert gained is not None
    assert gained == pytest.approx(lint.all.kept + lint.all.lost, rel=0.1)


def test_several_faults_are_told_apart_and_mended_one_after_another(tmp_path: Path) -> None:
    def shuffled(n: int) -> list[Any]:
        return random.Random(n).sample(TOOLS, len(TOOLS))

    path = written(tmp_path / "log.jsonl", turns(8, tools=shuffled, system=clock))
    lint = linted(path)
    assert [finding.cause for finding in lint.findings][:2] == [Cause.TOOLS_REORDERED, Cause.TIME]
    first, second = list(replay(lint, path).values())[:2]
    assert first is not None
    assert second is not None
    assert lint.all.kept < first < second


def test_the_nearest_prompt_may_be_far_back_and_of_another_session(tmp_path: Path, renderer: Renderer) -> None:
    """Not only the turn before: another conversation lies between, and the one that is gone on with has no session."""
    first, other = turns(3), turns(3, system=lambda n: "You write poems about the sea, and nothing but poems. " * 12)
    again = turns(4)[3]
    lint = linted(written(tmp_path / "log.jsonl", [*first, *other, again]), renderer=renderer)
    assert lint.samples[-1].lost == 0
    again["messages"][0]["content"] = clock(3)
    lint = linted(written(tmp_path / "log.jsonl", [*first, *other, again]), renderer=renderer)
    example = lint.findings[-1].examples[-1]
    assert (example.a[-11:], example.b[-11:]) == ("log.jsonl#3", "log.jsonl#7")


def test_requests_of_other_models_and_tenants_share_nothing(tmp_path: Path, renderer: Renderer) -> None:
    request = turns(1)[0]
    lint = linted(written(tmp_path / "log.jsonl", [request, {**request, "cache_salt": "b"}, request]), renderer=renderer)
    assert [(one.cause, one.requests) for one in lint.findings] == [(Cause.SALT, 1)]
    lint = linted(written(tmp_path / "log.jsonl", [request, {**request, "model": "n"}]), renderer=renderer)
    assert lint.findings == ()
    lines = [{"session_id": "s", "body": {**request, "model": model}} for model in "mn"]
    lint = linted(written(tmp_path / "log.jsonl", lines), renderer=renderer)
    assert [one.cause for one in lint.findings] == [Cause.MODEL]


def test_tokens_are_told_by_tenant_session_and_tag(tmp_path: Path) -> None:
    lines = [{"tenant": "a", "session_id": "s", "tags": ["x"], "body": body} for body in turns(3, system=clock)]
    lines += [
        {
            "tenant": "b",
            "session_id": "t",
            "body": {"messages": [{"role": "user", "content": "Nothing of this is said elsewhere. " * 40}]},
        }
    ] * 3
    lint = linted(written(tmp_path / "log.jsonl", lines))
    tenants = dict(lint.groups["tenant"])
    assert (tenants["a"].requests, tenants["b"].requests) == (3, 3)
    assert tenants["a"].lost > 0 == tenants["b"].lost
    assert lint.findings[0].by == {"tenant": {"a": lint.all.lost}, "session": {"s": lint.all.lost}, "tag": {"x": lint.all.lost}}
    assert sum(tally.tokens for tally in tenants.values()) == lint.all.tokens


def test_a_cache_that_is_too_small_finds_less_and_one_that_is_large_enough_the_same(tmp_path: Path) -> None:
    requests = [turns(1, system=lambda _, n=n: f"Prompt {n}. {SYSTEM}", tools=lambda _: [])[0] for n in (*range(8),) * 2]
    path = written(tmp_path / "log.jsonl", requests)
    assert linted(path, capacity_tokens=1000).all.held == 0 < linted(path).all.kept
    large = linted(path, capacity_tokens=1_000_000)
    assert large.all.held == large.all.kept


def test_what_a_server_counted_is_compared_and_the_rules_of_providers_are_named(tmp_path: Path, renderer: Renderer) -> None:
    requests = [{**one, "tools": one["tools"] * 4} for one in turns(3)]
    tokens = [len(renderer.chat(one["messages"], tools=one["tools"])) for one in requests]
    assert tokens[0] > 1024
    cached = [0, tokens[0] // 64 * 64, 0]
    lines = [
        {
            "timestamp": f"2026-11-30T10:{at}:00Z",
            "body": body,
            "response": {"usage": {"prompt_tokens": n, "prompt_tokens_details": {"cached_tokens": c}}},
        }
        for at, body, n, c in zip(("00", "01", "55"), requests, tokens, cached, strict=True)
    ]
    logged = linted(written(tmp_path / "log.jsonl", lines), renderer=renderer).logged
    assert logged is not None
    assert (logged.requests, logged.equal, logged.short, logged.rules) == (3, 2, 1, {Cause.LAPSED: 1})
    assert logged.predicted - logged.cached == logged.short_tokens == tokens[1] // 64 * 64


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"usage": 400}, Cause.BELOW_MINIMUM),
        ({"ttl": None}, Cause.NO_BREAKPOINT),
        ({"blocks": 30}, Cause.FAR_BREAKPOINT),
        ({"end": 1000.0}, Cause.CONCURRENT),
    ],
)
def test_each_rule_of_a_provider_is_recognised(tmp_path: Path, change: dict[str, Any], cause: Cause) -> None:
    mark = {"cache_control": {"type": "ephemeral"}} if change.get("ttl", 1) else {}
    blocks = [{"type": "text", "text": f"{n}. {SYSTEM[:300]}"} for n in range(2)]
    more = [{"type": "text", "text": f"and {n}"} for n in range(change.get("blocks", 1))]

    def line(at: float, content: list[Any], cached: int) -> dict[str, Any]:
        content = [*content[:-1], {**content[-1], **mark}]
        body = {"system": SYSTEM, "messages": [{"role": "user", "content": content}]}
        usage = {"input_tokens": change.get("usage", 5000), "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
        return {"timestamp": at, "endTime": change.get("end", at), "body": body, "usage": usage}

    lint = linted(written(tmp_path / "log.jsonl", [line(900.0, blocks, 0), line(950.0, [*blocks, *more], 0)]))
    assert lint.logged is not None
    assert lint.logged.rules == {cause: 1}


def test_limits_are_shares_of_tokens(tmp_path: Path) -> None:
    lint = linted(written(tmp_path / "log.jsonl", turns(4, system=clock)))
    assert fails(lint, {"any": 1.0, "rate": 0.0, "tools_changed": 0.0}) == []
    assert len(fails(lint, {"any": 0.01, "rate": 0.99, "time": 0.0})) == 3


def test_beyond_the_limit_differences_stand_for_others(tmp_path: Path) -> None:
    requests = [turns(1, system=lambda _, n=n: clock(n))[0] for n in range(40)]
    path = written(tmp_path / "log.jsonl", requests)
    all, some = linted(path), linted(path, judged=8)
    assert (all.judged, all.breaks) == (39, 39)
    assert some.judged < 25
    assert some.findings[0].tokens == pytest.approx(all.findings[0].tokens, rel=0.2)


def test_names_are_found_with_whoever_had_them_last() -> None:
    known, model = Known(), dict[int, int]()
    numbers = np.random.default_rng(1)
    for owner in range(100):
        names = numbers.integers(0, 3000, numbers.integers(0, 300), dtype=np.uint64) ** np.uint64(5)
        assert known.owners(names).tolist() == [model.get(max(int(name), 1), NOBODY) for name in names]
        known.put(names, owner)
        model.update({max(int(name), 1): owner for name in names})
    assert len(known) == len(model)


def test_what_is_bounded_forgets_what_was_not_named_for_longest() -> None:
    known = Known(most=1000)
    for owner in range(50):
        known.put(np.arange(owner * 100 + 1, owner * 100 + 101, dtype=np.uint64), owner)
    assert len(known) <= 1000
    assert known.owners(np.array([1, 4990], np.uint64)).tolist() == [NOBODY, 49]


def test_an_assertion_for_tests_names_the_difference_and_passes_what_goes_on() -> None:
    assert_prefix_stable(turns(4))
    assert_prefix_stable(turns(3, system=clock), allow=["time"])
    with pytest.raises(AssertionError, match=r"(?s)request 2.*messages\[0\].content.*cause   time"):
        assert_prefix_stable(turns(3, system=clock))
