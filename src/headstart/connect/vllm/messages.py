"""What the two sides of the connector tell each other. vLLM carries it between processes, so all of it can be pickled.

worker ── Handshake ──▶ scheduler        once, before any request: what only the worker knows for certain
scheduler ── Orders ──▶ worker           with each step: what to load where, what to save from where
worker ── Report ──▶ scheduler           with a step's result: the handshake, where vLLM's own did not carry it; what failed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from headstart.block.identity import Identity
from headstart.block.keys import BlockKey, Content, chain_keys

Rank = tuple[int, int]  # of the pipeline, of the tensors
Tables = tuple[tuple[int, ...], ...]  # by KV cache group that holds KV: block numbers, in the order of the prompt
StateBlocks = tuple[int, ...]  # by KV cache group of recurrent layers: the block with its state behind the prompt


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM has no types for us
    """`representation`, encoded, is None where nothing can be stored, and `reason` says why in one sentence."""

    rank: Rank
    host: str
    identity: Identity | None
    representation: bytes | None
    reason: str = ""


@dataclass(frozen=True)
class Prompt:
    """Tokens (u32, little endian), all else that has a part in their keys, and whether they may be kept."""

    tokens: bytes
    salt: str | None = None
    adapters: tuple[bytes, ...] = ()
    contents: tuple[Content, ...] = ()
    retention: str = "default"
    tenant: str = ""
    session: str = ""
    keep: bool = True

    @property
    def array(self) -> npt.NDArray[np.uint32]:
        return np.frombuffer(self.tokens, "<u4")

    def first(self, tokens: int) -> Prompt:
        """Return what it begins with."""
        contents = tuple(content for content in self.contents if content.start < tokens)
        return replace(self, tokens=self.tokens[: 4 * tokens], contents=contents)

    def identity(self, base: Identity) -> Identity | None:
        """Return the identity that differs from the cache's own, None where none does."""
        return replace(base, adapters=self.adapters) if self.adapters else None

    def keys(self, base: Identity) -> list[BlockKey]:
        """Return what its blocks are called, where `base` is the cache's identity."""
        root = (self.identity(base) or base).root()
        return chain_keys(self.array, root=root, salt=self.salt, contents=self.contents)


@dataclass(frozen=True)
class LoadOrder:
    """Fill the blocks of `tables` with what is stored of `prompt`, but for the first `skip` tokens, which are there already
    and may be in use by others, and those of `states` with the states behind all of it. `within_s`: after so long computing it
    would have been sooner; None: that is not known."""

    request: str
    prompt: Prompt
    tables: Tables
    skip: int
    within_s: float | None = None
    states: StateBlocks = ()


@dataclass(frozen=True)
class SaveOrder:
    """Keep `prompt`, of which the first `first` tokens are stored; `tables` begin behind them, `states` stand behind all of it.
    `last`: the request has ended and its blocks are kept until the worker says that it has copied them."""

    request: str
    prompt: Prompt
    tables: Tables
    first: int
    last: bool = False
    states: StateBlocks = ()


@dataclass(frozen=True)
class Orders(KVConnectorMetadata):  # type: ignore[misc]
    loads: Sequence[LoadOrder] = ()
    saves: Sequence[SaveOrder] = ()


@dataclass(frozen=True)
class Report(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """`short`: of requests whose load brought less than was found, how many of the prompt's tokens are there."""

    handshakes: dict[Rank, Handshake] = field(default_factory=dict)
    short: dict[str, int] = field(default_factory=dict)

    def aggregate(self, other: Any) -> Report:
        short = {**self.short, **other.short}
        both = self.short.keys() & other.short.keys()
        return Report(
            {**self.handshakes, **other.handshakes},
            {**short, **{name: min(self.short[name], other.short[name]) for name in both}},
        )
