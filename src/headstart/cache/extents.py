"""Building extents to write: how long a run to take, and the image of it, copied out of the engine's memory and sealed."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from headstart.block.extent import ALIGNMENT, ExtentLayout, layout_of, seal
from headstart.block.keys import BLOCK_TOKENS, BlockKey, Content, block_extras
from headstart.block.representation import Representation
from headstart.tier.base import Terms
from headstart.transfer.buffers import Bytes, Staging, flat, gather, total_bytes
from headstart.transfer.load import KVView

EXTENT_BYTES = 64 << 20  # long enough that one layer of it is a good read, short enough to stage and to place
_MAX_BLOCKS = 1024  # bounds the header, which is read whole however little of an extent is wanted


class Saved(Protocol):
    """The part of a save request that an extent is made of."""

    @property
    def tokens(self) -> npt.NDArray[np.uint32]: ...
    @property
    def source(self) -> KVView: ...
    @property
    def root(self) -> bytes: ...
    @property
    def salt(self) -> str | bytes | None: ...
    @property
    def shared_tokens(self) -> int: ...
    @property
    def terms(self) -> Terms: ...
    @property
    def states(self) -> Mapping[int, memoryview]: ...
    @property
    def contents(self) -> Sequence[Content]: ...


class ExtentBuilder:
    """Builds extents in staging memory of its own; an image is good until the next `build` in its `slot`. For one thread."""

    def __init__(self, representation: Representation) -> None:
        self.largest_bytes_per_token = 0  # seen so far
        self._representation = representation
        self._stagings: dict[int, Staging] = {}

    def least_bytes(self, *, state_bytes: int) -> int:
        """Return the size of the smallest extent there can be; what a varying piece will be is not known before."""
        if self._representation.varies:
            return ALIGNMENT + state_bytes
        return layout_of(self._representation, self._representation.blocks_per_piece, state_bytes=state_bytes).extent_bytes

    def build(
        self, saved: Saved, keys: Sequence[BlockKey], first: int, pieces: int, *, limit_bytes: int, slot: int = 0
    ) -> tuple[memoryview, int]:
        """Return the sealed image of the pieces from `first` on, and how many of `pieces` it holds: at least one, and no more
        than fit into `limit_bytes`. `keys`: of all blocks of the prompt. If it holds them all, and `saved` has a state that
        stands behind them, that comes along."""
        representation, per_piece = self._representation, self._representation.blocks_per_piece
        state = saved.states.get(first + pieces, memoryview(b""))
        wanted_bytes = min(limit_bytes, EXTENT_BYTES + state.nbytes)
        extras = self._extras(saved, first * per_piece, min(pieces * per_piece, _MAX_BLOCKS))
        views: list[list[list[memoryview]]] = []
        buffers: Bytes
        sizes = None
        if representation.varies:
            views, sizes = self._varying(saved.source, first, pieces, wanted_bytes - state.nbytes)
            count = sizes.shape[1]
        else:
            count = self._count(
                pieces, wanted_bytes, saved.terms.retention, state_bytes=state.nbytes, extras_bytes=sum(map(len, extras))
            )
        if count < pieces:
            state = memoryview(b"")
        blocks = range(first * per_piece, (first + count) * per_piece)
        extras = extras[: len(blocks)]
        layout = layout_of(
            representation,
            len(blocks),
            piece_bytes=sizes,
            extras_bytes=sum(map(len, extras)),
            state_bytes=state.nbytes,
            retention=saved.terms.retention,
        )
        staging = self._stagings.get(slot) or self._stagings.setdefault(slot, Staging(f"save staging {slot}"))
        image = staging.take(layout.extent_bytes)
        for layer, nbytes in enumerate(representation.layer_bytes):
            if sizes is not None:
                buffers = [buffer for piece in views for buffer in piece[layer]]
            else:
                assert nbytes is not None
                buffers = _buffers(saved.source, layer, first, [nbytes] * count)
            _copy(buffers, image, layout, layer, count)
        gather([state], image[layout.state_offset : layout.state_offset + state.nbytes])
        seal(
            image,
            representation,
            parent=keys[blocks.start - 1] if blocks.start else saved.root,
            keys=keys[blocks.start : blocks.stop],
            tokens=saved.tokens[blocks.start * BLOCK_TOKENS : blocks.stop * BLOCK_TOKENS],
            extras=extras if any(extras) else (),
            piece_bytes=sizes,
            state_bytes=state.nbytes,
            created_ms=int(time.time() * 1000),
            retention=saved.terms.retention,
        )
        self.largest_bytes_per_token = max(
            self.largest_bytes_per_token,
            -(-(layout.extent_bytes - state.nbytes) // (count * representation.piece_tokens)),
        )
        return image, count

    def _extras(self, saved: Saved, first: int, blocks: int) -> tuple[bytes, ...]:
        """Return the extras of so many blocks from `first` on; none where all are empty."""
        if not (saved.salt or saved.contents):
            return ()
        extras = tuple(
            block_extras(block, salt=saved.salt, shared_tokens=saved.shared_tokens, contents=saved.contents)
            for block in range(first, first + blocks)
        )
        return extras if any(extras) else ()

    def _count(self, pieces: int, limit_bytes: int, retention: str, *, state_bytes: int, extras_bytes: int) -> int:
        """Return how many pieces to take so that `pieces` of them, and the state behind them, go into as few extents as the
        limit allows, evenly long."""
        per_piece = self._representation.blocks_per_piece
        most = min(pieces, max(1, _MAX_BLOCKS // per_piece))
        while most > 1:
            blocks = most * per_piece
            extent_bytes = layout_of(
                self._representation, blocks, state_bytes=state_bytes, extras_bytes=extras_bytes, retention=retention
            ).extent_bytes
            if extent_bytes <= limit_bytes:
                break
            room, taken = limit_bytes - state_bytes, extent_bytes - state_bytes
            most = max(1, min(most - 1, most * room // taken))
        extents = -(-pieces // most)
        return -(-pieces // extents)

    def _varying(
        self, source: KVView, first: int, pieces: int, limit_bytes: int
    ) -> tuple[list[list[list[memoryview]]], npt.NDArray[np.uint32]]:
        """Return [piece][layer] buffers and u32 [layers, pieces] sizes of as many pieces as fit; the source decides how large
        each is, so pieces are asked for one by one."""
        views: list[list[list[memoryview]]] = []
        sizes: list[list[int]] = []
        nbytes = 0
        for piece in range(first, first + min(pieces, max(1, _MAX_BLOCKS // self._representation.blocks_per_piece))):
            view = [
                _listed(_buffers(source, layer, piece, [fixed or 0]))
                for layer, fixed in enumerate(self._representation.layer_bytes)
            ]
            size = [total_bytes(buffers) for buffers in view]
            nbytes += sum(size)
            if views and nbytes > limit_bytes - _header_allowance(len(views) + 1, self._representation):
                break
            views.append(view)
            sizes.append(size)
        return views, np.array(sizes, np.uint32).T.copy()


def _header_allowance(pieces: int, representation: Representation) -> int:
    """Return at least the bytes of a header and of the padding between regions, in an extent of `pieces` pieces."""
    blocks = pieces * representation.blocks_per_piece
    return 8192 + blocks * (32 + 4 * BLOCK_TOKENS + 128) + representation.layers * (pieces * 20 + 4096 + 8)


def _listed(buffers: Bytes) -> list[memoryview]:
    return [np.ascontiguousarray(buffers).reshape(-1).data] if isinstance(buffers, np.ndarray) else buffers


def _buffers(source: KVView, layer: int, first: int, sizes: Sequence[int]) -> Bytes:
    buffers = flat(source.buffers(layer, first, sizes))
    nbytes = total_bytes(buffers)
    if not nbytes or (all(sizes) and nbytes != sum(sizes)):
        raise ValueError(f"the source gave {nbytes} bytes for {len(sizes)} pieces of layer {layer}, which have {sum(sizes)}")
    return buffers


def _copy(buffers: Bytes, image: memoryview, layout: ExtentLayout, layer: int, pieces: int) -> None:
    offset, nbytes = layout.piece_range(layer, 0, pieces)
    gather(buffers, image[offset : offset + nbytes])
