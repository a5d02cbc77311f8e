"""Pairs of requests with known causes: the position is always exact, the cause nearly always right, and none is invented."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from diagnose.families import FAMILIES
from diagnose.pairs import Pair, pairs, pairs_of_ids
from headstart.diagnose.causes import LOST, PROVIDERS, Cause
from headstart.diagnose.placing import Side, side_of
from headstart.diagnose.report import Report, report_of
from headstart.diagnose.requests import Conversation, conversation_of
from headstart.render import Renderer

KINDS = [*FAMILIES, "as sent"]
APART = {Cause.MODEL, Cause.ADAPTER, Cause.SALT}  # whatever the tokens are
RIGHT = 0.95


_SEEDS = {"byte-level": (1, 2), "byte-fallback": (3,), "unigram": (4,), "as sent": (5,)}


@cache
def requests(kind: str) -> list[Pair]:
    found = [pair for seed in _SEEDS[kind] for pair in pairs(seed)]
    return [pair for pair in found if kind not in pair.without and (not pair.only or kind in pair.only)]


_OF_IDS: dict[str, list[Pair]] = {}


def labelled(kind: str, renderer: Renderer | None) -> list[Pair]:
    if renderer is not None and kind not in _OF_IDS:
        _OF_IDS[kind] = list(pairs_of_ids(renderer))
    return [*requests(kind), *_OF_IDS.get(kind, ())]


_DONE: dict[tuple[str, int], tuple[Report, list[Side]]] = {}


def compared(pair: Pair, kind: str, renderer: Renderer | None) -> tuple[Report, list[Side]]:
    if (kind, id(pair)) not in _DONE:  # the tests below look at the same ones
        _DONE[kind, id(pair)] = _compared(pair, renderer)
    return _DONE[kind, id(pair)]


def _compared(pair: Pair, renderer: Renderer | None) -> tuple[Report, list[Side]]:
    sides = [
        side_of(
            name,
            Conversation(prompt=tuple(body)) if isinstance(body, list) else conversation_of(body, as_sent=renderer is None),
            renderer,
        )
        for name, body in (("A", pair.a), ("B", pair.b))
    ]
    return report_of(*sides, begin_id=renderer.begin_id if renderer else None), sides


def parting(a: list[int], b: list[int]) -> int:
    return next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def ids(body: Any, renderer: Renderer) -> list[int]:
    """The token ids by the server's own way, where it can go it."""
    if isinstance(body, list):
        return body
    if "prompt" in body:
        return renderer.completion(body["prompt"])
    if {"chat_template", "chat_template_kwargs"} & body.keys() or any(
        isinstance(message["content"], list) and len(message["content"]) > 1 for message in body["messages"]
    ):
        return side_of("", conversation_of(body), renderer).units.tolist()
    return renderer.chat(body["messages"], tools=body.get("tools"))


def at_path(body: Any, path: str) -> str | None:
    """What a request has at a path; arguments that are JSON in a text are taken apart. As text, for 1 is not 1.0 there."""
    for name, number in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if isinstance(body, str):
            body = json.loads(body)
        try:
            body = body[name] if name else body[int(number)]
        except (KeyError, IndexError):
            return None
    return json.dumps(body)


@pytest.mark.parametrize("kind", KINDS)
def test_the_position_is_exact_and_the_path_holds_the_difference(kind: str, renderers: dict[str, Renderer]) -> None:
    renderer = renderers.get(kind)
    wrong = []
    for pair in labelled(kind, renderer):
        report, sides = compared(pair, kind, renderer)
        if renderer is not None:
            ours, theirs = ids(pair.a, renderer), ids(pair.b, renderer)
            position = parting(ours, theirs)
            assert [side.units.tolist() for side in sides] == [ours, theirs], pair.name
            assert report.common_tokens == position, pair.name
            if position < min(len(ours), len(theirs)) and pair.cause not in APART:
                first = report.findings[0]
                assert (first.a.position, first.b.position) == (position, position), pair.name
                assert (first.a.token, first.b.token) == (ours[position], theirs[position]), pair.name
            assert report.differs == (position < min(len(ours), len(theirs)) or pair.cause in APART), pair.name
        elif pair.cause is not None:
            assert report.differs, pair.name
        if pair.cause is None:
            assert not report.findings, (pair.name, report.findings)
        elif report.findings:
            first = report.findings[0]
            if not first.path.startswith(pair.path) or (pair.offset is not None and first.offset != pair.offset):
                wrong.append((pair.name, pair.path, pair.offset, first.path, first.offset))
            if pair.cause not in APART and first.path and not isinstance(pair.a, list):
                assert at_path(pair.a, first.path) != at_path(pair.b, first.path), (pair.name, first.path)
    assert wrong == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_cause_is_right(kind: str, renderers: dict[str, Renderer]) -> None:
    wrong, total = [], 0
    for pair in labelled(kind, renderers.get(kind)):
        report, _ = compared(pair, kind, renderers.get(kind))
        if pair.cause is not None and report.findings:
            total += 1
            if report.findings[0].cause is not pair.cause or {one.cause for one in report.findings} - {pair.cause, *pair.also}:
                wrong.append((pair.name, pair.cause, [(one.cause, one.evidence) for one in report.findings]))
    assert total > 80
    assert len(wrong) <= (1 - RIGHT) * total, wrong


def test_there_are_at_least_three_hundred_pairs_over_every_cause(renderers: dict[str, Renderer]) -> None:
    found = [pair for kind in KINDS for pair in labelled(kind, renderers.get(kind))]
    assert len({json.dumps([pair.a, pair.b]) for pair in found}) >= 300
    assert all(len(labelled(kind, renderers[kind])) >= 90 for kind in FAMILIES)
    elsewhere = {Cause.SHORT}  # a note: in test_report.py
    elsewhere |= set(PROVIDERS)  # labelled with times: test_providers.py
    elsewhere |= set(LOST)  # a server's: api/test_why.py
    assert {pair.cause for pair in found} | elsewhere >= set(Cause)
