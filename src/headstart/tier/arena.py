"""Page-aligned memory for I/O: one anonymous mapping backed by huge pages, carved into regions that are counted and reused.

Huge pages under the buffers double the read rate of a virtual disk, and memory that was never touched costs a fault a page
at the worst moment; so arenas are mapped once, touched if asked, and kept. Private and anonymous on purpose: a shared mapping
takes no huge pages.
"""

from __future__ import annotations

ALIGNMENT = 4096
HUGE_PAGE = 2 << 20


class Region:
    """Part of an arena: `view` is a writable memoryview, 4 KiB-aligned. Counted: `retain()` and `release()`; the bytes go
    back to the arena with the last release. Freed exactly once; releasing too often raises RuntimeError."""


class Arena:
    """`Arena(capacity_bytes, touch=False, name="…")`; `allocate(nbytes) -> Region | None` (None when it does not fit now;
    ValueError when it never can); `used_bytes`, `capacity_bytes`; `close()`."""
