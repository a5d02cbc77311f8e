"""What a report says of tokens, costs and the breaks behind the first."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diagnose.pairs import SYSTEM, body, split_of
from headstart.diagnose.causes import Cause
from headstart.diagnose.placing import side_of
from headstart.diagnose.report import Report, report_of
from headstart.diagnose.requests import Conversation, conversation_of
from headstart.diagnose.show import Prices, json_of, lines_of, visible
from headstart.render import Renderer


def of(a: Any, b: Any, renderer: Renderer | None) -> Report:
    sides = [
        side_of(
            name,
            Conversation(prompt=tuple(one)) if isinstance(one, list) else conversation_of(one, as_sent=renderer is None),
            renderer,
        )
        for name, one in (("A", a), ("B", b))
    ]
    return report_of(*sides, begin_id=renderer.begin_id if renderer else None)


@pytest.fixture
def byte_level(renderers: dict[str, Renderer]) -> Renderer:
    return renderers["byte-level"]


def test_a_checksum_in_a_billing_header_is_found_with_both_ids_and_what_it_costs(byte_level: Renderer) -> None:
    a, b = (
        {
            "messages": [
                {"role": "system", "content": f"x-anthropic-billing-header: v=2; cch={cch};\n{SYSTEM}"},
                *body()["messages"][1:],
            ]
        }
        for cch in ("fa690", "65abc")
    )
    report = of(a, b, byte_level)
    (finding,) = report.findings
    ours, theirs = byte_level.chat(a["messages"]), byte_level.chat(b["messages"])
    at = next(n for n, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y)
    assert (finding.a.position, finding.a.token, finding.b.token) == (at, ours[at], theirs[at])
    assert finding.cause is Cause.HEADER
    assert (finding.openai, finding.anthropic) == ("input_changed", "system_changed")
    assert report.lost_tokens == len(theirs) - at // 64 * 64
    assert finding.a.text == "fa690"
    assert finding.a.before.endswith("cch=")


def test_what_would_part_next_is_told_with_what_mending_gains(byte_level: Renderer) -> None:
    a, b = body(), body()
    a["messages"][0]["content"] = f"Now 10:00:00. {SYSTEM}"
    b["messages"][0]["content"] = f"Now 10:00:01. {SYSTEM}"
    b["messages"][4]["content"] += " So it is."
    report = of(a, b, byte_level)
    assert [finding.cause for finding in report.findings] == [Cause.TIME, Cause.EDITED]
    mended = body()
    mended["messages"][0]["content"] = f"Now 10:00:01. {SYSTEM}"
    after = of(mended, b, byte_level)
    assert after.findings[0].b.position == report.findings[1].b.position
    assert after.kept_tokens == report.findings[1].kept_tokens > report.kept_tokens
    assert after.findings[0].path == report.findings[1].path == "messages[4].content"


def test_a_second_time_at_the_same_path_is_the_same_finding(byte_level: Renderer) -> None:
    a, b = ({"prompt": f"At 10:0{n} we {SYSTEM[:200]} and at 11:0{n} we {SYSTEM[:100]}"} for n in (1, 2))
    (finding,) = of(a, b, byte_level).findings
    assert (finding.cause, finding.places) == (Cause.TIME, 2)


def test_a_doubled_beginning_is_found_among_ids(renderers: dict[str, Renderer]) -> None:
    renderer = renderers["unigram"]
    ids = renderer.completion(SYSTEM)
    assert ids[0] == renderer.begin_id
    for a, b in ((ids, [ids[0], *ids]), (ids, ids[1:]), ([ids[0], *ids], ids)):
        report = of(a, b, renderer)
        assert [finding.cause for finding in report.findings] == [Cause.BOS]
        assert report.findings[0].a.position == (1 if b[0] == ids[0] else 0)


def test_a_chat_that_is_tokenised_with_special_tokens_has_a_beginning_more(renderers: dict[str, Renderer]) -> None:
    report = of(body(), {**body(), "add_special_tokens": True}, renderers["byte-fallback"])
    assert [finding.cause for finding in report.findings] == [Cause.BOS]


def test_the_same_text_in_other_tokens_is_a_finding_of_its_own(renderers: dict[str, Renderer]) -> None:
    """What a model generated need not be what the tokenizer makes of it."""
    for renderer in renderers.values():
        ids = renderer.completion(SYSTEM)
        at, pair = next((n, split) for n in range(20, len(ids)) if (split := split_of(renderer, ids[n])) is not None)
        report = of(ids, [*ids[:at], *pair, *ids[at + 1 :]], renderer)
        assert [finding.cause for finding in report.findings] == [Cause.SAME_TEXT]
        assert (report.findings[0].a.position, report.findings[0].a.token, report.findings[0].b.token) == (at, ids[at], pair[0])


def test_prompts_of_less_than_a_block_are_said_to_be_too_short(byte_level: Renderer) -> None:
    report = of({"prompt": "Hello."}, {"prompt": "Hello. And"}, byte_level)
    assert not report.differs
    assert any(note.startswith(Cause.SHORT) for note in report.notes)


def test_a_request_that_goes_on_behind_the_other_loses_nothing(byte_level: Renderer) -> None:
    grown = body()
    grown["messages"] += [{"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "Good."}]
    report = of(body(), grown, byte_level)
    ours = byte_level.chat(body()["messages"], tools=body()["tools"])
    assert (report.differs, report.lost_tokens) == (False, 0)
    assert report.kept_tokens == len(ours) // 64 * 64


def test_one_token_is_always_left_to_compute(byte_level: Renderer) -> None:
    ids = byte_level.completion(SYSTEM)[:128]
    assert of(ids, ids, byte_level).kept_tokens == 64
    assert of(ids, [*ids, 5], byte_level).kept_tokens == 128


def test_ids_are_compared_without_a_tokenizer() -> None:
    report = of([1, 2, 3, 4], [1, 2, 9, 4], None)
    assert report.exact
    assert (report.findings[0].a.token, report.findings[0].b.token) == (3, 9)
    assert report.findings[0].cause is Cause.OTHER


def test_positions_without_a_tokenizer_are_marked_as_estimates() -> None:
    other = body()
    other["messages"][5]["content"] = "Else?"
    report = of(body(), other, None)
    assert not report.exact
    assert any("estimates" in note for note in report.notes)
    assert "token about " in "\n".join(lines_of(report, Prices()))


def test_money_and_time_are_those_of_the_tokens_lost(byte_level: Renderer) -> None:
    other = body()
    other["messages"][0]["content"] = "Else."
    report = of(body(), other, byte_level)
    told = json_of(report, Prices(3.0, 0.5, 100.0))
    assert told["lost_ms"] == pytest.approx(report.lost_tokens * 10)
    assert told["lost_money"] == pytest.approx(report.lost_tokens * 2.5e-6)
    assert json.loads(json.dumps(told))["findings"][0]["cause"] == "system_changed"
    assert json_of(report, Prices())["lost_money"] is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a \r\nb\tc ", "a␠␍⏎b⇥c␠"),
        ("a\u00a0b", "a⟨U+00A0 no-break space⟩b"),
        ("e\u0301", "e⟨U+0301 combining acute accent⟩"),
        ("a\u200bb", "a⟨U+200B zero width space⟩b"),
        ("a  b é", "a  b é"),
    ],
)
def test_what_cannot_be_seen_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_many_differences_are_bounded_and_counted(byte_level: Renderer) -> None:
    words = SYSTEM.split()
    a = {"messages": [{"role": "user", "content": f"{n} {' '.join(words[n : n + 40])}"} for n in range(20)]}
    b = {"messages": [{"role": "user", "content": f"{n} else {' '.join(words[n : n + 40])}"} for n in range(20)]}
    report = of(a, b, byte_level)
    assert len(report.findings) == 8
    assert report.unlisted == 12
