"""Rules of providers, one pair of requests each with its cause known: told alone, in `lint`, and by `diff --provider`."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from diagnose.logs import Body, linted, written
from diagnose.pairs import LINES, SYSTEM
from headstart.cli import run_cli
from headstart.diagnose.causes import PROVIDERS, Cause

MARK = {"cache_control": {"type": "ephemeral"}}
_numbers = count()


@dataclass(frozen=True)
class Timed:
    """Two requests with when they were sent and answered, and the cause; None: no rule is broken."""

    provider: str
    a: Body
    b: Body
    cause: Cause | None
    at: tuple[float, float, float] = (1000.0, 1010.0, 1060.0)
    tokens: int = 5000
    name: str = field(default_factory=lambda: f"pair {next(_numbers)}")


def claude(*texts: str, marks: tuple[int, ...] = (-1,), **more: Any) -> Body:
    content: list[Any] = [{"type": "text", "text": text} for text in texts]
    for at in marks:
        content[at] = {**content[at], **MARK}
    return {
        "model": "m",
        "system": [{"type": "text", "text": SYSTEM}],
        "messages": [{"role": "user", "content": content}],
        **more,
    }


def openai(*texts: str, **more: Any) -> Body:
    said = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
    return {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, *said], **more}


def pairs() -> Iterator[Timed]:
    one, two, many = claude(LINES[0]), claude(LINES[0], LINES[1]), claude(LINES[0], *map(str, range(30)))
    auto = {**claude(LINES[0], LINES[1], marks=()), **MARK}
    short, long = openai(LINES[0]), openai(LINES[0], LINES[1], LINES[2])
    for tokens in (12, 500, 1023):
        yield Timed("openai", short, long, Cause.BELOW_MINIMUM, tokens=tokens)
        yield Timed("anthropic", one, two, Cause.BELOW_MINIMUM, tokens=tokens)
    unmarked = claude(LINES[0], marks=())
    yield Timed("anthropic", unmarked, claude(LINES[0], LINES[1], marks=()), Cause.NO_BREAKPOINT)
    yield Timed("anthropic", unmarked, two, Cause.NO_BREAKPOINT)  # what was to be found was not kept
    yield Timed(
        "anthropic", claude(LINES[0], LINES[1], LINES[2]), claude(LINES[0], LINES[1], LINES[2], marks=(0,)), Cause.NO_BREAKPOINT
    )
    explicit = {"prompt_cache_options": {"mode": "explicit"}}
    yield Timed("openai", {**short, **explicit}, {**long, **explicit}, Cause.NO_BREAKPOINT)
    yield Timed("anthropic", one, many, Cause.FAR_BREAKPOINT)
    yield Timed("anthropic", one, {**many, "messages": [*many["messages"], *many["messages"]]}, Cause.FAR_BREAKPOINT)
    for ttl, gap in ((None, 301), (None, 86_400), ("1h", 3_700)):
        asked = copy.deepcopy([one, two])
        for body in asked:
            body["messages"][0]["content"][-1]["cache_control"] = {"type": "ephemeral", **({"ttl": ttl} if ttl else {})}
        yield Timed("anthropic", *asked, Cause.LAPSED, at=(0.0, 9.0, 9.0 + gap))
    yield Timed("openai", short, long, Cause.LAPSED, at=(0.0, 1.0, 2_000.0))
    kept = {"prompt_cache_retention": "24h"}
    yield Timed("openai", {**short, **kept}, {**long, **kept}, Cause.LAPSED, at=(0.0, 1.0, 90_000.0))
    for sent in (1000.5, 1009.0):
        yield Timed("openai", short, long, Cause.CONCURRENT, at=(1000.0, 1010.0, sent))
        yield Timed("anthropic", one, two, Cause.CONCURRENT, at=(1000.0, 1010.0, sent))
    yield Timed("anthropic", one, two, None)
    yield Timed("anthropic", one, auto, None)
    yield Timed("anthropic", auto, {**auto, "messages": [*auto["messages"], {"role": "assistant", "content": "Yes."}]}, None)
    yield Timed("openai", short, long, None, at=(0.0, 1.0, 1_700.0))
    yield Timed("openai", {**short, **kept}, {**long, **kept}, None, at=(0.0, 1.0, 80_000.0))


PAIRS = list(pairs())


def entries(pair: Timed) -> list[Any]:
    usage = {"prompt_tokens": pair.tokens, "prompt_tokens_details": {"cached_tokens": 0}}
    begun, ended, sent = pair.at
    return [
        {"request_id": "a", "start_time": begun, "end_time": ended, "body": pair.a, "usage": usage},
        {"request_id": "b", "start_time": sent, "end_time": sent + 1, "body": pair.b, "usage": usage},
    ]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.cause}-{pair.name}")
def test_diff_names_the_rule_that_two_requests_of_a_log_break(
    pair: Timed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path / "log.jsonl", entries(pair))
    run_cli(["diff", f"{log}#a", f"{log}#b", "--provider", pair.provider, "--json"])
    told = json.loads(capsys.readouterr().out)["provider"]
    assert [one["cause"] for one in told["causes"]] == ([] if pair.cause is None else [pair.cause])
    assert all(one["fix"] and one["evidence"] for one in told["causes"])
    assert (told["timed"], told["cached_tokens"], told["prompt_tokens"]) == (True, 0, pair.tokens)


def test_every_rule_is_among_the_pairs() -> None:
    assert {pair.cause for pair in PAIRS} == {*PROVIDERS, None}


def test_lint_names_the_same_where_the_dialect_tells_the_provider(tmp_path: Path) -> None:
    for pair in PAIRS:
        goes_on = pair.b["messages"][0] == pair.a["messages"][0] or pair.provider == "anthropic"
        if pair.cause is None or not goes_on:
            continue
        logged = linted(written(tmp_path / "log.jsonl", entries(pair))).logged
        assert logged is not None
        assert logged.rules in ({}, {pair.cause: 1}), pair


def test_diff_tells_it_for_people_and_says_what_it_cannot_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = []
    for name, body in (("a", claude(LINES[0], marks=())), ("b", claude(LINES[0], LINES[1], marks=()))):
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(body))
    run_cli(["diff", *map(str, files), "--provider", "anthropic"])
    said = capsys.readouterr().out
    assert "the rules of anthropic" in said
    assert "breakpoint_missing: the request sets no breakpoint" in said
    assert "set cache_control" in said
    assert "A and B have no times" in said
