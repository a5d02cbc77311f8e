"""A lease: the extents of one match, protected while it is held, and the one load that it gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Lock
from types import TracebackType

from headstart.cache.lookup import Run
from headstart.cache.source import Source
from headstart.metrics import Counters
from headstart.tier.base import ExtentId
from headstart.transfer.load import KVView, Load, lost_load
from headstart.transfer.plan import Prompt, Span
from headstart.transfer.span import start_reading

_WRONG = {"corrupt", "stale"}  # what the extent says will not get better
_FAILED = {"read", "collision", "gone"}


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
        self._load: Load | None = None
        self._loading = False
        self._released = False

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Matched tokens by the tier that they would be loaded from."""
        tokens: dict[str, int] = {}
        for run in self._runs:
            name = self._sources[run.tier].tier.name
            tokens[name] = tokens.get(name, 0) + run.pieces * self._prompt.representation.piece_tokens
        return tokens

    def load(self, into: KVView) -> Load:
        """Start reading all matched pieces into `into`. Once per lease. In a forked child nothing comes."""
        names = [(self._sources[run.tier].tier.name, run.pieces) for run in self._runs]
        if os.getpid() != self._pid:
            return lost_load(names, self._prompt.representation)
        with self._lock:
            if self._released:
                raise ValueError("this lease was released; match again before loading")
            if self._load is not None or self._loading:
                raise ValueError("this lease has given its load already; match again for another")
            self._loading = True
        load = Load(names, representation=self._prompt.representation, timeout_s=self._timeout_s, settle=self._settle)
        self._load = load
        spans = [self._span(run) for run in self._runs]
        start_reading(load, spans, self._prompt, into)
        return load

    def release(self) -> None:
        """Let the extents go; while a load is still reading from them, with the end of its last read."""
        if os.getpid() != self._pid:
            return  # they are the parent's
        with self._lock:
            self._released = True
            held = {} if self._loading else self._take_held()
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

    def _settle(self, load: Load) -> None:
        """Count what the load brought, avoid what failed, have the use noted. Called once, when no read is under way any more,
        and before anyone is told so: nothing here waits for a medium's writes."""
        good_pieces = load.usable_tokens // load.representation.piece_tokens
        for tier, tokens in load.tokens_by_tier.items():
            self._counters.add(f"loaded_tokens_{tier}", tokens)
        for reason, number in dict.fromkeys((fault.reason, fault.source) for fault in load.faults):
            self._counters.add(f"load_failed_{reason}")
            if reason in _WRONG | _FAILED:
                run = self._runs[number]
                self._sources[run.tier].quarantine.avoid(run.extent, for_good=reason in _WRONG)
        for number, source in enumerate(self._sources):
            runs = [run for run in self._runs if run.tier == number]
            if runs:
                self._note_use(source, list(dict.fromkeys(run.extent for run in runs if run.start < good_pieces)))
        with self._lock:
            self._loading = False
            held = self._take_held() if self._released else {}
        self._let_go(held)

    def _take_held(self) -> dict[int, list[ExtentId]]:
        held, self._held = self._held, {}
        return held

    def _let_go(self, held: dict[int, list[ExtentId]]) -> None:
        for number, extents in held.items():
            self._sources[number].release(extents)
