"""Arrays that grow without being copied: while one that a lookup needs is copied, the lookup waits.

They lie in anonymous memory maps. A longer map is the same pages under another address (mremap), and what is new costs
nothing until it is touched. Where that cannot be had, or somebody still looks at the old array, it is copied after all.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


class Maps:
    """The memory of the arrays that one object has as attributes."""

    def __init__(self) -> None:
        self._maps: dict[str, mmap.mmap] = {}

    def resize(self, owner: object, names: Sequence[str], rows: int) -> None:
        """Make the arrays that `owner` has under `names` so long, at least one row; what is new is zero. One stays longer where
        there is no memory to copy it. Raises MemoryError, and then some may be longer than others."""
        for name in names:
            self._resize(owner, name, rows)

    def _resize(self, owner: object, name: str, rows: int) -> None:
        old: npt.NDArray[np.generic] = getattr(owner, name)
        if rows == len(old):
            return
        dtype, others = old.dtype, old.shape[1:]
        nbytes = max(1, rows) * int(np.prod(others, dtype=np.int64)) * dtype.itemsize
        memory = self._maps.get(name)
        if memory is not None:
            old[rows : rows + mmap.PAGESIZE] = np.zeros((), dtype)  # else the rest of a page would come back one day
            del old
            setattr(owner, name, None)  # the last reference to the old array: a map that is looked at cannot be resized
            with suppress(BufferError, OSError, SystemError, ValueError):  # then it is copied
                memory.resize(nbytes)
            old = _view(memory, dtype, others)
            setattr(owner, name, old)
            if len(old) == rows:
                return
        try:
            memory = mmap.mmap(-1, nbytes, **_PRIVATE)
        except OSError as error:
            if rows < len(old):
                old[rows:] = np.zeros((), dtype)
                return
            raise MemoryError(f"no memory for {nbytes} bytes of {name}") from error
        new = _view(memory, dtype, others)
        new[: min(rows, len(old))] = old[:rows]
        self._maps[name] = memory
        setattr(owner, name, new)


def _view(memory: mmap.mmap, dtype: np.dtype[np.generic], others: tuple[int, ...]) -> npt.NDArray[np.generic]:
    return np.frombuffer(memory, dtype, len(memory) // dtype.itemsize).reshape(-1, *others)
