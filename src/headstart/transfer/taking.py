"""Taking what comes from a far tier without the interpreter: chunks are copied to where pieces go, and the pieces checked.

The tables of a load are made once, when the first of its requests wants them. Where there is no C reader, or a destination or
a check does not suit it, `span.py` does the same, at some 30 µs for each piece.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import lru_cache
from threading import Lock

import numpy as np
import numpy.typing as npt

from headstart.block.checks import XXH3
from headstart.block.extent import ExtentHeader, ExtentLayout
from headstart.transfer import native
from headstart.transfer.buffers import Coming
from headstart.transfer.load import KVView, Load
from headstart.transfer.plan import Prompt, Request, Span
from headstart.transfer.tables import Table, destination_of

_log = logging.getLogger(__name__)


class Taking:
    """What the far requests of one load have in common. Safe from many threads."""

    def __init__(self, load: Load, prompt: Prompt, into: KVView) -> None:
        self._load = load
        self._prompt = prompt
        self._into = into
        self._lock = Lock()
        self._asked = False
        self._destination: tuple[Table, list[object]] | None = None
        self._keys = self._digest = np.zeros(0, np.uint8)

    def suits(self, header: ExtentHeader) -> bool:
        """Whether `take` can take pieces of this extent."""
        if native.reader() is None or header.algorithm is not XXH3 or self._prompt.representation.varies:
            return False
        with self._lock:
            if not self._asked:
                self._asked = True
                self._lay_out()
        return self._destination is not None

    def take(
        self, coming: Coming, header: ExtentHeader, layout: ExtentLayout, span: Span, request: Request
    ) -> Iterator[tuple[range, npt.NDArray[np.int32]]]:
        """Bring what a request asks for of a span, from the stream of its extent. Yields the layers that are there since the
        last time, and how many pieces of each are right, from the first one on. Raises what the stream raises."""
        reader = native.reader()
        assert reader is not None
        assert self._destination is not None
        table = _parts(layout, span.first, request).copy()
        table["start"] += span.start
        right = np.zeros(len(table), np.int32)
        checks = np.ascontiguousarray(header.checks)
        batch = reader.batch()
        batch.layers, batch.keys, batch.digest = (
            array.ctypes.data for array in (self._destination[0], self._keys, self._digest)
        )
        # A piece's number in the load, and not in the extent, finds its check.
        batch.checks = checks.ctypes.data + (span.first - span.start) * checks.shape[2]
        batch.piece_count, batch.blocks_per_piece = checks.shape[1], self._prompt.representation.blocks_per_piece
        state = native.Coming(parts=table.ctypes.data, count=len(table), right=right.ctypes.data, at=coming.at)
        there = 0
        while there < len(table):
            chunk = coming.chunk()
            done = reader.take(batch, state, chunk)
            coming.take(chunk.nbytes)
            if done > there:
                yield request.layers[there:done], right[there:done]
                there = done
        coming.end()

    def _lay_out(self) -> None:
        prompt, blocks = self._prompt, self._load.pieces * self._prompt.representation.blocks_per_piece
        try:
            self._destination = destination_of(self._into, self._load, range(self._prompt.representation.layers))
        except Exception:  # noqa: BLE001 - an engine's view may raise anything: the portable way meets it again, and tells
            _log.debug("a load is taken the portable way", exc_info=True)
        self._keys = np.frombuffer(b"".join(prompt.keys[:blocks]), np.uint8)
        self._digest = np.frombuffer(prompt.digest, np.uint8)


@lru_cache(maxsize=256)
def _parts(layout: ExtentLayout, first: int, request: Request) -> Table:
    """Return what is asked for of a span that begins with the extent's piece `first`, as if the load began with it too."""
    places = ((layout.piece_range(layer, first + request.first, request.count)[0], layer) for layer in request.layers)
    return np.array([(offset, layer, request.first, request.count, 0) for offset, layer in places], native.PART)
