"""Memory that two processes of one machine share, through which pieces go: one copies in, the other out, and nothing is sent.

Whoever receives makes it and seals its size, so that neither side can take it away under the other, and checks what it has
copied out, not what lies here, which the other side could still change.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from headstart.errors import WireError

if hasattr(os, "memfd_create"):
    import fcntl

    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Window:
    """`view`: the bytes. Close it when nobody copies any more."""

    def __init__(self, mapping: mmap.mmap) -> None:
        self._mapping = mapping
        self.view = memoryview(mapping)

    @staticmethod
    def make(nbytes: int) -> tuple[Window, int] | None:
        """Return a new window and its descriptor, which the caller closes; None where this system has no such thing."""
        if not hasattr(os, "memfd_create"):
            return None
        try:
            descriptor = os.memfd_create("headstart-handoff", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:
            return None
        try:
            os.ftruncate(descriptor, nbytes)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return Window(mmap.mmap(descriptor, nbytes)), descriptor
        except OSError:
            os.close(descriptor)
            return None

    @staticmethod
    def of(descriptor: int, nbytes: int) -> Window:
        """Return the window that the other side made. Raises WireError for one that could be taken away."""
        try:
            sealed = hasattr(os, "memfd_create") and fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not sealed or os.fstat(descriptor).st_size != nbytes:
                raise WireError("the shared memory is not sealed, or not as large as was said", reason="garbage")
            return Window(mmap.mmap(descriptor, nbytes))
        except OSError as error:
            raise WireError(f"the shared memory cannot be used: {error.strerror}", reason="garbage") from error

    @property
    def nbytes(self) -> int:
        return self.view.nbytes

    def put(self, data: Any, at: int, *, timeout_s: float, waiting: Callable[[], None]) -> bool:
        """Copy an array of uint8 to byte `at`. Always true: see `remote.Reached`."""
        np.copyto(np.frombuffer(self.view, np.uint8, data.nbytes, at), data)
        return True

    def close(self) -> None:
        self.view.release()
        self._mapping.close()


class Places:
    """Which parts of a window are free: taken in turn, and given back in the same order.

    >>> places = Places(100)
    >>> places.take(60), places.take(60)
    (0, None)
    >>> places.free(1)
    >>> places.take(60)
    0
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._taken: deque[tuple[int, int]] = deque()  # (start, end), oldest first

    def take(self, nbytes: int) -> int | None:
        """Return where `nbytes` bytes are free now, or None."""
        if not self._taken:
            start = 0
        else:
            oldest, latest = self._taken[0][0], self._taken[-1]
            start = latest[1]
            if latest[0] < oldest:  # they go around the end
                if start + nbytes > oldest:
                    return None
            elif start + nbytes > self._nbytes:
                if nbytes > oldest:
                    return None
                start = 0
        if start + nbytes > self._nbytes:
            return None
        self._taken.append((start, start + nbytes))
        return start

    def free(self, count: int) -> None:
        """The oldest `count` are free again. Raises WireError where there are fewer, and for none."""
        if not 0 < count <= len(self._taken):
            raise WireError("more shared memory was given back than was taken, or none", reason="garbage")
        for _ in range(count):
            self._taken.popleft()
