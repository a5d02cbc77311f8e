"""Room for a request's KV: what is known of it and some more at first, and more whenever that is full.

    [ known │ room ]  ─ full ─▶  [ known            │ room ]     a larger region and one copy; regions stay contiguous
    [ shared by others │ own │ room ]  ─▶  the shared part stays where it lies, read by all; only what is behind it moves

Room grows with what is there, so each token is copied a few times at most. A region that a save still reads, or a load may
still write, is given back when that has ended; until then memory is *coming free*, and to take more from others is in vain.
"""

from __future__ import annotations

import time

from headstart.engine.serving.parts import Leaving
from headstart.engine.serving.sharing import Offer
from headstart.engine.torch.branches import BranchKV, accept
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory
from headstart.engine.torch.sequence import Sequence
from headstart.metrics import Counters

_SHARE = 4  # room is at least one in so many of the tokens known


class Rooms:
    """For the engine's thread. `least_tokens`: the least room beside what is known; `patience_s`: how long a save or load is
    expected to give back what it holds."""

    def __init__(self, memory: KVMemory, counters: Counters, *, least_tokens: int, patience_s: float) -> None:
        self._memory = memory
        self._counters = counters
        self._least_tokens = least_tokens
        self._patience_s = patience_s
        self._leaving: list[tuple[float, Leaving]] = []

    def first(self, sequence: Sequence, offer: Offer[Sequence] | None) -> HostKV | DeviceKV | BranchKV | None:
        """Return KV for a request that is about to run, None where there is none now."""
        wanted = self._wanted(sequence)
        if offer is None:
            return self._memory.allocate(wanted)
        if offer.giver.recurrent:
            return self._copied(offer, wanted)
        own = self._memory.allocate_host(wanted - offer.tokens)
        return None if own is None else accept(offer, own)

    def spare(self, sequence: Sequence) -> HostKV | None:
        """Return KV beyond the memory's capacity; see `KVMemory.allocate_spare`."""
        return self._memory.allocate_spare(sequence.kv_tokens)

    def grow(self, sequence: Sequence) -> bool:
        """Move a request to a larger region; False, and nothing changed, where there is none now."""
        kv, shared = sequence.kv, sequence.shared
        assert kv is not None
        stays = kv.prefix if isinstance(kv, BranchKV) else shared
        behind = 0 if stays is None else stays.tokens
        own = self._memory.allocate(self._wanted(sequence) - behind)
        if own is None:
            return False
        if isinstance(kv, BranchKV):
            own.begin_with(kv.own, tokens=sequence.computed - behind)
        else:
            own.begin_with(kv, first=behind, tokens=sequence.computed - behind)
        grown: HostKV | DeviceKV | BranchKV = own
        if stays is not None:
            trunk = kv.trunk if isinstance(kv, BranchKV) else kv
            assert isinstance(trunk, HostKV)
            assert isinstance(own, HostKV)  # only host memory is shared
            grown = BranchKV(trunk, stays, own)
        self._counters.add("kv_grown")
        self._counters.add("kv_grown_tokens", sequence.computed - behind)
        self._let_go(sequence)
        sequence.kv = grown
        return True

    def give_back(self, sequence: Sequence) -> None:
        """Let go of a request's KV and copies of states; a save that still reads it is remembered."""
        self._let_go(sequence)
        sequence.release_states()

    def leaves(self, what: Leaving) -> None:
        """Remember a save or load that may hold KV which nobody else does."""
        self._leaving = [(begun_s, one) for begun_s, one in self._leaving if not one.done]
        if not what.done:
            self._leaving.append((time.monotonic(), what))

    def coming_free(self) -> bool:
        """Return whether memory will be given back soon by a save or load that goes on without its request."""
        since_s = time.monotonic() - self._patience_s
        self._leaving = [(begun_s, what) for begun_s, what in self._leaving if not what.done]
        return any(begun_s > since_s for begun_s, _ in self._leaving)

    def _copied(self, offer: Offer[Sequence], wanted: int) -> HostKV | DeviceKV | None:
        """Return KV that begins with a copy of what is offered, and the state that stands behind it."""
        kv = self._memory.allocate(wanted)
        if kv is not None:
            giver = offer.giver.kv
            assert isinstance(giver, HostKV | DeviceKV)  # a state is never beside shared KV
            if giver.state is not None and giver.state.tokens == offer.tokens:
                kv.begin_with(giver, tokens=offer.tokens)
                kv.shared_tokens = offer.tokens
        return kv

    def _let_go(self, sequence: Sequence) -> None:
        if sequence.saving is not None:
            self.leaves(sequence.saving)
        if sequence.request.sink is not None:
            self.leaves(sequence.request.sink)
        sequence.release_kv()

    def _wanted(self, sequence: Sequence) -> int:
        """Return for how many tokens it gets room now. Who gave way before gets more: it would have to again."""
        known = len(sequence.tokens)
        room = max(self._least_tokens, known // _SHARE) << min(sequence.preemptions, 10)
        return sequence.kv_tokens if sequence.whole else min(sequence.kv_tokens, known + room)
