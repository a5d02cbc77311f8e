"""How a block's bytes are laid down: KV kind, the writer's layout, dtype, shard. Only an equal representation is read. Pure.

A representation names its *piece*, the smallest thing that is checked, read and hit: `piece_tokens` tokens (a multiple of 64;
lcm(64, the engine's page)) of one layer, or of all layers at once where the engine's state is opaque (then there is one
"layer"). Pieces start at multiples of `piece_tokens` from the start of the prompt.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Literal, cast, get_args

from headstart.block.framing import frame, unframe
from headstart.block.keys import BLOCK_TOKENS
from headstart.errors import ExtentCorrupt

FORMAT_VERSION = 1

KVKind = Literal["mha", "gqa", "mla", "opaque"]
BoundaryState = Literal["none", "required"]

MAX_LAYERS = 0xFFFF
_MAX_NAME_BYTES = 255
_U32_MAX = 0xFFFF_FFFF
_VARIES = 0  # a layer's bytes on a medium where pieces differ in size
_SHARD = re.compile(r"replicated|(0|[1-9][0-9]*)/([1-9][0-9]*)", re.ASCII)
# version, block tokens, kind, layout, dtype, quantisation, shard, piece tokens, state, layer numbers, layer bytes
_TAGS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11)


@dataclass(frozen=True, slots=True)
class Representation:
    """`layer_bytes[l]`: bytes of one piece in layer l, or None where it varies (opaque states; lengths then stand in the
    extent). `layer_numbers[l]`: which of the model's layers that is; left out, 0, 1, … A pipeline stage or a group of layers
    holds some of them, and its bytes must not pass for another's. `layout`: the writing engine's byte layout by name and
    version, e.g. "torch/token-kv-head-dim/1". `shard`: "replicated", or "rank/ranks" of the split that holds part of each
    block. `state`: "required" where blocks are of use only up to the end of an extent that carries a boundary state."""

    kind: KVKind
    layout: str
    dtype: str
    layer_bytes: tuple[int | None, ...]
    piece_tokens: int = BLOCK_TOKENS
    quantisation: str = "none"
    shard: str = "replicated"
    state: BoundaryState = "none"
    layer_numbers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.layer_numbers == tuple(range(len(self.layer_bytes))):
            object.__setattr__(self, "layer_numbers", ())  # one way to say it, so that equal meanings are equal values
        if self.kind not in get_args(KVKind):
            raise ValueError(f"KV kind {self.kind!r} is unknown; it is one of {', '.join(get_args(KVKind))}")
        for name in ("layout", "dtype", "quantisation"):
            if not 1 <= len(getattr(self, name).encode()) <= _MAX_NAME_BYTES:
                raise ValueError(f"a representation's {name} must be 1 to {_MAX_NAME_BYTES} bytes, not {getattr(self, name)!r}")
        if self.state not in get_args(BoundaryState):
            raise ValueError(f"a representation's state is {self.state!r}; it is one of {', '.join(get_args(BoundaryState))}")
        split = _SHARD.fullmatch(self.shard)
        if split is None or len(self.shard) > _MAX_NAME_BYTES or (split[1] is not None and int(split[1]) >= int(split[2])):
            raise ValueError(f'shard {self.shard!r} is neither "replicated" nor "rank/ranks"')
        if self.piece_tokens % BLOCK_TOKENS or not 0 < self.piece_tokens <= _U32_MAX:
            raise ValueError(f"piece_tokens is {self.piece_tokens}; it must be a multiple of {BLOCK_TOKENS}")
        if not 1 <= len(self.layer_bytes) <= MAX_LAYERS:
            raise ValueError(f"a representation has {len(self.layer_bytes)} layers; 1 to {MAX_LAYERS} are possible")
        numbers = self._numbers
        if not len(set(numbers)) == len(numbers) == len(self.layer_bytes) or min(numbers) < 0 or max(numbers) > _U32_MAX:
            raise ValueError(f"{len(self.layer_bytes)} layers are numbered {numbers}; give each one number of its own")
        for nbytes in self.layer_bytes:
            if nbytes is not None and not 0 < nbytes <= _U32_MAX:
                raise ValueError(f"a piece of {nbytes} bytes in one layer is not possible; 1 to {_U32_MAX} are")

    @property
    def layers(self) -> int:
        return len(self.layer_bytes)

    @property
    def _numbers(self) -> tuple[int, ...]:
        return self.layer_numbers or tuple(range(len(self.layer_bytes)))

    @property
    def blocks_per_piece(self) -> int:
        return self.piece_tokens // BLOCK_TOKENS

    @property
    def varies(self) -> bool:
        """True where pieces of some layer differ in size, so that every extent lists the sizes of its own."""
        return None in self.layer_bytes

    @property
    def bytes_per_token(self) -> int | None:
        """Bytes of one token over all layers (rounded up), or None where a layer's pieces vary in size."""
        total = 0
        for nbytes in self.layer_bytes:
            if nbytes is None:
                return None
            total += nbytes
        return -(-total // self.piece_tokens)

    def encode(self) -> bytes:
        """Return tagged, length-framed fields, format version first. `decode(encode())` is an equal value."""
        values = (
            _u32(FORMAT_VERSION),
            _u32(BLOCK_TOKENS),
            self.kind.encode(),
            self.layout.encode(),
            self.dtype.encode(),
            self.quantisation.encode(),
            self.shard.encode(),
            _u32(self.piece_tokens),
            self.state.encode(),
            _u32(*self._numbers),
            _u32(*(_VARIES if nbytes is None else nbytes for nbytes in self.layer_bytes)),
        )
        return b"".join(frame(tag, value) for tag, value in zip(_TAGS, values, strict=True))

    @classmethod
    def decode(cls, data: bytes) -> Representation:
        """Inverse of `encode`. Raises ExtentCorrupt on truncated or unknown fields (never guesses): reason "version" for
        another format version, else "representation"."""
        try:
            fields = unframe(data)
            if not fields or fields[0][0] != _TAGS[0]:
                raise ValueError("the format version does not come first")
            (version,) = struct.unpack("<I", fields[0][1])
            if version != FORMAT_VERSION:
                raise ExtentCorrupt(
                    f"a representation has format version {version}, this headstart reads {FORMAT_VERSION}",
                    reason="version",
                    found=version,
                    supported=FORMAT_VERSION,
                )
            if tuple(tag for tag, _ in fields) != _TAGS:
                raise ValueError(f"fields {[tag for tag, _ in fields]} are not {list(_TAGS)}")
            values = [value for _, value in fields]
            if values[1] != _u32(BLOCK_TOKENS):
                raise ValueError(f"blocks are not of {BLOCK_TOKENS} tokens")
            kind, layout, dtype, quantisation, shard = (value.decode() for value in values[2:7])
            (piece_tokens,) = struct.unpack("<I", values[7])
            state = values[8].decode()
            numbers, sizes = (struct.unpack(f"<{len(value) // 4}I", value) for value in values[9:11])
            if not numbers:
                raise ValueError("no layer has a number")
            return cls(
                kind=cast(KVKind, kind),
                layout=layout,
                dtype=dtype,
                layer_bytes=tuple(None if nbytes == _VARIES else nbytes for nbytes in sizes),
                piece_tokens=piece_tokens,
                quantisation=quantisation,
                shard=shard,
                state=cast(BoundaryState, state),
                layer_numbers=numbers,
            )
        except (ValueError, struct.error) as error:  # UnicodeDecodeError is a ValueError
            raise ExtentCorrupt(f"a representation cannot be read: {error}", reason="representation") from error

    @property
    def digest(self) -> bytes:
        """32 bytes: SHA-256 of `encode()`."""
        return _digest(self)


@lru_cache(maxsize=64)  # every extent that is read is compared with it
def _digest(representation: Representation) -> bytes:
    return sha256(representation.encode()).digest()


def _u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)
