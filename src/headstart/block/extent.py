"""A run of consecutive blocks of one prompt as one image of bytes: header, then pieces layer-major. Pure; tiers do the I/O.

    ┌ header (padded to 4 KiB) ┬ layer 0: piece 0, 1, … n-1 ┬ layer 1 … ┬ … ┬ boundary state (optional) ┐
                               └ each layer's region starts at a multiple of 4 KiB ┘

Layer 0 stands right behind the header so that one read fetches both; one layer of a run is one read; a hit that ends
inside a run still reads a contiguous part of each layer. The header holds the keys and token ids of its blocks (a hash
collision is a miss, not a wrong answer) and a 16-byte check of every piece, bound to the piece's key, its layer and the
representation, so that bytes that belong elsewhere never pass. `docs/format.md` is the specification.

    layout = layout_of(representation, blocks)       # writer: an image of layout.extent_bytes, pieces at layout.piece_range
    header = seal(image, representation, …)          #   … checks, padding and header
    header = decode_header(data, representation)     # reader: the header, then pieces, each with its piece_check
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.block.checks import (
    CHECK_BYTES,
    PLAIN,
    STATE_LAYER,
    XXH3,
    Algorithm,
    Buffer,
    Sealing,
    flat,
    header_check,
    is_keyed,
    piece_check,
)
from headstart.block.keys import BLOCK_TOKENS, KEY_BYTES, chain, token_bytes
from headstart.block.layout import (
    ALIGNMENT,
    FIXED_BYTES,
    MAX_HEADER_BYTES,
    ExtentLayout,
    HeaderSections,
    encode_retention,
    layout_of,
    padded,
)
from headstart.block.representation import FORMAT_VERSION, Representation
from headstart.errors import ExtentCorrupt

__all__ = [
    "ALIGNMENT",
    "CHECK_BYTES",
    "STATE_LAYER",
    "Buffer",
    "ExtentHeader",
    "ExtentLayout",
    "decode_header",
    "encode_header",
    "header_bytes_of",
    "layout_of",
    "piece_check",
    "seal",
    "verify_chain",
]

MAGIC = b"HSEXTENT"
_FLAG_EXTRAS = 1
_FLAG_VARIES = 2
_FLAG_STATE = 4

# magic, format version, header bytes, header check | flags, blocks, extent bytes, block tokens, piece tokens, layers,
# algorithm, retention length, state offset, state bytes, state check, created_ms, extras bytes, check key, representation,
# parent
_HEAD = struct.Struct("<8sII16s")
_FIXED = struct.Struct("<8sII16sIIQIIIHHQQ16sQII32s32s")
_CHECK_AT = 16


@dataclass(frozen=True, slots=True, eq=False)
class ExtentHeader:
    """The decoded header. `keys`: one per block. `tokens`: u32 [blocks · 64]. `checks`: u8 [layers, pieces, 16].
    `piece_bytes`: u32 [layers, pieces] where the representation's sizes vary, else None. `parent`: key of the block before
    the first, or the identity's root."""

    representation: bytes  # digest, 32 bytes
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: npt.NDArray[np.uint32]
    checks: npt.NDArray[np.uint8]
    extras: tuple[bytes, ...] = ()  # one per block, or empty when all are empty
    piece_bytes: npt.NDArray[np.uint32] | None = None
    state_bytes: int = 0
    state_check: bytes = b"\0" * CHECK_BYTES
    created_ms: int = 0  # wall clock of the writer, for people and ceilings; never for order
    retention: str = "default"
    algorithm: Algorithm = XXH3

    def layout(self, representation: Representation) -> ExtentLayout:
        """Return where everything lies in this extent."""
        return layout_of(
            representation,
            len(self.keys),
            piece_bytes=self.piece_bytes,
            extras_bytes=sum(map(len, self.extras)),
            state_bytes=self.state_bytes,
            retention=self.retention,
        )


def seal(
    image: memoryview,
    representation: Representation,
    *,
    parent: bytes,
    keys: Sequence[bytes],
    tokens: Sequence[int] | npt.NDArray[np.integer],
    extras: Sequence[bytes] = (),
    piece_bytes: npt.NDArray[np.uint32] | None = None,
    state_bytes: int = 0,
    created_ms: int = 0,
    retention: str = "default",
) -> ExtentHeader:
    """Finish an image whose pieces (and state) already lie where `layout_of` says: compute every check, zero the padding
    between regions, write the header at the front, and return it. `image` is writable and exactly `extent_bytes` long.
    Raises ValueError for parts that do not fit together.

    Every byte is read once: 47 MB at 10 GB/s from memory is 5 ms."""
    layout = layout_of(
        representation,
        len(keys),
        piece_bytes=piece_bytes,
        extras_bytes=sum(map(len, extras)),
        state_bytes=state_bytes,
        retention=retention,
    )
    image = flat(image)
    if len(image) != layout.extent_bytes:
        raise ValueError(f"the image has {len(image)} bytes, the extent {layout.extent_bytes}; allocate what layout_of says")
    digest = representation.digest
    algorithm = XXH3  # where it lies it may get others
    checks = bytearray()
    for layer, offset in enumerate(layout.layer_offsets):
        end = offset
        for piece in range(layout.pieces):
            start, end = end, offset + layout.bytes_before(layer, piece + 1)
            key = keys[(piece + 1) * representation.blocks_per_piece - 1]
            checks += piece_check(algorithm=algorithm, representation=digest, key=key, layer=layer, buffers=[image[start:end]])
        # Arenas are reused: whatever an earlier extent left in the padding must not reach a medium.
        image[end : padded(end, ALIGNMENT)] = bytes(-end % ALIGNMENT)
    state_end = layout.state_offset + state_bytes
    state_check = bytes(CHECK_BYTES)
    if state_bytes:
        state = image[layout.state_offset : state_end]
        state_check = piece_check(algorithm=algorithm, representation=digest, key=keys[-1], layer=STATE_LAYER, buffers=[state])
    image[state_end:] = bytes(layout.extent_bytes - state_end)
    header = ExtentHeader(
        representation=digest,
        parent=parent,
        keys=tuple(keys),
        tokens=np.frombuffer(token_bytes(tokens), dtype="<u4"),
        checks=np.frombuffer(bytes(checks), dtype=np.uint8).reshape(representation.layers, layout.pieces, CHECK_BYTES),
        extras=tuple(extras) if any(extras) else (),
        piece_bytes=piece_bytes,
        state_bytes=state_bytes,
        state_check=state_check,
        created_ms=created_ms,
        retention=retention,
        algorithm=algorithm,
    )
    image[: layout.header_bytes] = encode_header(header, representation)
    return header


def encode_header(header: ExtentHeader, representation: Representation) -> bytes:
    """Return the header, padded to its `header_bytes`, with its own check. Raises ValueError for parts that do not fit
    together or to the representation."""
    layout = header.layout(representation)
    blocks = len(header.keys)
    _require(header.representation == representation.digest, "the header names another representation")
    _require(len(header.parent) == KEY_BYTES, f"the parent has {len(header.parent)} bytes, not {KEY_BYTES}")
    _require(all(len(key) == KEY_BYTES for key in header.keys), f"a key does not have {KEY_BYTES} bytes")
    _require(len(header.tokens) == blocks * BLOCK_TOKENS, f"{len(header.tokens)} tokens for {blocks} blocks")
    _require(len(header.extras) in (0, blocks), f"{len(header.extras)} extras for {blocks} blocks")
    _require(header.checks.shape == (representation.layers, layout.pieces, CHECK_BYTES), "checks have another shape")
    _require(header.checks.dtype == np.uint8, "checks are not bytes")
    _require(len(header.state_check) == CHECK_BYTES, f"the state's check has {len(header.state_check)} bytes")
    _require(0 <= header.created_ms < 1 << 63, f"created_ms is {header.created_ms}")
    extras_bytes = sum(map(len, header.extras))
    retention = encode_retention(header.retention)
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        layout.header_bytes,
        bytes(CHECK_BYTES),
        _flags(varies=representation.varies, extras_bytes=extras_bytes, state_bytes=header.state_bytes),
        blocks,
        layout.extent_bytes,
        BLOCK_TOKENS,
        representation.piece_tokens,
        representation.layers,
        header.algorithm.number,
        len(retention),
        layout.state_offset,
        header.state_bytes,
        header.state_check,
        header.created_ms,
        extras_bytes,
        header.algorithm.key_id,
        header.representation,
        header.parent,
    )
    parts = [
        fixed,
        retention.ljust(padded(len(retention), 8), b"\0"),
        struct.pack(f"<{representation.layers}Q", *layout.layer_offsets),
        *header.keys,
        token_bytes(header.tokens),
        b"" if header.piece_bytes is None else header.piece_bytes.astype("<u4", copy=False).tobytes(),
        header.checks.tobytes(),
    ]
    if extras_bytes:
        parts += [struct.pack("<I", len(extra)) + extra for extra in header.extras]
    encoded = bytearray(b"".join(parts))
    encoded += bytes(layout.header_bytes - len(encoded))
    check = header_check(memoryview(encoded).toreadonly(), at=_CHECK_AT, algorithm=header.algorithm)
    encoded[_CHECK_AT : _CHECK_AT + CHECK_BYTES] = check
    return bytes(encoded)


def header_bytes_of(data: Buffer) -> int:
    """Return the header_bytes that the front of an extent (at least 32 bytes) promises: how much to read for `decode_header`.
    Not verified yet, but never more than MAX_HEADER_BYTES. Raises ExtentCorrupt: "truncated", "magic", "version", "fields"."""
    view = flat(data)
    if len(view) < _HEAD.size:
        raise ExtentCorrupt(f"an extent's header starts with {_HEAD.size} bytes, {len(view)} are there", reason="truncated")
    magic, version, header_bytes, _ = _HEAD.unpack_from(view)
    if magic != MAGIC:
        raise ExtentCorrupt(f"no extent starts here: magic {magic.hex()}", reason="magic")
    if version != FORMAT_VERSION:
        raise ExtentCorrupt(
            f"an extent has format version {version}, this headstart reads {FORMAT_VERSION}",
            reason="version",
            found=version,
            supported=FORMAT_VERSION,
        )
    if header_bytes % ALIGNMENT or not ALIGNMENT <= header_bytes <= MAX_HEADER_BYTES:
        raise ExtentCorrupt(f"an extent's header cannot have {header_bytes} bytes", reason="fields")
    return int(header_bytes)


def decode_header(data: Buffer, representation: Representation, sealing: Sealing = PLAIN) -> ExtentHeader:
    """Return the header in `data` (at least header_bytes long). `sealing`: whose checks are believed. Raises
    ExtentCorrupt(reason=…): "magic", "version", "truncated", "key" (checks with a key that is not known here, or without one
    where there is one), "algorithm", "header-check", "representation", "fields". The result owns its bytes."""
    view = flat(data)
    header_bytes = header_bytes_of(view)
    if header_bytes > len(view):
        raise ExtentCorrupt(f"an extent's header has {header_bytes} bytes, {len(view)} are there", reason="truncated")
    owned = bytes(view[:header_bytes])
    (
        *_,
        check,
        flags,
        blocks,
        extent_bytes,
        block_tokens,
        piece_tokens,
        layers,
        number,
        retention_bytes,
        state_offset,
        state_bytes,
        state_check,
        created_ms,
        extras_bytes,
        check_key,
        digest,
        parent,
    ) = _FIXED.unpack_from(owned)
    algorithm = sealing.find(number, check_key)
    if algorithm is None and is_keyed(number):
        raise ExtentCorrupt(
            f"an extent has checks with the key {check_key:08x}, which is not in cache.check_key_file", reason="key"
        )
    if check != header_check(memoryview(owned), at=_CHECK_AT, algorithm=algorithm or XXH3):
        raise ExtentCorrupt("an extent's header is not what was written: its check differs", reason="header-check")
    if algorithm is None and number == XXH3.number:
        raise ExtentCorrupt("an extent has checks without a key, and cache.check_key_file is given", reason="key")
    if algorithm is None:
        raise ExtentCorrupt(f"an extent's pieces have checks of unknown algorithm {number}", reason="algorithm")
    if digest != representation.digest:
        raise ExtentCorrupt(f"an extent has representation {digest.hex()[:16]}…, not the asked one", reason="representation")
    # The check only says that the writer wrote this. From here a wrong or hostile writer is assumed: every field must agree
    # with the representation and with the bytes that are there before anything is cut by it.
    _agree("block tokens", block_tokens, BLOCK_TOKENS)
    _agree("piece tokens", piece_tokens, representation.piece_tokens)
    _agree("layers", layers, representation.layers)
    _agree("check key", check_key, algorithm.key_id)
    _agree("flags", flags, _flags(varies=representation.varies, extras_bytes=extras_bytes, state_bytes=state_bytes))
    _agree("blocks outside whole pieces", blocks % representation.blocks_per_piece, 0)
    pieces = blocks // representation.blocks_per_piece
    at = HeaderSections.of(
        retention_bytes=retention_bytes,
        layers=layers,
        blocks=blocks,
        pieces=pieces,
        varies=representation.varies,
        extras_bytes=extras_bytes,
    )
    _agree("header bytes", header_bytes, padded(at.end, ALIGNMENT))
    piece_bytes = None
    if representation.varies:
        piece_bytes = np.frombuffer(owned, "<u4", layers * pieces, at.piece_bytes).astype(np.uint32, copy=False)
        piece_bytes = piece_bytes.reshape(layers, pieces)
    name = owned[FIXED_BYTES : FIXED_BYTES + retention_bytes]
    _agree("padded retention class", owned[FIXED_BYTES : at.layer_table], name.ljust(at.layer_table - FIXED_BYTES, b"\0"))
    _agree("created, top bit", created_ms >> 63, 0)
    try:
        retention = name.decode()
        layout = layout_of(
            representation,
            blocks,
            piece_bytes=piece_bytes,
            extras_bytes=extras_bytes,
            state_bytes=state_bytes,
            retention=retention,
        )
    except ValueError as error:
        raise ExtentCorrupt(f"an extent's header contradicts itself: {error}", reason="fields") from error
    _agree("extent bytes", extent_bytes, layout.extent_bytes)
    _agree("state offset", state_offset, layout.state_offset)
    _agree("layer offsets", struct.unpack_from(f"<{layers}Q", owned, at.layer_table), layout.layer_offsets)
    return ExtentHeader(
        representation=digest,
        parent=parent,
        keys=tuple(owned[start : start + KEY_BYTES] for start in range(at.keys, at.tokens, KEY_BYTES)),
        tokens=np.frombuffer(owned, "<u4", blocks * BLOCK_TOKENS, at.tokens).astype(np.uint32, copy=False),
        checks=np.frombuffer(owned, np.uint8, at.extras - at.checks, at.checks).reshape(layers, pieces, CHECK_BYTES),
        extras=_decode_extras(owned[at.extras : at.end], blocks) if extras_bytes else (),
        piece_bytes=piece_bytes,
        state_bytes=state_bytes,
        state_check=state_check,
        created_ms=created_ms,
        retention=retention,
        algorithm=algorithm,
    )


def verify_chain(header: ExtentHeader) -> bool:
    """Return whether the header's keys follow from its parent, tokens and extras. For scrubbing, not for the hot path: an
    extent whose header check holds has wrong keys only if its writer was wrong."""
    extras = dict(enumerate(header.extras))
    return tuple(chain(header.parent, token_bytes(header.tokens), extras)) == header.keys


def _decode_extras(section: bytes, blocks: int) -> tuple[bytes, ...]:
    extras = []
    at = 0
    for block in range(blocks):
        if at + 4 > len(section):
            raise ExtentCorrupt(f"the extras of block {block} are cut short", reason="fields")
        (length,) = struct.unpack_from("<I", section, at)
        at += 4
        extras.append(section[at : at + length])
        at += length
    _agree("bytes of extras", at, len(section))
    return tuple(extras)


def _flags(*, varies: bool, extras_bytes: int, state_bytes: int) -> int:
    return _FLAG_EXTRAS * (extras_bytes > 0) | _FLAG_VARIES * varies | _FLAG_STATE * (state_bytes > 0)


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"this extent header cannot be written: {what}")


def _agree(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise ExtentCorrupt(f"an extent's header says {what} = {found}, which should be {expected}", reason="fields")
