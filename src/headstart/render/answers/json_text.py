"""JSON as it is written, character by character: whether it goes on, where it stands, what of it may be told. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from math import isfinite
from typing import Any

_SPACE = " \t\n\r"
_WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|(?:0|[1-9][0-9]*)(?:\.[0-9]+)?[eE][+-]?[0-9]*)?")
_DEEPEST = 200


class _State(Enum):
    VALUE = auto()  # one must come
    FIRST_VALUE = auto()  # or the list ends
    KEY = auto()
    FIRST_KEY = auto()  # or the object ends
    COLON = auto()
    AFTER = auto()  # a value inside of something
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()  # a number, true, false or null
    END = auto()


class JsonText:
    """One value. `key`: of the member of the outermost object that is being written."""

    def __init__(self) -> None:
        self.key = ""
        self._state = _State.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._hex = 0
        self._word = ""

    @property
    def depth(self) -> int:
        """In how many objects and lists the next character stands."""
        return len(self._open)

    @property
    def at_value(self) -> bool:
        """Whether the next character, if it is no space, begins a value."""
        return self._state in (_State.VALUE, _State.FIRST_VALUE)

    @property
    def after_value(self) -> bool:
        """Whether a value inside of an object or a list has just ended."""
        return self._state is _State.AFTER

    @property
    def in_string(self) -> bool:
        return self._state is _State.STRING

    @property
    def done(self) -> bool:
        """Whether the value is whole; a number is once something follows, or with `end`."""
        return self._state is _State.END

    def end(self) -> bool:
        """Return whether the value is whole where nothing follows."""
        if self._state is _State.WORD and not self._open and _whole(self._word):
            self._state = _State.END
        return self.done

    def skip_value(self) -> None:
        """Go on behind a value that somebody else has read."""
        self._after_value()

    def push(self, c: str) -> bool:
        """Go on by one character. False where it cannot stand here; then nothing has changed, but that a number has ended."""
        state = self._state
        if state is _State.STRING:
            return self._in_string(c)
        if state is _State.ESCAPE:
            if c not in '"\\/bfnrtu':
                return False
            self._hex = 4
            self._state = _State.HEX if c == "u" else _State.STRING
            return self._collect(c)
        if state is _State.HEX:
            if c not in "0123456789abcdefABCDEF":
                return False
            self._hex -= 1
            self._state = _State.HEX if self._hex else _State.STRING
            return self._collect(c)
        if state is _State.WORD:
            word = self._word + c
            if _NUMBER_BEGUN.fullmatch(word) or any(whole.startswith(word) for whole in _WORDS):
                self._word = word
                return True
            if not _whole(self._word):
                return False
            self._after_value()
        return True if c in _SPACE else self._structure(c)

    def _in_string(self, c: str) -> bool:
        if c < " ":
            return False
        if c == '"':
            if self._is_key:
                self._state = _State.COLON
                if len(self._open) == 1:
                    self.key = str(json.loads(f'"{self.key}"'))
            else:
                self._after_value()
            return True
        if c == "\\":
            self._state = _State.ESCAPE
        return self._collect(c)

    def _collect(self, c: str) -> bool:
        if self._is_key and len(self._open) == 1:
            self.key += c
        return True

    def _structure(self, c: str) -> bool:
        state = self._state
        if state is _State.COLON:
            if c != ":":
                return False
            self._state = _State.VALUE
            return True
        if state is _State.AFTER and c == ",":
            self._state = _State.KEY if self._open[-1] == "{" else _State.VALUE
            return True
        if c in "}]":
            opened, first = ("{", _State.FIRST_KEY) if c == "}" else ("[", _State.FIRST_VALUE)
            if state not in (_State.AFTER, first) or self._open[-1] != opened:
                return False
            self._open.pop()
            self._after_value()
            return True
        if state in (_State.KEY, _State.FIRST_KEY):
            return self._begin_string(key=True) if c == '"' else False
        return self._begin_value(c) if self.at_value else False

    def _begin_value(self, c: str) -> bool:
        if c in "{[":
            if len(self._open) >= _DEEPEST:
                return False
            self._open.append(c)
            self._state = _State.FIRST_KEY if c == "{" else _State.FIRST_VALUE
            return True
        if c == '"':
            return self._begin_string(key=False)
        if c in "-0123456789tfn":
            self._word, self._state = c, _State.WORD
            return True
        return False

    def _begin_string(self, *, key: bool) -> bool:
        self._is_key, self._state = key, _State.STRING
        if key and len(self._open) == 1:
            self.key = ""
        return True

    def _after_value(self) -> None:
        self._state = _State.AFTER if self._open else _State.END


class Arguments:
    """The arguments of a call as a model writes them, and what of them may be told: an object as it comes, anything else when
    it is whole. A text where a tool's schema has no text becomes what it has, so it is told when it is whole."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._properties = properties if isinstance(properties := schema.get("properties"), Mapping) else {}
        self._json = JsonText()
        self._held: str | None = None  # a value that is not told yet
        self._begun = False

    @property
    def done(self) -> bool:
        return self._json.done and self._held is None

    def push(self, c: str) -> str | None:
        """Return what may be told with `c`; None where it does not go on, or is no more of it."""
        if self._json.in_string and c < " ":  # models write lines as they are
            told = [self.push(escaped) or "" for escaped in json.dumps(c)[1:-1]]
            return "".join(told)
        if not self._begun:
            if c in _SPACE:
                return ""
            self._begun = True
            if c != "{":
                self._held = ""
        elif self._held is None and c == '"' and self._json.depth == 1 and self._json.at_value and self._types():
            self._held = ""
        if not self._json.push(c):
            return None
        if self._held is None:
            return c
        self._held += c
        return self._let_go() if self._json.done or (self._json.depth == 1 and self._json.after_value) else ""

    def end(self) -> str:
        """Return what is left to tell where nothing follows."""
        return self._let_go() if self._held is not None and self._json.end() else ""

    def _let_go(self) -> str:
        assert self._held is not None
        held, self._held = self._held, None
        if not held.startswith('"'):
            return "{}" if held.strip() == "null" else held
        text = str(json.loads(held))
        # Within the object a member that has no text; else JSON that was written as a text within JSON.
        return json.dumps(cast_to(text, self._types()) if self._json.depth else _decoded(text), ensure_ascii=False)

    def _types(self) -> tuple[str, ...]:
        """Return what the value of this member may be, nothing where a text may stand or nothing is known."""
        types = types_of(self._properties.get(self._json.key))
        return () if "string" in types else types


def finished(arguments: str) -> str:
    """Return arguments as the object that they are as far as they were written whole.

    >>> finished('{"city": "Rome", "days": [1, 2'), finished('{"a": 1}'), finished("")
    ('{"city": "Rome"}', '{"a": 1}', '{}')
    """
    text = JsonText()
    whole = 0
    for at, c in enumerate(arguments):
        if not text.push(c):
            break
        if text.done:
            return arguments
        if text.depth == 1 and text.after_value:
            whole = at + 1
        elif text.depth == 1 and c == "," and not text.in_string:
            whole = at
    return arguments[:whole] + "}" if whole else "{}"


def types_of(schema: object) -> tuple[str, ...]:
    """Return the types that a JSON schema names for a value; none where it names none."""
    if not isinstance(schema, Mapping):
        return ()
    named = schema.get("type")
    types = [one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)]
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        types += [one for choice in (several if isinstance(several, list) else ()) for one in types_of(choice)]
    return (*types, *(("null",) if schema.get("nullable") is True else ()))


def cast_to(text: str, types: tuple[str, ...]) -> Any:
    """Return what `text` says as the first of `types` that it can be; the text itself where it can be none but that."""
    said = text.strip()
    for kind in types:
        if kind == "null" and said in ("null", "None"):
            return None
        if kind == "boolean" and said.lower() in ("true", "false", "1", "0"):
            return said.lower() in ("true", "1")
        value = _decoded(said) if kind in ("integer", "number", "object", "array") else None
        if isinstance(value, bool):
            continue
        if isinstance(value, {"object": dict, "array": list, "integer": int, "number": int}.get(kind, _Nothing)):
            return value
        if kind in ("integer", "number") and isinstance(value, float) and isfinite(value):
            if kind == "number":
                return value
            if value.is_integer():
                return int(value)
    return text


class _Nothing:
    """No value is of this type."""


def _whole(word: str) -> bool:
    return word in _WORDS or _NUMBER.fullmatch(word) is not None


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
