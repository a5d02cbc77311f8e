"""How a block's bytes are laid down: KV kind, the writer's layout, dtype, shard. Only an equal representation is read. Pure.

A representation names its *piece*, the smallest thing that is checked, read and hit: `piece_tokens` tokens (a multiple of 64;
lcm(64, the engine's page)) of one layer, or of all layers at once where the engine's state is opaque (then there is one
"layer"). Pieces start at multiples of `piece_tokens` from the start of the prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FORMAT_VERSION = 1

KVKind = Literal["mha", "gqa", "mla", "opaque"]


@dataclass(frozen=True, slots=True)
class Representation:
    """`layer_bytes[l]`: bytes of one piece in layer l, or None where it varies (opaque states; lengths then stand in the
    extent). `layout`: the writing engine's byte layout by name and version, e.g. "torch/token-kv-head-dim/1".
    `shard`: "replicated", or "rank/ranks" of the split that holds part of each block."""

    kind: KVKind
    layout: str
    dtype: str
    layer_bytes: tuple[int | None, ...]
    piece_tokens: int = 64
    quantisation: str = "none"
    shard: str = "replicated"

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def blocks_per_piece(self) -> int:
        raise NotImplementedError

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of one token over all layers, or None where a layer's pieces vary in size."""
        raise NotImplementedError

    def encode(self) -> bytes:
        """Return tagged, length-framed fields, format version first. `decode(encode())` is an equal value."""
        raise NotImplementedError

    @classmethod
    def decode(cls, data: bytes) -> Representation:
        """Inverse of `encode`. Raises ExtentCorrupt on truncated or unknown fields (never guesses)."""
        raise NotImplementedError

    @property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 of `encode()`. Cached by the caller if it is hot."""
        raise NotImplementedError
