"""Content names of blocks: a SHA-256 chain over runs of 64 token ids. Pure.

    key[i] = SHA-256( key[i-1] ‖ tokens[64·i : 64·(i+1)] as u32 little endian ‖ extras[i] )

key[-1] is the identity's root (`identity.py`). `extras` is empty, or tagged length-framed fields (`u8 tag, u32 length,
bytes`): the SHA-256 of the tenant's salt at the first block after the shared prefix, and content digests (an image's, say)
with their offset for the blocks that they touch. Because the fixed part has a fixed length, no two different inputs
give the same bytes to hash.

The salt is hashed before it enters, so it stands nowhere on a medium; `docs/format.md` specifies tags and fields.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NewType, cast

import numpy as np
import numpy.typing as npt

from headstart.block.framing import frame
from headstart.block.native import native_chain

BLOCK_TOKENS = 64
KEY_BYTES = 32

BlockKey = NewType("BlockKey", bytes)

_BLOCK_BYTES = 4 * BLOCK_TOKENS
_FEW = 4  # blocks, which are hashed as soon without C
_U32_MAX = 0xFFFF_FFFF
_TAG_SALT = 1
_TAG_CONTENT = 2
_CONTENT_SPAN = struct.Struct("<qI")  # offset from the block's first token, tokens


@dataclass(frozen=True, slots=True)
class Content:
    """Content that stands behind placeholder tokens: `tokens` positions from `start`, named by a digest of ≥ 16 bytes.

    `start` may be negative where a chain is continued inside a content."""

    start: int
    tokens: int
    digest: bytes

    def __post_init__(self) -> None:
        if self.tokens < 1 or self.tokens > _U32_MAX:
            raise ValueError(f"a content covers {self.tokens} tokens; give at least 1")
        if len(self.digest) < 16:
            raise ValueError(f"a content's digest has {len(self.digest)} bytes; give the whole digest, at least 16")


def chain_keys(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    root: bytes,
    salt: str | bytes | None = None,
    shared_tokens: int = 0,
    contents: Sequence[Content] = (),
) -> list[BlockKey]:
    """Return the key of every full block of `tokens`, in order; a remainder of fewer than 64 tokens has no key.

    `tokens` may be a list, an `array('I')` or a NumPy u32 array (fastest). `salt` keeps tenants apart: it enters the first
    block that is not wholly inside the first `shared_tokens` tokens, which the operator declared shared. An empty salt
    is no salt. Raises ValueError for a token id outside u32, a root that is not 32 bytes or a salt of another type.

    A chain is continued with `root=` the last key of a multiple of 64 tokens and the tokens after them; positions then
    count from the first token given, and a salt that has entered already is left out.

    >>> root = bytes(32)
    >>> keys = chain_keys(range(200), root=root)
    >>> len(keys), keys[1:] == chain_keys(range(64, 200), root=keys[0])
    (3, True)
    """
    return cut(packed_keys(tokens, root=root, salt=salt, shared_tokens=shared_tokens, contents=contents))


def packed_keys(
    tokens: Sequence[int] | npt.NDArray[np.integer],
    *,
    root: bytes,
    salt: str | bytes | None = None,
    shared_tokens: int = 0,
    contents: Sequence[Content] = (),
) -> bytes:
    """Return what `chain_keys` does, one key behind the other: of a long prompt in a fraction of the time."""
    data = _seen(tokens) if isinstance(tokens, array) and tokens.typecode == "I" else token_bytes(tokens)
    if len(root) != KEY_BYTES:
        raise ValueError(f"a chain's root has {len(root)} bytes, needs {KEY_BYTES}; use Identity.root() or a block's key")
    require_salt(salt)
    if not salt and not contents:
        return _chain(root, data, {})
    blocks = len(data) // _BLOCK_BYTES
    touching: dict[int, list[Content]] = {}
    for content in contents:
        first, last = _blocks_touched(content)
        for block in range(max(first, 0), min(last + 1, blocks)):
            touching.setdefault(block, []).append(content)
    touching.setdefault(_salted_block(shared_tokens), [])
    extras = {
        block: block_extras(block, salt=salt, shared_tokens=shared_tokens, contents=some) for block, some in touching.items()
    }
    return _chain(root, data, extras)


def block_extras(block: int, *, salt: str | bytes | None, shared_tokens: int, contents: Sequence[Content]) -> bytes:
    """Return the framed extras of block number `block` (empty for nearly all blocks); stored in extents beside the tokens."""
    fields = []
    if salt and block == _salted_block(shared_tokens):
        # A lone surrogate is legal in a JSON string; it must give a salt, not an error.
        secret = salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt
        fields.append(frame(_TAG_SALT, sha256(secret).digest()))
    touching = []
    for content in contents:
        first, last = _blocks_touched(content)
        if first <= block <= last:
            # Offsets count from the block, so that a continued chain and one from the start agree.
            touching.append(_CONTENT_SPAN.pack(content.start - block * BLOCK_TOKENS, content.tokens) + content.digest)
    fields += [frame(_TAG_CONTENT, data) for data in sorted(touching)]
    return b"".join(fields)


def chain(root: bytes, data: bytes, extras: Mapping[int, bytes] | None = None) -> list[BlockKey]:
    """Return the keys of the full blocks in `data` (token ids as u32 little endian); `extras[i]` belongs to block i.

    2,048 blocks (131,072 tokens) are 590 KB to hash: 0.4 ms where the processor has instructions for that, else 2 ms."""
    return cut(_chain(root, data, extras or {}))


def cut(packed: bytes) -> list[BlockKey]:
    """Return keys that stand one behind the other as a list."""
    return cast("list[BlockKey]", [packed[at : at + KEY_BYTES] for at in range(0, len(packed), KEY_BYTES)])


def _seen(tokens: array[int]) -> bytes | memoryview:
    """Return u32 token ids as little endian, where they lie if they are so already: new memory takes as long as its hashing."""
    return memoryview(tokens).cast("B") if sys.byteorder == "little" else token_bytes(tokens)


def _chain(root: bytes, data: bytes | memoryview, extras: Mapping[int, bytes]) -> bytes:
    blocks = len(data) // _BLOCK_BYTES
    parts: list[bytes] = []
    at, key = 0, root
    for block, extra in sorted(extras.items()):
        if block >= blocks:
            break
        parts.append(_plain_chain(key, data, at, block))
        before = parts[-1][-KEY_BYTES:] or key
        key = sha256(before + data[block * _BLOCK_BYTES : (block + 1) * _BLOCK_BYTES] + extra).digest()
        parts.append(key)
        at = block + 1
    parts.append(_plain_chain(key, data, at, blocks))
    return b"".join(parts)


def _plain_chain(key: bytes, data: bytes | memoryview, block: int, end: int) -> bytes:
    """Return the keys of blocks [block, end), to which nothing else belongs, behind `key`."""
    if end - block >= _FEW and len(key) == KEY_BYTES and (native := native_chain()) is not None:  # C takes it for so long
        return native(key, memoryview(data)[block * _BLOCK_BYTES : end * _BLOCK_BYTES])
    keys = []
    for start in range(block * _BLOCK_BYTES, end * _BLOCK_BYTES, _BLOCK_BYTES):
        key = sha256(key + data[start : start + _BLOCK_BYTES]).digest()
        keys.append(key)
    return b"".join(keys)


def token_bytes(tokens: Sequence[int] | npt.NDArray[np.integer]) -> bytes:
    """Return token ids as u32 little endian. Raises ValueError for anything that is not a whole number in u32."""
    if isinstance(tokens, np.ndarray):
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"token ids are a {tokens.dtype} array of shape {tokens.shape}; give one row of integers")
        if tokens.size and (int(tokens.min()) < 0 or int(tokens.max()) > _U32_MAX):
            raise ValueError(f"token ids run from {tokens.min()} to {tokens.max()}; they must lie in 0 … {_U32_MAX}")
        return tokens.astype("<u4", copy=False).tobytes()
    if isinstance(tokens, (str, bytes, bytearray)):
        raise ValueError(f"token ids are given as {type(tokens).__name__}; give integers")
    if isinstance(tokens, array) and tokens.typecode == "I":
        packed = tokens
    else:
        try:
            packed = array("I", tokens)  # a third of the time that np.asarray takes for a list
        except (OverflowError, TypeError) as error:
            raise ValueError(f"a token id is not a whole number in 0 … {_U32_MAX}: {error}") from error
    if sys.byteorder == "big":
        packed = packed[:]
        packed.byteswap()
    return packed.tobytes()


def require_salt(salt: object) -> None:
    """Raise ValueError for what is no salt: a number, say, of which 0 would be taken for none at all."""
    if not (salt is None or isinstance(salt, (str, bytes))):
        raise ValueError(f"a salt is given as {type(salt).__name__}; give text or bytes")


def _salted_block(shared_tokens: int) -> int:
    if shared_tokens < 0:
        raise ValueError(f"shared_tokens is {shared_tokens}; it counts tokens from the start of the prompt")
    return shared_tokens // BLOCK_TOKENS


def _blocks_touched(content: Content) -> tuple[int, int]:
    return content.start // BLOCK_TOKENS, (content.start + content.tokens - 1) // BLOCK_TOKENS
