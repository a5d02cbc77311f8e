"""What this server generated, remembered until it comes back as history, so that it keeps the tokens that it was made of.

A client returns an answer as a message; a template writes the message; a tokenizer makes tokens of it. They are those that the
model gave only if nobody changed a space on the way, and everything behind the first other one is computed again. So an answer
is remembered with its tokens and with the text of the prompt that it answered. In a later text that begins with that prompt,
what stands up to the end of the turn is the same answer, if it has the same characters but for their order and for spaces (the
JSON of arguments was compared before); then its tokens go in its place.

    text    prompt that was answered │ the answer, as the template writes it │<|im_end|> …
    tokens  of that text             │ as they were generated                │ of that text
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from headstart.render.answers import Call
from headstart.render.remembering import Remembered

REMEMBERED_BYTES = 32 << 20
_ALIKE = 8  # answers with the same text to different prompts that are remembered
_RECORD_BYTES = 600  # of books, beside texts and tokens
_Key = tuple[str, str]  # kind, and text or id


@dataclass(frozen=True, slots=True)
class Generated:
    """An answer: its tokens and their text with special tokens, without the one that ended it, and what was read in it.
    `prompt_characters` and `prompt_digest` tell what it answered; `mark` is no other answer's."""

    prompt_characters: int
    prompt_digest: bytes
    tokens: array[int]
    text: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    mark: object = field(default_factory=object, compare=False, repr=False)

    @property
    def rule(self) -> str:
        """By which rule it keeps its tokens."""
        return "tool-arguments" if self.calls else "generated-tokens"

    @property
    def nbytes(self) -> int:
        texts = len(self.text) + len(self.content) + len(self.reasoning) + sum(len(call.arguments) for call in self.calls)
        return 4 * (len(self.tokens) + texts) + _RECORD_BYTES  # a character takes 4 bytes at most


@dataclass(frozen=True, slots=True)
class Spliced:
    """A text in order: strings that are still to be tokenised, and tokens that are known. `acted`: the rules that did it."""

    parts: list[str | array[int]]
    acted: frozenset[str]


class Beginnings:
    """Digests of how far a text goes, from less to more; it is gone through once."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._digest = sha256()  # twice as fast as others where the processor has it

    def digest(self, end: int) -> bytes:
        self._digest.update(self.text[self.at : end].encode("utf-8", "surrogatepass"))
        self.at = end
        return self._digest.digest()

    def copy(self) -> Beginnings:
        """Return another that goes on from here."""
        copied = Beginnings(self.text)
        copied.at, copied._digest = self.at, self._digest.copy()
        return copied


def digest_of(prompt: str) -> bytes:
    return Beginnings(prompt).digest(len(prompt))


class Answers:
    """Any number of threads may use one."""

    def __init__(self, *, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._kept = Remembered[_Key, tuple[Generated, ...]](remembered_bytes, nbytes=_nbytes)

    def keep(self, answer: Generated, *, owner: str) -> None:
        key = _key(answer.content, [call.id for call in answer.calls])
        before = self._kept.get(owner, [key])[0] or ()
        others = tuple(one for one in before if one.prompt_digest != answer.prompt_digest)
        self._kept.put(owner, {key: (answer, *others[: _ALIKE - 1])})

    def like(self, messages: Sequence[Any], *, owner: str) -> dict[int, tuple[Generated, ...]]:
        """Return, by number, the answers that an assistant's message may be, the latest first: with the same text but for
        spaces around it, or the same calls by id, name and the JSON of their arguments. Messages that may be none are left
        out."""
        keys: dict[int, _Key] = {}
        for at, message in enumerate(messages):
            if isinstance(message, dict) and message.get("role") == "assistant" and (key := _key_of(message)) is not None:
                keys[at] = key
        alike: dict[int, tuple[Generated, ...]] = {}
        for (at, (kind, _)), found in zip(keys.items(), self._kept.get(owner, list(keys.values())), strict=True):
            if found is None:
                continue
            if kind == "text":  # and nothing else is to be compared
                alike[at] = found
                continue
            message = messages[at]
            content, calls = (message.get("content") or "").strip(), message.get("tool_calls") or []
            if same := tuple(one for one in found if one.content.strip() == content and _same_calls(one.calls, calls)):
                alike[at] = same
        return alike


def splice(beginnings: Beginnings, end: int, answers: Iterable[Generated], *, ends: re.Pattern[str]) -> Spliced:
    """Return what is left of a text up to `end` with the tokens of those answers that stand in it. `ends` finds what ends a
    turn; none of the answers goes on behind `end`."""
    text, done = beginnings.text, beginnings.at
    parts: list[str | array[int]] = []
    acted: set[str] = set()
    answered = -1  # the place that the newest of them took: one that is written as nothing leaves it free
    for one, begin in _answered(beginnings, end, answers):
        closing = ends.search(text, begin) if begin >= done and begin != answered else None
        if closing is None:
            continue
        written = text[begin : closing.start()]
        if written != one.text:
            if Counter("".join(written.split())) != Counter("".join(one.text.split())):
                continue
            acted.add(one.rule)
        parts += [text[done:begin], one.tokens]
        answered, done = begin, closing.start()
    return Spliced([*parts, text[done:end]], frozenset(acted))


def standing(text: str, answers: Iterable[Generated]) -> frozenset[bytes]:
    """Return the digests of those of the answered prompts with which `text` begins."""
    return frozenset(one.prompt_digest for one, _ in _answered(Beginnings(text), len(text), answers))


def _answered(beginnings: Beginnings, end: int, answers: Iterable[Generated]) -> Iterator[tuple[Generated, int]]:
    """Yield the answers whose prompt a text begins with, of less than `end` characters, and where that ends."""
    for one in sorted(answers, key=lambda one: one.prompt_characters):
        if one.prompt_characters >= end:
            return
        if beginnings.digest(one.prompt_characters) == one.prompt_digest:
            yield one, one.prompt_characters


def _key_of(message: Mapping[str, Any]) -> _Key | None:
    """Return under which key an answer is kept that comes back as `message`, an assistant's; None where it can be none."""
    content, calls = message.get("content") or "", message.get("tool_calls") or ()
    if calls == () and type(content) is str:
        return "text", content.strip()  # of nearly all
    if not isinstance(content, str) or not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return None
    return _key(content, [str(call.get("id")) for call in calls])


def _key(content: str, ids: Sequence[str]) -> _Key:
    return ("call", ids[0]) if ids else ("text", content.strip())


def _same_calls(mine: Sequence[Call], calls: Sequence[Mapping[str, Any]]) -> bool:
    functions = [call.get("function") for call in calls]
    return len(mine) == len(calls) and all(
        isinstance(function, Mapping)
        and (one.id, one.name) == (call.get("id"), function.get("name"))
        and _equal(one.arguments, function.get("arguments"))
        for one, call, function in zip(mine, calls, functions, strict=True)
    )


def _equal(one: str, other: Any) -> bool:
    """Whether two values are equal as JSON: order of keys and spaces do not count."""
    try:
        forms = [_form(json.loads(value or "{}") if isinstance(value, str) else value) for value in (one, other)]
    except (ValueError, TypeError, RecursionError):
        return bool(one == other)
    return forms[0] == forms[1]


def _form(value: Any) -> str:
    return json.dumps(_whole_numbers(value), sort_keys=True)


def _whole_numbers(value: Any) -> Any:
    """JSON has one kind of number: what went through a client may be 1 where it was 1.0."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _whole_numbers(item) for key, item in value.items()}
    return [_whole_numbers(item) for item in value] if isinstance(value, list) else value


def _nbytes(key: _Key, answers: tuple[Generated, ...]) -> int:
    return 4 * len(key[1]) + sum(answer.nbytes for answer in answers)
