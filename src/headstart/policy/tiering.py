"""Which extents move between tiers, and which tiers a save goes to: rules, and what follows from them. Pure.

    when class = "agent" and idle > 6h then move to pool

Rules are tried in their order, and the first that applies to an extent where it lies counts. A copy takes nothing away, so
rules behind it are tried too. Rules of the form "write to" are for saves alone, tried in their own order. Without any rule
nothing moves, and a save goes to every tier. Their text is read by `policy.rule_text`; a rule made in Python may have any
function from `Facts` to flags as its condition.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headstart.errors import ConfigError

TIERS = ("memory", "disk", "pool", "object")  # that rules may name, fastest first
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


@dataclass(frozen=True, slots=True)
class Words:
    """A column of words of which few differ: extent i has `names[numbers[i]]`."""

    numbers: Numbers
    names: Sequence[str]

    @classmethod
    def of(cls, words: Sequence[str]) -> Words:
        names = list(dict.fromkeys(words))
        place = {name: number for number, name in enumerate(names)}
        return cls(np.array([place[word] for word in words], np.int64), names)

    def equal(self, word: str) -> Flags:
        there = [number for number, name in enumerate(self.names) if name == word]
        return np.isin(self.numbers, there)

    def __getitem__(self, place: int) -> str:
        return self.names[int(self.numbers[place])]


@dataclass(frozen=True, slots=True)
class Facts:
    """What rules may ask of extents that lie in one tier, in columns. `idle_ms`: since the last use; `age_ms`: since they were
    written first."""

    tier: str
    retention: Words
    tenant: Words
    idle_ms: Numbers
    age_ms: Numbers
    nbytes: Numbers
    blocks: Numbers

    def __len__(self) -> int:
        return len(self.nbytes)

    @classmethod
    def of_save(cls, *, retention: str, tenant: str) -> Facts:
        """Return what is known of a prompt that is about to be saved."""
        nothing = np.zeros(1, np.int64)
        return cls("", Words(nothing, [retention]), Words(nothing, [tenant]), nothing, nothing, nothing, nothing)


Condition = Callable[[Facts], Flags]

_COLUMNS: dict[str, Callable[[Facts], Numbers]] = {
    "idle": lambda facts: facts.idle_ms,
    "age": lambda facts: facts.age_ms,
    "size": lambda facts: facts.nbytes,
    "blocks": lambda facts: facts.blocks,
}
_WORDS: dict[str, Callable[[Facts], Words]] = {
    "class": lambda facts: facts.retention,
    "tenant": lambda facts: facts.tenant,
}
FIELDS = (*_WORDS, "tier", *_COLUMNS)
OF_SAVES = tuple(_WORDS)  # what is known while something is saved
NOT_TO_DROP = ("age", "size", "blocks")  # by which the beginning of a prefix would go before what continues it
_UNITS = {
    "idle": (("w", 604_800_000), ("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000)),
    "size": (("GiB", 1 << 30), ("GB", 10**9), ("MiB", 1 << 20), ("MB", 10**6), ("KiB", 1 << 10), ("kB", 1000)),
}
_UNITS["age"] = _UNITS["idle"]


@dataclass(frozen=True, slots=True)
class Compare:
    """`field` of `FIELDS` against a value: a word for class, tenant and tier (with = and != alone), else a number, of
    milliseconds for idle and age, of bytes for size."""

    field: str
    operator: str
    value: str | int

    def __call__(self, facts: Facts) -> Flags:
        if self.field in _COLUMNS:
            compared: Flags = COMPARE[self.operator](_COLUMNS[self.field](facts), self.value)
            return compared
        word = str(self.value)
        found = np.full(len(facts), facts.tier == word) if self.field == "tier" else _WORDS[self.field](facts).equal(word)
        return found if self.operator == "=" else ~found

    def asked(self, facts: Facts, place: int) -> str:
        """Return the value that an extent has, as rules write it."""
        if self.field in _COLUMNS:
            return written(self.field, int(_COLUMNS[self.field](facts)[place]), exactly=False)
        return quoted(facts.tier if self.field == "tier" else _WORDS[self.field](facts)[place])

    def __str__(self) -> str:
        value = self.value
        return f"{self.field} {self.operator} {written(self.field, value) if isinstance(value, int) else quoted(value)}"


@dataclass(frozen=True, slots=True)
class Not:
    inner: Condition

    def __call__(self, facts: Facts) -> Flags:
        return ~self.inner(facts)

    def __str__(self) -> str:
        return f"not {_within(self.inner)}"


@dataclass(frozen=True, slots=True)
class Every:
    """Holds where all parts do: "and"."""

    parts: tuple[Condition, ...]

    def __call__(self, facts: Facts) -> Flags:
        found: Flags = np.logical_and.reduce([part(facts) for part in self.parts])
        return found

    def __str__(self) -> str:
        return " and ".join(map(_within, self.parts))


@dataclass(frozen=True, slots=True)
class Some:
    """Holds where one part does: "or"."""

    parts: tuple[Condition, ...]

    def __call__(self, facts: Facts) -> Flags:
        found: Flags = np.logical_or.reduce([part(facts) for part in self.parts])
        return found

    def __str__(self) -> str:
        return " or ".join(map(_within, self.parts))


@dataclass(frozen=True, slots=True)
class Target:
    """A tier that a save goes to: `behind`, it is brought there later by what moves extents, and no save waits for it."""

    tier: str
    behind: bool = False

    def __str__(self) -> str:
        return f"{self.tier} behind" if self.behind else self.tier


@dataclass(frozen=True, slots=True)
class Action:
    """`move` to a slower tier, `copy` to one, `keep` in a tier (no later rule moves or drops what lies there), `drop` from a
    tier, or `write`: which tiers saves go to."""

    verb: Literal["move", "copy", "keep", "drop", "write"]
    targets: tuple[Target, ...]

    @property
    def tier(self) -> str:
        return self.targets[0].tier

    def __str__(self) -> str:
        return f"{self.verb} {PREPOSITIONS[self.verb]} {', '.join(map(str, self.targets))}"


PREPOSITIONS = {"move": "to", "copy": "to", "keep": "in", "drop": "from", "write": "to"}


@dataclass(frozen=True, slots=True)
class Rule:
    """`when` None: always."""

    action: Action
    when: Condition | None = None

    def __str__(self) -> str:
        return str(self.action) if self.when is None else f"when {_named(self.when)} then {self.action}"

    def holds(self, facts: Facts) -> Flags:
        return np.ones(len(facts), np.bool_) if self.when is None else np.asarray(self.when(facts), np.bool_)

    def acts_on(self, tier: str, tiers: Sequence[str]) -> bool:
        """Whether the rule is about what lies in `tier`, where there are `tiers`, fastest first."""
        action = self.action
        if action.verb in ("keep", "drop"):
            return action.tier == tier
        return action.verb != "write" and action.tier in tiers and tiers.index(tier) < tiers.index(action.tier)


@dataclass(frozen=True, slots=True)
class Copy:
    """Extents that are to be in `tier` as well, by rule number `rule`."""

    rule: int
    tier: str
    which: Flags


@dataclass(frozen=True, slots=True)
class Decided:
    """`rule[i]`: the number of the rule that moves, drops or keeps extent i, or -1. `copies` come before that."""

    rule: Numbers
    copies: list[Copy]


@dataclass(frozen=True, slots=True)
class Route:
    """Which tiers a save goes to now, and which later."""

    through: tuple[str, ...]
    behind: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules in the order in which they are tried.

    >>> from headstart.policy.rule_text import parse_rules
    >>> policy = parse_rules(['when class = "agent" then write to disk, pool behind', "when idle > 6h then move to pool"])
    >>> policy.route(retention="agent", tenant="", tiers=("memory", "disk", "pool"))
    Route(through=('disk',), behind=('pool',))
    """

    rules: tuple[Rule, ...] = ()
    texts: tuple[str, ...] = field(default=(), compare=False)  # as they were written, where they were

    @property
    def writes_behind(self) -> bool:
        """Whether a rule has saves brought to a tier later."""
        return any(target.behind for rule in self.rules for target in rule.action.targets)

    @property
    def moves(self) -> bool:
        """Whether a rule is about more than where saves go at once."""
        return self.writes_behind or any(rule.action.verb != "write" for rule in self.rules)

    def concerns(self, tier: str, tiers: Sequence[str]) -> bool:
        """Whether a rule may move, copy or drop what lies in a tier, where there are `tiers`."""
        return any(rule.acts_on(tier, tiers) for rule in self.rules) or any(
            name in tiers and tiers.index(tier) < tiers.index(name)
            for _, rule in self._writing(tiers)
            for name in _route_of(rule, tiers).behind
        )

    def decide(self, facts: Facts, tiers: Sequence[str]) -> Decided:
        """Say what is to become of extents in one tier, where there are `tiers`, fastest first."""
        chosen = np.full(len(facts), -1, np.int64)
        copies = self._behind(facts, tiers)
        for number, rule in enumerate(self.rules):
            if not rule.acts_on(facts.tier, tiers):
                continue
            which = rule.holds(facts) & (chosen < 0)
            if rule.action.verb == "copy":
                copies.append(Copy(number, rule.action.tier, which))
            else:
                chosen[which] = number
        return Decided(chosen, copies)

    def route(self, *, retention: str, tenant: str, tiers: Sequence[str]) -> Route:
        """Say where a save goes, where there are `tiers`: everywhere, if no rule with a tier that is there says otherwise."""
        facts = Facts.of_save(retention=retention, tenant=tenant)
        for _, rule in self._writing(tiers):
            if rule.holds(facts)[0]:
                return _route_of(rule, tiers)
        return Route(tuple(tiers), ())

    def without_effect(self, tiers: Sequence[str]) -> list[tuple[int, str]]:
        """Return the rules that do nothing where there are these tiers: number and reason."""
        found = []
        always: dict[str, int] = {}  # tier → the rule without a condition that decides all in it
        for number, rule in enumerate(self.rules):
            verb, missing = rule.action.verb, [one.tier for one in rule.action.targets if one.tier not in tiers]
            about = [tier for tier in tiers if rule.acts_on(tier, tiers)] if verb != "write" else ["a save"]
            if missing and (verb != "write" or number not in dict(self._writing(tiers))):
                found.append((number, f"there is no tier {missing[0]!r}"))
            elif not about:
                found.append((number, f"no tier is faster than {rule.action.tier!r}"))
            elif all(tier in always for tier in about):
                found.append((number, f"rule {always[about[0]] + 1} comes before it and always applies"))
            elif rule.when is None and verb != "copy":
                always |= {tier: always.get(tier, number) for tier in about}
        return found

    def _behind(self, facts: Facts, tiers: Sequence[str]) -> list[Copy]:
        copies, left = [], np.ones(len(facts), np.bool_)
        for number, rule in self._writing(tiers):
            which = rule.holds(facts) & left
            left &= ~which
            for tier in _route_of(rule, tiers).behind:
                if tiers.index(facts.tier) < tiers.index(tier):
                    copies.append(Copy(number, tier, which))
        return copies

    def _writing(self, tiers: Sequence[str]) -> list[tuple[int, Rule]]:
        """Return the rules for saves that leave a tier to write to at once."""
        return [
            (number, rule)
            for number, rule in enumerate(self.rules)
            if rule.action.verb == "write" and _route_of(rule, tiers).through
        ]


def _route_of(rule: Rule, tiers: Sequence[str]) -> Route:
    named = {target.tier: target.behind for target in rule.action.targets}
    there = [tier for tier in tiers if tier in named]
    return Route(tuple(tier for tier in there if not named[tier]), tuple(tier for tier in there if named[tier]))


@dataclass(frozen=True, slots=True)
class Explained:
    """One comparison of a rule: its text, what the extent has, and whether it holds."""

    text: str
    value: str
    holds: bool


def explained(condition: Condition | None, facts: Facts, place: int) -> list[Explained]:
    """Return every comparison of a condition for one extent, in the order in which they are written."""
    match condition:
        case None:
            return []
        case Compare():
            return [Explained(str(condition), condition.asked(facts, place), bool(condition(facts)[place]))]
        case Not(inner):
            return explained(inner, facts, place)
        case Every(parts) | Some(parts):
            return [one for part in parts for one in explained(part, facts, place)]
        case _:
            return [Explained(_named(condition), "", bool(np.asarray(condition(facts))[place]))]


def require_rule(rule: Rule) -> None:
    """Raise ConfigError for a rule that can never mean anything: one that moves to the fastest tier, or writes to nothing at
    once, or twice to one tier."""
    action, names = rule.action, [target.tier for target in rule.action.targets]
    if action.verb in ("move", "copy") and action.tier == TIERS[0]:
        raise ConfigError(f"blocks come to {TIERS[0]!r} by being used; name a slower tier", word=action.tier)
    for number, name in enumerate(names):
        if name in names[:number]:
            raise ConfigError(f"{name!r} is named twice; name it once", word=name)
    if action.verb == "write" and all(target.behind for target in action.targets):
        raise ConfigError("there must be a tier that is not written behind; name one more, as in 'disk, pool behind'")


def written(field: str, value: int, *, exactly: bool = True) -> str:
    """Return a number as rules write it, with the largest unit that divides it; where not `exactly`, rounded.

    >>> written("idle", 21_600_000), written("size", 2_000_000), written("idle", 5_580_000, exactly=False)
    ('6h', '2MB', '1.55h')
    """
    for unit, size in _UNITS.get(field, ()):
        if value and (value % size == 0 if exactly else value >= size):
            return f"{value / size:.{16 if exactly else 3}g}{unit}"
    if field in ("idle", "age"):  # below a second
        return f"{value / 1000:g}s" if exactly else f"{value // 1000}s"
    return str(value)


def quoted(word: str) -> str:
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _within(condition: Condition) -> str:
    text = _named(condition)
    return f"({text})" if isinstance(condition, (Every, Some, Not)) else text


def _named(condition: Condition) -> str:
    if isinstance(condition, (Compare, Not, Every, Some)):
        return str(condition)
    return f"<{getattr(condition, '__name__', type(condition).__name__)}>"
