"""The optional C reader, found and tried out: requests are read and verified without the interpreter's lock.

It was compiled when headstart was installed, if there was a compiler then; nothing is compiled or downloaded later. Its hash is
the one inside the `xxhash` package, called by address, so that both readers verify with the same code. `reader()` is None where
a part is missing or the two do not agree; then Python reads, with the same outcome and at a little less than the same rate.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import logging
import sys
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np
import xxhash

# The structs of _reader.c.
LAYER = np.dtype([(n, "<i8") for n in ("address", "piece_bytes", "piece_stride", "rows", "row_bytes", "row_stride", "direct")])
PART = np.dtype([("offset", "<i8"), ("layer", "<i4"), ("start", "<i4"), ("pieces", "<i4"), ("unused", "<i4")])
_REQUEST = ("descriptor", "head_bytes", "first_part", "parts", "start", "pieces", "extent", "unused")
REQUEST = np.dtype([("offset", "<i8"), *((n, "<i4") for n in _REQUEST)])
_EXTENT = ("layer_table", "keys", "tokens", "checks", "pieces", "first", "wanted", "start")
EXTENT = np.dtype([("model", "<i8"), *((n, "<i4") for n in _EXTENT)])


class Outcome(IntEnum):
    """Why `work` came back."""

    NONE_LEFT = 0
    LAYER_ENDED = 1
    HANDED_BACK = 2  # a request has to be read otherwise
    TIME_IS_UP = 3
    HEAD_READ = 4  # a head that is not exactly as expected is in staging: say what it is, with `settle`
    HEAD_WRONG = 5  # a head is right, but not the pieces that were read with it
    NOT_YET = 6  # the head of a request's extent is not settled yet


class HeaderIs(IntEnum):
    UNKNOWN = 0
    KNOWN = 1
    PORTABLE = 2  # none of the C reader's business: nothing of the extent is read or counted by it


_log = logging.getLogger(__name__)
_HASH = ("XXH3_createState", "XXH3_freeState", "XXH3_128bits_reset", "XXH3_128bits_update", "XXH3_128bits_digest")
_PREFIX_BYTES = 68
_MEANING = 4  # raised together with the first number of `headstart_layout`
_NEVER_NS = 2**63 - 1
_NO_MEMORY = 7
_NO_MEMORY_SAID = "the C reader has no memory for the state of a check"


class Batch(ctypes.Structure):
    """`Batch` of _reader.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "parts", "extents", "requests")),
        *((name, ctypes.c_int64) for name in ("request_count", "piece_count", "layer_count", "blocks_per_piece")),
        ("states", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("digest", "keys", "tokens", "checks")),
        *(
            (name, ctypes.c_void_p)
            for name in ("left", "pieces_ended", "bytes_read", "limit", "cancelled", "closing", "waiting")
        ),
        ("until_ns", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("laid_out", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("create", "release", "reset", "update", "digest_of")),
    )


class Coming(ctypes.Structure):
    """`Coming` of _reader.c."""

    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("right", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("at", "part", "filled")),
    )


@dataclass(frozen=True, slots=True)
class Reader:
    """The compiled functions, and the addresses of the hash's."""

    library: ctypes.CDLL
    hashing: tuple[int, ...]

    def batch(self) -> Batch:
        return Batch(
            until_ns=_NEVER_NS, **dict(zip(("create", "release", "reset", "update", "digest_of"), self.hashing, strict=True))
        )

    def work(
        self, batch: Batch, staging: int, staging_bytes: int, budget_ns: int, alone_ns: int, first: int
    ) -> tuple[Outcome, int]:
        """Read requests of the batch in their order, `first` before them (-1: none), until one of the outcomes; return it, and
        the number of the request that it is about. Time is up after `alone_ns`, or `budget_ns` where jobs wait for the thread.
        Holds no lock; several threads work on one batch."""
        number = ctypes.c_int64(first)
        outcome = self.library.headstart_work(
            ctypes.byref(batch), staging, staging_bytes, budget_ns, alone_ns, ctypes.byref(number)
        )
        if outcome == _NO_MEMORY:
            raise MemoryError(_NO_MEMORY_SAID)
        return Outcome(outcome), number.value

    def go_on(self, batch: Batch) -> None:
        """Say that all requests are laid out; until then `work` takes those before `laid_out`."""
        self.library.headstart_go_on(ctypes.byref(batch))

    def settle(self, batch: Batch, number: int, staging: int, header: HeaderIs) -> tuple[bool, bool]:
        """Say what a head's header is, its checks being in the table. Returns whether the pieces that were read with it are
        right, and whether layer 0 has ended by it."""
        found: int = self.library.headstart_settle(ctypes.byref(batch), number, staging, header)
        return bool(found & 1), bool(found & 2)

    def take(self, batch: Batch, coming: Coming, chunk: memoryview) -> int:
        """Put a chunk where it belongs and check what is whole by it; return how many parts are there by now. Holds no lock."""
        data = np.frombuffer(chunk, np.uint8)
        found: int = self.library.headstart_take(
            ctypes.byref(batch), ctypes.byref(coming), data.__array_interface__["data"][0], data.nbytes
        )
        if found < 0:
            raise MemoryError(_NO_MEMORY_SAID)
        return found


def address_of(memory: memoryview) -> int:
    """Return where writable bytes begin, of which there is at least one. NumPy takes twenty times as long to say it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


@cache
def reader() -> Reader | None:
    """Return the C reader, or None where headstart was installed without it or it does not work here."""
    spec = importlib.util.find_spec("headstart.transfer._reader")
    if spec is None or spec.origin is None or sys.byteorder != "little" or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        hashes = ctypes.CDLL(importlib.import_module("xxhash._xxhash").__file__)
        address, number = ctypes.c_void_p, ctypes.c_int64
        library.headstart_work.argtypes = [address, address, number, number, number, address]
        library.headstart_go_on.argtypes = [address]
        library.headstart_take.argtypes = [address, address, address, number]
        library.headstart_take.restype = number
        library.headstart_settle.argtypes = [address, number, address, ctypes.c_int]
        found = Reader(library, tuple(_address(hashes, name) for name in _HASH))
        if not _is_ours(library):
            _log.warning(
                "Python reads instead of the C reader, which is another headstart's; install headstart anew to build it"
            )
            return None
        agrees = all(found.hashing) and _agrees(found)
    except (OSError, AttributeError) as error:  # no such file, no such function
        _log.info("Python reads instead of the C reader: %s", error)
        return None
    if not agrees:
        _log.warning("Python reads instead of the C reader, whose checks are not those of this xxhash %s", xxhash.VERSION)
    return found if agrees else None


def _is_ours(library: ctypes.CDLL) -> bool:
    """Whether the library was compiled from the source beside this file: an update of an editable install compiles nothing."""
    sizes = [LAYER.itemsize, PART.itemsize, REQUEST.itemsize, EXTENT.itemsize, ctypes.sizeof(Batch)]
    want = [_MEANING, *sizes, Batch.next.offset, ctypes.sizeof(Coming)]
    try:
        return list((ctypes.c_int64 * len(want)).in_dll(library, "headstart_layout")) == want
    except ValueError:  # it is from before there was such a thing
        return False


def _address(hashes: ctypes.CDLL, name: str) -> int:
    """Return where a function of the hash is, the one that suits this processor where there is a choice."""
    function = getattr(hashes, f"{name}_dispatch", None) or getattr(hashes, name)
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _agrees(found: Reader) -> bool:
    """Compare with Python's checks, over lengths on both sides of every change of method inside the hash."""
    data = bytes(range(251)) * 20
    out = ctypes.create_string_buffer(16)
    for nbytes in (0, 1, 172, 173, 188, 189, 956, 957, 5000):
        prefix = bytes(range(nbytes % 7, nbytes % 7 + _PREFIX_BYTES))
        found.library.headstart_check(ctypes.byref(found.batch()), prefix, data, ctypes.c_int64(nbytes), ctypes.byref(out))
        if out.raw != xxhash.xxh3_128_digest(prefix + data[:nbytes]):
            return False
    return True
