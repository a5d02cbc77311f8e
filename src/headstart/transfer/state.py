"""Reading a boundary state: the header of the extent that ends with it, then the state in parts, side by side, then its check.

    head job ──▶ header decoded, its last block compared with the prompt's ──▶ a job for each part ──▶ the last one verifies

A state may be tens of megabytes, and an engine needs it before it can begin with its first recurrent layer: it is read before
any layer. It lies in memory of its own, not in the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from headstart.block.checks import STATE_LAYER, piece_check
from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.layout import padded
from headstart.block.representation import Representation
from headstart.block.whole import aligned
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import ExtentId, FarTier, ReadRange, Tier
from headstart.transfer.buffers import Staging
from headstart.transfer.io_pool import REQUEST_BYTES, IOPool
from headstart.transfer.load import Fault, Load

_BEFORE_ALL_LAYERS = -1
_OF_ANOTHER = ("stale", "collision")  # right bytes, but not what was asked for


@dataclass(frozen=True, slots=True)
class StateSpan:
    """`extent`, leased by the caller, ends with the state behind the block of that key and those 64 token ids (u32)."""

    tier: Tier
    pool: IOPool
    extent: ExtentId
    key: bytes
    tokens: npt.NDArray[np.uint32]


def start_reading_state(load: Load, span: StateSpan, *, source: int, representation: Representation) -> None:
    """Queue what reads the state. `source`: what faults are told under."""
    span.pool.submit([_StateHead(load, span, source, representation)])


class _Reading:
    """What the jobs of one state share."""

    def __init__(self, load: Load, span: StateSpan, source: int) -> None:
        self.load = load
        self.span = span
        self.source = source
        self.urgency = (int(load.turn_s * 1e9), _BEFORE_ALL_LAYERS, 0)

    def fault(self, reason: str, message: object) -> Fault:
        return Fault(self.source, 0, reason, f"tier {self.span.tier.name!r}: {message}")

    def fault_of(self, read: Callable[[], None]) -> Fault | None:
        """Return what went wrong in reading something."""
        try:
            read()
        except ExtentCorrupt as error:
            reason = str(error.facts.get("reason"))
            return self.fault(reason if reason in _OF_ANOTHER else "corrupt", error)
        except (StoreError, OSError) as error:
            return self.fault("read", error)
        return None

    def abandoned(self, error: BaseException) -> Fault:
        return self.fault("closed" if isinstance(error, StoreError) else "error", error)

    def fill(self, offset: int, buffer: memoryview) -> None:
        got = self.span.tier.read([ReadRange(self.span.extent, offset, [buffer])])
        if got != buffer.nbytes:
            raise StoreError(f"a read of {buffer.nbytes} bytes at {offset} of extent {self.span.extent} gave {got}")


class _StateHead(_Reading):
    """Reads the header and queues the parts."""

    def __init__(self, load: Load, span: StateSpan, source: int, representation: Representation) -> None:
        super().__init__(load, span, source)
        self._representation = representation
        self._parts: list[_StatePart] = []

    def run(self, staging: Staging) -> None:
        if not self.load.state_wanted():
            self.load.state_ended(None)
            return
        fault = self.fault_of(lambda: self._read_header(staging))
        if fault is not None:
            self.load.state_ended(None, fault=fault)
            return
        self.span.pool.submit(self._parts)

    def abandon(self, error: BaseException) -> None:
        self.load.state_ended(None, fault=self.abandoned(error))

    def _read_header(self, staging: Staging) -> None:
        span = self.span
        shape = span.tier.shape(span.extent)
        if shape is None:
            raise StoreError(f"extent {span.extent} is gone")
        head = staging.take(shape.header_bytes)
        self.fill(0, head)
        header = decode_header(bytes(head), self._representation, span.tier.sealing)
        layout = header.layout(self._representation)
        # Before memory is taken for what a header says: a wrong writer's says anything.
        if (layout.header_bytes, layout.extent_bytes) != (shape.header_bytes, shape.extent_bytes):
            raise ExtentCorrupt(f"extent {span.extent} has another size than the tier says", reason="stale")
        if header.keys[-1] != span.key or not header.state_bytes:
            raise ExtentCorrupt(f"extent {span.extent} carries no state of that block", reason="stale")
        if not np.array_equal(header.tokens[-BLOCK_TOKENS:], span.tokens):
            raise ExtentCorrupt(f"extent {span.extent} has the key but not the tokens of the prompt", reason="collision")
        whole = _State(self, header, aligned(padded(header.state_bytes, ALIGNMENT)), layout.state_offset)
        step = span.tier.request_bytes if isinstance(span.tier, FarTier) else REQUEST_BYTES
        self._parts = [_StatePart(whole, at, whole.buffer[at : at + step]) for at in range(0, whole.buffer.nbytes, step)]
        whole.left = len(self._parts)


class _State:
    """A state that is being read, and how many of its parts have not ended."""

    def __init__(self, head: _StateHead, header: ExtentHeader, buffer: memoryview, offset: int) -> None:
        self.head = head
        self.buffer = buffer
        self.offset = offset
        self.left = 0
        self._header = header
        self._lock = Lock()
        self._fault: Fault | None = None
        self._dropped = False

    def ended(self, *, fault: Fault | None = None, dropped: bool = False) -> None:
        """Note the end of a part. With the last one, verify all of it and tell the load."""
        with self._lock:
            self._fault = self._fault or fault
            self._dropped |= dropped
            self.left -= 1
            if self.left:
                return
        load, header = self.head.load, self._header
        if self._fault is not None or self._dropped:
            load.state_ended(None, fault=self._fault)
            return
        state = self.buffer[: header.state_bytes]
        if not self.head.span.tier.trusted and _check(header, state) != header.state_check:
            message = f"the boundary state of extent {self.head.span.extent} is not what was written"
            load.state_ended(None, fault=self.head.fault("corrupt", message))
            return
        load.state_ended(state, nbytes=self.buffer.nbytes)


class _StatePart(_Reading):
    """Reads some of a state."""

    def __init__(self, whole: _State, at: int, buffer: memoryview) -> None:
        super().__init__(whole.head.load, whole.head.span, whole.head.source)
        self._whole = whole
        self._at = at
        self._buffer = buffer

    def run(self, staging: Staging) -> None:
        if not self.load.state_wanted():
            self._whole.ended(dropped=True)
            return
        self._whole.ended(fault=self.fault_of(lambda: self.fill(self._whole.offset + self._at, self._buffer)))

    def abandon(self, error: BaseException) -> None:
        self._whole.ended(fault=self.abandoned(error))


def _check(header: ExtentHeader, state: memoryview) -> bytes:
    return piece_check(
        algorithm=header.algorithm,
        representation=header.representation,
        key=header.keys[-1],
        layer=STATE_LAYER,
        buffers=[state],
    )
