"""What an answer is held to: JSON, JSON of a schema, or calls of tools as the model's family writes them.

The grammar is `llguidance`'s work; here is what it is made from, and reasoning, which comes before and is free.

    prompt ▷ reasoning, anything ▷ "</think>" ▷ the grammar ▷ a token that ends the answer

Where calls may be but need not, the grammar is any text, in which a call's mark leads into a call.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

from headstart.errors import RequestError
from headstart.render.answers import Family
from headstart.render.answers.families import Writing
from headstart.render.renderer import Tokens

SCHEMA_BYTES = 64 << 10  # a thousand properties, of which a grammar is made in a second
SCHEMA_DEPTH = 100

# One line, as models write it: white space without end would be allowed otherwise, and weak models take that road.
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Vocabulary(Protocol):
    """What is asked of a renderer."""

    stop_ids: frozenset[int]
    vocabulary: int

    def token_bytes(self, token: int) -> bytes: ...

    def tokenise(self, text: str, *, special_tokens: bool) -> Tokens: ...

    @property
    def special_tokens(self) -> Mapping[str, int]: ...


@dataclass(frozen=True, slots=True)
class Grammar:
    """What may stand, for `llguidance`. `param`: what the client wrote it in. `text`: whether it is the text of an answer.
    `free`: whether it has stretches of any text, which end where the answer may; special tokens may stand there, too."""

    start: str
    rules: tuple[str, ...]
    param: str
    text: bool
    free: bool = False


class Constraints:
    """Makes constraints for the answers of one model. Any number of threads may use one."""

    def __init__(self, renderer: Vocabulary) -> None:
        self._renderer = renderer
        self._lock = threading.Lock()
        self._made: Any = None

    def json(self, schema: Mapping[str, Any] | None, *, strict: bool, param: str, unless: Grammar | None = None) -> Grammar:
        """Return the grammar of what `schema` describes, any object without one, or of `unless`. Raises RequestError.

        Not `strict`: keywords that cannot be enforced are left out of account."""
        value = self._json(schema if schema is not None else {"type": "object"}, strict=strict, param=param)
        if unless is None:
            return Grammar(value, (), param, text=True)
        return Grammar(f"({value} | {unless.start})", unless.rules, param, text=False)

    def calls(self, family: Family, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Grammar:
        """Return the grammar of at least one call of `tools`, as the family writes them."""
        writing = family.writing
        assert writing is not None
        rules = self._calls(writing, tools, befores=(writing.before,))
        more = f"({self._literal(writing.between)} call)*" if parallel and writing.between is not None else ""
        start = f"({self._literal(writing.begin)} call {more} {self._literal(writing.end)})"
        return Grammar(start, rules, "tools", text=False)

    def calls_in_text(self, family: Family, tools: Sequence[Mapping[str, Any]], *, parallel: bool) -> Grammar:
        """Return the grammar of any text in which, behind the mark that begins one, stand calls of `tools` as the family writes
        them; where they are not `parallel`, one, and nothing behind it."""
        writing = family.writing
        assert writing is not None
        assert writing.trigger is not None
        mark = writing.trigger
        if mark in writing.before:  # each call has its own
            befores = [before.partition(mark)[2] for before in (writing.before, *writing.others)]
            calls = "call"
        else:
            befores = [writing.before]
            more = f"({self._literal(writing.between)} call)*" if parallel and writing.between is not None else ""
            calls = f"{self._literal(writing.begin.partition(mark)[2])} call {more} {self._literal(writing.end)}"
        heads = [f"begun: (by_letters{' | by_token' if mark in self._renderer.special_tokens else ''}) {calls}"]
        heads.append(f"by_letters[lazy]: ANY {json.dumps(mark)}")
        if mark in self._renderer.special_tokens:
            heads.append(f"by_token: ANY <[{self._renderer.special_tokens[mark]}]>")
        rules = (*heads, "ANY: /(.|\n)*/", *self._calls(writing, tools, befores=befores))
        return Grammar("begun* ANY" if parallel else "(ANY | begun)", rules, "tools", text=False, free=True)

    def _calls(self, writing: Writing, tools: Sequence[Mapping[str, Any]], *, befores: Sequence[str]) -> tuple[str, ...]:
        rules = []
        for i, tool in enumerate(tools):
            function = tool["function"]
            before = " | ".join(self._literal(before.replace("NAME", function["name"])) for before in befores)
            arguments = self._json(
                function.get("parameters") or {"type": "object"}, strict=bool(function.get("strict")), param=f"tools[{i}]"
            )
            rules.append(f"call_{i}: ({before}) {arguments} {self._literal(writing.after)}")
        return (*rules, f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}")

    def constraint(self, grammar: Grammar, family: Family | None, *, prompt_end: str) -> Held:
        """Return a new constraint. Raises RequestError where the grammar cannot be held to."""
        tokenizer = self._tokenizer()
        from llguidance import LLMatcher

        opens, closes = family.think if family is not None else ("", "")
        free_until, opening = "", None
        if family is not None and family.text_after is not None and grammar.text:
            free_until = family.text_after
        elif opens and prompt_end.rstrip().endswith(opens):
            free_until = closes
        elif opens:
            opening = self._renderer.special_tokens.get(opens)
        reasons = free_until or opening is not None
        space = "/\\n{0,2}/ " if reasons and not grammar.free else ""  # a line may end behind reasoning
        text = "\n".join([f"start: {space}{grammar.start}", *grammar.rules]) + "\n"
        matcher = LLMatcher(tokenizer, text, log_level=0)
        if matcher.is_error():
            said = str(matcher.get_error()).strip().partition("\n")[0]
            raise RequestError(f"{grammar.param} cannot be held to: {said[:300]}", param=grammar.param)
        return Held(matcher, self._renderer, free_until=free_until, opening=opening, closes=closes, free=grammar.free)

    def _json(self, schema: object, *, strict: bool, param: str) -> str:
        if not isinstance(schema, Mapping):
            raise RequestError(f"{param} must be a JSON schema, which is an object", param=param)
        if _depth(schema) > SCHEMA_DEPTH:
            raise RequestError(f"{param} is nested more than {SCHEMA_DEPTH} levels deep", param=param)
        text = json.dumps({**schema, "x-guidance": {**_ONE_LINE, "lenient": not strict}}, ensure_ascii=False)
        if len(text) > SCHEMA_BYTES:
            raise RequestError(f"{param} is larger than {SCHEMA_BYTES >> 10} KiB", param=param)
        return f"%json {text}"

    def _literal(self, text: str) -> str:
        """Return `text` for a grammar. A special token in it is meant as that token, not as its letters."""
        special = self._renderer.special_tokens
        if not text:
            return ""
        known = sorted((name for name in special if name in text), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, known))})", text) if known else [text]
        return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)

    def _tokenizer(self) -> Any:
        """Return the vocabulary as `llguidance` takes it: made once, which takes up to a second."""
        with self._lock:
            if self._made is None:
                self._made = _tokenizer(self._renderer)
            return self._made


class Held:
    """An `engine.base.Constraint`. `free_until`: a text up to which anything may come; `opening`: a token that opens such a
    stretch, if it comes first, up to `closes`. `free`: special tokens may stand wherever the answer may end."""

    def __init__(
        self, matcher: Any, renderer: Vocabulary, *, free_until: str, opening: int | None, closes: str, free: bool
    ) -> None:
        self._matcher = matcher
        self._special = frozenset(renderer.special_tokens.values()) if free else frozenset()
        self._token_bytes = renderer.token_bytes
        self._free_until = free_until.encode()
        self._opening = opening
        self._closes = closes.encode()
        self._tail = b""

    def again(self) -> Held:
        """Return another that stands where this one does."""
        other = copy(self)
        other._matcher = self._matcher.deep_copy()
        return other

    def allowed(self) -> bytes | None:
        if self._free_until:
            return None
        mask: bytes = self._matcher.compute_bitmask()
        also = self._special if self._special and self._matcher.is_accepting() else frozenset[int]()
        if self._opening is not None:
            also |= {self._opening}
        if not also:
            return mask
        changed = bytearray(mask)
        for token in also:
            changed[token // 8] |= 1 << token % 8
        return bytes(changed)

    def accept(self, token: int) -> None:
        if self._free_until:
            self._tail = (self._tail + self._token_bytes(token))[-len(self._free_until) - 64 :]
            if self._free_until in self._tail:
                self._free_until = b""
            return
        if token == self._opening:
            self._free_until, self._opening = self._closes, None
            return
        self._opening = None
        if token in self._special and self._matcher.is_accepting() and not self._matcher.validate_tokens([token]):
            return
        if not self._matcher.consume_token(token):
            raise ValueError(f"token {token} does not go on: {self._matcher.get_error() or 'it was not allowed'}")


def _depth(value: object) -> int:
    """Return how deep a JSON value is nested, without going there by calls."""
    depth, level = 0, [value]
    while level and depth <= SCHEMA_DEPTH:
        depth += 1
        inner = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list)]
        level = [value for values in inner for value in values]
    return depth


def _tokenizer(renderer: Vocabulary) -> Any:
    try:
        from llguidance import LLTokenizer, TokenizerWrapper
    except ImportError as error:
        raise RequestError(
            "holding answers to a form needs llguidance on the server: pip install 'headstart[render]'", code="not_installed"
        ) from error
    return LLTokenizer(
        TokenizerWrapper(_Words(renderer)), eos_token=sorted(renderer.stop_ids), slices=LLTokenizer.json_slices()
    )


class _Words:
    """The form in which `llguidance` asks for a vocabulary."""

    def __init__(self, renderer: Vocabulary) -> None:
        self.tokens = [renderer.token_bytes(token) for token in range(renderer.vocabulary)]
        self.special_token_ids = sorted(renderer.special_tokens.values())
        self.eos_token_id = min(renderer.stop_ids)
        self.bos_token_id = None
        self._tokenise = renderer.tokenise

    def __call__(self, text: str) -> list[int]:
        return self._tokenise(text, special_tokens=False).ids
