"""Why a served prompt was not found: against the nearest earlier one, token by token or block by block. Pure.

prompt  ▓▓▓▓▓▓▓▓▓▓▓▓▓▓│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│░░░│ new
         reused        lost: the earlier     ╰ parted: another text from here on, or nothing came behind
         memory, disk  prompt had it, too; evicted, not yet written, cheaper to compute …
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BLOCK_TOKENS, KEY_BYTES, BlockKey
from headstart.cache.explaining import Absence, Fate
from headstart.diagnose.around import Around
from headstart.diagnose.causes import FIXES, Cause, Names, names_of
from headstart.diagnose.compare import Units, common
from headstart.diagnose.fingerprints import Fingerprints, changed, kept_apart
from headstart.diagnose.placing import side_of
from headstart.diagnose.report import report_of
from headstart.diagnose.requests import Conversation
from headstart.diagnose.show import when
from headstart.render import Renderer

_COMPARED = 256  # earlier prompts with as many equal blocks that are compared token by token
_CAUSES: dict[Absence, Cause] = {
    "evicted": Cause.EVICTED,
    "expired": Cause.EXPIRED,
    "corrupt": Cause.CORRUPT,
    "deleted": Cause.DELETED,
    "pending": Cause.PENDING,
    "full": Cause.FULL,
    "budget": Cause.BUDGET,
    "dropped": Cause.DROPPED,
    "other-representation": Cause.REPRESENTATION,
    "other-key": Cause.CHECK_KEY,
    "late": Cause.LATE,
    "unknown": Cause.UNKNOWN,
}
_BY = {
    "capacity": "room was needed for other prompts",
    "full": "the file system was full",
    "min-free": "cache.min_free was to stay free for others",
    "quota": "its tenant was over its quota",
    "lost": "its file was gone",
    "policy": "a rule of cache.tiering drops it",
    "too-large": "it was too large for the tier",
    "budget": "today's writes were used up by prompts that are used more",
    "queue-full": "the queue of saves was full",
    "closed": "the server went down",
    "stopped": "nothing was stored just then",
    "error": "writing it failed",
    "no-tier": "there was no tier to write to",
}
FatesOf = Callable[[Sequence[BlockKey], float], list[Fate]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a prompt. Times in seconds since 1970: `matched_s`, when what was stored of it was looked up;
    `computed_s`, when all of it was there, None: never. `choice`: what was decided about `matched_tokens` (`LoadDecision`).
    `tiers_told` is False where the engine does not say what came from where; `notes` are its own sentences."""

    matched_s: float
    computed_s: float | None
    memory_tokens: int
    disk_tokens: int
    matched_tokens: int
    choice: str
    load_s: float | None = None
    compute_s: float | None = None
    tiers_told: bool = True
    notes: tuple[str, ...] = ()

    @property
    def cached_tokens(self) -> int:
        return self.memory_tokens + self.disk_tokens


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt as it is remembered. `names`: a chain over the blocks of prompt and answer, whatever keeps them apart; `keys`:
    those by which the prompt's blocks are stored, joined. `ids`: of prompt and answer, where they are kept. `keep_tokens`: so
    many were to be kept at most, None: all; 0: nothing was looked for either."""

    id: str
    asked_s: float
    session: str
    prompt_tokens: int
    names: npt.NDArray[np.uint64]
    keys: bytes
    prints: Fingerprints
    ids: Units | None = None
    tokens: int = 0  # of prompt and answer
    keep_tokens: int | None = None
    outcome: Outcome | None = None

    @property
    def nbytes(self) -> int:
        ids = 0 if self.ids is None else self.ids.nbytes
        return self.names.nbytes + len(self.keys) + ids + 128 * (len(self.prints.messages) + 8)

    def keys_from(self, first: int, end: int) -> list[BlockKey]:
        """Return the keys of the blocks first … end-1."""
        return [BlockKey(self.keys[n * KEY_BYTES : (n + 1) * KEY_BYTES]) for n in range(first, end)]


@dataclass(frozen=True, slots=True)
class Lost:
    """`tokens` of the prompt that an earlier one had and that were computed all the same. `first`: where they begin, None where
    they do not lie in one piece."""

    cause: Cause
    tokens: int
    first: int | None
    evidence: str
    time_s: float | None = None

    @property
    def fix(self) -> str:
        return FIXES[self.cause]


@dataclass(frozen=True, slots=True)
class Parted:
    """Where the prompt leaves the earlier one, and why. `alike_tokens` stand in both behind it, None where only digests are
    kept; then `a` and `b`, the texts around it, are None, too."""

    token: int
    cause: Cause
    evidence: str
    path: str
    names: Names
    alike_tokens: int | None = None
    a: Around | None = None
    b: Around | None = None


@dataclass(frozen=True, slots=True)
class Why:
    """`common_tokens` with the earlier prompt and its answer: to the token where `exact`, else to the block."""

    asked: Asked
    before: Asked | None
    common_tokens: int
    exact: bool
    lost: tuple[Lost, ...]
    parted: Parted | None
    notes: tuple[str, ...]

    @property
    def new_tokens(self) -> int:
        assert self.asked.outcome is not None
        return self.asked.prompt_tokens - self.asked.outcome.cached_tokens - sum(one.tokens for one in self.lost)


def explain(
    asked: Asked,
    before: Sequence[Asked],
    *,
    fates: FatesOf | None,
    store: str = "",
    piece_tokens: int = BLOCK_TOKENS,
    renderer: Renderer | None = None,
    now_s: float,
) -> Why:
    """Return why of a prompt that has ended no more was reused. `before`: earlier ones of the same tenant, oldest first.
    `fates`: what the cache says of blocks, None where there is none to ask; `store` then says what there is."""
    assert asked.outcome is not None
    other, shared, exact = nearest(asked, before)
    notes: list[str] = []
    if asked.prompt_tokens <= BLOCK_TOKENS:
        notes.append(f"{Cause.SHORT}: a prompt of {asked.prompt_tokens} tokens has no whole block of {BLOCK_TOKENS} to keep")
    if other is None:
        notes.append("no earlier prompt of this tenant that is remembered begins like it")
    lost = tuple(_lost(asked, other, shared, fates=fates, store=store, piece_tokens=piece_tokens, now_s=now_s))
    if sum(one.tokens for one in lost) + asked.outcome.cached_tokens > max(shared, asked.outcome.matched_tokens):
        notes.append("some of it was stored by a prompt that is not remembered: by another process, or too long ago")
    if asked.outcome.choice == "mixed":
        notes.append("its beginning was computed while its end was read")
    parted = None if other is None else _parted(asked, other, shared, renderer)
    if other is not None and not exact:
        notes.append("no token ids are kept (server.keep_prompts): compared block by block")
    return Why(asked, other, shared, exact, lost, parted, (*notes, *asked.outcome.notes))


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a provider's diagnostics say of a prompt against one that it names. `found`: whether that is remembered. `names`:
    of the miss, None for a hit. `reusable_tokens` of the earlier prompt, in whole blocks, could have been found; of those
    `missed_tokens` were not."""

    found: bool
    names: Names | None = None
    missed_tokens: int = 0
    reusable_tokens: int = 0


def diagnose(asked: Asked, other: Asked | None, *, cached_tokens: int, piece_tokens: int = BLOCK_TOKENS) -> Diagnosis:
    """Compare two requests by their fingerprints alone, once it is known how much was found."""
    if other is None:
        return Diagnosis(found=False)
    reusable = max(0, min(other.prompt_tokens, asked.prompt_tokens - 1)) // piece_tokens * piece_tokens
    missed = max(0, reusable - cached_tokens)
    if not missed:
        return Diagnosis(True, None, 0, reusable)
    apart = kept_apart(other.prints, asked.prints)
    if apart is None and common(asked.names, other.names) * BLOCK_TOKENS >= reusable:
        return Diagnosis(True, Names("unavailable", "unavailable"), missed, reusable)  # the same, and not there any more
    part = apart or changed(other.prints, asked.prints)
    if part is None:
        names = _names(Cause.OTHER, "", False)
    else:
        names = _names(part.cause, part.path, part.in_system)
        names = Names(part.openai or names.openai, names.anthropic)
    return Diagnosis(True, names, missed, reusable)


def nearest(asked: Asked, before: Sequence[Asked]) -> tuple[Asked | None, int, bool]:
    """Return the earlier prompt that begins most like `asked`, how many tokens they have in common, and whether that is exact;
    of equal ones the latest that may share with it. One of the same session where none begins like it."""
    blocks = {}
    for one in before:
        if len(one.names) and len(asked.names) and one.names[0] == asked.names[0]:
            blocks[one.id] = common(asked.names, one.names)
    most = max(blocks.values(), default=0)
    likely = [one for one in before if blocks.get(one.id, 0) == most][-_COMPARED:]
    counted = [(*_common(asked, one, most), one) for one in likely]
    ranked = [
        (tokens, one.prints.apart == asked.prints.apart, one.session == asked.session, place)
        for place, (tokens, _, one) in enumerate(counted)
    ]
    if not ranked:
        return None, 0, False
    best = max(ranked)
    tokens, exact, one = counted[best[3]]
    if not tokens and not (asked.session and one.session == asked.session):
        return None, 0, exact
    return one, tokens, exact


def _common(asked: Asked, other: Asked, blocks: int) -> tuple[int, bool]:
    if asked.ids is not None and other.ids is not None:
        return common(asked.ids[: asked.prompt_tokens], other.ids), True
    return min(blocks * BLOCK_TOKENS, asked.prompt_tokens), False


def _lost(
    asked: Asked, other: Asked | None, shared: int, *, fates: FatesOf | None, store: str, piece_tokens: int, now_s: float
) -> Iterator[Lost]:
    outcome = asked.outcome
    assert outcome is not None
    cached, matched = outcome.cached_tokens, outcome.matched_tokens
    if matched > cached:
        yield _unused(asked, outcome, fates, now_s)
    found = max(cached, matched)
    usable = max(0, asked.prompt_tokens - 1) // piece_tokens * piece_tokens
    reusable = 0 if other is None else min(usable, shared // piece_tokens * piece_tokens)
    if asked.keep_tokens == 0:
        if reusable > found:
            yield Lost(Cause.OFF, reusable - found, found, "the request asked for no caching, so nothing was looked for")
        return
    if other is not None and reusable > found and (apart := kept_apart(other.prints, asked.prints)) is not None:
        yield Lost(apart.cause, reusable - found, found, apart.evidence + ": the two may not share")
        return
    first, end, last = found // BLOCK_TOKENS, max(found, reusable) // BLOCK_TOKENS, usable // BLOCK_TOKENS
    ask = fates or (lambda keys, at_s: [Fate("unknown")] * len(keys))
    known = ask(asked.keys_from(first, last), outcome.matched_s)
    told = [_of_block(n, fate, other, outcome, store) for n, fate in enumerate(known[: end - first], first)]
    # What no remembered prompt had may have been stored all the same, by another process or long ago.
    more = list(takewhile(lambda fate: fate.absence != "unknown", known[end - first :]))
    told += [_told(fate) for fate in more[: len(more) // (piece_tokens // BLOCK_TOKENS) * (piece_tokens // BLOCK_TOKENS)]]
    at = found
    for (cause, evidence, time_s), some in groupby(told):
        tokens = len(list(some)) * BLOCK_TOKENS
        yield Lost(cause, tokens, at, evidence, time_s)
        at += tokens


def _of_block(n: int, fate: Fate, other: Asked | None, outcome: Outcome, store: str) -> tuple[Cause, str, float | None]:
    if fate.absence == "unknown" and other is not None:
        if other.keep_tokens is not None and (n + 1) * BLOCK_TOKENS > other.keep_tokens:
            return Cause.OFF, "the earlier request asked that it not be kept", None
        computed_s = None if other.outcome is None else other.outcome.computed_s
        if computed_s is None or computed_s > outcome.matched_s:
            return Cause.PENDING, "the earlier prompt was still being computed", None
        if store:
            return Cause.UNKNOWN, f"this server cannot tell what became of it; its cache: {store}", None
    return _told(fate)


def _told(fate: Fate) -> tuple[Cause, str, float | None]:
    return _CAUSES[fate.absence], _evidence(fate), fate.time_s


def _evidence(fate: Fate) -> str:
    by = _BY.get(fate.by, fate.by)
    because = f": {by}" if by else ""
    at = "" if fate.time_s is None else f" at {when(fate.time_s)}"
    place = f" from {fate.tier}" if fate.tier else ""
    return {
        "evicted": f"evicted{place}{at}{because}",
        "expired": f"removed{place}{at}, when it was as old as its class may grow",
        "deleted": f"removed{place}{at}, as {fate.by!r}",
        "corrupt": f"removed{place}{at}, because its bytes were not what was written",
        "pending": f"given to be saved{at}, and not written yet when it was looked for",
        "full": f"not written{at}" + (": there was no room, and nothing that could go" if fate.by == "full" else because),
        "budget": f"not written{at}{because}",
        "dropped": f"not written{at}{because}",
        "other-representation": f"in {fate.tier} only as another engine, dtype or shard wrote it",
        "other-key": f"in {fate.tier} only with checks that the keys here (cache.check_key_file) did not make",
        "late": f"in {fate.tier}, and not found in time",
        "unknown": "neither a save nor a removal of it is remembered",
    }[fate.absence]


def _unused(asked: Asked, outcome: Outcome, fates: FatesOf | None, now_s: float) -> Lost:
    """Return why what was found was not used."""
    cached, matched = outcome.cached_tokens, outcome.matched_tokens
    first = None if outcome.choice == "mixed" else cached
    if outcome.choice in ("compute", "mixed"):
        estimates = ""
        if outcome.load_s is not None and outcome.compute_s is not None:
            estimates = f": reading was estimated at {outcome.load_s:.3g} s, computing at {outcome.compute_s:.3g} s"
        return Lost(Cause.RECOMPUTED, matched - cached, first, "stored, and computed because that was faster" + estimates)
    keys = asked.keys_from(cached // BLOCK_TOKENS, min(matched // BLOCK_TOKENS, len(asked.keys) // KEY_BYTES))
    for fate in [] if fates is None else fates(keys, now_s):
        if fate.absence == "corrupt" and fate.time_s is not None and fate.time_s >= outcome.matched_s:
            evidence = f"found in {fate.tier}, and its bytes were not what was written; removed at {when(fate.time_s)}"
            return Lost(Cause.CORRUPT, matched - cached, first, evidence, fate.time_s)
    return Lost(Cause.LATE, matched - cached, first, "found, and could not be read, or not in time")


def _parted(asked: Asked, other: Asked, shared: int, renderer: Renderer | None) -> Parted | None:
    """Return where `asked` leaves the earlier prompt; None where it goes on from it, or only ends before it."""
    if shared >= min(asked.prompt_tokens, other.tokens):
        return None
    part = changed(other.prints, asked.prints)
    path = "" if part is None else part.path
    if asked.ids is not None and other.ids is not None:
        ids = other.ids, asked.ids[: asked.prompt_tokens]
        sides = [
            side_of(name, Conversation(prompt=tuple(one.tolist()), prompt_path="prompt"), renderer)
            for name, one in zip((other.id, asked.id), ids, strict=True)
        ]
        report = report_of(*sides, begin_id=None if renderer is None else renderer.begin_id, findings=1)
        if report.findings:
            finding = report.findings[0]
            cause, evidence = finding.cause, finding.evidence
            if cause is Cause.OTHER and part is not None:
                cause, evidence = part.cause, part.evidence
            names = _names(cause, path, part is not None and part.in_system)
            return Parted(shared, cause, evidence, path or finding.path, names, report.alike_tokens, finding.a, finding.b)
    to_the_block = shared >= min(asked.prompt_tokens, other.tokens) // BLOCK_TOKENS * BLOCK_TOKENS
    if to_the_block and not path.startswith("messages"):
        return None  # it goes on from it; a template may have no place for the tools that changed
    if part is None:
        where = "" if asked.prints.messages else "prompt"
        names = _names(Cause.OTHER, "", False)
        return Parted(shared, Cause.OTHER, "another text, or another rendering of the same", where, names)
    names = _names(part.cause, path, part.in_system)
    return Parted(shared, part.cause, part.evidence, path, Names(part.openai or names.openai, names.anthropic))


def _names(cause: Cause, path: str, in_system: bool) -> Names:
    return names_of(cause, in_tools=path.startswith("tools"), in_system=in_system)
