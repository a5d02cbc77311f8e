"""Content names of blocks: a SHA-256 chain over runs of 64 token ids. Pure.

    key[i] = SHA-256( key[i-1] ‖ tokens[64·i : 64·(i+1)] as u32 little endian ‖ extras[i] )

key[-1] is the identity's root (`identity.py`). `extras` is empty, or tagged length-framed fields (`u8 tag, u32 length,
bytes`): the SHA-256 of the tenant's salt at the first block after the shared prefix, and content digests (an image's, say)
with their offset for the blocks that they touch. Because the fixed part has a fixed length, no two different inputs
give the same bytes to hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

BLOCK_TOKENS = 64
KEY_BYTES = 32

BlockKey = NewType("BlockKey", bytes)


@dataclass(frozen=True, slots=True)
class Content:
    """Content that stands behind placeholder tokens: `tokens` positions from `start`, named by a digest of ≥ 16 bytes."""

    start: int
    tokens: int
    digest: bytes


def chain_keys(
    tokens: Sequence[int],
    *,
    root: bytes,
    salt: str | bytes | None = None,
    shared_tokens: int = 0,
    contents: Sequence[Content] = (),
) -> list[BlockKey]:
    """Return the key of every full block of `tokens`, in order; a remainder of fewer than 64 tokens has no key.

    `tokens` may be a list, an `array('I')` or a NumPy u32 array (fastest). `salt` keeps tenants apart: it enters the first
    block that is not wholly inside the first `shared_tokens` tokens, which the operator declared shared. An empty salt
    is no salt. Raises ValueError for a token id outside u32 or a root that is not 32 bytes.
    """
    raise NotImplementedError


def block_extras(
    block: int, *, salt: str | bytes | None, shared_tokens: int, contents: Sequence[Content]
) -> bytes:
    """Return the framed extras of block number `block` (empty for nearly all blocks); stored in extents beside the tokens."""
    raise NotImplementedError
