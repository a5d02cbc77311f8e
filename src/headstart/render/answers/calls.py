"""One region of an answer in which calls stand, as it comes: pieces of calls, and text where what was begun is no call.

What may be told is told at once and never taken back: a call begins when its name is known and its arguments have begun; what
ends it before they are whole stays with the client as it was written. What never became a call is text, marks included.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.render.answers.json_text import Arguments, JsonText, cast_to, types_of
from headstart.render.answers.parts import Call, Part, Text, call_id, merged

Schemas = Mapping[str, Mapping[str, Any]]  # of arguments, by a tool's name


@dataclass(frozen=True, slots=True)
class Inline:
    """How arguments stand that are no JSON but a mark for each: `open`, a pattern with `key`, then the value up to `close`.
    `line`: a value stands on lines of its own. A group `json` in `open` tells that the value is JSON."""

    open: str
    close: str
    line: bool = False


class Region(Protocol):
    def push(self, text: str) -> list[Part]:
        """Return what `text`, which is behind the region's opening mark, lets go."""
        ...

    def close(self, mark: str, *, cut: bool) -> list[Part]:
        """Return what is left. `mark` closes the region, "" where the answer ended before; `cut`: it was not at its end."""
        ...


class JsonCalls:
    """Objects with a name and arguments, one or several, in a row or in a list: {"name": …, "arguments": {…}}. Arguments are
    told as they come where the name stands before them, else with the end of the object."""

    def __init__(self, mark: str, schemas: Schemas, *, short_ids: bool) -> None:
        self._schemas = schemas
        self._short_ids = short_ids
        self._unsaid = mark  # text if no call comes of it
        self._is_text = False  # from here to the region's end
        self._object: JsonText | None = None
        self._read = ""  # of the object
        self._call: _Telling | None = None  # of the object
        self._called = False

    def push(self, text: str) -> list[Part]:
        return list(merged(part for c in text for part in self._push(c)))

    def close(self, mark: str, *, cut: bool) -> list[Part]:
        begun = self._called if self._object is None else self._call is not None and self._call.begun
        return [] if begun and not self._is_text else [Text(self._unsaid + mark)]

    def _push(self, c: str) -> Iterator[Part]:
        if self._is_text:
            yield Text(c)
        elif self._call is not None and not self._call.done:
            told = self._call.push(c)
            if told is not None:
                self._unsaid = "" if self._call.begun else self._unsaid + c
                yield from told
            elif ends := self._call.end():  # a number or the like, which ends with what follows
                self._unsaid = ""
                yield from ends
                yield from self._go_on(c)
            else:
                yield from self._end_as_text(c)
            self._called = self._called or self._call.begun
        else:
            yield from self._go_on(c)

    def _go_on(self, c: str) -> Iterator[Part]:
        if self._object is None:
            if c in _BETWEEN:
                self._unsaid += c
                return
            if c != "{":
                yield from self._end_as_text(c)
                return
            self._object, self._read, self._call = JsonText(), "", None
        if self._at_arguments(self._object, c) and (name := _name_in(self._read + "null}")) is not None:
            self._object.skip_value()
            self._call = _Telling(name, self._schemas, short_ids=self._short_ids)
            yield from self._push(c)
        elif not self._object.push(c) or not self._may_be_call(self._object):
            yield from self._end_as_text(c)
        else:
            self._read, self._unsaid = self._read + c, self._unsaid + c
            if self._object.done:
                yield from self._end_object()

    def _at_arguments(self, written: JsonText, c: str) -> bool:
        here = self._call is None and written.depth == 1 and written.at_value and c not in _SPACE
        return here and written.key in _ARGUMENTS

    def _may_be_call(self, written: JsonText) -> bool:
        return written.depth != 1 or written.in_string or not written.key or written.key in _KEYS

    def _end_object(self) -> Iterator[Part]:
        if self._call is None:
            call = whole_call(json.loads(self._read), self._schemas, short_ids=self._short_ids)
            if call is None:
                yield from self._end_as_text("")
                return
            self._called = True
            yield call
        self._object, self._unsaid = None, ""

    def _end_as_text(self, c: str) -> Iterator[Part]:
        between = self._called and self._object is None  # what stands behind a call and before something else says nothing
        self._is_text, text, self._unsaid = True, c if between else self._unsaid + c, ""
        if text:
            yield Text(text)


class NamedCall:
    """Arguments as JSON behind a mark that has the name."""

    def __init__(self, mark: str, name: str, schemas: Schemas, *, short_ids: bool) -> None:
        self._unsaid = mark
        self._is_text = False
        self._call = _Telling(name, schemas, short_ids=short_ids)

    def push(self, text: str) -> list[Part]:
        return list(merged(part for c in text for part in self._push(c)))

    def close(self, mark: str, *, cut: bool) -> list[Part]:
        if not self._call.done and (parts := self._call.end()):
            return parts
        return [] if self._call.begun and not self._is_text else [Text(self._unsaid + mark)]

    def _push(self, c: str) -> Iterator[Part]:
        if self._is_text:
            yield Text(c)
        elif not self._call.done and (told := self._call.push(c)) is not None:
            self._unsaid = "" if self._call.begun else self._unsaid + c
            yield from told
        elif not self._call.done and (ends := self._call.end()):
            self._unsaid = ""
            yield from ends
            yield from self._push(c)
        elif not self._call.done or c not in _SPACE:
            self._is_text, text, self._unsaid = True, self._unsaid + c, ""
            yield Text(text)


class InlineCall:
    """Arguments each between marks of their own, behind a mark that has the name. A text is told as it comes."""

    def __init__(self, mark: str, name: str, schemas: Schemas, form: Inline, *, short_ids: bool) -> None:
        self._unsaid = mark
        self._name = name.strip()
        self._properties = schemas.get(self._name, {}).get("properties")
        self._form = form
        self._id = call_id(short=short_ids)
        self._text = ""  # that is not read yet
        self._begun = False
        self._types: tuple[str, ...] | None = None  # of the argument whose value is being read
        self._first = False  # whether nothing of the value is read

    def push(self, text: str) -> list[Part]:
        self._text += text
        told = ""
        while (more := self._value() if self._types is not None else self._opening()) is not None:
            told += more
        return [Call(self._id, self._name, told, done=False)] if told else []

    def close(self, mark: str, *, cut: bool) -> list[Part]:
        if not self._begun and not mark:
            return [Text(self._unsaid + self._text)]
        if not mark and cut:
            return []
        told = "" if self._begun else "{"
        if self._types is not None:  # the mark behind the value is missing
            told += self._end_of(self._text)
        return [Call(self._id, self._name, told + "}")]

    def _opening(self) -> str | None:
        """Return what is told of the next argument's name; None where there is none yet."""
        found = re.search(self._form.open, self._text)
        if found is None:
            return None
        self._text = self._text[found.end() :]
        key = found["key"].strip()
        properties = self._properties if isinstance(self._properties, Mapping) else {}
        types = types_of(properties.get(key)) or _types_of_mark(found.groupdict().get("json"))
        self._types = () if set(types) == {"string"} else types
        self._first = True
        before, self._begun = (", " if self._begun else "{"), True
        return f"{before}{json.dumps(key, ensure_ascii=False)}: " + ("" if self._types else '"')

    def _value(self) -> str | None:
        """Return what is told of a value; None where there is nothing more of it yet."""
        if self._first and self._form.line:
            if not self._text:
                return None
            self._text = self._text.removeprefix("\n")
        self._first = False
        at = self._text.find(self._form.close)
        if at >= 0:
            value, self._text = self._text[:at], self._text[at + len(self._form.close) :]
            return self._end_of(value)
        if self._types:
            return None
        kept = _overlap(self._text, ("\n" if self._form.line else "") + self._form.close)
        kept = max(kept, _overlap(self._text, self._form.close))
        told, self._text = self._text[: len(self._text) - kept], self._text[len(self._text) - kept :]
        return _escaped(told) if told else None

    def _end_of(self, value: str) -> str:
        types, self._types = self._types, None
        if self._form.line:
            value = (value.removeprefix("\n") if self._first else value).removesuffix("\n")
        return json.dumps(cast_to(value, types), ensure_ascii=False) if types else _escaped(value) + '"'


class OtherCalls:
    """What is read by somebody else once it is whole; `read` returns calls, or None for what is none."""

    def __init__(self, mark: str, read: Callable[[str], Sequence[Call] | None]) -> None:
        self._text = mark
        self._read = read

    def push(self, text: str) -> list[Part]:
        self._text += text
        return []

    def close(self, mark: str, *, cut: bool) -> list[Part]:
        calls = self._read(self._text + mark)
        return [Text(self._text + mark)] if calls is None else list(calls)


class _Telling:
    """A call whose name is known, while its arguments come. `begun`: whether anything of it was told."""

    def __init__(self, name: str, schemas: Schemas, *, short_ids: bool) -> None:
        self.begun = False
        self._id = call_id(short=short_ids)
        self._name = name.strip()
        self._arguments = Arguments(schemas.get(self._name, {}))

    @property
    def done(self) -> bool:
        return self._arguments.done

    def push(self, c: str) -> list[Part] | None:
        """Return what `c` lets go; None where arguments do not go on so, or have ended before it."""
        told = self._arguments.push(c)
        if told is None:
            return None
        return self._told(told) if told or self.done else []

    def end(self) -> list[Part]:
        return self._told(told) if (told := self._arguments.end()) else []

    def _told(self, told: str) -> list[Part]:
        self.begun = True
        return [Call(self._id, self._name, told, self.done)]


_SPACE = " \t\n\r"
_BETWEEN = _SPACE + "[],;"  # objects that are calls
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", *_ARGUMENTS, "type", "id", "function")  # that an object has which is a call


def whole_call(value: object, schemas: Schemas, *, short_ids: bool) -> Call | None:
    """Return the call that a JSON value is; None where it is none."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(name := function.get("name"), str):
        return None
    name = name.strip()
    given = next((function[key] for key in _ARGUMENTS if key in function), {} if name in schemas else _NOTHING)
    if given is _NOTHING:
        return None
    arguments = Arguments(schemas.get(name, {}))
    told = [arguments.push(c) or "" for c in json.dumps(given, ensure_ascii=False)]
    return Call(call_id(short=short_ids), name, "".join([*told, arguments.end()]))


_NOTHING = object()


def _name_in(head: str) -> str | None:
    name = json.loads(head).get("name")
    return name if isinstance(name, str) else None


def _types_of_mark(json_mark: str | None) -> tuple[str, ...]:
    """Return the types of a value of which its mark says whether it is JSON."""
    return ("null", "number", "boolean", "object", "array") if json_mark else ()


def _escaped(text: str) -> str:
    """Return `text` as it stands within the quotation marks of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _overlap(text: str, mark: str) -> int:
    """Return how long the longest end of `text` is that begins `mark`."""
    longest = min(len(text), len(mark) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(mark[:n])), 0)
