"""What means nothing is taken out, each rule by itself; what somebody wrote stays as it was written."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.config import parse_rules
from headstart.errors import ConfigError
from headstart.render.canonical import RULES, canonical, lacks_reasoning

SYSTEM = "You are an agent.\nx-anthropic-billing-header: is a header.\n"
HEADER = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={};"
MARK = {"type": "ephemeral", "ttl": "5m"}
USER = {"role": "user", "content": "Go."}


def _plain(messages: list[Any], tools: list[Any] | None = None, *rules: str) -> tuple[list[Any], list[Any] | None, set[str]]:
    before = copy.deepcopy((messages, tools))
    made = canonical(messages, tools, rules or RULES)
    assert (messages, tools) == before, "the request was changed"
    return made.messages, made.tools, set(made.acted)


@pytest.mark.parametrize(
    "content",
    [
        f"{HEADER}\n{SYSTEM}",
        f"x-anthropic-billing-header: fa690\n{SYSTEM}",
        f"{HEADER}{SYSTEM}",  # blocks that were joined
        [{"type": "text", "text": HEADER}, {"type": "text", "text": SYSTEM}],
        [{"type": "text", "text": f"{HEADER}\n{SYSTEM}"}],
    ],
)
def test_the_billing_header_at_the_top_is_dropped_and_nothing_else(content: Any) -> None:
    for number in ("fa690", "65abc"):
        sent = json.loads(json.dumps(content).replace("{}", number))
        messages, _, acted = _plain([{"role": "system", "content": sent}, USER])
        assert messages == [{"role": "system", "content": SYSTEM}, USER]
        assert acted >= {"billing-header"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": HEADER},
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": HEADER}]},
    ],
)
def test_a_billing_header_elsewhere_is_what_somebody_wrote(message: dict[str, Any]) -> None:
    assert _plain([message, {"role": "system", "content": HEADER}], None, "billing-header") == (
        [message, {"role": "system", "content": HEADER}],
        None,
        set(),
    )


def test_marks_for_caches_are_taken_out_wherever_they_stand_and_never_out_of_what_was_written() -> None:
    schema = {"type": "object", "properties": {"cache_control": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"cache_control": "no-cache"}}}
    plain = [
        {"role": "system", "content": [{"type": "text", "text": "cache_control"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "{}"},
    ]
    marked = copy.deepcopy(plain)
    marked[0]["content"][0]["cache_control"] = MARK
    marked[1]["tool_calls"][0]["cache_control"] = MARK
    marked[2]["prompt_cache_breakpoint"] = {"mode": "explicit"}
    tools = [{**tool, "cache_control": MARK}, {**tool, "function": {**tool["function"], "cache_control": MARK}}]
    assert _plain(marked, tools, "cache-control") == (plain, [tool, tool], {"cache-control"})
    assert _plain(plain, [tool], "cache-control") == (plain, [tool], set())


def test_text_parts_are_the_string_that_they_make_and_other_parts_stay() -> None:
    picture = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": "x"}}]
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    said = _plain([{"role": "user", "content": parts}, {"role": "user", "content": picture}], None, "text-parts")
    assert said == ([{"role": "user", "content": "a b"}, {"role": "user", "content": picture}], None, {"text-parts"})


def test_reasoning_is_put_back_only_where_the_client_left_it_out() -> None:
    messages = [
        {"role": "user", "content": "Well?"},
        *({"role": "assistant", "content": "Yes.", **more} for more in ({}, {"reasoning": ""}, {"thinking": None})),
    ]
    assert [lacks_reasoning(message) for message in messages] == [False, True, False, True]
    made = canonical(messages, None, RULES)
    assert made.with_reasoning({}) == made
    whole = made.with_reasoning({1: "Hm."})
    assert [message.get("reasoning_content") for message in whole.messages] == [None, "Hm.", None, None]
    assert (made.acted, whole.acted) == (frozenset(), {"reasoning"})
    assert made.messages == messages


def test_with_every_rule_off_nothing_is_changed() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": HEADER, "cache_control": MARK}]},
        {"role": "assistant", "content": "Yes.", "reasoning": "Hm."},
    ]
    made = canonical(messages, [{"cache_control": MARK}], [])
    assert (made.messages, made.tools, made.acted) == (messages, [{"cache_control": MARK}], frozenset())


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from([HEADER, "assistant", "system", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "reasoning", "cache_control"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.lists(_ANYTHING, max_size=3), st.none() | st.lists(_ANYTHING, max_size=2))
def test_whatever_is_sent_is_made_canonical_once_and_stays_so(messages: list[Any], tools: list[Any] | None) -> None:
    once = canonical(messages, tools, RULES)
    assert len(once.messages) == len(messages)
    if "billing-header" not in once.acted:  # a second header below the first one stays, and is then the first
        again = canonical(once.messages, once.tools, RULES)
        assert (again.messages, again.tools) == (once.messages, once.tools)


def test_rules_are_named_in_the_configuration_and_a_wrong_name_is_refused_with_the_nearest() -> None:
    assert parse_rules("") == ()
    assert set(parse_rules(" text-parts ,reasoning,")) == {"text-parts", "reasoning"}
    with pytest.raises(ConfigError, match="did you mean 'text-parts'"):
        parse_rules("text-part")
