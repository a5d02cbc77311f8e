"""Who collects: the holder of the newest term. A term is a file that is created once, by one, and never used again.

    terms/<number, 8 hex digits>        {"writer": "<32 hex>"}; "" where the holder has gone and the next one may begin at once

A holder shows that it lives by what it says in its journal. Whoever has heard nothing of it for `term_s`, on its own clock,
creates the next number: the file system lets exactly one do that. A holder that stalled finds a newer term when it looks
again. Until then it can only do what it had begun: remove what is removed already, and write tombstones, which are final
whoever writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from headstart.errors import StoreError
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk

TERMS = "terms"
_NAME = re.compile(r"[0-9a-f]{8}")
_MAX_BYTES = 4096
_KEPT = 4  # terms before the newest: who is slow still finds that there is a newer one


@dataclass(frozen=True, slots=True)
class Term:
    number: int
    writer: bytes | None  # b"": nobody holds it; None: who does cannot be read, or not yet


class Election(Protocol):
    """Who collects. Everything raises OSError."""

    def prepare(self) -> None: ...

    def hold(self, writer: bytes) -> bool:
        """Whether `writer` is who collects now."""
        ...

    def resign(self, writer: bytes) -> None: ...


class Terms:
    """`silent_s(writer)`: for how long a writer has said nothing. Not safe from many threads. Everything raises OSError."""

    def __init__(
        self,
        disk: Disk,
        directory: Directory,
        *,
        silent_s: Callable[[bytes], float | None],
        term_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.newest: Term | None = None
        self._disk = disk
        self._folder = directory.root / TERMS
        self._silent_s = silent_s
        self._term_s = term_s
        self._clock = clock
        self._seen_at = 0.0  # when the newest term was first seen here

    def prepare(self) -> None:
        """Make the folder where it is not there."""
        self._disk.make_directory(self._folder)

    def hold(self, writer: bytes) -> bool:
        """Look who collects, and begin a term where nobody does any more; whether it is `writer`."""
        self._look()
        newest = self.newest
        if newest is None:
            return self._begin(0, writer)
        if newest.writer == writer:
            return True
        age_s = self._clock() - self._seen_at
        heard_s = self._silent_s(newest.writer) if newest.writer else None
        idle_s = age_s if heard_s is None else min(age_s, heard_s)
        if newest.writer == b"" or idle_s > self._term_s:
            return self._begin(newest.number + 1, writer)
        return False

    def resign(self, writer: bytes) -> None:
        """Leave the term to whoever comes next, if `writer` holds it."""
        self._look()
        if self.newest is not None and self.newest.writer == writer:
            self._begin(self.newest.number + 1, b"")

    def _look(self) -> None:
        names = [entry.name for entry in self._disk.entries(self._folder) if _NAME.fullmatch(entry.name)]
        if not names:
            self.newest = None
            return
        number = int(max(names), 16)
        if self.newest is None or self.newest.number != number:
            self._seen_at = self._clock()
            self.newest = Term(number, None)
        if self.newest.writer is None:
            self.newest = Term(number, self._read(number))

    def _begin(self, number: int, writer: bytes) -> bool:
        try:
            handle = self._disk.open(self._path(number), "create")
            try:
                self._disk.write(handle, json.dumps({"writer": writer.hex()}).encode(), 0)
                self._disk.sync(handle)
            finally:
                self._disk.close(handle)
        except FileExistsError:
            return False  # somebody else was first
        self._disk.sync_directory(self._folder)
        self.newest, self._seen_at = Term(number, writer), self._clock()
        for entry in self._disk.entries(self._folder):
            if _NAME.fullmatch(entry.name) and int(entry.name, 16) < number - _KEPT:
                with suppress(OSError):
                    self._disk.unlink(self._folder / entry.name)
        return bool(writer)

    def _read(self, number: int) -> bytes | None:
        """Return who holds a term; None where the file says nothing yet, or nothing that can be read."""
        try:
            handle = self._disk.open(self._path(number), "read")
        except FileNotFoundError:
            return None
        try:
            data = bytearray(min(self._disk.facts(handle).size, _MAX_BYTES))
            self._disk.read(handle, [memoryview(data)], 0)
            return bytes.fromhex(json.loads(data)["writer"])
        except (ValueError, KeyError, TypeError, StoreError, RecursionError):
            return None
        finally:
            self._disk.close(handle)

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08x}"
