"""The optional attention kernel in C, found and fed: float32 on the CPU, all requests of a layer in one call.

It was compiled when headstart was installed, if there was a compiler then; nothing is compiled or downloaded later. Without it,
or for what it does not serve, `attention.py` computes the same by torch's own operations. Its threads are those of the OpenMP
that torch has loaded: two pools would take each other's cores.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from headstart.engine.torch.attention import KV, Prefix, Segment

_log = logging.getLogger(__name__)

_MEANING = 1  # raised together with the first number of `headstart_attention_layout`
_STEP = 8  # widths are multiples of this
_ALIGNMENT = 64

# The structs of _attention.c.
_PART = np.dtype(
    [
        (name, "<i8")
        for name in (
            *("keys", "values", "key_head", "value_head", "count", "at", "first", "rows"),
            *("runs", "first_task", "first_partial"),
        )
    ]
)
_PLACE = np.dtype([("row", "<i4"), ("position", "<i4")])
_COVER = np.dtype([("row", "<i4"), ("part", "<i4", 2), ("place", "<i4", 2)])
_WRITE = np.dtype([(name, "<i8") for name in ("keys", "values", "key_head", "value_head", "start", "count")])


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("query_head", "query_row", "key_head", "key_row", "value_head", "value_row")),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("kv_heads", "group", "key_width", "value_width", "window")),
        *((name, ctypes.c_int64) for name in ("kept_key_row", "kept_value_row")),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ("parts", "places", "covers", "writes")),
        *((name, ctypes.c_int64) for name in ("part_count", "cover_count", "write_count")),
        *((name, ctypes.c_int64) for name in ("threads", "lanes", "tasks", "partials", "thread_numbers")),
        ("scratch", ctypes.c_void_p),
        ("parallel", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("next", "joined")),
    )


@dataclass(frozen=True, slots=True)
class Kernel:
    """The compiled functions, and OpenMP's `GOMP_parallel`. `lanes`: which of its codes is used, by rows of a vector."""

    library: ctypes.CDLL
    lanes: int
    parallel: int

    def serves(self, query: Tensor, key: Tensor, value: Tensor) -> bool:
        """Whether the numbers of these are what it computes with, and lie so that it can read them."""
        return (
            all(one.dtype == torch.float32 and one.device.type == "cpu" and one.stride(-1) == 1 for one in (query, key, value))
            and key.shape[-1] % _STEP == 0 == value.shape[-1] % _STEP
            and query.shape[1] % key.shape[1] == 0
            and (self.parallel != 0 or torch.get_num_threads() == 1)
        )


@cache
def kernel() -> Kernel | None:
    """Return the C kernel, or None where headstart was installed without it or this processor is too old for it."""
    spec = importlib.util.find_spec("headstart.engine.torch._attention")
    if spec is None or spec.origin is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        if not _is_ours(library):
            _log.warning(
                "torch attends instead of the C kernel, which is another headstart's; install headstart anew to build it"
            )
            return None
        library.headstart_attention_plan.restype = ctypes.c_int64
        lanes: int = library.headstart_attention_lanes()
    except (OSError, AttributeError) as error:  # no such file, no such function
        _log.info("torch attends instead of the C kernel: %s", error)
        return None
    return Kernel(library, lanes, _openmp()) if lanes else None


def _is_ours(library: ctypes.CDLL) -> bool:
    """Whether the library was compiled from the source beside this file: an update of an editable install compiles nothing."""
    want = [_MEANING, *(one.itemsize for one in (_PART, _PLACE, _COVER, _WRITE)), ctypes.sizeof(_Call)]
    try:
        return list((ctypes.c_int64 * len(want)).in_dll(library, "headstart_attention_layout")) == want
    except ValueError:  # it is from before there was such a thing
        return False


def _openmp() -> int:
    """Return where GOMP_parallel is in the OpenMP that torch uses (LLVM's has it, too), 0 if nowhere."""
    try:  # a library's handle also finds what is in the libraries that it needs
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):
        return 0


class Shape(NamedTuple):
    """What a plan depends on beside rows and keys. `group`: query heads for each KV head."""

    kv_heads: int
    group: int
    key_width: int
    value_width: int


class Plan:
    """Which rows of a batch see which keys, in tables: the same for all layers whose heads and widths are equal.

    `groups` are segments, or what is wanted of them, with the prefix that they share; of each of `writes` the new keys and
    values are kept. For one call at a time."""

    def __init__(
        self,
        kernel: Kernel,
        groups: Iterable[tuple[Prefix | None, Sequence[Segment]]],
        writes: Sequence[Segment],
        shape: Shape,
    ) -> None:
        self._kernel = kernel
        self._shape = shape
        self._sources: list[tuple[KV, int, int]] = []  # of each part, its first key there and how many it has
        self._kept = [(one.kv, one.first - _base(one), one.count) for one in writes]
        parts: list[tuple[int, ...]] = []
        places: list[npt.NDArray[np.void]] = []
        covers: list[npt.NDArray[np.void]] = []

        def add(kv: KV, base: int, at: int, end: int, rows: Sequence[Segment]) -> None:
            """Rows against the keys at positions at … end-1; `kv` begins with position `base`."""
            count = end - at
            if count < 1 or any(one.count < 1 for one in rows):
                raise ValueError("a part of a plan has at least a row and a key")  # the kernel divides by how many there are
            first = sum(map(len, places))
            places.extend(_rows(one) for one in rows)
            parts.append((0, 0, 0, 0, count, at, first, sum(one.count for one in rows), 0, 0, 0))
            self._sources.append((kv, at - base, count))

        for prefix, members in groups:
            shared, behind = -1 if prefix is None else len(parts) + len(members), 0
            for one in members:
                cover = np.empty(one.count, _COVER)
                cover["row"] = np.arange(one.start, one.start + one.count)
                cover["part"] = len(parts), shared
                cover["place"][:, 0] = np.arange(one.count)
                cover["place"][:, 1] = np.arange(behind, behind + one.count)
                covers.append(cover)
                add(one.kv, _base(one), max(_base(one), one.sees_from), one.first + one.count, [one])
                behind += one.count
            if prefix is not None:
                add(prefix.kv, 0, members[0].sees_from, prefix.tokens, members)
        self._parts = np.array(parts, _PART)
        self._places = np.concatenate([np.empty(0, _PLACE), *places])
        self._covers = np.concatenate([np.empty(0, _COVER), *covers])
        self._writes = np.zeros(len(writes), _WRITE)
        self._writes["start"] = [one.start for one in writes]
        self._writes["count"] = [one.count for one in writes]
        self._call = call = _Call(
            **shape._asdict(),
            parts=self._parts.ctypes.data,
            places=self._places.ctypes.data,
            covers=self._covers.ctypes.data,
            writes=self._writes.ctypes.data,
            part_count=len(self._parts),
            cover_count=len(self._covers),
            write_count=len(self._writes),
            threads=torch.get_num_threads(),
            lanes=kernel.lanes,
            parallel=kernel.parallel,
        )
        numbers = kernel.library.headstart_attention_plan(ctypes.byref(call), ctypes.c_void_p(call.parts))
        self._scratch = torch.empty(numbers + _ALIGNMENT // 4, dtype=torch.float32)
        call.scratch = -(-self._scratch.data_ptr() // _ALIGNMENT) * _ALIGNMENT

    def attend(
        self,
        layer: int,
        query: Tensor,  # [heads, rows, width]
        key: Tensor,  # [kv_heads, rows, width]
        value: Tensor,
        out: Tensor,  # [rows, heads, width of values]
        *,
        scale: float,
        window: int | None,
        sinks: Tensor | None,  # [heads]
    ) -> None:
        """Keep new keys and values, and fill the planned rows of `out`, others being left as they are."""
        call = self._call
        call.query, (call.query_head, call.query_row) = query.data_ptr(), query.stride()[:2]
        call.key, (call.key_head, call.key_row) = key.data_ptr(), key.stride()[:2]
        call.value, (call.value_head, call.value_row) = value.data_ptr(), value.stride()[:2]
        call.out = out.data_ptr()
        scores = None if sinks is None else sinks.detach().float().contiguous()
        call.sinks = None if scores is None else scores.data_ptr()
        call.scale = scale
        call.window = window or 0
        self._point(self._parts, self._sources, layer)
        self._point(self._writes, self._kept, layer)
        self._kernel.library.headstart_attend(ctypes.byref(call))

    def _point(self, table: npt.NDArray[np.void], places: Sequence[tuple[KV, int, int]], layer: int) -> None:
        """Fill in where the layer's keys and values lie, from a first one on. Raises ValueError for what is not there."""
        columns: list[tuple[int, int, int, int]] = []
        for kv, first, count in places:
            keys, values = kv.keys(layer), kv.values(layer)
            self._check(keys, first + count, self._shape.key_width)
            self._check(values, first + count, self._shape.value_width)
            strides = (keys.stride(1), values.stride(1))
            if columns and strides != (self._call.kept_key_row, self._call.kept_value_row):
                raise ValueError("the KV of a batch must lie alike")
            self._call.kept_key_row, self._call.kept_value_row = strides
            columns.append(
                (
                    keys.data_ptr() + 4 * first * strides[0],
                    values.data_ptr() + 4 * first * strides[1],
                    keys.stride(0),
                    values.stride(0),
                )
            )
        if columns:
            for name, column in zip(("keys", "values", "key_head", "value_head"), zip(*columns, strict=True), strict=True):
                table[name] = column

    def _check(self, kept: Tensor, tokens: int, width: int) -> None:
        heads, room, numbers = kept.shape
        if (
            (heads, numbers) != (self._shape.kv_heads, width)
            or room < tokens
            or kept.stride(2) != 1
            or kept.dtype != torch.float32
        ):
            raise ValueError(f"KV of {tuple(kept.shape)} {kept.dtype} does not hold {tokens} tokens of {self._shape}")


def _base(segment: Segment) -> int:
    """Return the position of the first key in the segment's own KV."""
    return segment.prefix.tokens if segment.prefix else 0


def _rows(segment: Segment) -> npt.NDArray[np.void]:
    places = np.empty(segment.count, _PLACE)
    places["row"] = np.arange(segment.start, segment.start + segment.count)
    places["position"] = np.arange(segment.first, segment.first + segment.count)
    return places
