"""A whole log: what of it an ideal cache would find again, and what keeps the rest from being found. Reads through it once.

Of every prompt the longest beginning that any earlier one had is found again, in whole blocks. If an earlier prompt has more of
its text than that, somewhere behind a difference, the two are compared like `diff` compares them, and what stands behind the
difference is lost by its cause. What no earlier prompt has is unique: no cache could have it.

    prompt   ▓▓▓▓▓▓▓▓▓▓ x ░░░░░░░░░░░░░░░ ▁▁▁▁▁▁▁
             found again  lost, by cause  unique

Differences beyond `judged` are judged one in two, then one in four …, each standing for as many; `Lint.judged` says how many
were. Held are names of blocks and pieces, some tens of bytes each, and places in the log; no text.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.causes import Cause
from headstart.diagnose.comparing import Break, compare_prints, compare_sources
from headstart.diagnose.entries import Entry
from headstart.diagnose.known import NOBODY, Known, Names
from headstart.diagnose.logs import Found, Locator, Log, Unread
from headstart.diagnose.prints import TENANT, Print, data_of, print_of, with_answer
from headstart.diagnose.providers import Times, rules
from headstart.diagnose.reading import Reading
from headstart.diagnose.tallies import Finding, Findings, Groups, Lint, Logged, Lru, Sample, Sampled, Tally
from headstart.errors import RequestError

JUDGED = 2000  # differences of which each is compared
_SEGMENTS = 8_000_000  # names of pieces and lines that are remembered
_RECENT = 2048  # prompts of which all names are at hand
_SESSIONS = 100_000
_ASKED = 4  # earlier prompts of which all names are compared
_SLACK_CHARS = 96  # of text in common that a prompt did not find again, from where on it is compared
_WHYS = 5


@dataclass(slots=True)
class _Seen:
    """What is kept of every prompt, in arrays: where it is, and when."""

    files: array[int] = field(default_factory=lambda: array("I"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    lengths: array[int] = field(default_factory=lambda: array("I"))
    numbers: array[int] = field(default_factory=lambda: array("I"))
    turns: array[int] = field(default_factory=lambda: array("I"))
    groups: array[int] = field(default_factory=lambda: array("q"))
    begins: array[float] = field(default_factory=lambda: array("d"))
    ends: array[float] = field(default_factory=lambda: array("d"))

    def add(self, locator: Locator, entry: Entry, group: int) -> int:
        self.files.append(locator.file)
        self.offsets.append(locator.offset)
        self.lengths.append(locator.length)
        self.numbers.append(locator.number)
        self.turns.append(locator.turn)
        self.groups.append(group)
        self.begins.append(float("nan") if entry.at is None else entry.at)
        self.ends.append(float("nan") if entry.end is None else entry.end)
        return len(self.files) - 1

    def locator(self, number: int) -> Locator:
        arrays = (self.files, self.offsets, self.lengths, self.numbers, self.turns)
        return Locator(*(array[number] for array in arrays))

    def times(self, number: int, entry: Entry) -> Times:
        begin, end = self.begins[number], self.ends[number]
        return Times(None if begin != begin else begin, None if end != end else end, entry.at)


class Linter:
    """`add` every request of `log` in order, then ask for the `result`. A `reading` with a renderer makes token counts exact;
    `capacity_tokens` asks what a cache of that size, least recently used out, would find."""

    def __init__(self, log: Log, reading: Reading, *, capacity_tokens: int | None = None, judged: int = JUDGED) -> None:
        self._log = log
        self._reading = reading
        self._blocks = Known()
        self._segments = Known(_SEGMENTS)
        self._seen = _Seen()
        self._recent: OrderedDict[int, Names] = OrderedDict()  # sorted
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._lru = None if capacity_tokens is None else Lru(capacity_tokens // BLOCK_TOKENS)
        self._capacity_tokens = capacity_tokens
        self._limit = judged
        self._every = 1  # one difference in so many is judged
        self._breaks = 0
        self._judged = 0
        self._all = Tally()
        self._groups = Groups()
        self._findings = Findings()
        self._logged = Logged()
        self._samples = Sampled()
        self._unread = 0
        self._whys: dict[str, str] = {}
        self._inexact = 0
        self._canonical = 0

    def add(self, found: Found) -> None:
        """Take one more request, or place without one."""
        entry = found.entry
        if isinstance(entry, Unread):
            self._not_read(entry)
            return
        try:
            printed, content = self._printed(entry)
        except RequestError as error:
            self._not_read(Unread(entry.id, error.message))
            return
        if not printed.tokens:
            self._not_read(Unread(entry.id, "its prompt is empty"))
            return
        self._inexact += not printed.exact
        blocks = self._blocks.longest(printed.chain)
        kept = printed.kept(blocks)
        held = None if self._lru is None else printed.kept(self._lru.touch(printed.chain.tolist()))
        nearest = self._nearest(printed, entry, kept)
        lost, weight, parted = 0, 1, None
        if nearest is not None:
            lost, weight, parted = self._judge(entry, printed, nearest, kept)
        self._count(entry, printed, kept, lost, weight, parted, held)
        if entry.usage.cached_tokens is not None:
            owner = int(self._blocks.owners(printed.chain[blocks - 1 : blocks])[0]) if blocks else None
            self._count_logged(entry, printed, kept, owner)
        self._remember(found.locator, entry, printed, content)

    def result(self) -> Lint:
        """Return what is known of all that was added."""
        return Lint(
            all=self._all,
            exact=not self._inexact,
            unread=self._unread,
            unread_such_as=tuple(self._whys.values()),
            breaks=self._breaks,
            judged=self._judged,
            findings=self._findings.sorted(),
            groups=self._groups.sorted(),
            logged=self._logged if self._logged.requests else None,
            capacity_tokens=self._capacity_tokens,
            samples=self._samples.taken(),
            canonical=self._canonical,
        )

    def _printed(self, entry: Entry) -> tuple[Print, bytes]:
        if entry.kept is not None:
            return self._reading.kept(entry), b""
        conversation = self._reading.conversation(entry)
        self._canonical += bool(conversation.acted)
        data = data_of(conversation, self._reading.renderer)
        return print_of(conversation, data), data.content

    def _nearest(self, printed: Print, entry: Entry, kept: int) -> int | None:
        """Return the earlier prompt that has most of this one's text; None where it has none behind what is found again."""
        votes: dict[int, int] = {}
        owners = self._segments.owners(printed.segments)
        for owner, weight in zip(owners.tolist(), printed.weights.tolist(), strict=True):
            if owner != NOBODY:
                votes[owner] = votes.get(owner, 0) + weight
        before = self._sessions.get(entry.session) if entry.session is not None else None
        # Nothing of one model or tenant is of use to another, so only a session that has changed its own is told of that.
        group = _group(printed)
        votes = {owner: weight for owner, weight in votes.items() if self._seen.groups[owner] == group}
        asked = sorted(votes, key=lambda owner: (-votes[owner], -owner))[:_ASKED]
        if before is not None and before not in asked:
            asked.append(before)
        if not asked:
            return None
        behind = printed.ends > kept

        def shared(owner: int) -> tuple[int, int]:
            """Weigh what is shared in all, and behind what is found again."""
            mine = self._recent.get(owner)
            # Of one that is too old only what nobody has had since is known to be its own.
            has = owners == owner if mine is None else _inside(printed.segments, mine)
            return int(printed.weights[has].sum()), int(printed.weights[has & behind].sum())

        weighed = {owner: shared(owner) for owner in asked}
        best = max(asked, key=lambda owner: (weighed[owner], owner == before, owner))
        return best if weighed[best][1] > _SLACK_CHARS else None

    def _judge(self, entry: Entry, printed: Print, nearest: int, kept: int) -> tuple[int, int, Break | None]:
        """Compare with an earlier prompt. Return tokens lost, for how many requests this stands, and what is the matter."""
        self._breaks += 1
        if self._breaks % self._every:
            return 0, 0, None
        weight = self._every
        self._judged += 1
        if self._judged % self._limit == 0:
            self._every *= 2
        other = self._log.read(self._seen.locator(nearest))
        if entry.kept is not None or other.kept is not None:
            both = entry.kept is not None and other.kept is not None
            parted = compare_prints(other, entry, self._reading) if both else None
        else:
            parted = compare_sources(other, entry, self._reading)
        if parted is None:
            return 0, weight, None
        # What any prompt gives is not lost, be it another one than the one that is compared with.
        lost = min(sum(cause.tokens for cause in parted.causes), max(0, printed.tokens - kept))
        return (lost, weight, parted) if lost >= BLOCK_TOKENS else (0, weight, None)

    def _count(
        self, entry: Entry, printed: Print, kept: int, lost: int, weight: int, parted: Break | None, held: int | None
    ) -> None:
        for tally in (self._all, *self._groups.of(entry)):
            tally.add(printed.tokens, kept, lost * weight, held)
        if parted is not None:
            self._findings.add(entry, parted, lost, weight)
        main = parted.causes[0].cause if parted is not None else None
        self._samples.add(Sample(entry.id, printed.tokens, kept, lost, main))

    def _count_logged(self, entry: Entry, printed: Print, kept: int, owner: int | None) -> None:
        usage = entry.usage
        assert usage.cached_tokens is not None
        prompt = printed.tokens if usage.prompt_tokens is None else usage.prompt_tokens
        scaled = kept * prompt // printed.tokens  # its tokens are not ours, or ours are estimates
        cause = None
        if usage.cached_tokens + BLOCK_TOKENS <= scaled and entry.source is not None and owner is not None:
            before = self._log.read(self._seen.locator(owner)).source if self._logged.short < self._limit else None
            times = self._seen.times(owner, entry)
            body = None if before is None else before.body
            cause = next((one.cause for one in rules(entry.source.body, tokens=prompt, times=times, a=body)), None)
        self._logged.add(prompt, usage.cached_tokens, scaled, cause)

    def _remember(self, locator: Locator, entry: Entry, printed: Print, content: bytes) -> None:
        number = self._seen.add(locator, entry, _group(printed))
        self._blocks.put(printed.chain, number)
        if self._lru is not None:
            self._lru.put(printed.chain.tolist())
        longer = None
        if content and entry.answer:
            longer = with_answer(entry.answer, content, self._reading.renderer, cut=entry.cut)
        if longer is not None:
            answered = printed.longer(longer)
            self._blocks.put(answered, number)
            if self._lru is not None:
                self._lru.put(answered.tolist())
        self._segments.put(printed.segments, number)
        self._recent[number] = np.sort(printed.segments)
        if len(self._recent) > _RECENT:
            self._recent.popitem(last=False)
        if entry.session is not None:
            self._sessions[entry.session] = number
            self._sessions.move_to_end(entry.session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)

    def _not_read(self, unread: Unread) -> None:
        self._unread += 1
        if len(self._whys) < _WHYS:
            self._whys.setdefault(unread.why, f"{unread.name}: {unread.why}")


def _group(printed: Print) -> int:
    """Return a name for those that may share, as far as a log is searched for them."""
    return hash((printed.apart.get("model", ""), printed.apart.get(TENANT)))


def _inside(names: Names, sorted_names: Names) -> npt.NDArray[np.bool_]:
    """Return which of `names` are there."""
    if not len(sorted_names):
        return np.zeros(len(names), bool)
    at = np.minimum(np.searchsorted(sorted_names, names), len(sorted_names) - 1)
    found: npt.NDArray[np.bool_] = sorted_names[at] == names
    return found


def fails(lint: Lint, limits: Mapping[str, float]) -> list[str]:
    """Return which limits a log breaks, as sentences. A limit is the share of all tokens that may be lost by a cause, or by
    "any", or the least "rate" that an ideal cache must reach."""
    tokens = max(1, lint.all.tokens)
    broken = []
    for name, limit in limits.items():
        if name == "rate":
            share = lint.all.kept / tokens
            if share < limit:
                broken.append(f"an ideal cache finds {share:.1%} of the tokens again, and {limit:.1%} are asked for")
            continue
        lost = lint.all.lost if name == "any" else sum(one.tokens for one in lint.findings if one.cause == name)
        if lost / tokens > limit or (limit == 0 and lost):
            broken.append(
                f"{lost / tokens:.1%} of the tokens are lost{'' if name == 'any' else f' by {name}'}, and {limit:.1%} may be"
            )
    return broken


__all__ = ["JUDGED", "Cause", "Finding", "Lint", "Linter", "fails"]
