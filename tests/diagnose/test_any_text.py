"""Whatever texts two requests hold: the position is that of the ids, and the path named holds a difference."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diagnose.test_labelled import at_path, parting
from headstart.diagnose.placing import place_of, side_of
from headstart.diagnose.report import report_of
from headstart.diagnose.requests import conversation_of
from headstart.diagnose.show import Prices, json_of, lines_of
from headstart.render import Renderer

WORDS = [
    "a",
    " ",
    "\n",
    "\r\n",
    "é",
    "e\u0301",
    "\u200b",
    "<think>",
    "</think>",
    "<",
    '{"k": 1}',
    "10:00",
    "7",
    "gate ",
    "😀",
    "\U000f0000",
]
text = st.lists(st.sampled_from(WORDS), max_size=8).map("".join)
FAMILIES = ["byte-level", "byte-fallback", "unigram"]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    texts = draw(st.lists(text, min_size=2, max_size=6))
    other = list(texts)
    at = draw(st.integers(0, len(texts) - 1))
    other[at] = draw(text)
    if draw(st.booleans()):
        other = other[:-1] or other
    roles = ["user", "assistant"]
    return tuple(
        {"messages": [{"role": roles[n % 2], "content": one} for n, one in enumerate(them)]} for them in (texts, other)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("family", FAMILIES)
@given(pair=bodies())
def test_a_difference_is_where_the_ids_part_and_in_what_the_path_names(
    family: str, pair: tuple[dict[str, Any], dict[str, Any]], renderers: dict[str, Renderer]
) -> None:
    renderer = renderers[family]
    a, b = pair
    sides = [side_of(name, conversation_of(body), renderer) for name, body in (("A", a), ("B", b))]
    report = report_of(*sides, begin_id=renderer.begin_id)
    ours, theirs = renderer.chat(a["messages"]), renderer.chat(b["messages"])
    position = parting(ours, theirs)
    assert report.common_tokens == position
    assert report.differs == (position < min(len(ours), len(theirs)))
    if report.differs:
        first = report.findings[0]
        assert (first.a.position, first.a.token, first.b.token) == (position, ours[position], theirs[position])
        assert not first.path or at_path(a, first.path) != at_path(b, first.path)
    assert list(lines_of(report, Prices()))
    assert json_of(report, Prices())["same"] != report.differs


@pytest.mark.parametrize("family", FAMILIES)
@given(pair=bodies())
def test_a_character_that_is_placed_is_that_of_the_request(
    family: str, pair: tuple[dict[str, Any], dict[str, Any]], renderers: dict[str, Renderer]
) -> None:
    body = pair[0]
    side = side_of("A", conversation_of(body), renderers[family])
    assert side.text is not None
    for char, character in enumerate(side.text):
        place = place_of(side, char)
        if place.piece is not None:
            message = int(place.path[len("messages[") :].partition("]")[0])
            assert body["messages"][message]["content"][place.offset] == character


def test_many_turns_that_a_template_cuts_are_placed_in_a_few_renderings(renderers: dict[str, Renderer]) -> None:
    written = 0

    class Counting(Renderer):
        def write(self, *arguments: Any, **more: Any) -> str:
            nonlocal written
            written += 1
            return super().write(*arguments, **more)

    renderer = renderers["unigram"]
    counting = Counting(renderer._tokenizer, stop_ids=renderer.stop_ids, vocabulary=renderer.vocabulary)
    messages = []
    for n in range(200):
        messages += [{"role": "user", "content": f" question {n} \n"}]
        messages += [{"role": "assistant", "content": f"<think>\nHm {n}.\n</think>\n\nanswer {n} <b>yes</b>\n"}]
    side = side_of("A", conversation_of({"messages": messages}), counting)
    assert side.text is not None
    for n in range(200):
        assert place_of(side, side.text.index(f"answer {n} ")).path == f"messages[{2 * n + 1}].content"
    assert written < 10
