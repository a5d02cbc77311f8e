"""A stored prefix on its way into a request: read in ranges, each set while the next ones are being read.

    0 ── set ──▶ computed ◀─ landed ─┤ under way ├ … asked for next ▶                    tokens     from the front
    0 ── set ──▶ computed ──▶ computing ──▶ …        ◀ asked for next … ├ under way ├─ landed ─┤    mixed: from the end

libllama takes all layers of a range at once, and only behind what a sequence holds already. So a range that has landed waits in
host memory until all before it is there, set or computed, whichever came first. From the front that is at once. Where reading
is slower than computing it turns round, and what was read so far stays; what fails is a hole, which is computed.

Of a recurrent model nothing counts until every range and the state behind them, which comes with the last, are set.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import Lease, Load
from headstart.engine.llama.context import Context, WrongState
from headstart.engine.serving.bridge import MEMORY, stretches_of
from headstart.engine.serving.loading import Outcome
from headstart.engine.speeds import ReadAccount, Speeds
from headstart.errors import LoadFailed
from headstart.policy import loading
from headstart.policy.loading import Plan
from headstart.tier.arena import Arena, Region

_log = logging.getLogger(__name__)

_LOOK_S = 0.02
_RANGE_BYTES = 8 << 20
_AT_ONCE = 4  # ranges under way, so that 16 to 32 MiB are
_SET_AT_ONCE = 4  # ranges that are set between two steps


class PrefixRead:
    """`tokens`: how many matched. Takes over `lease`; the engine calls `end` once. `passage`: where ranges land; a range for
    which there is no room waits for one before it."""

    def __init__(
        self,
        lease: Lease,
        passage: Arena,
        *,
        plan: Plan,
        representation: Representation,
        speeds: Speeds,
        timeout_s: float,
        least_s: float,
        wake: Callable[[], None],
    ) -> None:
        self.plan = plan
        self.tokens = lease.tokens
        self.started_s = time.monotonic()
        self._lease = lease
        self._passage = passage
        self._piece_bytes = representation.layer_bytes[0] or 0
        self._whole = representation.state == "required"  # or nothing
        self._stretches = stretches_of(lease)
        self._speeds = speeds
        self._end_s = self.started_s + timeout_s
        self._least_s = least_s
        self._wake = wake
        self._range_tokens = max(1, min(_RANGE_BYTES, passage.capacity_bytes // _AT_ONCE) // self._piece_bytes) * BLOCK_TOKENS
        self._ranges = -(-plan.at_once_tokens // self._range_tokens)
        self._lock = Lock()  # guards what follows
        self._front, self._front_end = 0, plan.at_once_tokens  # asked for from the front, and how far that goes
        self._back = lease.tokens if plan.choice == "mixed" else plan.at_once_tokens  # asked for from the end, down to this
        self._claimed = 0  # tokens before this are computed, or being computed
        self._turned = False
        self._under_way: list[_Range] = []
        self._landed: list[_Range] = []
        self._arrived, self._arrived_s = 0, 0.0
        self._memory_tokens = self._set_tokens = self._bytes_read = 0
        self._landed_s = self.started_s
        self._failed = False  # though it is whole or nothing
        self._over = False
        self._more()

    # For the engine's thread.

    @property
    def mixed(self) -> bool:
        """Whether computing goes on meanwhile."""
        return self.plan.choice == "mixed" or self._turned

    @property
    def done(self) -> bool:
        """No read holds memory for it any more."""
        with self._lock:
            return not self._under_way

    @property
    def deadline_s(self) -> float:
        """When to look again, if nothing comes before."""
        return time.monotonic() + _LOOK_S

    @property
    def overdue(self) -> bool:
        return time.monotonic() >= self._end_s

    @property
    def slow(self) -> bool:
        """Whether the prompt is sooner there in another way (`policy.loading.too_slow`)."""
        if self.mixed:
            return False
        return loading.too_slow(
            time.monotonic() - self.started_s,
            arrived=self._arrived,
            arrived_s=self._arrived_s,
            layers=self._ranges,
            plan=self.plan,
            least_s=self._least_s,
        )

    def turn_round(self) -> None:
        """Read from the end from now on, while the beginning is computed."""
        with self._lock:
            self._turned = True
            self._front_end, self._back = self._front, self.tokens
            late = list(self._under_way)
        for one in late:
            one.account.late(1, of=1)
        self._more()

    def room(self, computed: int) -> int:
        """Return how many tokens from `computed` on are to be computed next; 0: wait."""
        if not self.mixed or computed >= self.tokens:
            return 0
        with self._lock:
            if not self._turned and computed < self._front_end and self._reading(computed):
                return 0  # the lead is waited for
            landed = [one.first for one in self._landed if one.first > computed]
            gap = min(landed, default=self.tokens) - computed
            reading = bool(self._under_way)
        if computed % BLOCK_TOKENS:  # a step was cut; ranges are set behind whole blocks
            return min(gap, BLOCK_TOKENS - computed % BLOCK_TOKENS)
        if gap <= 0 or not reading:
            return max(0, gap)
        return loading.stride(
            gap,
            first=computed,
            loading_s=self._loading_s(gap),
            computing=self._speeds.computing,
            piece_tokens=BLOCK_TOKENS,
        )

    def claim(self, end: int) -> None:
        """The tokens before `end` are being computed from now on: they need not be read."""
        with self._lock:
            self._claimed = max(self._claimed, end)

    def set_into(self, context: Context, sequence: int, computed: int) -> int:
        """Set what has landed and comes next into a sequence that holds `computed` tokens; return how many it holds then, as
        far as they count."""
        at = self._set_tokens if self._whole else computed
        for _ in range(_SET_AT_ONCE):
            one = self._next_landed(at)
            if one is None:
                self._more()  # where the passage had no room, it may have some now
                break
            try:
                at = self._set(one, context, sequence, at)
            finally:
                one.region.release()
                self._more()
        return computed if self._whole and at < self.tokens else at

    def over(self, computed: int) -> bool:
        """Whether nothing more will come, or be of use."""
        if computed >= self.tokens or self._failed:
            return True
        with self._lock:
            return not self._under_way and not self._landed and not self._left()

    def outcome(self) -> Outcome:
        """Return what was read and used so far."""
        with self._lock:
            seconds = self._landed_s - self.started_s
            good = 0 if self._whole and (self._failed or self._set_tokens < self.tokens) else self._set_tokens
            return Outcome.of(good, self._memory_tokens, bytes_read=self._bytes_read, seconds=seconds)

    def end(self) -> None:
        """Read nothing more. What is under way keeps its own memory until it ends."""
        with self._lock:
            if self._over:
                return
            self._over = True
            landed, self._landed = self._landed, []
            under_way = list(self._under_way)
        for one in landed:
            one.region.release()
        for one in under_way:
            one.account.cancelled = True
            if one.load is not None:
                one.load.cancel()
        self._lease.release()

    def _next_landed(self, computed: int) -> _Range | None:
        with self._lock:
            for one in [one for one in self._landed if one.end <= computed]:  # computed sooner than read
                self._landed.remove(one)
                one.region.release()
            if computed % BLOCK_TOKENS:
                return None
            found = next((one for one in self._landed if one.first <= computed), None)
            if found is not None:
                self._landed.remove(found)
            return found

    def _set(self, one: _Range, context: Context, sequence: int, computed: int) -> int:
        """Set a range from `computed` on; return how far it came."""
        at = computed
        try:
            while at < one.end:
                offset = (at - one.first) // BLOCK_TOKENS * self._piece_bytes
                piece = one.region.view[offset : offset + self._piece_bytes]
                context.put_in(sequence, piece, at, at + BLOCK_TOKENS)
                at += BLOCK_TOKENS
            if self._whole and at == self.tokens:
                assert one.load is not None
                context.state_in(sequence, one.load.state(timeout_s=0.0), at)
        except (WrongState, LoadFailed) as error:
            _log.error("what was stored of the tokens from %d on is not what this context takes: %s", at, error)
            with self._lock:
                self._give_up_rest()
        with self._lock:
            self._set_tokens += at - computed
            self._memory_tokens += min(one.memory_tokens, at - computed)
        return at

    def _reading(self, at: int) -> bool:
        """Under the lock."""
        return any(one.first <= at < one.end for one in [*self._under_way, *self._landed]) or self._front <= at

    def _left(self) -> bool:
        """Whether there is more to ask for. Under the lock."""
        return self._front < self._front_end or (self.mixed and self._back > max(self._front_end, self._claimed))

    def _loading_s(self, tokens: int) -> float | None:
        """Return in how many seconds reading will have brought so many more; None: nobody knows. The longer nothing has come,
        the later that is, so a device that hangs is waited for but once."""
        reading = self._speeds.reading()
        names = {one.tier for one in self._stretches if not one.always}
        if not names <= set(reading):
            return None
        token_bytes = self._piece_bytes / BLOCK_TOKENS

        def seconds(count: int) -> float:
            return max((reading[name].speed.seconds(int(count * token_bytes), 0) for name in names), default=0.0)

        due_s = self._landed_s + 2 * _AT_ONCE * seconds(self._range_tokens)
        return seconds(tokens) + max(0.0, time.monotonic() - due_s)

    # For reading threads as well.

    def _more(self) -> None:
        """Ask for ranges until enough are under way, there is no room for another, or none is left."""
        while (one := self._ask()) is not None:
            try:
                load = self._lease.load(one, one.first, one.end)
            except ValueError:  # the engine has ended it just now
                with self._lock:
                    self._under_way.remove(one)
                one.account.ended(0)
                one.region.release()
                return
            one.load = load
            if one.account.cancelled:
                load.cancel()
            load.add_done_callback(one.done)

    def _ask(self) -> _Range | None:
        with self._lock:
            if self._over or self._failed or len(self._under_way) >= _AT_ONCE or not self._left():
                return None
            from_front = self._front < self._front_end
            if from_front:
                first, end = self._front, min(self._front_end, self._front + self._range_tokens)
            else:
                first, end = max(self._front_end, self._back - self._range_tokens), self._back
            nbytes = (end - first) // BLOCK_TOKENS * self._piece_bytes
            region = self._passage.allocate(nbytes)
            if region is None:
                return None
            if from_front:
                self._front = end
            else:
                self._back = first
            one = _Range(self, first, end, region, ReadAccount(self._speeds, self._stretches, first, end))
            self._under_way.append(one)
            return one

    def _done(self, one: _Range, load: Load) -> None:
        """A range has ended, and no read can touch its memory any more."""
        one.account.ended(load.bytes_read)
        with self._lock:
            self._under_way.remove(one)
            self._bytes_read += load.bytes_read
            good = load.usable_tokens
            if good and not self._over:
                one.end = one.first + good
                one.memory_tokens = load.tokens_by_tier.get(MEMORY, 0)
                self._landed.append(one)
                self._landed_s = time.monotonic()
                self._arrived += 1
                self._arrived_s = self._landed_s - self.started_s
            else:
                one.region.release()
            if load.faults and not self._over:
                self._give_up_rest()
        self._more()
        self._wake()

    def _give_up_rest(self) -> None:
        """What failed must be computed, while the rest is read if that is of use without it. Under the lock."""
        if self._whole:
            self._failed = True
        elif not self.mixed:
            self._turned = True
            self._front_end, self._back = self._front, self.tokens


@dataclass(slots=True, eq=False)
class _Range:
    """Tokens `first` … `end`-1 on their way into memory of their own. The `KVView` that they are loaded into."""

    read: PrefixRead
    first: int
    end: int
    region: Region
    account: ReadAccount
    load: Load | None = None
    memory_tokens: int = 0

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        """See `KVView`."""
        start = sum(sizes[:1]) * (first - self.first // BLOCK_TOKENS)
        return [self.region.view[start : start + sum(sizes)]]

    def done(self, load: Load) -> None:
        self.read._done(self, load)
