"""A lease: the extents of one match, protected while it is held, what is known of them, and the loads that it gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from threading import Lock
from types import TracebackType

from headstart.block.extent import layout_of
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.faults import counted
from headstart.cache.finding import Found
from headstart.cache.lookup import Boundary, Run, part_of
from headstart.cache.source import Source
from headstart.metrics import Counters
from headstart.tier.base import ExtentId
from headstart.transfer.load import KVView, Load, lost_load
from headstart.transfer.plan import Prompt, Span
from headstart.transfer.span import start_reading
from headstart.transfer.state import StateSpan

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
    manager). `tokens`: how many tokens matched, a multiple of the piece; 0 for a miss. Where the representation needs a
    boundary state, one stands behind them; `beyond_tokens` more are stored behind that, of no use without a later state."""

    def __init__(
        self,
        sources: Sequence[Source],
        found: Found,
        prompt: Prompt,
        *,
        timeout_s: float,
        counters: Counters,
        note_use: Callable[[Source, Sequence[ExtentId]], None],
    ) -> None:
        """`note_use` is called with what a load read from each source, and must not do I/O."""
        self.tokens = sum(run.pieces for run in found.runs) * prompt.representation.piece_tokens
        self.beyond_tokens = found.beyond * prompt.representation.piece_tokens
        self._sources = sources
        self._runs = found.runs
        self._boundary = found.boundary
        self._prompt = prompt
        self._timeout_s = timeout_s
        self._counters = counters
        self._note_use = note_use
        self._pid = os.getpid()
        self._lock = Lock()
        self._held = found.held
        self._claimed: list[tuple[int, int]] = []  # pieces that loads were given for
        self._loads = 0  # under way
        self._released = False

    @property
    def stretches(self) -> tuple[Stretch, ...]:
        """What matched, in the order of the prompt: what there is to know before anything is read."""
        return tuple(self._stretch(number, list(runs)) for number, runs in groupby(self._runs, key=lambda run: run.tier))

    @property
    def state_bytes(self) -> int:
        """About how many bytes the boundary state has that comes beside the stretches, 0 where there is none."""
        boundary, representation = self._boundary, self._prompt.representation
        if boundary is None:
            return 0
        source = self._sources[boundary.tier]
        with counted(source.counters, source.tier, "shape"):
            shape = source.tier.shape(boundary.extent)
            if shape is not None and not representation.varies:
                layout = layout_of(representation, shape.blocks)
                return (shape.extent_bytes - shape.header_bytes) - (layout.extent_bytes - layout.header_bytes)
        return 0

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

        Where there is a boundary state, a load that reaches the end of the match brings it, also one of no tokens, and any of
        them is good as a whole or not at all.

        Raises ValueError for a range that cuts a piece, goes beyond the match, or overlaps with an earlier load's, and after
        the release."""
        first, pieces = self._range(first_tokens, self.tokens if end_tokens is None else end_tokens)
        runs = part_of(self._runs, first, pieces)
        names = [(self._sources[run.tier].tier.name, run.pieces) for run in runs]
        last = first + pieces == self.tokens // self._prompt.representation.piece_tokens
        boundary = self._boundary if last else None
        if os.getpid() != self._pid:
            return lost_load(names, self._prompt.representation, with_state=boundary is not None)
        # What may raise comes before anything is counted: a load that never ends would keep the extents for ever.
        spans = [self._span(run) for run in runs]
        state = None if boundary is None else self._state_span(boundary)
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
            settle=partial(self._settle, runs=runs, boundary=boundary),
            first_piece=first,
            behind=behind,
            with_state=boundary is not None,
        )
        start_reading(load, spans, self._prompt.part(first, pieces), into, state=state)
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
        return Span(source.tier, source.pool_of(run.extent), run.extent, run.first, run.pieces, run.start)

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

    def _state_span(self, boundary: Boundary) -> StateSpan:
        source = self._sources[boundary.tier]
        blocks = boundary.pieces * self._prompt.representation.blocks_per_piece
        tokens = self._prompt.tokens[(blocks - 1) * BLOCK_TOKENS : blocks * BLOCK_TOKENS]
        extent = boundary.extent
        return StateSpan(source.tier, source.pool_of(extent), extent, self._prompt.keys[blocks - 1], tokens)

    def _settle(self, load: Load, *, runs: Sequence[Run], boundary: Boundary | None) -> None:
        """Count what the load brought, avoid what failed, have the use noted. Called once, when no read is under way any more,
        and before anyone is told so: nothing here waits for a medium's writes."""
        good_pieces = load.usable_tokens // load.representation.piece_tokens
        # What was read, by the number under which faults are told: the state comes last.
        places = [(run.tier, run.extent) for run in runs]
        good = [place for place, run in zip(places, runs, strict=True) if run.start < good_pieces]
        if boundary is not None:
            places.append((boundary.tier, boundary.extent))
            good += [] if load.faults else places[-1:]
        for name, tokens in load.tokens_by_tier.items():
            self._counters.add(f"loaded_tokens_{name}", tokens)
        # A header that is wrong fails both what is read behind it and the state.
        for reason, (tier, extent) in dict.fromkeys((fault.reason, places[fault.source]) for fault in load.faults):
            self._counters.add(f"load_failed_{reason}")
            if reason in _WRONG | _FAILED:
                self._sources[tier].quarantine.avoid(extent, for_good=reason in _WRONG)
        for number in dict.fromkeys(tier for tier, _ in places):
            self._note_use(self._sources[number], list(dict.fromkeys(extent for tier, extent in good if tier == number)))
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
    with counted(source.counters, source.tier, "shape"):
        shape = source.tier.shape(run.extent)
        if shape is not None:
            pieces = shape.blocks // representation.blocks_per_piece
            return (shape.extent_bytes - shape.header_bytes) * run.pieces // pieces
    return 0
