"""What a key may ask at once and in a minute, and how long who came too early should wait. For the event loop."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from headstart.api.errors import TooManyRequests, TooManyWaiting
from headstart.api.keyring import Caller
from headstart.api.keys import Key
from headstart.ledger.entry import Entry
from headstart.policy.rates import Bucket

REFUSAL_LINES = 600  # a minute and key
_LANDINGS = 32  # that the pace is taken from
_LONGEST_S = 60  # that anybody is sent away for because of a queue


@dataclass(slots=True)
class _State:
    in_flight: int = 0
    requests: Bucket | None = None
    tokens: Bucket | None = None


@dataclass(slots=True, eq=False)
class Pass:
    """One request's leave to run. `used` charges tokens as they become known; `end` once, twice is fine."""

    state: _State | None
    clock: Callable[[], float]
    charged: int = 0
    ended: bool = False

    def used(self, tokens: int) -> None:
        """Charge up to `tokens` in all."""
        if self.state is not None and self.state.tokens is not None and tokens > self.charged:
            self.state.tokens.take(tokens - self.charged, self.clock())
            self.charged = tokens

    def end(self) -> None:
        if not self.ended:
            self.ended = True
            if self.state is not None:
                self.state.in_flight -= 1


@dataclass(slots=True)
class Limits:
    """Of every key that has asked; bounded by how many keys there are."""

    clock: Callable[[], float] = time.monotonic
    _states: dict[str, _State] = field(default_factory=dict)

    def enter(self, caller: Caller) -> Pass:
        """Return the leave for one request. Raises TooManyRequests, with the seconds after which it would be given."""
        key = caller.key
        if key is None:
            return Pass(None, self.clock)
        now_s = self.clock()
        state = self._state(key, now_s)
        if key.in_flight is not None and state.in_flight >= key.in_flight:
            raise _refusal(f"{key.in_flight} requests of this key are running or waiting already", 1.0)
        if state.requests is not None and (wait_s := state.requests.wait_s(now_s)):
            raise _refusal(f"this key may send {key.requests_per_minute} requests a minute", wait_s)
        if state.tokens is not None and (wait_s := state.tokens.wait_s(now_s)):
            raise _refusal(f"this key may use {key.tokens_per_minute} tokens a minute", wait_s)
        if state.requests is not None:
            state.requests.take(1, now_s)
        state.in_flight += 1
        return Pass(state, self.clock)

    def _state(self, key: Key, now_s: float) -> _State:
        """Return what is known of a key, its limits as they are now."""
        state = self._states.setdefault(key.id, _State())
        state.requests = _as_it_is(state.requests, key.requests_per_minute, now_s)
        state.tokens = _as_it_is(state.tokens, key.tokens_per_minute, now_s)
        return state


@dataclass(slots=True)
class Refusals:
    """Which refusals get a line of their own: of each key so many a minute, or who floods us with requests would fill the usage
    log and push out what was used. The others are added to the next line of that key."""

    clock: Callable[[], float] = time.monotonic
    _buckets: dict[str, Bucket] = field(default_factory=dict)
    _held: dict[str, Entry] = field(default_factory=dict)

    def line(self, entry: Entry) -> Entry | None:
        """Return the line to write for a refusal, or None for none now."""
        now_s = self.clock()
        bucket = self._buckets.setdefault(entry.key, Bucket(REFUSAL_LINES, now_s))
        held = self._held.pop(entry.key, None)
        entry = structs.replace(entry, requests=1 + (0 if held is None else held.requests))
        if bucket.wait_s(now_s):
            self._held[entry.key] = entry
            return None
        bucket.take(1, now_s)
        return entry

    def rest(self) -> list[Entry]:
        """Return lines for all that have none yet."""
        held, self._held = list(self._held.values()), {}
        return held


@dataclass(slots=True)
class Pace:
    """How fast requests leave the engine, for telling whom the queue has no place for when to come again."""

    clock: Callable[[], float] = time.monotonic
    _landed_s: deque[float] = field(default_factory=lambda: deque(maxlen=_LANDINGS))

    def landed(self) -> None:
        self._landed_s.append(self.clock())

    def too_many(self, waiting: int) -> TooManyWaiting:
        """Return the refusal for one who comes when so many wait."""
        return TooManyWaiting(
            f"{waiting} requests are waiting already; try again in a moment",
            code="rate_limit_exceeded",
            retry_after_s=self.retry_after_s(waiting),
        )

    def retry_after_s(self, waiting: int) -> int:
        """Return in how many seconds those that wait now will probably be done: at the pace of the latest ones, 1 where nothing
        is known."""
        if len(self._landed_s) < 2:
            return 1
        span_s = self.clock() - self._landed_s[0]
        return max(1, min(_LONGEST_S, math.ceil(waiting * span_s / len(self._landed_s))))


def _as_it_is(bucket: Bucket | None, per_minute: int | None, now_s: float) -> Bucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return Bucket(per_minute, now_s)
    if bucket.per_minute != per_minute:
        bucket.change(per_minute, now_s)
    return bucket


def _refusal(why: str, wait_s: float) -> TooManyRequests:
    return TooManyRequests(f"{why}; try again later", code="rate_limit_exceeded", retry_after_s=max(1, math.ceil(wait_s)))
