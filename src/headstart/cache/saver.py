"""Writing behind: a bounded queue of saves and the one thread that works it off. The engine never waits for a medium.

For each prompt the thread asks every tier which pieces it lacks, copies runs of those from the engine's memory into extents,
seals them, and has each written to all tiers that lack it while it builds the next. From head to tail, so that what a full tier
drops is a tail, and under leases, so that a prompt never evicts its own head. A prompt that was read from disk reaches memory
the same way.

What else is written for the cache's sake is written here as well: that extents were used, and that corrupt ones are deleted.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread, get_native_id

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BlockKey, Content, chain_keys
from headstart.block.representation import Representation
from headstart.cache.budget import WriteBudget
from headstart.cache.extents import ExtentBuilder
from headstart.cache.faults import counted
from headstart.cache.history import SaveHistory
from headstart.cache.lookup import Pieces, absent_runs, last_boundary, pieces_of
from headstart.cache.source import Source
from headstart.cache.ticket import SaveResult, Ticket
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, Terms
from headstart.transfer.load import KVView

_MAX_WAITING = 64
_MAX_NOTES = 1024
_IDLE_S = 1.0  # with nothing to do for so long, the tiers' upkeep gets a turn
_TENDING_SHARE = 0.25  # of the time that nothing else is done
_SAVING_SHARE = 0.75  # of the time for closing; the rest is for the extent under way, for reads and for the tiers
_STORED = ("written", "present")
_NICENESS = 10  # steps: a tenth of the weight of who computes
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """A prompt's full pieces, and how their keys are made. `tokens`: u32, whole pieces, not changed by anyone any more.
    `own_tokens`: how many of them earlier saves of the same request had. `memory_only`: no other tier is written or told of it.
    `states`: by how many pieces they stand behind, in that order; one stands behind all, or there are none."""

    tokens: npt.NDArray[np.uint32]
    source: KVView
    root: bytes
    salt: str | bytes | None
    shared_tokens: int
    terms: Terms
    own_tokens: int = 0
    memory_only: bool = False
    states: Mapping[int, memoryview] = field(default_factory=dict)
    contents: Sequence[Content] = ()


class Saver:
    """Owns the queue and the thread. `submit` never blocks; `close` is bounded.

    The queue copies nothing: what it holds is the caller's own KV memory, kept alive until the ticket is done. At most
    `_MAX_WAITING` saves wait, and they and the one under way keep at most `queue_bytes` alive; but one may always wait,
    however large, or of two long prompts in a row the second would never be kept. Sizes that vary count as the largest seen
    so far, and as nothing before."""

    def __init__(
        self,
        sources: Sequence[Source],
        representation: Representation,
        *,
        queue_bytes: int,
        counters: Counters,
        write_budget_bytes: int | None = None,
        route: Callable[[Terms], Collection[str]] | None = None,
        on_saved: Callable[[], None] = lambda: None,
    ) -> None:
        """`route`: which tiers a save on these terms goes to, by their names; None: to all. `on_saved` is called behind each
        save."""
        self._sources = sources
        self._route = route
        self._on_saved = on_saved
        self._representation = representation
        self._digest = representation.digest
        self._queue_bytes = queue_bytes
        self._counters = counters
        self._builder = ExtentBuilder(representation)
        self.history = SaveHistory()
        self._budget = WriteBudget(write_budget_bytes, counters=counters)
        self._condition = Condition()
        self._queue: deque[tuple[SaveRequest, int, Ticket]] = deque()
        self._notes: deque[tuple[Source, Sequence[ExtentId]]] = deque()
        self._held_bytes = 0  # alive for the saves that wait and the one under way
        self._closing = False
        self._stop = False  # at the next extent's edge: the time for closing is over
        self._thread = Thread(target=self._work, name="save", daemon=True)
        self._thread.start()

    def why_not(self, source: Source) -> str:
        """Return why of a new prompt nothing goes to a tier now though the tier takes it; "" where something does."""
        return self._budget.why_not(source)

    @property
    def idle(self) -> bool:
        """Whether no save waits or is under way."""
        return not self._held_bytes

    def submit(self, request: SaveRequest) -> Ticket:
        """Queue a save, or return a ticket that is done already, with the reason."""
        ticket = Ticket()
        if not request.memory_only:
            self.history.add(ticket, _keys_of(request), own_tokens=request.own_tokens)
        nbytes = len(request.tokens) * (self._representation.bytes_per_token or self._builder.largest_bytes_per_token)
        nbytes += sum(state.nbytes for state in request.states.values())
        with self._condition:
            full = len(self._queue) >= _MAX_WAITING or self._held_bytes + nbytes > self._queue_bytes
            if self._closing:
                reason = "closed"
            elif self._queue and full:
                reason = "queue-full"
            else:
                self._queue.append((request, nbytes, ticket))
                self._held_bytes += nbytes
                self._condition.notify()
                return ticket
        self._dropped(ticket, reason)
        return ticket

    def note_use(self, source: Source, extents: Sequence[ExtentId]) -> None:
        """Have `extents` touched soon, the first one last, and what is corrupt deleted; before any save that is submitted
        later. Returns at once. A note too many is dropped: a use that is forgotten costs little."""
        with self._condition:
            if len(self._notes) < _MAX_NOTES:
                self._notes.append((source, extents))
                self._condition.notify()
                return
        self._counters.add("notes_dropped")

    def close(self, timeout_s: float) -> bool:
        """Finish what is queued in three quarters of `timeout_s`, drop the rest; False if the thread is stuck in a tier and is
        left behind."""
        deadline = time.monotonic() + timeout_s
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join(_SAVING_SHARE * timeout_s)
        with self._condition:
            self._stop = True
            dropped = [ticket for _, _, ticket in self._queue]
            self._queue.clear()
        for ticket in dropped:
            self._dropped(ticket, "closed")
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _dropped(self, ticket: Ticket, reason: str) -> None:
        self._counters.add(f"save_dropped_{reason}")
        ticket.finish(SaveResult(stored_tokens=0, written_bytes=0, reason=reason))

    def _work(self) -> None:
        _yield_to_computing()  # and so do those that it starts
        pause_s = _IDLE_S
        while True:
            with self._condition:
                called = self._condition.wait_for(lambda: self._queue or self._notes or self._closing, pause_s)
                if called and not (self._queue or self._notes):
                    return
            if not called:
                pause_s = self._tend()
                continue
            pause_s = _IDLE_S
            try:
                self._take_notes()
            except Exception:  # noqa: BLE001 - the thread's outer edge: what fails here must not end all saving
                self._counters.add("note_errors")
                _log.exception("noting what was used failed unexpectedly")
            with self._condition:
                if not self._queue:
                    continue
                request, nbytes, ticket = self._queue.popleft()
            try:
                result = self._save(request)
            except BaseException:  # noqa: BLE001 - the thread's outer edge: a source that fails must not end all saving
                self._counters.add("save_errors")
                _log.exception("a save failed unexpectedly")
                result = SaveResult(stored_tokens=0, written_bytes=0, reason="error")
            with self._condition:
                self._held_bytes -= nbytes
            if result.reason is not None:
                self._counters.add(f"save_dropped_{result.reason}")
            self._counters.add("saved_bytes", result.written_bytes)
            ticket.finish(result)
            self.history.name_ended()
            self._on_saved()
            del request, ticket  # an idle thread keeps no source alive

    def _tend(self) -> float:
        """Do one step of upkeep in each tier; return how long to wait until the next one, unless something else comes."""
        begun, more = time.monotonic(), False
        try:
            for source in self._sources:
                with counted(self._counters, source.tier, "tend"):
                    more = source.tier.tend() or more
        except Exception:  # noqa: BLE001 - the thread's outer edge: what fails here must not end all saving
            self._counters.add("tend_errors")
            _log.exception("upkeep failed unexpectedly")
        took_s = time.monotonic() - begun
        return took_s * (1 / _TENDING_SHARE - 1) if more else max(_IDLE_S, took_s)

    def _take_notes(self) -> None:
        with self._condition:
            notes, self._notes = self._notes, deque()
        for source, extents in notes:
            with counted(self._counters, source.tier, "touch"):
                source.tier.touch(extents)
            source.quarantine.delete_corrupt()

    def _save(self, request: SaveRequest) -> SaveResult:
        keys = _keys_of(request)()
        state_bytes = max((state.nbytes for state in request.states.values()), default=0)
        targets = [_Target(source) for source in self._sources if self._goes_to(source, request)]
        try:
            for target in targets:
                target.quarantine.delete_corrupt()  # what was noted before, but could not be deleted then
                self._largest_bytes(target, state_bytes=state_bytes)
            present = [self._hold(target, keys, request.states) >= 0 for target in targets]
            admitted = [self._admit(target, keys, there, request) for target, there in zip(targets, present, strict=True)]
            written_bytes = 0
            for first, pieces, lacking in absent_runs(admitted, cuts=list(request.states)):
                written_bytes += self._save_run(request, keys, first, pieces, [targets[number] for number in lacking])
            return self._conclude(targets, keys, request, written_bytes)
        finally:
            for target in targets:
                with counted(self._counters, target.tier, "release"):
                    target.tier.release(target.held)

    def _goes_to(self, source: Source, request: SaveRequest) -> bool:
        if request.memory_only:
            return source.tier.in_memory
        return self._route is None or source.tier.name in self._route(request.terms)

    def _admit(
        self, target: _Target, keys: Sequence[BlockKey], present: npt.NDArray[np.bool_], request: SaveRequest
    ) -> npt.NDArray[np.bool_]:
        """Return `present` with the pieces that are not worth a write today called present too."""
        representation = self._representation
        piece_bytes = (representation.bytes_per_token or self._builder.largest_bytes_per_token) * representation.piece_tokens
        lacking_bytes = sum(state.nbytes for pieces, state in request.states.items() if not present[pieces - 1])
        if lacking_bytes:
            piece_bytes += lacking_bytes // int(np.count_nonzero(~present))
        limit = self._budget.limit(
            target.source,
            keys[representation.blocks_per_piece - 1 :: representation.blocks_per_piece],
            present,
            piece_bytes=piece_bytes,
            session=request.terms.session,
            own=request.own_tokens // representation.piece_tokens,
            ends=request.states,  # what has no state behind it is of no use
        )
        if limit == len(present):
            return present
        dropped = int(np.count_nonzero(~present[limit:])) * representation.piece_tokens
        self._counters.add(f"save_budget_dropped_tokens_{target.tier.name}", dropped)
        target.refused = "budget"
        return np.concatenate([present[:limit], np.ones(len(present) - limit, np.bool_)])

    def _save_run(
        self, request: SaveRequest, keys: Sequence[BlockKey], first: int, pieces: int, targets: Sequence[_Target]
    ) -> int:
        """Write `pieces` pieces from `first` on, as one or more extents, to those of `targets` that take them, the last extent
        with the state that stands behind it; return bytes.

        While one is written the image of the next is built. On several devices as many are written side by side as
        `writes_at_once` says, and what was not taken is known so many extents later."""
        written_bytes = 0
        per_piece = self._representation.blocks_per_piece
        end = first + pieces
        under_way: list[_Writing] = []
        at_once = max(target.source.writes_at_once for target in targets)
        free = list(range(at_once + 1))  # slots for images
        try:
            while True:
                self._take_notes()  # else a long save would evict what was used meanwhile
                if self._stop:
                    for target in targets:
                        target.reason = target.reason or "closed"
                state_bytes = request.states[end].nbytes if end in request.states else 0
                limits = [self._largest_bytes(target, state_bytes=state_bytes) for target in targets if target.reason is None]
                takers = [target for target in targets if target.reason is None]
                if first == end or not takers:
                    break
                limit_bytes = min(filter(None, limits))
                slot = free.pop()
                image, taken = self._builder.build(request, keys, first, end - first, limit_bytes=limit_bytes, slot=slot)
                if len(under_way) == at_once:  # whichever ends first: a fast device must not wait for a slow one
                    wait([writing.reasons for writing in under_way], return_when=FIRST_COMPLETED)
                    ended = under_way.pop(next(i for i, writing in enumerate(under_way) if writing.reasons.done()))
                    free.append(ended.slot)
                    written_bytes += self._end_write(ended)
                takers = [target for target in takers if target.reason is None]
                block_keys = keys[first * per_piece : (first + taken) * per_piece]
                reasons = _in_thread(partial(self._write, image, takers, request.terms))
                first += taken
                with_state = (taken,) if first == end and end in request.states else ()
                under_way.append(_Writing(takers, block_keys, with_state, image.nbytes, slot, reasons))
            while under_way:
                written_bytes += self._end_write(under_way.pop(0))
        finally:
            wait([writing.reasons for writing in under_way])  # before anything is built where their images are
        return written_bytes

    def _largest_bytes(self, target: _Target, *, state_bytes: int) -> int:
        """Return how large an extent a tier takes. One that fails, or takes too little for any, gets no more of this prompt (it
        would cut every extent to one piece for the others); then 0."""
        target.reason = target.reason or "error"
        with counted(self._counters, target.tier, "write"):
            largest = target.tier.max_extent_bytes(self._representation, state_bytes=state_bytes)
            fits = largest >= self._builder.least_bytes(state_bytes=state_bytes)
            target.reason = None if fits else "too-large"
            return largest if fits else 0
        return 0

    def _write(self, image: memoryview, targets: Sequence[_Target], terms: Terms) -> list[str]:
        """Write one extent to each target; return what each says became of it."""
        reasons = []
        for target in targets:
            reason = "error"
            with counted(self._counters, target.tier, "write"):
                reason = target.tier.write(image, self._representation, terms=terms).reason
            reasons.append(reason)
        return reasons

    def _end_write(self, writing: _Writing) -> int:
        """Wait for an extent to be written, protect it, and return the bytes that were."""
        written_bytes = 0
        for target, reason in zip(writing.targets, writing.reasons.result(), strict=True):
            there = reason in _STORED and bool((self._hold(target, writing.keys, writing.states) >= 0).all())
            if reason == "present" and not there:
                reason = "error"  # there, but only in what is corrupt and could not be deleted
            if reason == "written":
                written_bytes += writing.nbytes
            elif reason != "present":
                target.reason = reason  # what follows is this prompt's tail: this tier goes without it
        return written_bytes

    def _hold(self, target: _Target, keys: Sequence[BlockKey], states: Iterable[int]) -> npt.NDArray[np.int64]:
        """Lease the extents in which the pieces of `keys` lie, and those that carry the states behind so many of them; return
        the former, -1 where a piece is absent, or the last one before a state that is."""
        pieces = self._locate(target, keys)
        extents = _extents_of(pieces, states)
        with counted(self._counters, target.tier, "lease"):
            kept = target.tier.lease(extents)
            target.held += [extent for extent, ok in zip(extents, kept, strict=True) if ok]
            pieces = pieces.without([extent for extent, ok in zip(extents, kept, strict=True) if not ok])
        found = pieces.extents.copy()
        found[[behind - 1 for behind in states if pieces.state_behind(behind) is None]] = -1
        return found

    def _locate(self, target: _Target, keys: Sequence[BlockKey]) -> Pieces:
        per_piece = self._representation.blocks_per_piece
        with counted(self._counters, target.tier, "locate"):
            placement = target.tier.locate(self._digest, keys)
            return pieces_of(placement, blocks_per_piece=per_piece, excluded=target.quarantine.corrupt())
        nowhere = np.full(len(keys) // per_piece, -1, np.int64)
        return Pieces(nowhere, nowhere)

    def _conclude(
        self, targets: Sequence[_Target], keys: Sequence[BlockKey], request: SaveRequest, written_bytes: int
    ) -> SaveResult:
        """Note the use of what the prompt consists of now, heads last, have all of it kept on these terms, and say how much."""
        leading = []
        for target in targets:
            pieces = self._locate(target, keys)
            there = pieces.leading()
            if request.states:
                boundary = last_boundary([(0, pieces)], within=there)
                there = 0 if boundary is None else boundary.pieces
            leading.append(there * self._representation.piece_tokens)
            extents = _extents_of(pieces, request.states)
            with counted(self._counters, target.tier, "touch"):
                target.tier.touch(extents)
            with counted(self._counters, target.tier, "keep"):
                target.tier.keep(extents, request.terms)
        takes = [number for number, target in enumerate(targets) if target.reason is None]
        refused = [reason for target in targets if (reason := target.reason or target.refused) is not None]
        return SaveResult(
            stored_tokens=leading[takes[-1] if takes else -1],
            written_bytes=written_bytes,
            reason=refused[-1] if refused else None,
        )


def _keys_of(request: SaveRequest) -> Callable[[], list[BlockKey]]:
    """Return what makes the keys of a save, and holds nothing else of it."""
    return partial(
        chain_keys,
        request.tokens,
        root=request.root,
        salt=request.salt,
        shared_tokens=request.shared_tokens,
        contents=request.contents,
    )


@dataclass(frozen=True, slots=True)
class _Writing:
    """An extent that is being written, and to whom."""

    targets: Sequence[_Target]
    keys: Sequence[BlockKey]
    states: tuple[int, ...]  # behind how many of its pieces
    nbytes: int
    slot: int
    reasons: Future[list[str]]


def _extents_of(pieces: Pieces, states: Iterable[int]) -> list[ExtentId]:
    """Return every extent that holds a piece or the state behind one of `states` pieces, once, in the order of the prompt."""
    behind = [state for state in map(pieces.state_behind, states) if state is not None]
    return list(dict.fromkeys([*pieces.extents_in_order(), *behind]))


def _yield_to_computing() -> None:
    """Let the calling thread run rather where a core is idle than in the place of a thread that computes; nothing where threads
    have no niceness of their own. Each operation of a pass goes on when the last core is through with its part of it: what is
    taken from one core is taken from all."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + _NICENESS)


def _in_thread(work: Callable[[], list[str]]) -> Future[list[str]]:
    """Do it in a daemon thread: one that hangs in a tier must not keep the process from ending."""
    future: Future[list[str]] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the thread's outer edge: whoever waits is told
            future.set_exception(error)

    Thread(target=run, name="save-write", daemon=True).start()
    return future


class _Target:
    """A tier during one save: the extents held there, and why it takes no more of this prompt."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.tier = source.tier
        self.quarantine = source.quarantine
        self.held: list[ExtentId] = []
        self.reason: str | None = None
        self.refused: str | None = None  # why it was not even asked to take all
