"""What is counted of a log: tokens and requests by cause, by place, by whose they were. Values, and how they add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headstart.diagnose.causes import FIXES, Cause
from headstart.diagnose.comparing import Break, Lost
from headstart.diagnose.entries import Entry

GROUPS = 2000  # of each kind that are told apart
OTHERS = "(others)"
_EXAMPLES = 3
_SAMPLES = 160


@dataclass(slots=True)
class Tally:
    """Requests with their tokens: `kept` are found again by an ideal cache, `lost` would be with every cause mended, `held` are
    found again by a cache of the capacity asked for."""

    requests: int = 0
    tokens: int = 0
    kept: int = 0
    lost: int = 0
    held: int | None = None

    def add(self, tokens: int, kept: int, lost: int, held: int | None) -> None:
        self.requests += 1
        self.tokens += tokens
        self.kept += kept
        self.lost += lost
        if held is not None:
            self.held = (self.held or 0) + held

    @property
    def unique(self) -> int:
        """Tokens that no earlier prompt had."""
        return max(0, self.tokens - self.kept - self.lost)

    def share(self, tokens: int) -> float:
        return tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Example:
    """Two requests by their ids, with the exact place; `evidence` may quote what stands there."""

    a: str
    b: str
    path: str
    evidence: str


@dataclass(slots=True)
class Finding:
    """One cause at one kind of place. Counts are estimates where differences were judged in part only."""

    cause: Cause
    place: str
    requests: int = 0
    tokens: int = 0
    by: dict[str, dict[str, int]] = field(default_factory=dict)  # kind of group → name → tokens
    examples: list[Example] = field(default_factory=list)

    @property
    def fix(self) -> str:
        return FIXES[self.cause]


class Findings:
    def __init__(self) -> None:
        self._found: dict[tuple[Cause, str], Finding] = {}

    def add(self, entry: Entry, parted: Break, lost: int, weight: int) -> None:
        """Count a break that loses `lost` tokens: each of its causes by its own part."""
        left = lost
        for one in parted.causes:
            tokens = min(left, one.tokens)
            left -= tokens
            if tokens:
                self._add(entry, parted, one, tokens, weight)

    def _add(self, entry: Entry, parted: Break, one: Lost, tokens: int, weight: int) -> None:
        finding = self._found.setdefault((one.cause, one.place), Finding(one.cause, one.place))
        finding.requests += weight
        finding.tokens += tokens * weight
        for kind, name in names_of_groups(entry):
            by = finding.by.setdefault(kind, {})
            name = name if name in by or len(by) < GROUPS else OTHERS
            by[name] = by.get(name, 0) + tokens * weight
        if len(finding.examples) < _EXAMPLES:
            finding.examples.append(Example(parted.a, parted.b, one.path, one.evidence))

    def sorted(self) -> tuple[Finding, ...]:
        return tuple(sorted(self._found.values(), key=lambda one: (-one.tokens, one.cause, one.place)))


def names_of_groups(entry: Entry) -> Iterator[tuple[str, str]]:
    if entry.tenant is not None:
        yield "tenant", entry.tenant
    if entry.session is not None:
        yield "session", entry.session
    for tag in entry.tags:
        yield "tag", tag


class Groups:
    """Tallies of tenants, sessions and tags; what comes behind the first `GROUPS` of a kind is counted together."""

    def __init__(self) -> None:
        self._by: dict[str, dict[str, Tally]] = {}

    def of(self, entry: Entry) -> list[Tally]:
        found = []
        for kind, name in names_of_groups(entry):
            by = self._by.setdefault(kind, {})
            name = name if name in by or len(by) < GROUPS else OTHERS
            found.append(by.setdefault(name, Tally()))
        return found

    def sorted(self) -> dict[str, list[tuple[str, Tally]]]:
        """Return for each kind its groups, those that lose most first."""
        order = ("tenant", "session", "tag")
        kinds = sorted(self._by, key=order.index)
        return {kind: sorted(self._by[kind].items(), key=lambda one: (-one[1].lost, -one[1].tokens, one[0])) for kind in kinds}


@dataclass(slots=True)
class Logged:
    """What a server had counted as cached, against what an ideal cache finds, over the requests whose log says so. `short` are
    those where the server found at least a block less; `rules` the provider's rules that explain it."""

    requests: int = 0
    tokens: int = 0
    cached: int = 0
    predicted: int = 0
    equal: int = 0
    short: int = 0
    more: int = 0
    short_tokens: int = 0
    rules: dict[Cause, int] = field(default_factory=dict)

    def add(self, tokens: int, cached: int, predicted: int, rule: Cause | None) -> None:
        self.requests += 1
        self.tokens += tokens
        self.cached += cached
        self.predicted += predicted
        self.equal += cached == predicted
        if cached + 64 <= predicted:
            self.short += 1
            self.short_tokens += predicted - cached
            if rule is not None:
                self.rules[rule] = self.rules.get(rule, 0) + 1
        elif cached > predicted:
            self.more += 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One request of the picture."""

    id: str
    tokens: int
    kept: int
    lost: int
    cause: Cause | None


class Sampled:
    """Requests spread evenly over a log whose length is not known before."""

    def __init__(self) -> None:
        self._taken: list[Sample] = []
        self._every = 1
        self._seen = 0

    def add(self, sample: Sample) -> None:
        if self._seen % self._every == 0:
            self._taken.append(sample)
        self._seen += 1
        if len(self._taken) > _SAMPLES:
            self._taken = self._taken[::2]
            self._every *= 2

    def taken(self) -> tuple[Sample, ...]:
        return tuple(self._taken)


class Lru:
    """The blocks that a cache of `capacity` blocks would hold, least recently used out, tails before heads."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._held: dict[int, None] = {}

    def touch(self, chain: Sequence[int]) -> int:
        """Return how many blocks `chain` begins with are held."""
        return next((n for n, name in enumerate(chain) if name not in self._held), len(chain))

    def put(self, chain: Sequence[int]) -> None:
        for name in reversed(chain[: self._capacity]):
            self._held.pop(name, None)
            self._held[name] = None
        while len(self._held) > self._capacity:
            del self._held[next(iter(self._held))]


@dataclass(frozen=True, slots=True)
class Lint:
    """What was found in a log. `breaks` prompts had more in common with an earlier one than they found again; `judged` of
    these were compared. Of `canonical` requests something was left out before, as a server of ours does."""

    all: Tally
    exact: bool
    unread: int
    unread_such_as: tuple[str, ...]
    breaks: int
    judged: int
    findings: tuple[Finding, ...]
    groups: Mapping[str, list[tuple[str, Tally]]]
    logged: Logged | None
    capacity_tokens: int | None
    samples: tuple[Sample, ...]
    canonical: int = 0
