"""Ways in which agents and templates lose a prefix, as their users met them (K12 of the cases)."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from diagnose.families import byte_level
from diagnose.logs import linted, written
from diagnose.pairs import LINES, SYSTEM, body
from headstart.diagnose.causes import Cause
from headstart.diagnose.placing import side_of
from headstart.diagnose.report import Finding, report_of
from headstart.diagnose.requests import conversation_of
from headstart.render import Renderer


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(byte_level(tmp_path_factory.mktemp("cases")), light=True)


def first(a: Any, b: Any, renderer: Renderer | None) -> Finding:
    sides = [side_of(name, conversation_of(one, as_sent=renderer is None), renderer) for name, one in (("A", a), ("B", b))]
    return report_of(*sides).findings[0]


RESULT = {"name": "café", "path": "a/b", "value": 1, "unit": "cm"}


@pytest.mark.parametrize(
    "again",
    [
        json.dumps(dict(reversed(RESULT.items())), ensure_ascii=False),
        json.dumps(RESULT, ensure_ascii=False, separators=(",", ":")),
        json.dumps(RESULT),
        json.dumps({**RESULT, "value": 1.0}, ensure_ascii=False),
        json.dumps(RESULT, ensure_ascii=False).replace("/", "\\/"),
    ],
    ids=["order", "spacing", "escapes", "number", "slash"],
)
def test_a_tool_result_that_is_written_otherwise_is_named_as_that(again: str, renderer: Renderer) -> None:
    a, b = body(), body()
    a["messages"][3]["content"], b["messages"][3]["content"] = json.dumps(RESULT, ensure_ascii=False), again
    for used in (renderer, None):
        found = first(a, b, used)
        assert (found.cause, found.path) == (Cause.JSON, "messages[3].content")


def test_tools_are_rendered_as_they_were_sent_and_a_swapped_schema_is_found_at_its_tool(renderer: Renderer) -> None:
    a, b = body(), body()
    text = renderer.write(a["messages"], tools=a["tools"])
    assert json.dumps(a["tools"], ensure_ascii=False) in text
    function = b["tools"][0]["function"]
    function["parameters"] = dict(reversed(function["parameters"].items()))
    found = first(a, b, renderer)
    assert found.cause is Cause.TOOLS_RESERIALISED
    assert found.path.startswith("tools[0].function.parameters")


def test_a_clock_is_named_with_where_to_move_it(renderer: Renderer) -> None:
    a, b = ({"messages": [{"role": "system", "content": f"Now {time}. {SYSTEM}"}]} for time in ("10:00:00", "10:00:01"))
    found = first(a, b, renderer)
    assert (found.cause, found.path, found.offset) == (Cause.TIME, "messages[0].content", 11)
    assert "move the time behind" in found.fix


def test_every_edit_in_the_middle_of_a_long_session_is_counted_and_all_tokens_add_up(
    tmp_path: Path, renderer: Renderer
) -> None:
    """87 calls, in 27 of which an old tool result is shortened."""
    said: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    calls, edits, words, r = [], 0, sorted(set(" ".join(LINES).split())), random.Random(1)
    for n in range(87):
        said = [*said, {"role": "user", "content": f"Step {n}: {' '.join(r.sample(words, 14))}"}]
        if n % 3 == 2 and n > 3 and edits < 27:  # behind less than a block nothing is lost
            edits += 1
            at = 2 * edits - 1
            said = [*said[:at], {**said[at], "content": f"(result {at} removed)"}, *said[at + 1 :]]
        calls.append({"messages": said})
        said = [*said, {"role": "assistant", "content": f"Done with {n}."}]
    assert edits == 27
    lint = linted(written(tmp_path / "log.jsonl", calls), renderer=renderer)
    assert [(one.cause, one.requests) for one in lint.findings] == [(Cause.EDITED, 27)]
    prompts = [renderer.chat(call["messages"]) for call in calls]
    assert [(sample.tokens, sample.kept) for sample in lint.samples] == [
        (len(prompt), _alike(prompt, prompts[:n])) for n, prompt in enumerate(prompts)
    ]
    assert lint.all.kept + lint.all.lost + lint.all.unique == lint.all.tokens == sum(map(len, prompts))
    assert lint.all.lost == sum(one.tokens for one in lint.findings) > lint.all.unique


def _alike(prompt: list[int], before: list[list[int]]) -> int:
    alike = [next((i for i, (x, y) in enumerate(zip(prompt, one, strict=False)) if x != y), len(one)) for one in before]
    return min(max(alike, default=0), len(prompt) - 1) // 64 * 64
