"""Which extent a block is found in, where several may hold it. No I/O; whoever owns it holds the lock."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headstart.tier.disk.records import PREFIX_BYTES
from headstart.tier.index import BlockIndex


class Lookup:
    """Blocks of one representation → (row, position). Of several extents with a block the one that came first is found; the
    others are *hidden* for that block until it goes."""

    def __init__(self, prefixes: Sequence[bytes]) -> None:
        """`prefixes`: those of each row's blocks, joined; the owner keeps them while a row is in here."""
        self._prefixes = prefixes
        self._index = BlockIndex()
        self._hidden: dict[bytes, set[int]] = {}  # block → rows that have it and are not found for it

    def find(self, keys: Sequence[bytes]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
        """Return (rows, positions), -1 in both where a block is absent."""
        return self._index.lookup(keys)

    def add(self, row: int) -> None:
        keys = self._keys(row)
        new = self._index.insert(keys, row)
        self._hide(keys[~new], np.full(len(keys), row, np.int64)[~new])

    def add_all(self, rows: Sequence[int]) -> None:
        """As `add` for one row after the other, at once."""
        blocks = np.array([len(self._prefixes[row]) // PREFIX_BYTES for row in rows], np.int64)
        keys = _split(b"".join(self._prefixes[row] for row in rows))
        new = self._index.insert_extents(keys, np.array(rows, np.int64), blocks)
        self._hide(keys[~new], np.repeat(np.array(rows, np.int64), blocks)[~new])

    def remove(self, row: int) -> None:
        """Forget a row; a block that lies elsewhere as well is found there from now on."""
        keys = self._keys(row)
        gone = self._index.remove(keys, row)
        if not self._hidden:
            return
        self._unhide(keys, row)
        for other in {other for key in map(bytes, keys[gone]) for other in self._hidden.get(key, ())}:
            others = self._keys(other)
            self._unhide(others[self._index.insert(others, other)], other)

    def _hide(self, keys: npt.NDArray[np.uint8], rows: npt.NDArray[np.int64]) -> None:
        for key, row in zip(map(bytes, keys), rows.tolist(), strict=True):
            self._hidden.setdefault(key, set()).add(row)

    def _unhide(self, keys: npt.NDArray[np.uint8], row: int) -> None:
        for key in map(bytes, keys):
            rows = self._hidden.get(key)
            if rows is not None:
                rows.discard(row)
                if not rows:
                    del self._hidden[key]

    def _keys(self, row: int) -> npt.NDArray[np.uint8]:
        return _split(self._prefixes[row])


def _split(prefixes: bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(prefixes, np.uint8).reshape(-1, PREFIX_BYTES)
