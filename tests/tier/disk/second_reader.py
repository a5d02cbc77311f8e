"""A second reader of a cache directory, written from docs/format.md alone: it imports nothing of headstart, so a mistake that
writer and reader of the product share is seen here. Files are read whole: it is for tests, and for whoever writes a third.

    contents = read_directory(root)              # what the journals call alive
    extents = scan_segments(root)                # what the segments say by themselves, without journals

Whatever the page does not define is refused: `refused` says where and why, and what is refused is missing, never guessed.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash

try:
    from blake3 import blake3
except ImportError:  # then nothing with a key can be read
    blake3 = None

PAGE = 4096
BLOCK_TOKENS = 64
SKIPPABLE = 128  # a record of such a type, or above, may be passed over


class Refused(Exception):
    """The page does not define such bytes."""


@dataclass(frozen=True)
class Representation:
    kind: str
    layout: str
    dtype: str
    quantisation: str
    shard: str
    piece_tokens: int
    state: str
    layer_numbers: tuple[int, ...]
    layer_bytes: tuple[int, ...]  # of a piece; 0 where pieces differ
    digest: bytes


@dataclass(frozen=True)
class Extent:
    """`pieces[layer][piece]`: verified bytes. `tokens`: those of each block. What stands last is what journals say, and is
    empty where none was read: `classes` are all that it was ever promised to, `pinned_until_ms` is 0 where it is not pinned."""

    segment: tuple[bytes, int]
    offset: int
    nbytes: int
    representation: Representation
    parent: bytes
    keys: tuple[bytes, ...]
    tokens: tuple[tuple[int, ...], ...]
    extras: tuple[bytes, ...]
    retention: str
    created_ms: int
    pieces: tuple[tuple[bytes, ...], ...]
    state: bytes
    last_used: int = 0
    tenant: str = ""
    classes: frozenset[str] = frozenset()
    pinned_until_ms: int = 0


@dataclass
class Added:
    """What a journal says of an extent."""

    nbytes: int
    header_bytes: int
    last_used: int
    flags: int
    retention: str
    tenant: str
    parent: bytes
    prefixes: tuple[bytes, ...]
    check_key: int = 0


@dataclass
class Journals:
    """All that journals say. A name is (writer, sequence) of a segment, with an offset of an extent."""

    representations: dict[bytes, Representation] = field(default_factory=dict)
    opened: dict[tuple[bytes, int], tuple[int, int, bytes]] = field(default_factory=dict)  # header bytes, capacity, digest
    sealed: dict[tuple[bytes, int], int] = field(default_factory=dict)
    added: dict[tuple[bytes, int, int], Added] = field(default_factory=dict)
    used: dict[tuple[bytes, int, int], int] = field(default_factory=dict)
    promises: dict[tuple[bytes, int, int], list[tuple[int, str]]] = field(default_factory=dict)  # until when, which class
    pins: dict[tuple[bytes, int, int], tuple[int, int]] = field(default_factory=dict)  # counter, deadline; 0: unpinned
    removed: dict[tuple[bytes, int, int], str] = field(default_factory=dict)  # why
    quarantined: set[tuple[bytes, int, int]] = field(default_factory=set)
    removals: list[tuple[str, tuple[bytes, ...]]] = field(default_factory=list)  # reason, prefixes of what went
    unknown: int = 0  # records that were passed over
    refused: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class Contents:
    extents: list[Extent]
    journals: Journals
    refused: list[tuple[str, str]]

    def blocks(self) -> dict[tuple[bytes, bytes], list[tuple[Extent, int]]]:
        """Return where each block lies: (digest of the representation, key) → extents with the block's place in them."""
        return blocks_of(self.extents)


def blocks_of(extents: list[Extent]) -> dict[tuple[bytes, bytes], list[tuple[Extent, int]]]:
    found: dict[tuple[bytes, bytes], list[tuple[Extent, int]]] = {}
    for extent in extents:
        for block, key in enumerate(extent.keys):
            found.setdefault((extent.representation.digest, key), []).append((extent, block))
    return found


def read_directory(root: Path, *, key: bytes = b"", features: tuple[str, ...] = ()) -> Contents:
    """Return every extent that the journals call alive, every byte of it verified. `key`: the one that its checks were made
    with. `features`: what the directory has."""
    check_marker(root, features)
    journals = read_journals(root)
    extents, refused = [], list(journals.refused)
    for (writer, sequence), (header_bytes, _, digest) in sorted(journals.opened.items()):
        path = segment_path(root, writer, sequence)
        if not path.exists():
            continue  # it holds nothing, whatever journals say
        data = path.read_bytes()
        try:
            own_header_bytes, representation = read_segment_header(data, writer, sequence)
            require(representation.digest == digest, "a segment of another representation than its journal says")
            require(own_header_bytes == header_bytes, "a segment header of another length than its journal says")
        except Refused as why:
            refused.append((path.name, str(why)))
            continue
        for name, added in sorted(journals.added.items()):
            if name[:2] != (writer, sequence) or name in journals.removed:
                continue
            try:
                extent = read_extent(data, (writer, sequence), name[2], representation, key)
                agree_with_journal(extent, added)
            except Refused as why:
                refused.append((f"{path.name}, byte {name[2]}", str(why)))
                continue
            said = {
                "last_used": max(added.last_used, journals.used.get(name, 0)),
                "tenant": added.tenant,
                "classes": frozenset({added.retention, *(word for _, word in journals.promises.get(name, []))}),
                "pinned_until_ms": journals.pins.get(name, (0, 0))[1],
            }
            extents.append(replace(extent, **said))
    return Contents(extents, journals, refused)


def scan_segments(root: Path) -> list[Extent]:
    """Return what stands in the segments, journals left aside: also what was removed and not yet given back."""
    found = []
    for path in sorted((root / "segments").glob("*/*.seg")):
        writer, sequence = segment_name(path)
        data = path.read_bytes()
        try:
            offset, representation = read_segment_header(data, writer, sequence)
        except Refused:
            continue
        while offset + PAGE <= len(data):
            try:
                extent = read_extent(data, (writer, sequence), offset, representation)
            except Refused:
                offset += PAGE
            else:
                found.append(extent)
                offset += extent.nbytes
    return found


def check_marker(root: Path, features: tuple[str, ...] = ()) -> None:
    marker = json.loads((root / "headstart.json").read_text())
    require(marker["format"] == "headstart" and marker["version"] == 1, "another format or version")
    require(sorted(marker.get("features", [])) == sorted(features), "features that this reader does not know")


# Journals.


def read_journals(root: Path) -> Journals:
    newest: dict[bytes, tuple[int, Path]] = {}
    for path in (root / "journals").iterdir():
        if found := re.fullmatch(r"([0-9a-f]{32})-([0-9a-f]{8})\.log", path.name):
            writer, generation = bytes.fromhex(found[1]), int(found[2], 16)
            if generation < 1 << 30 and generation >= newest.get(writer, (-1, path))[0]:
                newest[writer] = (generation, path)
    said = Journals()
    for writer, (generation, path) in sorted(newest.items()):
        try:
            for kind, payload in journal_records(path.read_bytes(), writer, generation):
                apply_record(said, kind, payload)
        except (Refused, struct.error, UnicodeDecodeError, IndexError) as why:
            said.refused.append((path.name, str(why) or type(why).__name__))
    return said


def journal_records(data: bytes, writer: bytes, generation: int) -> Iterator[tuple[int, bytes]]:
    """Yield (type, payload) of each whole record. Zeros or a torn record behind the last one end the journal, quietly; other
    bytes there are said to be refused."""
    require(len(data) >= 80 and xxh128(data[:64]) == data[64:80], "the journal's header check does not hold")
    magic, version, its_generation, its_writer, _host, _created, reserved = struct.unpack("<8sII16s16sQQ", data[:64])
    require(magic == b"hsjournl" and version == 1, "no journal of version 1")
    require((its_writer, its_generation, reserved) == (writer, generation, 0), "the journal's header is not that of its name")
    at = 80
    while at < len(data):
        if at + 13 > len(data):
            raise Refused("the journal ends amid a record")
        length, kind = struct.unpack_from("<IB", data, at)
        end = at + 5 + length + 8
        require(length <= 1 << 24 and end <= len(data), "the journal ends amid a record")
        body, check = data[at : end - 8], data[end - 8 : end]
        expected = xxhash.xxh3_64(writer + struct.pack("<IQ", generation, at) + body).digest()
        require(check == expected, "a record's check does not hold")
        yield kind, body[5:]
        at = end


def apply_record(said: Journals, kind: int, payload: bytes) -> None:
    match kind:
        case 1:
            representation = read_representation(payload)
            said.representations[representation.digest] = representation
        case 2:
            writer, sequence, header_bytes, capacity, created, digest = exactly("<16sIIQQ32s", payload)
            require(sequence < 1 << 30 and header_bytes < 1 << 31 and max(capacity, created) < 1 << 62, "a number too large")
            require(digest in said.representations, "a segment of a representation that was not declared")
            said.opened[writer, sequence] = (header_bytes, capacity, digest)
        case 3:
            writer, sequence, end = exactly("<16sIQ", payload)
            said.sealed[writer, sequence] = end
        case 4:
            name, added = read_added(payload)
            require(name[:2] in said.opened, "an extent in a segment that was not opened")
            said.added.setdefault(name, added)
            said.used[name] = max(added.last_used, said.used.get(name, 0))
        case 133:
            for at in range(0, len(payload), 36):
                writer, sequence, offset, used = exactly("<16sIQQ", payload[at : at + 36])
                name = (writer, sequence, offset)
                said.used[name] = max(used, said.used.get(name, 0))
        case 134:
            at = 8  # behind the time at which it was reckoned
            while at < len(payload):
                writer, sequence, offset, until_ms, length = struct.unpack_from("<16sIQQB", payload, at)
                require(at + 37 + length <= len(payload), "a class that is cut")
                promises = said.promises.setdefault((writer, sequence, offset), [])
                promises.append((until_ms, payload[at + 37 : at + 37 + length].decode()))
                at += 37 + length
        case 135:
            for at in range(0, len(payload), 44):
                writer, sequence, offset, until_ms, counter = exactly("<16sIQQQ", payload[at : at + 44])
                name = (writer, sequence, offset)
                said.pins[name] = max((counter, until_ms), said.pins.get(name, (0, 0)))
        case 9 | 10:
            read_removed(said, payload, quarantined=kind == 10)
        case 11:
            counter, next_sequence = exactly("<QI", payload)
            require(counter < 1 << 56 and next_sequence < 1 << 30, "a number too large")
        case _:
            require(kind >= SKIPPABLE, f"a record of type {kind}, which this reader does not know")
            said.unknown += 1


def read_added(payload: bytes) -> tuple[tuple[bytes, int, int], Added]:
    fixed = struct.Struct("<16sIQQIQQII16s")
    writer, sequence, offset, nbytes, header_bytes, created, used, flags, blocks, parent = fixed.unpack_from(payload)
    require(max(offset, nbytes, created) < 1 << 62 and used < 1 << 56 and header_bytes < 1 << 31, "a number too large")
    at = fixed.size + 16 * blocks
    require(at <= len(payload), "an extent's prefixes are cut")
    prefixes = tuple(payload[fixed.size + 16 * n : fixed.size + 16 * n + 16] for n in range(blocks))
    fields = framed(payload[at:])
    require(bool(fields) and fields[0][0] == 1, "an extent without a class in front")
    require(len({tag for tag, _ in fields}) == len(fields), "a field twice")
    tenant = dict(fields).get(2, b"").decode()
    (check_key,) = exactly("<I", dict(fields).get(4, bytes(4)))
    added = Added(nbytes, header_bytes, used, flags, fields[0][1].decode(), tenant, parent, prefixes, check_key)
    return (writer, sequence, offset), added


def read_removed(said: Journals, payload: bytes, *, quarantined: bool) -> None:
    _time_ms, count, word = struct.unpack_from("<QIB", payload)
    at = 13 + word
    reason = payload[13:at].decode()
    for _ in range(count):
        writer, sequence, offset, blocks = struct.unpack_from("<16sIQI", payload, at)
        prefixes = tuple(payload[at + 32 + 16 * n : at + 48 + 16 * n] for n in range(blocks))
        at += 32 + 16 * blocks
        said.removals.append((reason, prefixes))
        said.removed[writer, sequence, offset] = reason or said.removed.get((writer, sequence, offset), "")
        if quarantined:
            said.quarantined.add((writer, sequence, offset))
    require(at == len(payload), "a removal whose lengths do not add up")


# Segments.


def segment_path(root: Path, writer: bytes, sequence: int) -> Path:
    return root / "segments" / f"{sequence & 0xFF:02x}" / f"{writer.hex()}-{sequence:08x}.seg"


def segment_name(path: Path) -> tuple[bytes, int]:
    writer, sequence = path.stem.split("-")
    return bytes.fromhex(writer), int(sequence, 16)


def read_segment_header(data: bytes, writer: bytes, sequence: int) -> tuple[int, Representation]:
    """Return (where extents may begin, their representation)."""
    require(len(data) >= PAGE, "a segment shorter than its header")
    magic, version, header_bytes, its_writer, its_sequence, zero, _capacity, _created, digest, length, zero_too = struct.unpack(
        "<8sII16sIIQQ32sII", data[:96]
    )
    encoded = data[112 : 112 + length]
    require(magic == b"hssegmnt", "no segment")
    require(xxh128(data[:96] + encoded) == data[96:112], "a segment's header check does not hold")
    require(version == 1 and not zero and not zero_too, "a segment of another version")
    require((its_writer, its_sequence) == (writer, sequence), "a segment that is not the one of its name")
    require(header_bytes == up(112 + length), "a segment header of another length than its parts")
    representation = read_representation(encoded)
    require(representation.digest == digest, "a segment's representation is not what its digest says")
    return header_bytes, representation


def read_representation(encoded: bytes) -> Representation:
    fields = framed(encoded)
    require([tag for tag, _ in fields] == list(range(1, 12)), "a representation without each field once, in order")
    version, block_tokens, kind, layout, dtype, quantisation, shard, piece, state, numbers, sizes = (v for _, v in fields)
    require(version == u32(1) and block_tokens == u32(BLOCK_TOKENS), "a representation of another version")
    piece_tokens = int.from_bytes(piece, "little")
    layer_numbers, layer_bytes = u32s(numbers), u32s(sizes)
    require(kind in (b"mha", b"gqa", b"mla", b"opaque"), "another kind")
    require(state in (b"none", b"required"), "another state")
    require(len(piece) == 4 and piece_tokens > 0 and piece_tokens % BLOCK_TOKENS == 0, "pieces of no whole blocks")
    require(0 < len(layer_numbers) < 1 << 16 and len(set(layer_numbers)) == len(layer_numbers), "layers that are not")
    require(len(layer_bytes) == len(layer_numbers), "sizes for another number of layers")
    words = (kind.decode(), layout.decode(), dtype.decode(), quantisation.decode(), shard.decode())
    digest = hashlib.sha256(encoded).digest()
    return Representation(*words, piece_tokens, state.decode(), layer_numbers, layer_bytes, digest)


# Extents.


def read_extent(
    data: bytes, segment: tuple[bytes, int], start: int, representation: Representation, secret: bytes = b""
) -> Extent:
    """Return the extent at byte `start` of a segment file, once its header, its chain of keys and every check are right."""
    require(start % PAGE == 0 and data[start : start + 8] == b"HSEXTENT", "no extent begins here")
    version, header_bytes = struct.unpack_from("<II", data, start + 8)
    require(version == 1, "an extent of another version")
    require(header_bytes % PAGE == 0 and PAGE <= header_bytes <= 1 << 28, "an extent header of no possible length")
    header = data[start : start + header_bytes]
    require(len(header) == header_bytes, "an extent header that is cut")
    (algorithm,), (check_key,) = struct.unpack_from("<H", header, 60), struct.unpack_from("<I", header, 108)
    check_of = checks_of(algorithm, check_key, secret)
    require(check_of(header[:16] + header[32:]) == header[16:32], "an extent's header check does not hold")
    flags, blocks, nbytes, block_tokens, piece_tokens, layers, algorithm, retention_bytes = struct.unpack_from(
        "<IIQIIIHH", header, 32
    )
    state_offset, state_bytes, state_check, created, extras_bytes, check_key, digest, parent = struct.unpack_from(
        "<QQ16sQII32s32s", header, 64
    )
    require(digest == representation.digest, "an extent of another representation")
    require(flags < 8 and created < 1 << 63, "a flag or a time that is not known")
    require(block_tokens == BLOCK_TOKENS and piece_tokens == representation.piece_tokens, "tokens of another number")
    require(layers == len(representation.layer_bytes) and 1 <= retention_bytes <= 64, "layers or a class that are not")
    per_piece = piece_tokens // BLOCK_TOKENS
    require(blocks > 0 and blocks % per_piece == 0, "blocks that are no whole pieces")
    pieces = blocks // per_piece

    at = 176
    retention = header[at : at + retention_bytes].decode()
    require(retention.isprintable() and not any(header[at + retention_bytes : at + up(retention_bytes, 8)]), "an odd class")
    at += up(retention_bytes, 8)
    layer_offsets = struct.unpack_from(f"<{layers}Q", header, at)
    at += 8 * layers
    keys = tuple(header[at + 32 * n : at + 32 * n + 32] for n in range(blocks))
    at += 32 * blocks
    token_bytes = [header[at + 256 * n : at + 256 * n + 256] for n in range(blocks)]
    at += 256 * blocks
    varies = 0 in representation.layer_bytes
    require(bool(flags & 2) == varies, "piece sizes where there are none, or none where there are")
    if varies:
        listed = struct.unpack_from(f"<{layers * pieces}I", header, at)
        sizes = [listed[layer * pieces : (layer + 1) * pieces] for layer in range(layers)]
        fits = all(fixed in (0, size) for fixed, row in zip(representation.layer_bytes, sizes, strict=True) for size in row)
        require(all(listed) and fits, "a piece of a size that it cannot have")
        at += 4 * layers * pieces
    else:
        sizes = [(nbytes_,) * pieces for nbytes_ in representation.layer_bytes]
    checks = [header[at + 16 * n : at + 16 * n + 16] for n in range(layers * pieces)]
    at += 16 * layers * pieces
    require(bool(flags & 1) == (extras_bytes > 0), "extras where there are none, or none where there are")
    extras = [b""] * blocks
    if flags & 1:
        before = at
        for block in range(blocks):
            (length,) = struct.unpack_from("<I", header, at)
            extras[block] = header[at + 4 : at + 4 + length]
            at += 4 + length
        require(at - before == 4 * blocks + extras_bytes, "extras whose lengths do not add up")
    require(header_bytes == up(at) and not any(header[at:]), "a header of another length than its parts")

    key = parent
    for block in range(blocks):
        key = hashlib.sha256(key + token_bytes[block] + extras[block]).digest()
        require(key == keys[block], "a key that does not follow from the one before")

    end = header_bytes
    found: list[tuple[bytes, ...]] = []
    for layer in range(layers):
        require(layer_offsets[layer] == end, "a layer that is elsewhere than behind the one before")
        row = []
        for piece in range(pieces):
            content = data[start + end : start + end + sizes[layer][piece]]
            last = keys[(piece + 1) * per_piece - 1]
            good = check_of(digest + last + u32(layer) + content) == checks[layer * pieces + piece]
            require(good, f"layer {layer}, piece {piece} is not what was written")
            row.append(content)
            end += sizes[layer][piece]
        found.append(tuple(row))
        end = up(end)
    require(state_offset == end and bool(flags & 4) == (state_bytes > 0), "a boundary state where there is none")
    state = data[start + end : start + end + state_bytes]
    expected = check_of(digest + keys[-1] + b"\xff\xff\xff\xff" + state) if state_bytes else bytes(16)
    require(state_check == expected, "the boundary state is not what was written")
    require(nbytes == up(state_offset + state_bytes) and start + nbytes <= len(data), "an extent of another length")
    tokens = tuple(struct.unpack("<64I", raw) for raw in token_bytes)
    return Extent(
        segment, start, nbytes, representation, parent, keys, tokens, tuple(extras), retention, created, tuple(found), state
    )


def agree_with_journal(extent: Extent, added: Added) -> None:
    require(extent.nbytes == added.nbytes, "an extent of another length than its journal says")
    require(tuple(key[:16] for key in extent.keys) == added.prefixes, "an extent with other blocks than its journal says")
    require(extent.parent[:16] == added.parent, "an extent with another parent than its journal says")
    require(bool(extent.state) == bool(added.flags & 1), "a boundary state that the journal does not know of")


# Small things.


def framed(data: bytes) -> list[tuple[int, bytes]]:
    fields, at = [], 0
    while at < len(data):
        require(at + 5 <= len(data), "a field that is cut")
        tag, length = struct.unpack_from("<BI", data, at)
        require(at + 5 + length <= len(data), "a field that is cut")
        fields.append((tag, data[at + 5 : at + 5 + length]))
        at += 5 + length
    return fields


def exactly(layout: str, payload: bytes) -> tuple:
    require(len(payload) == struct.calcsize(layout), "a record of another length")
    return struct.unpack(layout, payload)


def require(fits: bool, what: str) -> None:
    if not fits:
        raise Refused(what)


def up(nbytes: int, unit: int = PAGE) -> int:
    return -(-nbytes // unit) * unit


def u32(number: int) -> bytes:
    return struct.pack("<I", number)


def u32s(data: bytes) -> tuple[int, ...]:
    require(len(data) % 4 == 0, "numbers that are cut")
    return struct.unpack(f"<{len(data) // 4}I", data)


def checks_of(algorithm: int, check_key: int, secret: bytes) -> Callable[[bytes], bytes]:
    """Return how the checks are made that a header names."""
    if algorithm == 1:
        require(check_key == 0 and not secret, "checks without a key where there is one")
        return xxh128
    require(algorithm == 2, "an algorithm that is not known")
    require(bool(secret) and blake3 is not None, "checks with a key that is not known")
    own = struct.unpack("<I", blake3(b"headstart check key 1", key=secret).digest(4))[0] or 1
    require(check_key == own, "checks with another key")
    return lambda data: blake3(data, key=secret).digest(16)


def xxh128(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()
