"""A conversation as it is computed, token by token, and for every character of it where the client wrote it.

A chat template is a program; where it puts what cannot be read off its source. So each text is rendered once more with marks
in it, characters that no text has, and a mark counts only if the rendered text without marks is what it was without them:

    request   "content": "be brief"          rendered   <|im_start|>system\\n be brief <|im_end|>
    marked    "content": "①be brief②"        marked     <|im_start|>system\\n①be brief②<|im_end|>

Where a template cuts or tests a text, marks are tried farther inside. What no mark surrounds is the template's own.
"""

from __future__ import annotations

import codecs
import copy
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from headstart.diagnose.compare import Units
from headstart.diagnose.requests import Conversation, Piece, Where
from headstart.errors import RequestError
from headstart.render import Renderer

ESTIMATED_BYTES = 4  # of text in a token, where no tokenizer is known
_MARKS = range(0xF0000, 0xFFFFE)  # a plane for private use: 65,534 characters
_MARK = re.compile("([\U000f0000-\U000ffffd])")
_RENDERS = 256
_INSIDE = 64  # places tried within a text that its template cuts
_OWN = {"messages", "tools", "add_generation_prompt", "tokenize", "chat_template"}  # not for a request to set


@dataclass(frozen=True, slots=True)
class Span:
    """Characters begin to end of the rendered text are those of `piece` from its character `offset` on."""

    begin: int
    end: int
    piece: Piece
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a character comes from: `piece` at character `offset`, or, with None, what stands between `before` and `after`."""

    path: str
    offset: int | None
    piece: Piece | None
    before: Piece | None = None
    after: Piece | None = None


@dataclass(frozen=True, slots=True)
class Side:
    """One of two prompts. `units` are token ids, or characters where no tokenizer is known; unit i begins at character
    `begins[i]` of `text`. `text` is None where ids are all that is known. `spans` are sorted and do not overlap."""

    name: str
    conversation: Conversation
    units: Units
    text: str | None
    begins: Sequence[int]
    exact: bool
    spans: tuple[Span, ...] = ()

    def char(self, unit: int) -> int:
        """Return the character with which a unit begins; the text's end behind the last."""
        return self.begins[unit] if unit < len(self.begins) else len(self.text or "")

    def tokens(self, unit: int) -> int:
        """Return how many tokens stand before a unit: an estimate where no tokenizer is known."""
        if self.exact or self.text is None:
            return unit
        return len(self.text[:unit].encode("utf-8", "surrogatepass")) // ESTIMATED_BYTES


def side_of(name: str, conversation: Conversation, renderer: Renderer | None) -> Side:
    """Return a conversation as it is computed. Raises RequestError where the template or the tokenizer refuses it."""
    prompt = conversation.prompt
    if isinstance(prompt, tuple):
        return _of_ids(name, conversation, prompt, renderer)
    if prompt is not None:
        text = prompt
        spans = [Span(0, len(text), Piece(conversation.prompt_path, ("prompt",), text))] if text else []
    elif renderer is None:
        text, spans = _written(conversation)
    else:
        text, spans = _rendered(conversation, renderer)
    if renderer is None:
        units = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        return Side(name, conversation, units, text, range(len(text)), exact=False, spans=tuple(spans))
    tokens = renderer.tokenise(text, special_tokens=begins_with_special(conversation))
    return Side(name, conversation, np.array(tokens.ids, np.uint32), text, tokens.begins, exact=True, spans=tuple(spans))


def text_of(conversation: Conversation, renderer: Renderer | None) -> str | tuple[int, ...]:
    """Return the text of a conversation as `side_of` has it, or the ids that were given, without looking for places."""
    if conversation.prompt is not None:
        return conversation.prompt
    if renderer is None:
        return _written(conversation)[0]
    return _writer(conversation, renderer)(conversation.messages, conversation.tools)


def begins_with_special(conversation: Conversation) -> bool:
    """Return whether the tokenizer puts its own tokens before a conversation's text."""
    return conversation.special_tokens is not False if conversation.prompt is not None else bool(conversation.special_tokens)


def place_of(side: Side, char: int) -> Place:
    """Return where character `char` of the rendered text comes from; at the end of a piece, what follows it."""
    spans = side.spans
    at = bisect_right(spans, char, key=lambda span: span.begin) - 1
    if at >= 0 and char < spans[at].end:
        span = spans[at]
        return Place(span.piece.path, span.offset + char - span.begin, span.piece)
    before = spans[at].piece if at >= 0 else None
    after = spans[at + 1].piece if at + 1 < len(spans) else None
    return Place(shared_path(before, after), None, None, before, after)


def end_of(side: Side, char: int) -> Place | None:
    """Return the piece that ends exactly before `char`, at its end; None where there is none."""
    at = bisect_right(side.spans, char, key=lambda span: span.begin) - 1
    if at < 0 or side.spans[at].end != char:
        return None
    span = side.spans[at]
    return Place(span.piece.path, span.offset + span.end - span.begin, span.piece)


def _of_ids(name: str, conversation: Conversation, ids: tuple[int, ...], renderer: Renderer | None) -> Side:
    if any(isinstance(token, bool) or not 0 <= token < 1 << 32 for token in ids):
        raise RequestError("a token id is a whole number from 0 on", param="prompt")
    units = np.array(ids, np.uint32)
    if renderer is None:
        return Side(name, conversation, units, None, (), exact=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, begins = "", []
    parts: list[str] = []
    for token in ids:
        begins.append(len(text))
        parts.append(decoder.decode(renderer.token_bytes(token)))
        text += parts[-1]
    text += decoder.decode(b"", final=True)
    spans = (Span(0, len(text), Piece(conversation.prompt_path, ("prompt",), text)),) if text else ()
    return Side(name, conversation, units, text, begins, exact=True, spans=spans)


def shared_path(before: Piece | None, after: Piece | None) -> str:
    """Return the path of what holds both neighbours; "" where only the whole request does."""
    if before is None or after is None:
        return ""
    ours, theirs = _steps(before.path), _steps(after.path)
    n = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), min(len(ours), len(theirs)))
    return "".join(ours[:n]).removeprefix(".")


def _steps(path: str) -> list[str]:
    return re.findall(r"\.?[^.\[\]]+|\[\d+\]", path)


def _written(conversation: Conversation) -> tuple[str, list[Span]]:
    """Return the conversation in a plain form of ours, for a server whose template is not known, and all its spans."""
    pieces: dict[Where, list[Piece]] = {}
    for piece in conversation.pieces:
        pieces.setdefault(piece.where, []).append(piece)
    parts: list[str] = []
    spans: list[Span] = []
    length = 0

    def add(text: str, piece: Piece | None = None) -> None:
        nonlocal length
        if piece is not None and text:
            spans.append(Span(length, length + len(text), piece))
        parts.append(text)
        length += len(text)

    def add_value(value: object, where: Where) -> None:
        if isinstance(value, dict) and value:
            for n, (key, item) in enumerate(value.items()):
                add(f"{', ' if n else '{'}{_quoted(key)}: ")
                add_value(item, (*where, str(key)))
            add("}")
        elif isinstance(value, list) and value:
            for n, item in enumerate(value):
                add(", " if n else "[")
                add_value(item, (*where, n))
            add("]")
        elif isinstance(value, str):
            add('"')
            for piece in pieces.get(where, ()):
                add(piece.text, piece)
            add('"')
        else:
            add(json.dumps(value, default=str), next(iter(pieces.get(where, ())), None))

    described = conversation.described
    known = described is not None and described.tools is conversation.tools
    if described is not None and known and described.written is not None:
        text, before = described.written
        parts.append(text)
        spans += before
        length = len(text)
    else:
        for n, tool in enumerate(conversation.tools or ()):
            add_value(tool, ("tools", n))
            add("\n")
        if described is not None and known:
            described.written = "".join(parts), tuple(spans)
    for n, message in enumerate(conversation.messages):
        for key, value in message.items():
            where: Where = ("messages", n, key)
            if key == "role":
                add(value, pieces[where][0])
                add(":\n")
            elif key == "content":
                for piece in pieces.get(where, ()):
                    add("[part] " if conversation.shapes.get(n) == "parts" else "")
                    add(piece.text, piece)
            else:
                add(f" {key}=")
                add_value(value, where)
        add("<end>\n")  # or a longer message would only go on behind this one
    return "".join(parts), spans


@lru_cache(maxsize=4096)
def _quoted(key: object) -> str:
    return json.dumps(key, ensure_ascii=False)


def _rendered(conversation: Conversation, renderer: Renderer) -> tuple[str, list[Span]]:
    write = _writer(conversation, renderer)
    text = write(conversation.messages, conversation.tools)
    marking = _Marking(conversation, text, write)
    spans: list[Span] = []
    marked = [piece for piece in conversation.pieces if piece.kind != "fixed" and piece.text]
    for span in sorted(marking.spans_of(marked), key=lambda span: (span.begin, span.end)):
        if not spans or span.begin >= spans[-1].end:
            spans.append(span)
    return text, spans


def _writer(conversation: Conversation, renderer: Renderer) -> Callable[[Any, Any], str]:
    """Return how messages and tools are written with what the request tells its template."""
    told = conversation.template
    arguments = {name: told[name] for name in ("documents", "reasoning_effort", "enable_thinking") if name in told}
    more = told.get("chat_template_kwargs")
    arguments.update(more if isinstance(more, dict) else {})

    def write(messages: Any, tools: Any) -> str:
        return renderer.write(
            messages,
            tools=tools,
            add_generation_prompt=bool(told.get("add_generation_prompt", True)),
            template=str(told["chat_template"]) if "chat_template" in told else None,
            arguments={name: value for name, value in arguments.items() if name not in _OWN},
        )

    return write


class _Marking:
    """Finds pieces in `text`, which `write` made of the conversation. Renders at most `_RENDERS` times; what is not found by
    then is named by its neighbours."""

    def __init__(self, conversation: Conversation, text: str, write: Callable[[Any, Any], str]) -> None:
        self._document = {"messages": conversation.messages, "tools": conversation.tools}
        self._text = text
        self._write = write
        self._renders = _RENDERS
        used = set(_MARK.findall(text)).union(*(_MARK.findall(piece.text) for piece in conversation.pieces))
        self._marks: Sequence[str] | _Marks = [chr(code) for code in _MARKS if chr(code) not in used] if used else _Marks()

    def spans_of(self, pieces: Sequence[Piece]) -> Iterator[Span]:
        """Yield where `pieces` are."""
        cut: list[Piece] = []
        for spans, in_part in self._whole(pieces):
            yield from spans
            cut += in_part
        points = [(piece, place, place) for piece in cut for place in _places_in(piece.text)]
        seen: dict[int, list[Span]] = {}
        for spans in self._points(points):
            for span in spans:
                seen.setdefault(id(span.piece), []).append(span)
        for found in seen.values():
            for one, two in pairwise(sorted(found, key=lambda span: span.offset)):
                if self._text[one.begin : two.begin] == one.piece.text[one.offset : two.offset]:
                    yield Span(one.begin, two.begin, one.piece, one.offset)

    def _whole(self, pieces: Sequence[Piece]) -> Iterator[tuple[list[Span], list[Piece]]]:
        """Yield where pieces are and which are there in part: all at once if their marks change nothing, else by halves."""
        if not pieces:
            return
        found = self._found([(piece, 0, len(piece.text)) for piece in pieces])
        if found is None:  # a template that trims leaves a text between its first and its last word
            found = self._found([(one, len(one.text) - len(one.text.lstrip()), len(one.text.rstrip())) for one in pieces])
        if found is not None:
            yield found
        elif len(pieces) > 1:
            half = len(pieces) // 2
            yield from self._whole(pieces[:half])
            yield from self._whole(pieces[half:])
        else:
            yield [], [*pieces]

    def _points(self, points: Sequence[tuple[Piece, int, int]]) -> Iterator[list[Span]]:
        """Yield where single places of pieces are, in the same way."""
        if not points:
            return
        found = self._found(points)
        if found is not None:
            yield found[0]
        elif len(points) > 1:
            half = len(points) // 2
            yield from self._points(points[:half])
            yield from self._points(points[half:])

    def _found(self, wanted: Sequence[tuple[Piece, int, int]]) -> tuple[list[Span], list[Piece]] | None:
        """Return where (piece, from, to) stand, and the pieces of which only a part does; None where marks there change more
        than themselves."""
        marks = self._marks
        if self._renders == 0 or 2 * len(wanted) > len(marks):
            return None
        self._renders -= 1
        inserts: dict[Where, list[tuple[int, str]]] = {}
        for n, (piece, begin, end) in enumerate(wanted):
            at = inserts.setdefault(piece.where, [])
            at += [(piece.begin + begin, marks[2 * n]), (piece.begin + end, marks[2 * n + 1])]
        document = _edited(self._document, inserts)
        try:
            marked = self._write(document["messages"], document["tools"])
        except RequestError:
            return None
        own = {mark for points in inserts.values() for _, mark in points}
        seen: dict[str, list[int]] = {}
        plain: list[str] = []
        length = 0
        for part in _MARK.split(marked):
            if part in own:
                seen.setdefault(part, []).append(length)
            else:
                plain.append(part)
                length += len(part)
        if "".join(plain) != self._text:
            return None
        spans: list[Span] = []
        cut: list[Piece] = []
        for n, (piece, begin, end) in enumerate(wanted):
            first, last = seen.get(marks[2 * n], []), seen.get(marks[2 * n + 1], [])
            pairs = list(zip(first, last, strict=False))
            if len(first) != len(last) or any(self._text[x:y] != piece.text[begin:end] for x, y in pairs):
                cut.append(piece)
            else:
                spans += [Span(x, y, piece, begin) for x, y in pairs]
        return spans, cut


def _places_in(text: str) -> list[int]:
    """Return places at which templates take a text apart: beside tags and line breaks, and its ends."""
    places = sorted({0, len(text), *(match.end() for match in re.finditer(r"[>\n]\s*|\S(?=\s*<)", text))})
    step = -(-len(places) // _INSIDE)
    return [*places[:-1:step], places[-1]]


def _edited(document: dict[str, Any], inserts: Mapping[Where, list[tuple[int, str]]]) -> dict[str, Any]:
    """Return a copy of `document` with marks put into its strings; what has none is shared."""
    copies: dict[Where, Any] = {(): dict(document)}
    for where, points in inserts.items():
        for n in range(1, len(where)):
            if where[:n] not in copies:
                holder = copies[where[: n - 1]]
                holder[where[n - 1]] = copies[where[:n]] = copy.copy(holder[where[n - 1]])
        old = copies[where[:-1]][where[-1]]
        parts, before = [], 0
        for place, mark in sorted(points, key=lambda point: point[0]):
            parts += [old[before:place], mark]
            before = place
        copies[where[:-1]][where[-1]] = "".join([*parts, old[before:]])
    return dict(copies[()])


class _Marks:
    """All marks there are, in order."""

    def __len__(self) -> int:
        return len(_MARKS)

    def __getitem__(self, n: int) -> str:
        return chr(_MARKS[n])
