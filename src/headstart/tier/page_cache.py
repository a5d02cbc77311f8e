"""What of a file the operating system's page cache holds, and how to empty it: for measurements that claim a cold start.

Linux only; elsewhere `resident_bytes` returns None and `drop` does nothing, and whoever measures must say "not checked".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Iterable
from pathlib import Path


def drop(paths: Iterable[Path]) -> None:
    """Write back and drop the cached pages of each file. Clean pages only can be dropped, hence the fsync."""
    if sys.platform != "linux":
        return
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_bytes(paths: Iterable[Path]) -> int | None:
    """Return how many bytes of the files are in the page cache, or None where that cannot be asked."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    total = 0
    for path in paths:
        size = path.stat().st_size
        if size == 0:
            continue
        # A private writable mapping only so that ctypes may take its address; nothing is ever written or touched.
        access = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        with path.open("rb") as file, mmap.mmap(file.fileno(), size, **access) as view:
            pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            vector = (ctypes.c_ubyte * pages)()
            anchor = ctypes.c_char.from_buffer(view)
            try:
                if libc.mincore(ctypes.addressof(anchor), size, vector) != 0:
                    return None
            finally:
                del anchor
            total += sum(page & 1 for page in vector) * mmap.PAGESIZE
    return total
