"""Requests that begin alike hold that beginning once: those that come later read it in the KV of the one that came first.

    first ┌ [0 … n) read by all │ its own, as it grows ┐     one region; it is given back when the last reader has ended
    later                       ┌ [n … ) its own       ┐     a region each

A beginning that the first one still loads or computes is waited for: loading or computing it twice would end no sooner.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from torch import Tensor

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.torch.attention import KV, Prefix
from headstart.engine.torch.kv_memory import HostKV

if TYPE_CHECKING:
    from headstart.engine.torch.sequence import Sequence


class BranchKV:
    """KV of one request: the beginning of another's, read only, and its own behind it. A `KVView` for saving.

    Takes over one reference to `own` and adds one to `trunk`; `retain` and `release` count for both."""

    def __init__(self, trunk: HostKV, prefix: Prefix, own: HostKV) -> None:
        trunk.retain()
        self.state = None  # what has one is not shared
        self.trunk = trunk
        self.prefix = prefix
        self.own = own
        self.capacity_tokens = prefix.tokens + own.capacity_tokens

    def buffers(self, layer: int, first: int, sizes: Several[int]) -> npt.NDArray[np.uint8]:
        """See `KVView`; pieces on both sides of the border are copied together."""
        border = self.prefix.tokens // BLOCK_TOKENS
        if first >= border:
            return self.own.buffers(layer, first - border, sizes)
        here = self.trunk.buffers(layer, first, sizes[: border - first])
        if first + len(sizes) <= border:
            return here
        return np.concatenate([here, self.own.buffers(layer, 0, sizes[border - first :])])

    def retain(self) -> None:
        self.trunk.retain()
        self.own.retain()

    def release(self) -> None:
        self.own.release()
        self.trunk.release()


@dataclass(frozen=True, slots=True)
class Beyond:
    """The part of `kv` behind its first `tokens`, for the request that others share those with."""

    kv: KV
    tokens: int

    def keys(self, layer: int) -> Tensor:
        return self.kv.keys(layer)[:, self.tokens :]

    def values(self, layer: int) -> Tensor:
        return self.kv.values(layer)[:, self.tokens :]


@dataclass(frozen=True, slots=True)
class Offer:
    """The first `tokens` of a request are, or (not `ready`) will be, in the KV of `giver`."""

    giver: Sequence
    tokens: int
    ready: bool

    def accept(self, own: HostKV) -> BranchKV:
        """Return the KV of who takes the offer, with `own` for what comes behind."""
        kv = self.giver.kv
        if isinstance(kv, BranchKV):
            prefix = kv.prefix if kv.prefix.tokens == self.tokens else Prefix(kv.trunk, self.tokens)
            return BranchKV(kv.trunk, prefix, own)
        assert isinstance(kv, HostKV)
        shared = self.giver.shared
        if shared is None or shared.tokens != self.tokens:
            shared = Prefix(kv, self.tokens)
            self.giver.share(shared)
        return BranchKV(kv, shared, own)


def best_offer(sequence: Sequence, running: Iterable[Sequence]) -> Offer | None:
    """Return the longest beginning, in whole blocks and leaving a token to compute, that a running request has as well."""
    best = None
    running = list(running) if sequence.use_cache else []
    sequence.alike = {one.number: sequence.alike[one.number] for one in running if one.number in sequence.alike}
    for one in running:
        if not one.use_cache or one.request.salt != sequence.request.salt or not isinstance(one.kv, HostKV | BranchKV):
            continue
        if one.request.adapter != sequence.request.adapter:
            continue
        if one.kv.state is not None:
            continue  # who joins would need the state at that place, which is gone
        tokens = _common(sequence, one)
        if isinstance(one.kv, BranchKV):
            tokens = min(tokens, one.kv.prefix.tokens)
        if tokens > (0 if best is None else best.tokens):
            best = Offer(one, tokens, ready=one.load is None and one.computed >= tokens)
    return best


def _common(sequence: Sequence, other: Sequence) -> int:
    """Return the tokens of the whole blocks with which both begin, less than all of the first. Asked at every step while one
    waits, so what was compared is remembered; both only grow."""
    at, differs = sequence.alike.get(other.number, (0, False))
    end = min(len(sequence.tokens) - 1, len(other.tokens)) // BLOCK_TOKENS * BLOCK_TOKENS
    while not differs and at < end:
        differs = sequence.tokens[at : at + BLOCK_TOKENS] != other.tokens[at : at + BLOCK_TOKENS]
        at += 0 if differs else BLOCK_TOKENS
    sequence.alike[other.number] = (at, differs)
    return at
