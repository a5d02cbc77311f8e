"""An answer's text, as it comes, taken apart into reasoning, text and tool calls.

The work is done by `transformers`' streaming response parser; here is what it leaves to its caller: which region is which,
what a prompt has opened already, white space between regions, ids of calls, and output that is not what its family writes.
A model may write anything: what cannot be read as a call stays text, whole.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.errors import RequestError
from headstart.render.answers.families import Family
from headstart.render.answers.parts import Call, Part, Reasoning, Text, call_id

log = logging.getLogger("headstart")

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


class AnswerReader:
    """`prompt_end`: the end of the prompt's text, in which the template may have opened reasoning. `tools`: in the form of
    chat completions, whose schemas say what arguments are; None where none were given: then nothing is read as a call.

    All texts that `push` and `finish` return joined are the answer without marks and the white space beside them."""

    def __init__(self, family: Family, *, prompt_end: str = "", tools: Sequence[Mapping[str, Any]] | None = None) -> None:
        self._family = family
        self._tools = [dict(tool) for tool in tools or ()]
        self._parser = self._new_parser()
        opens = family.think[0]
        self._prefix = opens if prompt_end.rstrip().endswith(opens) else ""
        if self._prefix:
            self._parser.feed(self._prefix)
        self.reasoning = bool(self._prefix)  # whether what comes next is reasoning, as far as is known
        self._unsaid = ""  # of the answer, what is in no part yet
        self._spaces = ""  # at the end of the text so far: they count once more text follows
        self._trim = bool(self._prefix)  # whether white space before the next text belongs to a mark
        self._called = False

    def push(self, text: str) -> list[Part]:
        """Return what `text` completes."""
        if not text:
            return []
        self._unsaid += text
        try:
            events = self._parser.feed(text)
        except (ValueError, KeyError, TypeError):
            return self._given_up()
        return self._parts(events)

    def finish(self) -> list[Part]:
        """Return what is left: nothing follows."""
        try:
            _, events = self._parser.finalize()
        except (ValueError, KeyError, TypeError):
            parts = self._given_up()
        else:
            parts = self._parts(events)
        if self._spaces and not self._called:
            parts.append(Text(self._spaces))
        self._spaces = ""
        return parts

    def _new_parser(self) -> Any:
        try:
            from transformers.utils.chat_parsing import ResponseParser
        except ImportError as error:
            raise RequestError(
                "reading tool calls needs transformers on the server: pip install 'headstart[render]'", code="not_installed"
            ) from error
        fields = {
            name: field for name, field in self._family.fields.items() if self._tools or _kind(name) not in ("calls", "mark")
        }
        template = {"version": 1, "start_anchor": _NOWHERE, "fields": fields}
        return ResponseParser(template, prefix="", tools=self._tools or None)

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> list[Part]:
        parts: list[Part] = []
        for event in events:
            kind = _kind(event["field"])
            if event["type"] == "region_open":
                self.reasoning = kind == "reasoning"
                self._trim = self._trim or self.reasoning
            elif event["type"] == "region_chunk" and kind not in ("calls", "mark"):
                _, _, self._unsaid = self._unsaid.partition(event["text"])
                parts += self._said(kind, event["text"])
            elif event["type"] == "region_close":
                self.reasoning = False
                if kind == "calls":
                    self._unsaid, self._spaces, self._trim = "", "", True
                    parts += self._calls(event["value"])
                elif kind == "reasoning":
                    self._spaces, self._trim = "", True
                elif kind == "mark":
                    self._unsaid, self._trim = "", True
        return parts

    def _said(self, kind: str, text: str) -> list[Part]:
        """Return text or reasoning without the white space that belongs to marks beside it."""
        if self._trim:
            text = text.lstrip()
        if not text:
            return []
        self._trim = False
        if self._called and kind == "text" and not text.strip():
            return []
        whole = self._spaces + text
        kept = whole.rstrip()
        self._spaces = whole[len(kept) :]
        if not kept:
            return []
        return [Reasoning(kept) if kind == "reasoning" else Text(kept)]

    def _calls(self, value: object) -> list[Part]:
        self._called = True
        found: list[Part] = []
        for one in value if isinstance(value, list) else [value]:
            function = one.get("function") if isinstance(one, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                found.append(Text(json.dumps(one, ensure_ascii=False)))
                continue
            assert isinstance(function, Mapping)
            arguments = function.get("arguments")
            if isinstance(arguments, str):  # JSON that was written as a text within JSON
                arguments = _decoded(arguments)
            said = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
            found.append(Call(call_id(short=self._family.short_ids), name.strip(), said))
        return found

    def _given_up(self) -> list[Part]:
        """Return what was begun as a call and is none, as text, and read on from there."""
        text, self._unsaid = self._spaces + self._unsaid, ""
        self._spaces, self._trim, self.reasoning = "", False, False
        self._parser = self._new_parser()
        log.debug("an answer has what looks like a tool call and cannot be read as one: it is given as text")
        return [Text(text)] if text else []


def _kind(name: str) -> str:
    return next((kind for begin, kind in _KINDS.items() if name.startswith(begin)), "mark")


def _decoded(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
