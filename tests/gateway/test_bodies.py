"""What the router puts into bodies: that, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headstart.api.dialects import chat, completions
from headstart.api.dialects.base import Dialect
from headstart.gateway.bodies import with_more

BODIES: list[dict[str, Any]] = [
    {"prompt": "hello"},
    {"prompt": 'it says "stream_options" and cache_salt'},
    {"prompt": "ä is written as it is", "stream_options": {"include_usage": False, "more": 1}},
    {"prompt": "", "cache_salt": "its own", "stream_options": None},
    {"messages": [{"role": "user", "content": "}"}], "x": {"cache_salt": "deep inside"}},
]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("salt", [None, "a tenant's"])
@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("content", BODIES, ids=lambda content: next(iter(content.values()))[:20])
def test_a_body_gets_what_is_put_in_and_keeps_what_it_had(
    content: dict[str, Any], ascii: bool, salt: str | None, usage: bool
) -> None:
    options = content.get("stream_options") or {}
    wanted = content | ({"stream_options": options | {"include_usage": True}} if usage else {})
    wanted |= {"cache_salt": salt} if salt else {}
    for text in (json.dumps(content, ensure_ascii=ascii), json.dumps(content, ensure_ascii=ascii, indent=1) + "\n "):
        pairs = json.loads(with_more(text.encode(), usage=usage, salt=salt), object_pairs_hook=lambda found: found)
        assert len({name for name, _ in pairs}) == len(pairs)  # of two of one name parsers take the one or the other
        assert json.loads(with_more(text.encode(), usage=usage, salt=salt)) == wanted
        known = "stream_options" in content
        assert json.loads(with_more(text.encode(), usage=usage, salt=salt, has_stream_options=known)) == wanted


@pytest.mark.parametrize(
    "said", [b'"stream_options": null', b'"stream_options": {}', b'"stream\\u005foptions": {"include_usage": false}']
)
@pytest.mark.parametrize("dialect", [chat, completions])
def test_whether_a_body_says_how_it_streams_is_known_from_reading_it(dialect: Dialect, said: bytes) -> None:
    prompt = b'"prompt": "stream_options", "messages": [{"role": "user", "content": "stream_options"}]'
    if dialect is completions:
        prompt = b'"prompt": "stream_options"'
    assert dialect.parse(b"{" + prompt + b", " + said + b"}", {}).has_stream_options
    assert not dialect.parse(b"{" + prompt + b"}", {}).has_stream_options


def test_a_salt_whose_name_is_written_otherwise_is_replaced_too() -> None:
    body = with_more(b'{"prompt": "x", "cache\\u005fsalt": "another tenant\'s"}', salt="own")
    assert json.loads(body, object_pairs_hook=list) == [("prompt", "x"), ("cache_salt", "own")]


def test_a_body_that_says_nothing_gets_it_too() -> None:
    assert json.loads(with_more(b"{ }", usage=True)) == {"stream_options": {"include_usage": True}}
