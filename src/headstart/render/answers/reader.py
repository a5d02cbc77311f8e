"""An answer's text, as it comes, taken apart into reasoning, text and tool calls.

Where one region ends and the next begins is found by `transformers`' streaming response parser; `calls` reads what stands in
those of calls. Here is what both leave to their caller: what a prompt has opened already, and white space between regions.
A model may write anything: what cannot be read as a call stays text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

from headstart.errors import RequestError
from headstart.render.answers.calls import Inline, InlineCall, JsonCalls, NamedCall, OtherCalls, Region, whole_call
from headstart.render.answers.families import Family
from headstart.render.answers.parts import Call, Part, Reasoning, Text, merged

_NOWHERE = "\x00"  # where an answer begins is known: no mark of it is looked for
_KINDS = {
    "text": "text",
    "content": "text",
    "reasoning": "reasoning",
    "thinking": "reasoning",
    "calls": "calls",
    "tool": "calls",
    "mark": "mark",
}
_EDGES = ("open", "open_pattern", "close", "close_pattern")


class AnswerReader:
    """`prompt_end`: the end of the prompt's text, in which the template may have opened reasoning. `tools`: in the form of
    chat completions, whose schemas say what arguments are; None where none were given: then nothing is read as a call.

    All texts that `push` and `finish` return joined are the answer without marks and the white space beside them. Calls come as
    they are written, in pieces."""

    def __init__(self, family: Family, *, prompt_end: str = "", tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._family = family
        self._tools = [dict(tool) for tool in tools or ()]
        self._schemas = {name: schema for tool in self._tools for name, schema in _schema_of(tool)}
        self._parser = self._new_parser()
        self._region: Region | None = None  # of calls, that is open
        opens = family.think[0]
        begun = prompt_end.rstrip().endswith(opens)
        if begun:
            self._parser.feed(opens)
        self.reasoning = begun  # whether what comes next is reasoning, as far as is known
        self._spaces = ""  # at the end of the text so far: they count once more text follows
        self._trim = begun  # whether white space before the next text belongs to a mark
        self._called = False

    def push(self, text: str) -> list[Part]:
        """Return what `text` completes."""
        return self._parts(self._parser.feed(text), cut=True) if text else []

    def finish(self, *, cut: bool = False) -> list[Part]:
        """Return what is left: nothing follows. `cut`: the answer was not at its end."""
        _, events = self._parser.finalize()
        parts = self._parts(events, cut=cut)
        if self._spaces and not self._called:
            parts.append(Text(self._spaces))
        self._spaces = ""
        return parts

    def _new_parser(self) -> Any:
        fields = {
            name: _edges(field)
            for name, field in self._family.fields.items()
            if self._tools or _kind(name) not in ("calls", "mark")
        }
        return _regions()({"version": 1, "start_anchor": _NOWHERE, "fields": fields}, prefix="")

    def _parts(self, events: Sequence[Mapping[str, Any]], *, cut: bool) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind, what = _kind(event["field"]), event["type"]
            if kind == "calls":
                parts += self._of_calls(event, cut=cut)
            elif what == "region_open":
                self.reasoning = kind == "reasoning"
                self._trim = self._trim or self.reasoning
            elif what == "region_chunk" and kind != "mark":
                parts += self._said(kind, event["text"])
            elif what == "region_close":
                self.reasoning = False
                if kind == "reasoning":
                    self._spaces, self._trim = "", True
                elif kind == "mark":
                    self._trim = True
        return list(merged(parts))

    def _of_calls(self, event: Mapping[str, Any], *, cut: bool) -> list[Part]:
        if event["type"] == "region_open":
            self.reasoning = False
            self._region = self._new_region(event["field"], event["mark"], event["captures"])
            return []
        assert self._region is not None
        closes = event["type"] == "region_close"
        read = self._region.close(event["mark"], cut=cut) if closes else self._region.push(event["text"])
        parts: list[Part] = []
        for part in read:
            if isinstance(part, Call):
                self._called, self._spaces, self._trim = True, "", True
                parts.append(part)
            elif isinstance(part, Text) and part.text:
                self._trim = self._trim and self._called
                parts += self._said("text", part.text)
        if closes:
            self._region = None
        return parts

    def _new_region(self, field: str, mark: str, captures: Mapping[str, str]) -> Region:
        form, short_ids = self._family.form, self._family.short_ids
        if form == "json":
            return JsonCalls(mark, self._schemas, short_ids=short_ids)
        if form == "named":
            return NamedCall(mark, captures["name"], self._schemas, short_ids=short_ids)
        if isinstance(form, Inline):
            return InlineCall(mark, captures["name"], self._schemas, form, short_ids=short_ids)
        return OtherCalls(mark, partial(self._read_whole, field))

    def _read_whole(self, field: str, region: str) -> list[Call] | None:
        """Return the calls in a region as the model's own response template reads them, None where it cannot."""
        from transformers.utils.chat_parsing import parse_response

        template = {"version": 1, "start_anchor": _NOWHERE, "fields": {field: {**self._family.fields[field], "repeats": True}}}
        try:
            found = parse_response(region, template, prefix="", tools=self._tools).get(field, [])
        except (ValueError, KeyError, TypeError):
            return None
        values = [value for some in found for value in (some if isinstance(some, list) else [some])]
        calls = [whole_call(value, self._schemas, short_ids=self._family.short_ids) for value in values]
        return [call for call in calls if call is not None] if calls and None not in calls else None

    def _said(self, kind: str, text: str) -> list[Part]:
        """Return text or reasoning without the white space that belongs to marks beside it."""
        if self._trim:
            text = text.lstrip()
        if not text:
            return []
        self._trim = False
        whole = self._spaces + text
        kept = whole.rstrip()
        self._spaces = whole[len(kept) :]
        if not kept:
            return []
        return [Reasoning(kept) if kind == "reasoning" else Text(kept)]


@cache
def _regions() -> Any:
    """Return the parser's class, with what it knows of a region's marks in its events."""
    try:
        from transformers.utils.chat_parsing import ResponseParser
    except ImportError as error:
        raise RequestError(
            "reading tool calls needs transformers on the server: pip install 'headstart[render]'", code="not_installed"
        ) from error

    class Regions(ResponseParser):  # type: ignore[misc]  # it has no types
        _body_at = 0

        def _open_explicit(self, events: list[dict[str, Any]], field: Any, match: Any) -> None:
            super()._open_explicit(events, field, match)
            self._body_at = match.end()
            events[-1] |= {"mark": match.group(), "captures": match.groupdict()}

        def _close_current(self, events: list[dict[str, Any]]) -> None:
            ends = self._body_at + len(self._body)
            before = len(events)
            super()._close_current(events)
            for event in events[before:]:
                event["mark"] = self._buffer[ends : self._pos]

    return Regions


def _edges(field: Mapping[str, Any]) -> dict[str, Any]:
    """Return where a region begins and ends, with its text as it is."""
    edges = {key: field[key] for key in _EDGES if key in field}
    return {**edges, "repeats": True, "transform": "{content}", "content_args": {"strip": False}}


def _kind(name: str) -> str:
    return next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), "mark")


def _schema_of(tool: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    function = tool.get("function")
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        return []
    schema = function.get("parameters")
    return [(name, schema if isinstance(schema, Mapping) else {})]
