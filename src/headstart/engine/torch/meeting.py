"""A stored prefix is read from its end backwards while its beginning is computed; where both meet, all of it is there.

    0 ── lead ──▶ computed ──▶ claimed           lowest ◀── loaded ── tokens
                                        ◀─ range ─┘◀─ range (under way, each into memory of its own)

So no speed has to be known, nor stay as it was: what reading does not bring in time is computed. Ranges are copied to the
request's KV once they are there, in order from the end and never over what is computed, so no read can touch what the engine is
at, and a read that never ends holds its range's memory and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.prefix_cache import Lease, Load
from headstart.engine.serving.bridge import MEMORY
from headstart.engine.serving.loading import Outcome
from headstart.engine.speeds import ReadAccount, Speeds
from headstart.engine.torch.kv_memory import DeviceKV, HostKV
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.policy.loading import Plan, Stretch, stride

_LOOK_S = 0.02
_AT_ONCE = 2  # ranges under way: one is being read while the next is asked for


class Meeting:
    """`lead`: a load of the prompt's beginning, which computing waits for. `allocate` gives host memory for so many tokens, or
    None. Takes over `lease`; the engine calls `end` once, after which nothing is written to `kv` any more."""

    def __init__(
        self,
        lease: Lease,
        kv: HostKV | DeviceKV,
        *,
        lead: PrefixLoad | None,
        plan: Plan,
        stretches: Sequence[Stretch],
        range_tokens: int,
        speeds: Speeds,
        allocate: Callable[[int], HostKV | None],
        wake: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.tokens = lease.tokens
        self.lead = lead
        self._lead_outcome: Outcome | None = None
        self.started_s = time.monotonic()
        self._lease = lease
        self._kv = kv
        self._first = plan.at_once_tokens
        self._stretches = stretches
        self._token_bytes = sum(one.nbytes for one in stretches) // lease.tokens
        self._range_tokens = range_tokens
        self._speeds = speeds
        self._allocate = allocate
        self._wake = wake
        self._lock = Lock()  # guards what follows
        self._claimed = self._first  # tokens before this are computed, or being computed
        self._lowest = lease.tokens  # from here on all is loaded
        self._asked = lease.tokens  # from here on all was asked for
        self._under_way: list[_Range] = []
        self._landed: dict[int, _Range] = {}  # by end; those that wait for one behind them
        self._lost = 0  # what ends here or before cannot join any more: something behind it could not be read
        self._over = False
        self._memory_tokens = 0
        self._bytes_read = 0
        self._landed_s = self.started_s  # when reading last brought something
        self._more()

    # For the engine's thread.

    def room(self, computed: int) -> int:
        """Return how many tokens from `computed` on are to be computed next; 0: wait, or they have met."""
        if self.lead is not None:
            return 0
        with self._lock:
            gap, reading = self._lowest - computed, any(one.end > self._lost for one in self._under_way)
        if gap <= 0 or not reading:
            return max(0, gap)
        return stride(
            gap,
            first=computed,
            loading_s=self._loading_s(gap),
            computing=self._speeds.computing,
            piece_tokens=BLOCK_TOKENS,
        )

    @property
    def done(self) -> bool:
        """No read holds memory for it any more."""
        with self._lock:
            return not self._under_way and (self.lead is None or self.lead.done)

    @property
    def deadline_s(self) -> float:
        """When to look again whether waiting still pays."""
        return time.monotonic() + _LOOK_S

    def take_lead(self) -> int:
        """Take over the lead, which is done; return how many tokens it brought."""
        assert self.lead is not None
        lead, self.lead = self.lead, None
        self._lead_outcome = lead.outcome()
        lead.release()
        return self._lead_outcome.tokens

    def go_on(self) -> None:
        """Ask for more, where there was no memory for it before."""
        self._more()

    def claim(self, end: int) -> None:
        """The tokens before `end` are being computed from now on: nothing that was read goes there."""
        with self._lock:
            self._claimed = max(self._claimed, end)

    def met(self, computed: int) -> bool:
        return self.lead is None and computed >= self._lowest

    def outcome(self) -> Outcome:
        """Return what was read and used, once both have met."""
        lead = self._lead_outcome
        with self._lock:
            tokens = self.tokens - self._lowest
            memory_tokens, bytes_read = self._memory_tokens, self._bytes_read
        if lead is not None:
            tokens, memory_tokens = tokens + lead.tokens, memory_tokens + lead.memory_tokens
            bytes_read += lead.bytes_read
        return Outcome.of(tokens, memory_tokens, bytes_read=bytes_read, seconds=time.monotonic() - self.started_s)

    def end(self) -> None:
        """Read and write nothing more. What is under way keeps its own memory until it ends."""
        with self._lock:
            if self._over:
                return
            self._over = True
            landed, self._landed = list(self._landed.values()), {}
            under_way = list(self._under_way)
        if self.lead is not None:
            self.lead.cancel()
            self.lead.release()
        for one in landed:
            one.host.release()
        for one in under_way:
            one.cancel()
        self._lease.release()

    # For reading threads as well.

    def _more(self) -> None:
        """Ask for ranges until enough are under way, or nothing is left that computing will not have reached."""
        while (one := self._next()) is not None:
            try:
                load = self._lease.load(one, one.first, one.end)
            except ValueError:  # the engine has ended it just now
                load = None
            if load is None:
                with self._lock:
                    self._under_way.remove(one)
                one.account.ended(0)
                one.host.release()
                return
            one.load = load
            if one.account.cancelled:
                load.cancel()
            load.add_done_callback(one.done)

    def _next(self) -> _Range | None:
        with self._lock:
            if self._over or self._lost or len(self._under_way) >= _AT_ONCE:
                return None
            end, first = self._asked, max(self._first, self._asked - self._range_tokens)
            if end <= self._claimed or first >= end:
                return None
            host = self._allocate(end - first)
            if host is None:
                return None
            one = _Range(self, first, end, host, ReadAccount(self._speeds, self._stretches, first, end))
            self._asked = first
            self._under_way.append(one)
            return one

    def _done(self, one: _Range, load: Load) -> None:
        """A range has ended, and no read can touch its memory any more."""
        one.account.ended(load.bytes_read)
        with self._lock:
            self._under_way.remove(one)
            self._bytes_read += load.bytes_read
            good = load.usable_tokens == one.end - one.first
            if good and not self._over:
                one.memory_tokens = load.tokens_by_tier.get(MEMORY, 0)
                self._landed[one.end] = one
                self._take()
            else:
                one.host.release()
                self._lost = max(self._lost, one.end)
            useless = [other for other in self._under_way if other.end <= self._lost]
        for other in useless:
            other.cancel()
        self._more()
        self._wake()

    def _take(self) -> None:
        """Take over what has landed, in order from the end, as far as it is not computed."""
        while (one := self._landed.pop(self._lowest, None)) is not None:
            first = max(one.first, -(-self._claimed // BLOCK_TOKENS) * BLOCK_TOKENS)
            try:
                if first < one.end:
                    self._kv.take(one.host, first - one.first, at=first, tokens=one.end - first)
                    self._lowest = first
                    self._memory_tokens += min(one.memory_tokens, one.end - first)
            finally:
                one.host.release()
            self._landed_s = time.monotonic()
            if first != one.first:
                return  # they have met

    def _loading_s(self, tokens: int) -> float | None:
        """Return in how many seconds reading will have brought so many more; None: nobody knows. The longer nothing has come,
        the later that is, so a device that hangs is waited for but once."""
        reading = self._speeds.reading()
        names = {one.tier for one in self._stretches if not one.always}
        if not names <= set(reading):
            return None

        def seconds(count: int) -> float:
            return max((reading[name].speed.seconds(count * self._token_bytes, 0) for name in names), default=0.0)

        due_s = self._landed_s + 2 * _AT_ONCE * seconds(self._range_tokens)
        return seconds(tokens) + max(0.0, time.monotonic() - due_s)


@dataclass(slots=True, eq=False)
class _Range:
    """Tokens `first` … `end`-1 on their way into memory of their own. The `KVView` that they are loaded into."""

    meeting: Meeting
    first: int
    end: int
    host: HostKV
    account: ReadAccount
    load: Load | None = None
    memory_tokens: int = 0

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See `KVView`."""
        return self.host.buffers(layer, first - self.first // BLOCK_TOKENS, sizes)

    def cancel(self) -> None:
        self.account.late(1, of=1)
        self.account.cancelled = True
        if self.load is not None:
            self.load.cancel()

    def done(self, load: Load) -> None:
        self.meeting._done(self, load)
