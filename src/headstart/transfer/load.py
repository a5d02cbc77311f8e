"""A load in flight: which layers are there, what is good, what went wrong, who waits. The reading itself is `span.py`'s.

The pieces of a load are numbered 0 … P-1 in the order of the prompt. `limit` is the first piece that is known to be unusable;
it only ever falls. A piece has ended in a layer when no read can touch its destination any more, for better or worse:

    layer l may be attended    ⇔ all P pieces have ended in l and nothing has failed anywhere
    the load is done           ⇔ all P pieces have ended in all layers; then exactly the pieces before `limit` are good

Where the representation needs a boundary state, a load is good as a whole or not at all: any failure takes `limit` to 0. The
load that reaches the end of the match brings the state as well, which ends like a piece does.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation
from headstart.errors import LoadFailed

_BEHIND_S = 1e6
_log = logging.getLogger(__name__)


class KVView(Protocol):
    """An engine's KV memory of one request, seen as pieces. The same shape serves loading (writable) and saving (readable).

    Called from reading threads, several at a time, and from the saver's thread."""

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> Sequence[memoryview] | npt.NDArray[np.uint8]:
        """Return buffers that together hold pieces first … first+len(sizes)-1 of `layer`, in order, numbered from the start of
        the prompt, whatever part of it is loaded; `sizes[i]` is the bytes of piece first+i. When saving an opaque
        representation sizes are 0 and the view decides. Large aligned buffers are read into directly; others go through
        staging.

        Memory in which a piece lies in many parts is better given as one u8 array whose first axis is the pieces and whose
        bytes, in C order, are theirs, with any strides: it is copied in one call, where a list costs one for each part."""
        ...


@dataclass(frozen=True, slots=True)
class Fault:
    """What ended a piece badly. `source`: index of the span it was read from, as given to the load."""

    source: int
    piece: int
    reason: str  # "corrupt", "read", "collision", "stale", "gone", "error", "closed", "cancelled", "timeout", "forked"
    message: str


class Load:
    """A load in flight. Every wait has a deadline. `pieces`: how many it is of, from piece `first_piece` of the prompt on. All
    other numbers of pieces and tokens count from there.

    Attributes once done: `usable_tokens`, `bytes_read`, `tokens_by_tier` ({"memory": n, "disk": m}, only what was
    verified), `seconds`."""

    def __init__(
        self,
        pieces_by_source: Sequence[tuple[str, int]],
        *,
        representation: Representation,
        timeout_s: float,
        settle: Callable[[Load], None],
        first_piece: int = 0,
        behind: bool = False,
        with_state: bool = False,
    ) -> None:
        """`pieces_by_source`: (tier name, pieces) in the order of the prompt. `settle` is called once, with the numbers final
        and before anyone is told that the load is done. `behind`: it is read when nothing else is wanted. `with_state`: it
        brings the boundary state as well."""
        self.representation = representation
        self.started = time.monotonic()
        self.turn_s = self.started + (_BEHIND_S if behind else 0.0)  # who comes first: lower before higher
        self.bytes_read = 0
        self.seconds = 0.0
        self.faults: tuple[Fault, ...] = ()
        self._pid = os.getpid()
        self._sources = tuple(pieces_by_source)
        self.first_piece = first_piece
        self.pieces = sum(pieces for _, pieces in pieces_by_source)
        self._deadline = self.started + timeout_s
        self._settle = settle
        self._condition = Condition()
        self._limit = self.pieces
        # The same for a reader that takes no lock: pieces before this one are wanted, unless the load has ended early.
        self.wanted_before = np.array([self.pieces], np.int64)
        self.stopped = np.zeros(1, np.int64)
        self._left = [self.pieces] * representation.layers  # pieces that have not ended, by layer
        self._with_state = with_state
        self._state: memoryview | None = None
        self._unfinished = self.pieces * representation.layers + with_state
        self._cancelled: str | None = None  # why nothing more is read: "cancelled", "timeout"
        self._done = False
        self._callbacks: list[Callable[[Load], None]] = []
        if not self._unfinished:
            self._finish()

    # For whoever waits.

    def wait(self, layer: int, timeout_s: float | None = None) -> None:
        """Return when `layer` is verified for every token of this load. Raises LoadFailed on the first failure or when the
        deadline passes (`timed_out=True`: bytes may still land in the destination until `done`)."""
        self._require_own_process()
        with self._condition:
            ready = self._wait_for(lambda: self._limit < self.pieces or not self._left[layer], timeout_s)
            if self._limit < self.pieces:
                raise self._failed(f"layer {layer} is not usable")
            if not ready:
                raise self._timed_out(f"layer {layer} was not there")

    def state(self, timeout_s: float | None = None) -> memoryview:
        """Return the boundary state behind the last matched token, verified; it is read before any layer. Raises LoadFailed as
        `wait` does, and ValueError where this load brings none: it ends before the match does, or there is no such thing."""
        self._require_own_process()
        with self._condition:
            if not self._with_state:
                raise ValueError(
                    "this load brings no boundary state; load up to lease.tokens, in a representation that has one"
                )
            ready = self._wait_for(lambda: bool(self.faults) or self._state is not None, timeout_s)
            if self.faults:
                raise self._failed("the boundary state is not usable")
            if not ready or self._state is None:
                raise self._timed_out("the boundary state was not there")
            return self._state

    def result(self, timeout_s: float | None = None) -> int:
        """Wait for every read to end, good or bad; return the tokens that are good in all layers: whole pieces from the
        load's first on. Raises LoadFailed(timed_out=True, usable_tokens=0) when the deadline passes first."""
        self._require_own_process()
        with self._condition:
            if not self._wait_for(lambda: self._done, timeout_s):
                raise self._timed_out("reads were still under way")
            return self.usable_tokens

    def cancel(self) -> None:
        """Start no further reads. Reads under way still end; `result` then returns, and the callbacks are called: from then on
        nothing touches the destination any more."""
        with self._condition:
            self._stop("cancelled")

    def add_done_callback(self, callback: Callable[[Load], None]) -> None:
        """Call back once no read can touch the destination any more (at once if that is so already)."""
        with self._condition:
            if not self._done:
                self._callbacks.append(callback)
                return
        self._call(callback)

    @property
    def done(self) -> bool:
        """True once no read can touch the destination any more."""
        return self._done

    @property
    def usable_tokens(self) -> int:
        """Tokens from the load's first on that are certain to be good in every layer: 0 until the load is done."""
        return self._limit * self.representation.piece_tokens if not self._unfinished else 0

    @property
    def tokens_by_tier(self) -> dict[str, int]:
        """Usable tokens by the tier that they came from."""
        tokens: dict[str, int] = {}
        left = self.usable_tokens
        for tier, pieces in self._sources:
            part = min(left, pieces * self.representation.piece_tokens)
            tokens[tier] = tokens.get(tier, 0) + part
            left -= part
        return tokens

    def __repr__(self) -> str:
        tokens = self.pieces * self.representation.piece_tokens
        if not self._done:
            return f"<Load of {tokens} tokens, {sum(not left for left in self._left)} of {len(self._left)} layers ended>"
        return f"<Load of {tokens} tokens, {self.usable_tokens} usable, {self.bytes_read} bytes in {self.seconds:.3f} s>"

    # For the reading side.

    def wanted(self, piece: int, pieces: int) -> int:
        """Return how many of `pieces` pieces from `piece` on are still worth reading: those before the limit, none after a
        cancel, which lowers the limit itself."""
        with self._condition:
            if self._cancelled and piece < self._limit:
                self._fail(
                    Fault(source=0, piece=piece, reason=self._cancelled, message=f"the load ended early: {self._cancelled}")
                )
            return max(0, min(pieces, self._limit - piece))

    def ended(self, layers: Sequence[int], *, pieces: int, nbytes: int = 0, fault: Fault | None = None) -> None:
        """Note that `pieces` pieces have ended in each of `layers`; with a fault, `fault.piece` and what follows is lost."""
        with self._condition:
            self.bytes_read += nbytes
            if fault is not None:
                self._fail(fault)
            for layer in layers:
                self._left[layer] -= pieces
                assert self._left[layer] >= 0
            self._unfinished -= pieces * len(layers)
            last = not self._unfinished
            if any(not self._left[layer] for layer in layers):
                self._condition.notify_all()
        if last:
            self._finish()

    def state_wanted(self) -> bool:
        """Return whether the boundary state is still worth reading; where the load was cancelled, note that it is not."""
        with self._condition:
            if self._cancelled and not self.faults:
                self._fail(Fault(0, 0, self._cancelled, f"the load ended early: {self._cancelled}"))
            return not self.faults

    def state_ended(self, state: memoryview | None, *, nbytes: int = 0, fault: Fault | None = None) -> None:
        """Note that reading the boundary state has ended: it is there, or there will be none."""
        with self._condition:
            self.bytes_read += nbytes
            self._state = state
            if fault is not None:
                self._fail(fault)
            self._unfinished -= 1
            last = not self._unfinished
            self._condition.notify_all()
        if last:
            self._finish()

    def _stop(self, why: str) -> None:
        self._cancelled = self._cancelled or why
        self.stopped[0] = 1

    def _fail(self, fault: Fault) -> None:
        self.faults += (fault,)
        self._limit = 0 if self.representation.state == "required" else min(self._limit, fault.piece)
        self.wanted_before[0] = self._limit
        self._condition.notify_all()

    def _finish(self) -> None:
        self.seconds = time.monotonic() - self.started
        try:
            self._settle(self)
        except Exception:  # noqa: BLE001 - the last reading thread's outer edge: nobody may wait for ever
            _log.exception("settling a load failed")
        with self._condition:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[Load], None]) -> None:
        try:
            callback(self)
        except BaseException:  # noqa: BLE001 - an engine's mistake must not end a reading thread
            _log.exception("a callback of a load failed")

    def _wait_for(self, ready: Callable[[], bool], timeout_s: float | None) -> bool:
        now = time.monotonic()
        until = self._deadline if timeout_s is None else min(self._deadline, now + timeout_s)
        if self._condition.wait_for(ready, max(0.0, until - now)):
            return True
        if time.monotonic() >= self._deadline:
            self._stop("timeout")  # too late to be of use: what is queued is not read any more
        return False

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:  # whoever reads is in the parent, and may have held the lock when it forked
            message = "this load was started before the process forked and fills the parent's memory; compute instead"
            raise LoadFailed(message, usable_tokens=0, timed_out=False, reason="forked")

    def _failed(self, what: str) -> LoadFailed:
        fault = self.faults[0]
        return LoadFailed(f"{what}: {fault.message}", usable_tokens=self.usable_tokens, timed_out=False, reason=fault.reason)

    def _timed_out(self, what: str) -> LoadFailed:
        return LoadFailed(
            f"{what} within {time.monotonic() - self.started:.1f} s of the load's start; the rest is computed instead",
            usable_tokens=0,
            timed_out=True,
            reason="timeout",
        )


def lost_load(pieces_by_source: Sequence[tuple[str, int]], representation: Representation, *, with_state: bool = False) -> Load:
    """Return a load that is done and brought nothing: what a process gets that has forked away from its cache."""
    load = Load(pieces_by_source, representation=representation, timeout_s=0.0, settle=lambda _: None, with_state=with_state)
    pieces = sum(pieces for _, pieces in pieces_by_source)
    fault = Fault(source=0, piece=0, reason="forked", message="the process has forked since; its cache is the parent's")
    if with_state:
        load.state_ended(None, fault=fault)
    if pieces:
        load.ended(range(representation.layers), pieces=pieces, fault=fault)
    return load
