"""Cache directories of a million blocks and next to no bytes: journals and segments as writers leave them, bodies as holes."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headstart.block.extent import ExtentHeader, encode_header, layout_of
from headstart.block.identity import Identity
from headstart.block.keys import chain_keys
from headstart.block.representation import Representation
from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import (
    PREFIX_BYTES,
    ExtentAdded,
    ExtentName,
    Record,
    Removed,
    RepresentationDeclared,
    SegmentName,
    SegmentOpened,
    SegmentSealed,
    Snapshot,
    Touched,
    encode_journal_header,
    encode_record,
)
from headstart.tier.disk.segment import SegmentHeader, encode_segment_header, segment_capacity

IDENTITY = Identity(weights=bytes(range(32)), architecture=b"{}")
SMALL = Representation("gqa", "torch/token-kv-head-dim/1", "float32", (98_304,) * 30)  # SmolLM2-135M
CAPACITY_BYTES = 1 << 43
_NOW_MS = 1_790_000_000_000
_USES_A_RECORD = 4096


@dataclass(frozen=True, slots=True)
class Paper:
    """A directory as it was built: `journals` by path, so that it can be put back after an opening changed it."""

    root: Path
    journals: dict[Path, bytes]
    keys: list[bytes]  # of the prompt whose blocks are the first ones in it
    blocks: int

    def restore(self) -> None:
        """Put the journals back, and nothing into the page cache."""
        for path in (self.root / "journals").iterdir():
            path.unlink()
        for path, data in self.journals.items():
            path.write_bytes(data)
        for path in [*self.journals, *self.root.glob("segments/*/*.seg")]:
            with path.open("rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build(
    root: Path,
    *,
    blocks: int,
    extent_blocks: int,
    tokens: np.ndarray,
    writers: int = 1,
    crash: bool = False,
    headers: bool = False,
) -> Paper:
    """Make a directory of so many blocks, the first of which are those of `tokens`. `crash`: the journals were not renewed and
    name as many extents that are gone, their last segments are open, their last records torn. `headers`: extents have theirs,
    as a directory without journals needs."""
    DiskTier.open(root, capacity_bytes=CAPACITY_BYTES).close()
    prompt = chain_keys(tokens, root=IDENTITY.root())
    keys = np.random.default_rng(1).integers(0, 256, (blocks, 32), np.uint8)
    keys[: len(prompt)] = np.frombuffer(b"".join(prompt), np.uint8).reshape(-1, 32)
    journals: dict[Path, bytes] = {}
    each = -(-blocks // writers // extent_blocks) * extent_blocks
    for number in range(writers):
        writer = bytes([number + 1]) * 16
        extents = [
            keys[at : at + extent_blocks] for at in range(number * each, min(blocks, (number + 1) * each), extent_blocks)
        ]
        data = bytearray(encode_journal_header(writer, 0, _NOW_MS, host=bytes(16)))
        for record in _records(root, writer, extents, crash=crash, headers=headers):
            data += encode_record(record, writer=writer, generation=0, offset=len(data))
        journals[root / "journals" / f"{writer.hex()}-00000000.log"] = bytes(data[:-7] if crash else data)
    return Paper(root, {} if headers else journals, list(map(bytes, prompt)), blocks)


def _records(root: Path, writer: bytes, extents: Sequence[np.ndarray], *, crash: bool, headers: bool) -> Iterator[Record]:
    """Yield what a writer's journal says, and make its segment files."""
    rng = random.Random(int.from_bytes(writer[:4], "big"))
    layout = layout_of(SMALL, len(extents[0]), piece_bytes=None, extras_bytes=0, state_bytes=0, retention="default")
    header = SegmentHeader(
        SegmentName(writer, 0), segment_capacity(SMALL, capacity_bytes=CAPACITY_BYTES), _NOW_MS, SMALL.encode(), SMALL.digest
    )
    room = (header.capacity_bytes - header.header_bytes) // layout.extent_bytes
    yield Snapshot(0, 0)
    yield RepresentationDeclared(SMALL.encode())
    counter, at, sequence = 0, 0, 0
    uses: list[tuple[ExtentName, int]] = []
    while at < len(extents):
        name = SegmentName(writer, sequence)
        yield SegmentOpened(name, header.header_bytes, header.capacity_bytes, _NOW_MS, SMALL.digest)
        images: list[tuple[int, np.ndarray]] = []
        gone: list[tuple[ExtentName, bytes]] = []
        end = header.header_bytes
        for _ in range(room):
            if at == len(extents):
                break
            counter += 1
            extent = ExtentName(name, end)
            dead = crash and rng.random() < 0.5
            rows = np.frombuffer(rng.randbytes(extents[at].size), np.uint8).reshape(-1, 32) if dead else extents[at]
            prefixes = np.ascontiguousarray(rows[:, :PREFIX_BYTES]).tobytes()
            parent = bytes(PREFIX_BYTES) if not at else extents[at - 1][-1, :PREFIX_BYTES].tobytes()
            fixed = (layout.extent_bytes, layout.header_bytes, _NOW_MS, counter)
            yield ExtentAdded(
                extent, *fixed, rng.choice(("agent", "chat")), parent, prefixes, tenant=rng.choice(("a", "b", "c"))
            )
            if dead:
                gone.append((extent, prefixes))
            else:
                images.append((end, rows))
                uses.append((extent, counter))
                at += 1
            end += layout.extent_bytes
            if len(uses) == _USES_A_RECORD:
                yield Touched(tuple(uses))
                uses = []
        if gone:
            yield Removed(_NOW_MS, "capacity", tuple(gone))
        if not crash or at < len(extents):
            yield SegmentSealed(name, end)
        _write_segment(root, header, name, end, images if headers else [])
        sequence += 1
    yield Touched(tuple(uses))


def _write_segment(
    root: Path, header: SegmentHeader, name: SegmentName, end: int, images: Sequence[tuple[int, np.ndarray]]
) -> None:
    path = root / "segments" / f"{name.sequence & 0xFF:02x}" / name.file
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with path.open("wb") as file:
        own = SegmentHeader(name, header.capacity_bytes, header.created_ms, header.representation, header.digest)
        file.write(encode_segment_header(own))
        for offset, rows in images:
            file.seek(offset)
            file.write(_extent_header(rows))
        file.truncate(end)
    path.chmod(0o600)


def _extent_header(rows: np.ndarray) -> bytes:
    return encode_header(
        ExtentHeader(
            SMALL.digest,
            parent=bytes(32),
            keys=tuple(map(bytes, rows)),
            tokens=np.zeros(64 * len(rows), np.uint32),
            checks=np.zeros((SMALL.layers, len(rows), 16), np.uint8),
            created_ms=_NOW_MS,
        ),
        SMALL,
    )
