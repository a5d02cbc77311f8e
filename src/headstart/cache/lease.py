"""A lease: the extents of one match, protected while it is held, what is known of them, and the loads that it gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import Lock
from types import TracebackType

from headstart.block.representation import Representation
from headstart.cache.faults import counted
from headstart.cache.lookup import Run, part_of
from headstart.cache.source import Source
from headstart.metrics import Counters
from headstart.tier.base import ExtentId
from headstart.transfer.load import KVView, Load, lost_load
from headstart.transfer.plan import Prompt, Span
from headstart.transfer.span import start_reading

_WRONG = {"corrupt", "stale"}  # what the extent says will not get better
_FAILED = {"read", "collision", "gone"}


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive tokens of a match that come from one tier: how many, how many bytes there are of them, less headers and
    padding (an estimate where pieces vary in size), and in how many extents they lie."""

    tier: str
    tokens: int
    nbytes: int
    extents: int


class Lease:
    """The longest stored prefix of a prompt, protected from eviction until `release()` (twice is fine; also a context
    manager). `tokens`: how many tokens matched, a multiple of the piece; 0 for a miss."""

    def __init__(
        self,
        sources: Sequence[Source],
        runs: Sequence[Run],
        prompt: Prompt,
        *,
        held: dict[int, list[ExtentId]],
        timeout_s: float,
        counters: Counters,
        note_use: Callable[[Source, Sequence[ExtentId]], None],
    ) -> None:
        """`held`: extents that are under this lease, by source number; exactly those are released. `note_use` is called with
        what a load read from each source, and must not do I/O."""
        self.tokens = sum(run.pieces for run in runs) * prompt.representation.piece_tokens
        self._sources = sources
        self._runs = runs
        self._prompt = prompt
        self._timeout_s = timeout_s
        self._counters = counters
        self._note_use = note_use
        self._pid = os.getpid()
        self._lock = Lock()
        self._held = held
        self._claimed: list[tuple[int, int]] = []  # pieces that loads were given for
        self._loads = 0  # under way
        self._released = False

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What matched, in the order of the prompt: what there is to know before anything is read."""
        return tuple(self._stretch(number, list(runs)) for number, runs in groupby(self._runs, key=lambda run: run.tier))

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Matched tokens by the tier that they would be loaded from."""
        tokens: dict[str, int] = {}
        for run in self._runs:
            name = self._sources[run.tier].tier.name
            tokens[name] = tokens.get(name, 0) + run.pieces * self._prompt.representation.piece_tokens
        return tokens

    @property
    def tier_bytes(self) -> dict[str, int]:
        """Bytes of the matched tokens by the tier that they would be loaded from, as in `stretches`."""
        nbytes: dict[str, int] = {}
        for stretch in self.stretches:
            nbytes[stretch.tier] = nbytes.get(stretch.tier, 0) + stretch.nbytes
        return nbytes

    def load(self, into: KVView, first_tokens: int = 0, end_tokens: int | None = None, *, behind: bool = False) -> Load:
        """Start reading what matched from token `first_tokens` up to `end_tokens` (None: all of it) into `into`, which is asked
        for pieces by their number in the prompt. Several loads may be under way, each with its own layers, limit, deadline and
        callbacks; what one of them says counts from its first token. Those that were started first are read first, and
        those that nobody waits for (`behind`) last. In a forked child nothing comes.

        Raises ValueError for a range that cuts a piece, goes beyond the match, or overlaps with an earlier load's, and after
        the release."""
        first, pieces = self._range(first_tokens, self.tokens if end_tokens is None else end_tokens)
        runs = part_of(self._runs, first, pieces)
        names = [(self._sources[run.tier].tier.name, run.pieces) for run in runs]
        if os.getpid() != self._pid:
            return lost_load(names, self._prompt.representation)
        with self._lock:
            if self._released:
                raise ValueError("this lease was released; match again before loading")
            for start, end in self._claimed:
                if start < first + pieces and first < end:
                    step = self._prompt.representation.piece_tokens
                    raise ValueError(f"tokens {start * step} to {end * step} of this lease were loaded already; match again")
            if pieces:
                self._claimed.append((first, first + pieces))
            self._loads += 1
        load = Load(
            names,
            representation=self._prompt.representation,
            timeout_s=self._timeout_s,
            settle=partial(self._settle, runs=runs),
            first_piece=first,
            behind=behind,
        )
        start_reading(load, [self._span(run) for run in runs], self._prompt.part(first, pieces), into)
        return load

    def release(self) -> None:
        """Let the extents go; while loads are still reading from them, with the end of the last read."""
        if os.getpid() != self._pid:
            return  # they are the parent's
        with self._lock:
            self._released = True
            held = {} if self._loads else self._take_held()
        self._let_go(held)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def __repr__(self) -> str:
        where = ", ".join(f"{tokens} from {tier}" for tier, tokens in self.tokens_by_tier.items()) or "a miss"
        return f"<Lease on {self.tokens} tokens: {where}{', released' if self._released else ''}>"

    def _span(self, run: Run) -> Span:
        source = self._sources[run.tier]
        return Span(source.tier, source.pool_of(run.extent), run.extent, first=run.first, pieces=run.pieces, start=run.start)

    def _range(self, first_tokens: int, end_tokens: int) -> tuple[int, int]:
        """Return (first, pieces)."""
        step = self._prompt.representation.piece_tokens
        if first_tokens % step or end_tokens % step or not 0 <= first_tokens <= end_tokens <= self.tokens:
            raise ValueError(
                f"tokens {first_tokens} to {end_tokens} cannot be loaded; give whole pieces of {step} within the "
                f"{self.tokens} that matched"
            )
        return first_tokens // step, (end_tokens - first_tokens) // step

    def _stretch(self, number: int, runs: Sequence[Run]) -> Stretch:
        source, representation = self._sources[number], self._prompt.representation
        pieces = sum(run.pieces for run in runs)
        if representation.varies:
            nbytes = sum(_share(source, run, representation) for run in runs)
        else:
            nbytes = pieces * sum(size or 0 for size in representation.layer_bytes)
        extents = len({run.extent for run in runs})
        return Stretch(source.tier.name, pieces * representation.piece_tokens, nbytes, extents)

    def _settle(self, load: Load, *, runs: Sequence[Run]) -> None:
        """Count what the load brought, avoid what failed, have the use noted. Called once, when no read is under way any more,
        and before anyone is told so: nothing here waits for a medium's writes."""
        good_pieces = load.usable_tokens // load.representation.piece_tokens
        for tier, tokens in load.tokens_by_tier.items():
            self._counters.add(f"loaded_tokens_{tier}", tokens)
        for reason, number in dict.fromkeys((fault.reason, fault.source) for fault in load.faults):
            self._counters.add(f"load_failed_{reason}")
            if reason in _WRONG | _FAILED:
                run = runs[number]
                self._sources[run.tier].quarantine.avoid(run.extent, for_good=reason in _WRONG)
        for number, source in enumerate(self._sources):
            read = [run for run in runs if run.tier == number]
            if read:
                self._note_use(source, list(dict.fromkeys(run.extent for run in read if run.start < good_pieces)))
        with self._lock:
            self._loads -= 1
            held = self._take_held() if self._released and not self._loads else {}
        self._let_go(held)

    def _take_held(self) -> dict[int, list[ExtentId]]:
        held, self._held = self._held, {}
        return held

    def _let_go(self, held: dict[int, list[ExtentId]]) -> None:
        for number, extents in held.items():
            self._sources[number].release(extents)


def _share(source: Source, run: Run, representation: Representation) -> int:
    """Return how many bytes the pieces of a run have, if all of its extent were equally large."""
    with counted(source.counters, source.tier, "info"):
        info = source.tier.info(run.extent)
        if info is not None:
            pieces = info.blocks // representation.blocks_per_piece
            return (info.extent_bytes - info.header_bytes) * run.pieces // pieces
    return 0
