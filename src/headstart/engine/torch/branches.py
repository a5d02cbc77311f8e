"""The beginning of one request's KV, read by others as well (`serving.sharing` says who).

first ┌ [0 … n) read by all │ its own, as it grows ┐     one region; it is given back when the last reader has ended
later                       ┌ [n … ) its own       ┐     a region each
"""

from __future__ import annotations

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
    from headstart.engine.serving.sharing import Offer
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

    @property
    def shared_tokens(self) -> int:
        return self.prefix.tokens

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

    def index_keys(self, layer: int) -> Tensor:
        return self.kv.index_keys(layer)[self.tokens :]


def shareable_tokens(sequence: Sequence) -> int:
    """Return how many tokens of a running request's beginning others may read at most."""
    kv = sequence.kv
    if isinstance(kv, BranchKV):
        return kv.prefix.tokens
    return len(sequence.tokens) if isinstance(kv, HostKV) else 0


def accept(offer: Offer[Sequence], own: HostKV) -> BranchKV:
    """Return the KV of who takes the offer, with `own` for what comes behind."""
    kv = offer.giver.kv
    if isinstance(kv, BranchKV):
        prefix = kv.prefix if kv.prefix.tokens == offer.tokens else Prefix(kv.trunk, offer.tokens)
        return BranchKV(kv.trunk, prefix, own)
    assert isinstance(kv, HostKV)
    shared = offer.giver.shared
    if shared is None or shared.tokens != offer.tokens:
        shared = Prefix(kv, offer.tokens)
        offer.giver.share(shared)
    return BranchKV(kv, shared, own)
