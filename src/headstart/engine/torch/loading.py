"""Loads of stored prefixes, from their start to what came of them."""

from __future__ import annotations

import logging
import time

from headstart.engine.torch.kv_memory import DeviceKV, HostKV
from headstart.engine.torch.prefix import Outcome, PrefixBridge
from headstart.engine.torch.room import Rooms
from headstart.engine.torch.roster import Roster
from headstart.engine.torch.sequence import Sequence
from headstart.metrics import Counters

_log = logging.getLogger(__name__)


class Loads:
    """For the engine's thread."""

    def __init__(self, roster: Roster, rooms: Rooms, bridge: PrefixBridge | None, counters: Counters) -> None:
        self._roster = roster
        self._rooms = rooms
        self._bridge = bridge
        self._counters = counters

    def start(self, sequence: Sequence) -> None:
        """Match what is known of a request that has its KV, and start to load what matched. Of one that was preempted that is
        its prompt and its answer so far."""
        if self._bridge is None or not sequence.use_cache or not sequence.reload:
            return
        assert isinstance(sequence.kv, HostKV | DeviceKV)
        started = time.monotonic()
        try:
            sequence.load = self._bridge.start_load(sequence.tokens, sequence.kv, salt=sequence.request.salt)
        except Exception:  # noqa: BLE001 - a request's outer edge: without the cache it can still be answered
            self._counters.add("match_faults")
            _log.exception("matching request %s failed; it is computed", sequence.request.id)
        sequence.match_s = time.monotonic() - started
        if sequence.load is not None:
            sequence.computed = sequence.load.tokens

    def settle(self) -> None:
        """Take over what is done, and give up what takes too long."""
        for sequence in list(self._roster.running):
            load = sequence.load
            if load is None:
                continue
            if load.done:
                self.adopt(sequence, load.outcome())
            elif load.overdue:
                # Bytes may still land in its KV, so it gets fresh KV, at its place in the queue, and computes everything.
                self.give_up(sequence)
                self._rooms.give_back(sequence)
                sequence.computed = 0
                sequence.reload = False
                sequence.notes.append("the load took too long; computed instead")
                self._counters.add("loads_timed_out")
                self._roster.put_back(sequence)

    def adopt(self, sequence: Sequence, outcome: Outcome) -> None:
        """The load is over: what it brought counts, what it did not is computed."""
        assert sequence.load is not None
        if outcome.tokens < sequence.load.tokens:
            sequence.notes.append(f"loaded {outcome.tokens} of {sequence.load.tokens} matched tokens; the rest was computed")
            self._counters.add("loads_cut_short")
        sequence.computed = outcome.tokens
        sequence.bytes_read += outcome.bytes_read
        sequence.load_s += outcome.seconds
        self.found(sequence, memory_tokens=outcome.memory_tokens, disk_tokens=outcome.disk_tokens)
        self.drop(sequence)

    def found(self, sequence: Sequence, *, memory_tokens: int, disk_tokens: int = 0) -> None:
        """Count what a request need not compute. What was its own before it gave way is no hit: it is counted apart."""
        if sequence.reached:
            self._counters.add("resumed_tokens", memory_tokens + disk_tokens)
            return
        sequence.cached_memory_tokens, sequence.cached_disk_tokens = memory_tokens, disk_tokens
        self._counters.add("cached_memory_tokens", memory_tokens)
        self._counters.add("cached_disk_tokens", disk_tokens)

    def give_up(self, sequence: Sequence) -> None:
        """End its load, if it has one, before all of it is there: nothing of it counts."""
        if sequence.load is not None:
            sequence.load.cancel()
            self._rooms.leaves(sequence.load)
            self.drop(sequence)

    def drop(self, sequence: Sequence) -> None:
        """The engine is through with its load; reads under way keep the memory that they touch."""
        load, sequence.load = sequence.load, None
        if load is not None:
            load.release()
