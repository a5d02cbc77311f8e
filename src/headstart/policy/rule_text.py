"""Reading the text of rules. Pure. What is wrong is told with its place, the word, and the nearest right one.

rule      = [ "when" some "then" ] action
some      = every { "or" every }
every     = one { "and" one }
one       = "not" one | "(" some ")" | field operator value
field     = "class" | "tenant" | "tier" | "idle" | "age" | "size" | "blocks"
operator  = "=" | "!=" | "<" | "<=" | ">" | ">="          of class, tenant and tier: = and !=
value     = "text" | word | number with unit              6h, 3d; 10MB, 1GiB
action    = "move" "to" tier | "copy" "to" tier | "keep" "in" tier | "drop" "from" tier
          | "write" "to" tier [ "through" | "behind" ] { "," tier [ "through" | "behind" ] }
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

from headstart.config import parse_duration_ms, parse_size
from headstart.errors import ConfigError
from headstart.policy.tiering import (
    COMPARE,
    FIELDS,
    NOT_TO_DROP,
    OF_SAVES,
    PREPOSITIONS,
    TIERS,
    Action,
    Compare,
    Condition,
    Every,
    Not,
    Policy,
    Rule,
    Some,
    Target,
    require_rule,
)

MOST_CHARACTERS = 2000  # of a rule
MOST_RULES = 256
_MOST_DEPTH = 32  # of parentheses
_TOKEN = re.compile(r'\s*(?:("(?:[^"\\]|\\.)*")|(<=|>=|!=|[=<>(),])|([^\s"=<>!(),]+)|(.))', re.DOTALL)
_WORDS = ("class", "tenant", "tier")


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str  # "text", "sign", "word", "end"
    text: str
    at: int


def parse_rules(texts: Sequence[str]) -> Policy:
    """Return the policy that rules make. Raises ConfigError with `rule` (counted from 1), `at` (the character, from 0) and
    `text` as facts.

    >>> str(parse_rules(["when idle>6h and not tenant = acme then move to pool"]).rules[0])
    'when idle > 6h and (not tenant = "acme") then move to pool'
    """
    if len(texts) > MOST_RULES:
        raise ConfigError(f"{len(texts)} rules are more than {MOST_RULES}; join some with or", rule=MOST_RULES + 1)
    rules = []
    for number, text in enumerate(texts, start=1):
        try:
            rules.append(parse_rule(text))
        except ConfigError as error:
            raise ConfigError(f"rule {number}, {error.message}", **{**error.facts, "rule": number}) from error
    return Policy(tuple(rules), tuple(texts))


def parse_rule(text: str) -> Rule:
    """Return one rule. Raises ConfigError as `parse_rules` does."""
    return _Parser(text).rule()


def parse_condition(text: str) -> Condition:
    """Return what stands between "when" and "then". Raises ConfigError as `parse_rules` does."""
    parser = _Parser(text)
    found = parser.some()
    parser.end()
    return found


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        if len(text) > MOST_CHARACTERS:
            self._refuse(MOST_CHARACTERS, f"a rule has at most {MOST_CHARACTERS} characters")
        self._tokens = self._split()
        self._place = 0
        self._depth = 0

    def rule(self) -> Rule:
        condition: Condition | None = None
        if self._next.text == "when":
            self._take()
            condition = self.some()
            if self._next.kind != "end" and not self._is("then"):
                self._expected(("then", "and", "or"))
            self._word(("then",))
        begun = self._next
        action = self._action(("move", "copy", "keep", "drop", "write") if condition else (*PREPOSITIONS, "when"))
        self.end()
        rule = Rule(action, condition)
        try:
            require_rule(rule)
        except ConfigError as error:
            self._refuse(begun.at, error.message)
        for token, name in self._asked:
            if action.verb == "write" and name not in OF_SAVES:
                self._refuse(token.at, f"{name!r} is not known of what is being saved; such a rule asks for class and tenant")
            if action.verb == "drop" and name in NOT_TO_DROP:
                self._refuse(
                    token.at,
                    f"a rule that drops does not ask for {name!r}: the beginnings of what stays would go; give the class a "
                    "ceiling in cache.retention, or ask for idle",
                )
        return rule

    def some(self) -> Condition:
        parts = [self._every()]
        while self._is("or"):
            self._take()
            parts.append(self._every())
        return parts[0] if len(parts) == 1 else Some(tuple(parts))

    def end(self) -> None:
        if self._next.kind != "end":
            self._refuse(self._next.at, f"nothing can follow here, but {self._next.text!r} does; leave it out")

    def _every(self) -> Condition:
        parts = [self._one()]
        while self._is("and"):
            self._take()
            parts.append(self._one())
        return parts[0] if len(parts) == 1 else Every(tuple(parts))

    def _one(self) -> Condition:
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            self._refuse(self._next.at, f"more than {_MOST_DEPTH} parentheses and nots lie in one another; write it simpler")
        try:
            if self._is("not"):
                self._take()
                return Not(self._one())
            if self._next.text == "(" and self._next.kind == "sign":
                opened = self._take()
                inner = self.some()
                if self._next.text != ")" or self._next.kind != "sign":
                    self._refuse(self._next.at, f"the parenthesis of character {opened.at + 1} is not closed here; write )")
                self._take()
                return inner
            return self._comparison()
        finally:
            self._depth -= 1

    def _comparison(self) -> Compare:
        begun = self._next
        field = self._word(FIELDS)
        self._asked.append((begun, field))
        sign = self._take()
        signs = ("=", "!=") if field in _WORDS else tuple(COMPARE)
        if sign.kind != "sign" or sign.text not in signs:
            self._refuse(sign.at, f"after {field!r} one of {' '.join(signs)} is needed, not {_shown(sign)}")
        value = self._take()
        if field == "tier":
            self._known(value, TIERS)
            return Compare(field, sign.text, value.text)
        if field in _WORDS:
            if value.kind not in ("text", "word"):
                self._refuse(value.at, f'a {field} is needed, as in {field} = "agent", not {_shown(value)}')
            return Compare(field, sign.text, value.text)
        return Compare(field, sign.text, self._number(field, value))

    def _number(self, field: str, token: _Token) -> int:
        try:
            if token.kind == "word" and field in ("idle", "age"):
                return parse_duration_ms(token.text)
            if token.kind == "word" and field == "size":
                return parse_size(token.text)
        except ConfigError as error:
            self._refuse(token.at, error.message)
        if token.kind == "word" and token.text.isdecimal() and token.text.isascii() and len(token.text) < 18:
            return int(token.text)
        example = {"size": "10MB", "blocks": "64"}.get(field, "6h")
        self._refuse(token.at, f"{field!r} is compared with a value such as {example}, not {_shown(token)}")

    def _action(self, verbs: Sequence[str]) -> Action:
        verb = self._word(verbs)
        self._word((PREPOSITIONS[verb],))
        targets = [self._target(verb)]
        while verb == "write" and self._next.text == "," and self._next.kind == "sign":
            self._take()
            targets.append(self._target(verb))
        return Action(verb, tuple(targets))  # type: ignore[arg-type] # it is one of the verbs

    def _target(self, verb: str) -> Target:
        token = self._take()
        self._known(token, TIERS)
        if verb != "write" or self._next.kind != "word":
            return Target(token.text)
        return Target(token.text, behind=self._word(("through", "behind")) == "behind")

    def _word(self, known: Sequence[str]) -> str:
        token = self._take()
        self._known(token, known)
        return token.text

    def _known(self, token: _Token, known: Sequence[str]) -> None:
        if token.kind not in ("word", "text") or token.text not in known or (token.kind == "text" and known != TIERS):
            self._place -= 1
            self._expected(known)

    def _expected(self, known: Sequence[str]) -> NoReturn:
        token = self._next
        near = get_close_matches(token.text, known, n=1) if token.kind == "word" else []
        wanted = repr(known[0]) if len(known) == 1 else "one of " + ", ".join(known)
        self._refuse(token.at, f"{wanted} is needed, not {_shown(token)}" + (f"; did you mean {near[0]!r}?" if near else ""))

    @property
    def _next(self) -> _Token:
        return self._tokens[self._place]

    def _is(self, word: str) -> bool:
        return self._next.kind == "word" and self._next.text == word

    def _take(self) -> _Token:
        token = self._next
        self._place += 1
        if token.kind == "end":
            self._tokens.append(token)  # so that there is always a next one
        return token

    def _split(self) -> list[_Token]:
        self._asked: list[tuple[_Token, str]] = []
        tokens, at = [], 0
        text = self._text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            assert found is not None
            begins = found.start(found.lastindex or 0)
            match found.lastindex:
                case 1:
                    tokens.append(_Token("text", re.sub(r"\\(.)", r"\1", found[1][1:-1], flags=re.DOTALL), begins))
                case 2:
                    tokens.append(_Token("sign", found[2], begins))
                case 3:
                    tokens.append(_Token("word", found[3], begins))
                case _ if found[4] == '"':
                    self._refuse(begins, 'the quotation mark is not closed; write another "')
                case _:
                    self._refuse(begins, f"{found[4]!r} means nothing in a rule; leave it out")
            at = found.end()
        return [*tokens, _Token("end", "", len(text))]

    def _refuse(self, at: int, why: str) -> NoReturn:
        raise ConfigError(f"character {at + 1}: {why}", at=at, text=self._text)


def _shown(token: _Token) -> str:
    return "the end" if token.kind == "end" else repr(token.text)
