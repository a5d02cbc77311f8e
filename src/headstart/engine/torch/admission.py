"""Who of those that wait runs next: as soon as there is KV memory for it, first come first served."""

from __future__ import annotations

import logging
import time

from headstart.engine.torch.ending import Endings
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory
from headstart.engine.torch.loading import Loads
from headstart.engine.torch.prefix import PrefixBridge
from headstart.engine.torch.roster import Roster
from headstart.engine.torch.sequence import Sequence
from headstart.engine.torch.sharing import BranchKV, Offer, best_offer
from headstart.metrics import Counters

_log = logging.getLogger(__name__)


class Admission:
    """For the engine's thread."""

    def __init__(
        self,
        roster: Roster,
        memory: KVMemory,
        loads: Loads,
        endings: Endings,
        bridge: PrefixBridge | None,
        counters: Counters,
        *,
        max_running: int,
        patience_s: float,
        share: bool,
    ) -> None:
        """`share`: whether requests that begin alike hold that beginning together."""
        self._share = share
        self._roster = roster
        self._memory = memory
        self._loads = loads
        self._endings = endings
        self._bridge = bridge
        self._counters = counters
        self._max_running = max_running
        self._patience_s = patience_s
        self._starved_s: float | None = None  # since when nothing runs and the next one finds no memory

    def admit(self) -> None:
        """Give KV to those who wait, first come first served, and start their loads. Who will share what another one is still
        loading or computing stays until it is there, and holds up nobody."""
        for sequence in list(self._roster.waiting):
            if len(self._roster.running) >= self._max_running:
                return
            offer = self._offer(sequence)
            if offer is not None and not offer.ready:
                continue
            kv = self._allocate(sequence, offer)
            if kv is not None:
                self._starved_s = None
            elif (kv := self._spare_for(sequence)) is None:
                return
            self._roster.start(sequence)
            sequence.kv = kv
            if sequence.admitted_s is None:
                sequence.admitted_s = time.monotonic()
                self._counters.add("prompt_tokens", sequence.prompt_tokens)
            if isinstance(kv, BranchKV):
                sequence.computed = sequence.cached_memory_tokens = kv.prefix.tokens
                self._counters.add("cached_memory_tokens", kv.prefix.tokens)
                self._counters.add("prefixes_shared")
            else:
                self._loads.start(sequence)

    def _offer(self, sequence: Sequence) -> Offer | None:
        """Return what a running request has of this one's prompt, unless the cache has more."""
        if self._bridge is None or not sequence.use_cache or not self._share:
            return None
        offer = best_offer(sequence, self._roster.running)
        if offer is None:
            return None
        if sequence.stored is None:
            try:
                sequence.stored = self._bridge.stored_tokens(sequence.request.prompt, salt=sequence.request.salt)
            except Exception:  # noqa: BLE001 - as where it is loaded, which will fail, be counted and logged again
                sequence.stored = 0
        return offer if offer.tokens >= sequence.stored else None

    def _allocate(self, sequence: Sequence, offer: Offer | None) -> HostKV | DeviceKV | BranchKV | None:
        if offer is None:
            return self._memory.allocate(sequence.kv_tokens)
        own = self._memory.allocate_host(sequence.kv_tokens - offer.tokens)
        return None if own is None else offer.accept(own)

    def _spare_for(self, sequence: Sequence) -> HostKV | None:
        """Return memory beyond the capacity once nothing runs and still none comes free: reads or writes that never end hold
        it. One request at a time then goes on without the cache, whose reads could take this memory, too. Where there is no
        such memory either, end the request: nobody waits for ever."""
        if self._roster.running:
            return None
        now = time.monotonic()
        if self._starved_s is None:
            self._starved_s = now
        waited = not sequence.reload or sequence.mix  # for its load, before it had to have fresh memory
        if not waited and now < self._starved_s + self._patience_s:
            return None
        kv = self._memory.allocate_spare(sequence.kv_tokens)
        if kv is None:
            self._counters.add("requests_starved")
            self._endings.end(
                sequence, "error", error="there was no memory for this request's KV for too long; send it again later"
            )
            self._roster.wake.set()  # for those behind it
            return None
        sequence.use_cache = False
        sequence.notes.append("reads or writes that do not end hold the KV memory; computed beside it, without the cache")
        self._counters.add("spare_memory_used")
        return kv
