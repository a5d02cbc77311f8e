"""The tables that the C reader works from: what each extent's header must say, where bytes lie, and where they go. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from headstart.block.extent import ExtentHeader, encode_header
from headstart.block.keys import BLOCK_TOKENS, KEY_BYTES
from headstart.block.layout import ExtentLayout, HeaderSections, layout_of
from headstart.block.representation import Representation
from headstart.tier.arena import ALIGNMENT
from headstart.tier.base import RawExtents
from headstart.transfer import native
from headstart.transfer.buffers import flat
from headstart.transfer.load import KVView, Load
from headstart.transfer.plan import Request, Span, expected_layout, read_with_head, requests

Table = npt.NDArray[np.void]

_CLASS = "default"  # a class whose name is padded to another length is left to Python


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How an extent is read if it is what its tier says. `together`: pieces of layer 0 that come with the header. `asked`: the
    head and `requests` as rows, and `parts` theirs, of an extent at the beginning of a file and of the prompt. `counts`: how
    many parts each layer has. `most_bytes`: of one request."""

    layout: ExtentLayout
    together: int
    requests: tuple[Request, ...]
    model: Model
    asked: Table
    parts: Table
    counts: npt.NDArray[np.int64]
    most_bytes: int


@lru_cache(maxsize=256)
def plan_of(representation: Representation, blocks: int, header_bytes: int, first: int, wanted: int) -> Plan:
    """Return how `wanted` pieces from `first` on are read of an extent; the same object for the same extent lengths."""
    layout = expected_layout(representation, blocks, header_bytes)
    together = read_with_head(representation, first=first, wanted=wanted)
    planned = requests(layout, first=first, pieces=wanted, done=together)
    model = _model(representation, blocks, header_bytes)
    return Plan(
        layout, together, planned, model, *_rows(layout, first, [Request(range(bool(together)), 0, together), *planned])
    )


def _rows(layout: ExtentLayout, first: int, asked: Sequence[Request]) -> tuple[Table, Table, npt.NDArray[np.int64], int]:
    """Return `asked`, `parts`, `counts` and `most_bytes` of a plan."""
    found, ends = [], []
    for request in asked:
        end = layout.header_bytes
        for layer in request.layers:
            start, nbytes = layout.piece_range(layer, first + request.first, request.count)
            found.append((start, layer, request.first, request.count, 0))
            end = start + nbytes
        ends.append(end)
    parts = np.array(found, native.PART)
    rows = np.zeros(len(asked), native.REQUEST)
    rows["parts"] = [len(request.layers) for request in asked]
    rows["first_part"] = np.cumsum(rows["parts"]) - rows["parts"]
    rows["start"] = [request.first for request in asked]
    rows["pieces"] = [max(1, request.count) for request in asked]
    rows["offset"][1:] = parts["offset"][rows["first_part"][1:]]
    rows["head_bytes"][0] = layout.header_bytes
    counts = np.bincount(parts["layer"], minlength=len(layout.layer_offsets))
    return rows, parts, counts, int((np.array(ends) - rows["offset"]).max())


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """A header of an extent of that length, of other blocks. None: the extent cannot have a header of that length."""

    header: npt.NDArray[np.uint8] | None
    sections: HeaderSections


def _model(representation: Representation, blocks: int, header_bytes: int) -> Model:
    layout = expected_layout(representation, blocks, header_bytes)
    pieces = layout.pieces
    sections = HeaderSections.of(
        retention_bytes=len(_CLASS), layers=representation.layers, blocks=blocks, pieces=pieces, varies=False, extras_bytes=0
    )
    if header_bytes < layout_of(representation, blocks).header_bytes:
        return Model(None, sections)
    header = ExtentHeader(
        representation=representation.digest,
        parent=bytes(KEY_BYTES),
        keys=(bytes(KEY_BYTES),) * blocks,
        tokens=np.zeros(blocks * BLOCK_TOKENS, np.uint32),
        checks=np.zeros((representation.layers, pieces, 16), np.uint8),
        retention=_CLASS,
    )
    model = bytearray(encode_header(header, representation))
    struct.pack_into("<I", model, 12, header_bytes)  # longer where there are extras, which move what follows
    struct.pack_into("<Q", model, 40, layout.extent_bytes)
    struct.pack_into("<Q", model, 64, layout.state_offset)
    struct.pack_into(f"<{representation.layers}Q", model, sections.layer_table, *layout.layer_offsets)
    return Model(np.frombuffer(bytes(model), np.uint8), sections)


@dataclass(frozen=True, slots=True, eq=False)
class Alike:
    """Extents that are read in the same way, `wanted` pieces from `first` on of each: they differ only in where they start, in
    their file and in what is loaded."""

    plan: Plan
    first: int
    wanted: int
    numbers: npt.NDArray[np.int64]  # in the order of the prompt
    starts: npt.NDArray[np.int64]


def alike(representation: Representation, raw: RawExtents, spans: Sequence[Span]) -> list[Alike]:
    """Return the extents of a batch, those together that are read in the same way."""
    groups: dict[tuple[int, int, int, int], list[int]] = {}
    _, _, _, firsts, counts, begins = zip(*spans, strict=True)
    for number, key in enumerate(zip(raw.blocks.tolist(), raw.header_bytes.tolist(), firsts, counts, strict=True)):
        groups.setdefault(key, []).append(number)
    starts = np.array(begins, np.int64)
    found = []
    for (blocks, header_bytes, first, wanted), members in groups.items():
        numbers = np.array(members, np.int64)
        plan = plan_of(representation, blocks, header_bytes, first, wanted)
        found.append(Alike(plan, first, wanted, numbers, starts[numbers]))
    return found


def expected(groups: Sequence[Alike]) -> Table:
    """Return what each extent's header must say. The models that it points to live as long as the plans."""
    table = np.zeros(sum(len(group.numbers) for group in groups), native.EXTENT)
    for group in groups:
        plan, at = group.plan, group.plan.model.sections
        rows = np.zeros(len(group.numbers), native.EXTENT)
        rows["model"] = 0 if plan.model.header is None else _address(plan.model.header)
        rows["layer_table"], rows["keys"], rows["tokens"], rows["checks"] = at.layer_table, at.keys, at.tokens, at.checks
        rows["pieces"], rows["first"], rows["wanted"] = plan.layout.pieces, group.first, group.wanted
        rows["start"] = group.starts
        table[group.numbers] = rows
    return table


def _address(array: npt.NDArray[np.generic]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def destination_of(into: KVView, load: Load, asked: range) -> tuple[Table, list[object]] | None:
    """Return where the pieces of each of `asked` layers go, and the memory itself. None where that is not one buffer or one
    array of rows."""
    layers = []
    memory: list[object] = []
    sizes = {nbytes: [nbytes] * load.pieces for nbytes in {*load.representation.layer_bytes} if nbytes is not None}
    for layer in asked:
        nbytes = load.representation.layer_bytes[layer]
        assert nbytes is not None
        found = flat(into.buffers(layer, load.first_piece, sizes[nbytes]))
        if isinstance(found, np.ndarray):
            if found.nbytes != load.pieces * nbytes or found.dtype != np.uint8 or not found.flags.writeable:
                return None
            rows = _rows_of(found, load.pieces, nbytes)
            if rows is None:
                return None
            address = _address(found)
        elif len(found) == 1 and found[0].nbytes == load.pieces * nbytes and not found[0].readonly:
            address, rows = native.address_of(found[0]), (nbytes, 1, nbytes, nbytes)
        else:
            return None
        stride, count, row_bytes, row_stride = rows
        direct = not (address | stride | row_stride | row_bytes) % ALIGNMENT
        layers.append((address, nbytes, stride, count, row_bytes, row_stride, direct))
        memory.append(found)
    return np.array(layers, native.LAYER), memory


def _rows_of(array: npt.NDArray[np.uint8], pieces: int, nbytes: int) -> tuple[int, int, int, int] | None:
    """Return from where to where it is to the next piece, how many rows a piece has, how long they are, and from where to where
    it is to the next one; None where the array cannot be seen like that."""
    if array.ndim == 1 and array.strides[0] == 1:
        return nbytes, 1, nbytes, nbytes
    if array.ndim == 1:
        array = array.reshape(pieces, nbytes)
    if array.ndim == 2:
        array = array[:, np.newaxis]
    if array.ndim != 3 or array.shape[0] != pieces or (array.strides[2] != 1 and array.shape[2] > 1):
        return None
    _, rows, row_bytes = array.shape
    return array.strides[0], rows, row_bytes, array.strides[1] if rows > 1 else row_bytes


def lay_out(groups: Sequence[Alike], raw: RawExtents, *, rest: bool, first_part: int) -> tuple[Table, Table, list[int]]:
    """Return the requests for the heads, or with `rest` all others: layer after layer, each from the head of the prompt on;
    their parts, which are numbered from `first_part` on; and which of its extent's requests each of them is, -1 for a head.

    Each plan's rows are there already, and are moved."""
    all_parts, all_requests, turns, which = [], [], [], []
    for group in groups:
        plan, numbers, starts = group.plan, group.numbers, group.starts[:, None]
        of_head = int(plan.asked["parts"][0])
        rows, parts = (plan.asked[1:], plan.parts[of_head:]) if rest else (plan.asked[:1], plan.parts[:of_head])
        moved, moved_parts = np.tile(rows, (len(numbers), 1)), np.tile(parts, (len(numbers), 1))
        offsets = raw.offsets[numbers][:, None]
        moved_parts["offset"] += offsets
        moved_parts["start"] += starts
        moved["descriptor"] = raw.descriptors[numbers][:, None]
        moved["extent"] = numbers[:, None]
        moved["start"] += starts
        moved["first_part"] += first_part - of_head * rest + len(parts) * np.arange(len(numbers))[:, None]
        moved["offset"] += offsets
        first_part += moved_parts.size
        all_parts.append(moved_parts.ravel())
        all_requests.append(moved.ravel())
        turns.append(np.tile([request.layers.start for request in plan.requests] if rest else [0], len(numbers)))
        which.append(np.tile(np.arange(len(rows)) if rest else [-1], len(numbers)))
    table = np.concatenate(all_requests)
    order = np.lexsort((table["start"], np.concatenate(turns)))
    return table[order], np.concatenate(all_parts), np.concatenate(which)[order].tolist()
