"""What is told and counted of stored prefixes, whichever way they are loaded; conversations that may go on soon."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, Generic

from headstart.block.identity import Identity
from headstart.engine.base import LoadDecision
from headstart.engine.expecting import Conversations
from headstart.engine.serving.bridge import Bridge, Started
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.sequence import S
from headstart.engine.speeds import Speeds
from headstart.metrics import Counters
from headstart.policy.loading import Plan

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tokens that are good in all layers, by tier; all bytes read for them; seconds from start to the last byte."""

    memory_tokens: int
    disk_tokens: int
    bytes_read: int
    seconds: float

    @classmethod
    def of(cls, tokens: int, memory_tokens: int, *, bytes_read: int, seconds: float) -> Outcome:
        memory = min(tokens, memory_tokens)
        return cls(memory, tokens - memory, bytes_read, seconds)

    @property
    def tokens(self) -> int:
        return self.memory_tokens + self.disk_tokens


class LoadBooks(ABC, Generic[S]):
    """For the engine's thread."""

    def __init__(self, roster: Roster[S], bridge: Bridge[Any] | None, speeds: Speeds, counters: Counters) -> None:
        self.speeds = speeds
        self._roster = roster
        self._conversations = None if bridge is None else Conversations(self.promote)
        self._promoter = bridge
        self._counters = counters

    def start(self, sequence: S) -> None:
        """Match what is known of a request that has its KV (its prompt; of one that gave way its answer so far, too), decide
        what is done with what matched, and start to read it."""
        if self._promoter is None or not sequence.use_cache or not sequence.reload:
            return
        begun = time.monotonic()
        try:
            started = self._begin(sequence)
        except Exception:  # noqa: BLE001 - a request's outer edge: without the cache it can still be answered
            self._counters.add("match_faults")
            _log.exception("matching request %s failed; it is computed", sequence.request.id)
            return
        finally:
            sequence.match_s = time.monotonic() - begun
        sequence.load = started.load
        sequence.note_known(started.matched_tokens)
        if started.beyond_tokens:
            sequence.diverges = started.matched_tokens + started.beyond_tokens
        if started.plan is not None:
            self._tell(sequence, started.plan, started.matched_tokens)

    @abstractmethod
    def _begin(self, sequence: S) -> Started[Any]:
        """Begin to load the longest stored prefix of a request, unless computing it is sooner."""

    def went_on(self, sequence: S) -> None:
        """Note that a request of a conversation has ended."""
        asked = sequence.request
        if self._conversations is not None and sequence.use_cache and asked.session:
            self._conversations.went_on(
                tenant=asked.tenant,
                session=asked.session,
                tokens=sequence.tokens,
                salt=asked.salt,
                shared_tokens=asked.shared_tokens,
                identity=sequence.identity,
                started_s=sequence.submitted_s,
                ended_s=time.monotonic(),
            )

    def look_ahead(self) -> None:
        """With nothing else to do: have the prefix of a conversation that may go on about now brought to the memory tier."""
        if self._conversations is not None:
            self._conversations.look_ahead(time.monotonic())

    def promote(self, tokens: Several[int], salt: str | bytes | None, shared_tokens: int, identity: Identity | None) -> bool:
        """Have what is stored of `tokens` brought to the memory tier; see `PrefixCache.promote`."""
        try:
            return self._promoter is not None and self._promoter.promote(
                tokens, salt=salt, shared_tokens=shared_tokens, identity=identity
            )
        except Exception:  # noqa: BLE001 - nobody waits for it
            self._counters.add("match_faults")
            _log.exception("bringing a prefix to memory failed")
            return False

    def found(self, sequence: S, *, memory_tokens: int, disk_tokens: int = 0) -> None:
        """Count what a request need not compute. What was its own before it gave way is no hit: it is counted apart."""
        if sequence.reached:
            self._counters.add("resumed_tokens", memory_tokens + disk_tokens)
            return
        sequence.cached_memory_tokens, sequence.cached_disk_tokens = memory_tokens, disk_tokens
        if sequence in self._roster.running:
            self.count_hit(sequence)

    def count_hit(self, sequence: S) -> None:
        """Count what was found for a request that runs, once; of one that waits it may be taken back, and is no hit yet."""
        if sequence.hit_counted or not sequence.cached_tokens:
            return
        sequence.hit_counted = True
        self._counters.add("cached_memory_tokens", sequence.cached_memory_tokens)
        self._counters.add("cached_disk_tokens", sequence.cached_disk_tokens)

    def _count(self, sequence: S, outcome: Outcome) -> None:
        sequence.bytes_read += outcome.bytes_read
        sequence.load_s += outcome.seconds
        self.found(sequence, memory_tokens=outcome.memory_tokens, disk_tokens=outcome.disk_tokens)

    def _tell(self, sequence: S, plan: Plan, matched: int) -> None:
        sequence.decision = LoadDecision(plan.choice, matched, plan.load_s, plan.compute_s)
        self._counters.add(f"load_decisions_{plan.choice}")
        if plan.choice == "compute" and plan.load_s is not None and plan.compute_s is not None:
            left = matched - plan.at_once_tokens
            self._counters.add("stored_tokens_computed", left)
            sequence.notes.append(
                f"{left} stored tokens were computed, in an estimated {plan.compute_s:.2g} s: reading takes {plan.load_s:.2g} s"
            )

    def _ahead_s(self, sequence: S) -> float:
        """Return in how many seconds the prompts of those that run will be computed."""
        computing = self.speeds.computing
        if computing is None:
            return 0.0
        others = [one for one in self._roster.running if one is not sequence and one.load is None and not one.decoding]
        return sum(computing.seconds(one.computed, len(one.tokens)) for one in others)
