"""Several consecutive extents of one prompt as one: its header from theirs, and where each one's pieces come to lie. Pure.

Checks are bound to the piece's key, its layer and the representation, not to a place, so they are carried over as they are.
What rots before or while it is copied fails in the new extent as it did in the old one, and `verify_part` says so before the
new one is written.

    joined = join_headers(headers, representation)      # then each old one's layers are copied to joined.places(part, layer)
    verify_part(image, joined, part)                    # raises ExtentCorrupt where part `part` is not what was written
    finish(image, joined)                               # header and padding
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from headstart.block.checks import STATE_LAYER, piece_check
from headstart.block.extent import ExtentHeader, encode_header
from headstart.block.layout import ALIGNMENT, ExtentLayout, padded
from headstart.block.representation import Representation
from headstart.errors import ExtentCorrupt


@dataclass(frozen=True, slots=True)
class Move:
    """Bytes of an old extent, and where they lie in the new one."""

    source: int
    target: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """`header` and `layout` of the new extent. `firsts`: the first piece of each part, and one past the last of all."""

    representation: Representation
    header: ExtentHeader
    layout: ExtentLayout
    parts: tuple[ExtentHeader, ...]
    firsts: tuple[int, ...]

    def moves(self, part: int) -> Iterator[Move]:
        """Yield what is to be copied of a part: its pieces layer by layer, and the boundary state of the last one."""
        old = self.parts[part].layout(self.representation)
        for layer in range(self.representation.layers):
            source, nbytes = old.piece_range(layer, 0, old.pieces)
            yield Move(source, self.layout.piece_range(layer, self.firsts[part], old.pieces)[0], nbytes)
        if self.header.state_bytes and part == len(self.parts) - 1:
            yield Move(old.state_offset, self.layout.state_offset, self.header.state_bytes)


def join_headers(headers: Sequence[ExtentHeader], representation: Representation, *, retention: str | None = None) -> Joined:
    """Return the extent that holds all blocks of `headers`, which follow each other; the oldest creation counts. `retention`:
    that of the first where it is None. Raises ValueError for parts that cannot be joined: no consecutive ones, other checks,
    or a boundary state before the end, which would be lost."""
    if not headers:
        raise ValueError("nothing to join")
    for one, other in pairwise(headers):
        if other.parent != one.keys[-1]:
            raise ValueError("an extent does not follow the one before it")
        if one.state_bytes or other.algorithm != one.algorithm:
            raise ValueError("an extent with a boundary state, or with other checks, cannot be joined to what follows")
    if any(header.representation != representation.digest for header in headers):
        raise ValueError("extents of several representations cannot be joined")
    first, last = headers[0], headers[-1]
    varying = [header.piece_bytes for header in headers if header.piece_bytes is not None]
    with_extras = any(header.extras for header in headers)
    header = ExtentHeader(
        representation=first.representation,
        parent=first.parent,
        keys=tuple(key for header in headers for key in header.keys),
        tokens=np.concatenate([header.tokens for header in headers]),
        checks=np.concatenate([header.checks for header in headers], axis=1),
        extras=tuple(e for h in headers for e in (h.extras or (b"",) * len(h.keys))) if with_extras else (),
        piece_bytes=np.concatenate(varying, axis=1) if varying else None,
        state_bytes=last.state_bytes,
        state_check=last.state_check,
        created_ms=min(header.created_ms for header in headers),
        retention=first.retention if retention is None else retention,
        algorithm=first.algorithm,
    )
    firsts = [0]
    for part in headers:
        firsts.append(firsts[-1] + part.checks.shape[1])
    return Joined(representation, header, header.layout(representation), tuple(headers), tuple(firsts))


def verify_part(image: memoryview, joined: Joined, part: int) -> None:
    """Check every piece of a part, and its boundary state, where they lie in the new image. Raises ExtentCorrupt (reason
    "piece", "state")."""
    header, layout = joined.header, joined.layout
    per_piece = joined.representation.blocks_per_piece

    def check(layer: int, key: bytes, offset: int, nbytes: int) -> bytes:
        return piece_check(
            algorithm=header.algorithm,
            representation=header.representation,
            key=key,
            layer=layer,
            buffers=[image[offset : offset + nbytes]],
        )

    for layer in range(joined.representation.layers):
        for piece in range(joined.firsts[part], joined.firsts[part + 1]):
            found = check(layer, header.keys[(piece + 1) * per_piece - 1], *layout.piece_range(layer, piece, 1))
            if found != header.checks[layer, piece].tobytes():
                raise ExtentCorrupt(f"piece {piece} of layer {layer} is not what was written", reason="piece")
    if not header.state_bytes or part < len(joined.parts) - 1:
        return
    if check(STATE_LAYER, header.keys[-1], layout.state_offset, header.state_bytes) != header.state_check:
        raise ExtentCorrupt("an extent's boundary state is not what was written", reason="state")


def finish(image: memoryview, joined: Joined) -> None:
    """Write the header and the padding of an image whose pieces lie where they belong."""
    layout = joined.layout
    for layer in range(joined.representation.layers):
        offset, nbytes = layout.piece_range(layer, 0, layout.pieces)
        end = offset + nbytes
        image[end : padded(end, ALIGNMENT)] = bytes(-end % ALIGNMENT)
    end = layout.state_offset + joined.header.state_bytes
    image[end : layout.extent_bytes] = bytes(layout.extent_bytes - end)
    image[: layout.header_bytes] = encode_header(joined.header, joined.representation)
