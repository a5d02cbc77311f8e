"""Stored prefixes of requests: what is decided about them, their loads from start to end, and what came of them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Several

from headstart.block.identity import Identity
from headstart.engine.base import LoadDecision
from headstart.engine.expecting import Conversations
from headstart.engine.serving.roster import Roster
from headstart.engine.speeds import Speeds
from headstart.engine.torch.kv_memory import DeviceKV, HostKV
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.prefix import PrefixBridge
from headstart.engine.torch.prefix_load import Outcome, PrefixLoad
from headstart.engine.torch.room import Rooms
from headstart.engine.torch.sequence import Sequence
from headstart.metrics import Counters
from headstart.policy.loading import Plan

_log = logging.getLogger(__name__)


class Loads:
    """For the engine's thread."""

    def __init__(
        self, roster: Roster[Sequence], rooms: Rooms, bridge: PrefixBridge | None, speeds: Speeds, counters: Counters
    ) -> None:
        self.speeds = speeds
        self._roster = roster
        self._rooms = rooms
        self._bridge = bridge
        self._conversations = None if bridge is None else Conversations(self.promote)
        self._counters = counters

    def start(self, sequence: Sequence) -> None:
        """Match what is known of a request that has its KV (its prompt; of one that gave way its answer so far, too), decide
        what is done with what matched, and start to read it."""
        if self._bridge is None or not sequence.use_cache or not sequence.reload:
            return
        assert isinstance(sequence.kv, HostKV | DeviceKV)
        begun = time.monotonic()
        try:
            started = self._bridge.start_load(
                sequence.tokens,
                sequence.kv,
                salt=sequence.request.salt,
                shared_tokens=sequence.request.shared_tokens,
                identity=sequence.identity,
                ahead_s=self._ahead_s(sequence),
                mix=sequence.mix,
            )
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
        if started.plan is None:
            return
        self._tell(sequence, started.plan, started.matched_tokens)
        if isinstance(sequence.load, PrefixLoad):
            sequence.computed = sequence.load.tokens

    def went_on(self, sequence: Sequence) -> None:
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
            return self._bridge is not None and self._bridge.promote(
                tokens, salt=salt, shared_tokens=shared_tokens, identity=identity
            )
        except Exception:  # noqa: BLE001 - nobody waits for it
            self._counters.add("match_faults")
            _log.exception("bringing a prefix to memory failed")
            return False

    def settle(self) -> None:
        """Take over what is done, go on with what meets, and give up what takes too long."""
        for sequence in [*self._roster.running, *self._roster.waiting]:
            load = sequence.load
            if isinstance(load, Meeting):
                self._settle_meeting(sequence, load)
            elif load is None:
                continue
            elif load.done:
                self.adopt(sequence, load.outcome())
            elif load.overdue:
                self._counters.add("loads_timed_out")
                sequence.reload = False
                self._start_again(sequence, "the load took too long; computed instead")
            elif load.slow:
                assert self._bridge is not None
                self._counters.add("load_waits_cut_short")
                sequence.reload = self._bridge.in_parts and not sequence.mix  # what is slow twice is not tried for ever
                sequence.mix = self._bridge.in_parts
                load.give_up()
                self._start_again(
                    sequence, "reading was slower than computing would be: it is computed from the start meanwhile"
                )

    def adopt(self, sequence: Sequence, outcome: Outcome) -> None:
        """The load is over: what it brought counts, what it did not is computed."""
        load = sequence.load
        assert load is not None
        self._count(sequence, outcome)
        missing = load.tokens - outcome.tokens
        if isinstance(load, Meeting):
            sequence.computed = load.tokens
            sequence.notes.append(f"{missing} stored tokens were computed while {outcome.tokens} were read")
            self._counters.add("stored_tokens_computed", missing)
        else:
            sequence.computed = outcome.tokens
            if missing:
                sequence.notes.append(f"loaded {outcome.tokens} of {load.tokens} matched tokens; the rest was computed")
                self._counters.add("loads_cut_short")
                self._counters.add("stored_tokens_computed", missing)
            elif load.plan.load_s is not None:
                self.speeds.loaded(outcome.seconds, estimate_s=load.plan.load_s)
        self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The engine is through with its load, whatever became of it; reads under way keep the memory that they touch."""
        load, sequence.load = sequence.load, None
        if load is None:
            return
        if isinstance(load, Meeting):
            load.end()
        else:
            if not load.done:
                load.cancel()
            load.release()
        self._rooms.leaves(load)

    def _settle_meeting(self, sequence: Sequence, load: Meeting) -> None:
        lead = load.lead
        if lead is not None:
            if lead.done:
                sequence.computed = load.take_lead()
            elif lead.overdue:
                self._counters.add("loads_timed_out")
                sequence.reload = False
                self._start_again(sequence, "the load took too long; computed instead")
                return
        load.go_on()
        if load.met(sequence.computed):
            self.adopt(sequence, load.outcome())

    def _start_again(self, sequence: Sequence, why: str) -> None:
        """Bytes may still land in its KV, so it gets fresh KV, at its place in the queue."""
        self.drop(sequence)
        self._rooms.give_back(sequence)
        sequence.computed = 0
        sequence.notes.append(why)
        if sequence in self._roster.running:
            self._roster.put_back(sequence)

    def _count(self, sequence: Sequence, outcome: Outcome) -> None:
        sequence.bytes_read += outcome.bytes_read
        sequence.load_s += outcome.seconds
        self.found(sequence, memory_tokens=outcome.memory_tokens, disk_tokens=outcome.disk_tokens)

    def found(self, sequence: Sequence, *, memory_tokens: int, disk_tokens: int = 0) -> None:
        """Count what a request need not compute. What was its own before it gave way is no hit: it is counted apart."""
        if sequence.reached:
            self._counters.add("resumed_tokens", memory_tokens + disk_tokens)
            return
        sequence.cached_memory_tokens, sequence.cached_disk_tokens = memory_tokens, disk_tokens
        if sequence in self._roster.running:
            self.count_hit(sequence)

    def count_hit(self, sequence: Sequence) -> None:
        """Count what was found for a request that runs, once; of one that waits it may be taken back, and is no hit yet."""
        if sequence.hit_counted or not sequence.cached_tokens:
            return
        sequence.hit_counted = True
        self._counters.add("cached_memory_tokens", sequence.cached_memory_tokens)
        self._counters.add("cached_disk_tokens", sequence.cached_disk_tokens)

    def _tell(self, sequence: Sequence, plan: Plan, matched: int) -> None:
        sequence.decision = LoadDecision(plan.choice, matched, plan.load_s, plan.compute_s)
        self._counters.add(f"load_decisions_{plan.choice}")
        if plan.choice == "compute" and plan.load_s is not None and plan.compute_s is not None:
            left = matched - plan.at_once_tokens
            self._counters.add("stored_tokens_computed", left)
            sequence.notes.append(
                f"{left} stored tokens were computed, in an estimated {plan.compute_s:.2g} s: reading takes {plan.load_s:.2g} s"
            )

    def _ahead_s(self, sequence: Sequence) -> float:
        """Return in how many seconds the prompts of those that run will be computed."""
        computing = self.speeds.computing
        if computing is None:
            return 0.0
        others = [one for one in self._roster.running if one is not sequence and one.load is None and not one.decoding]
        return sum(computing.seconds(one.computed, len(one.tokens)) for one in others)
