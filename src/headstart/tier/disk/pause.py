"""When nothing is stored: why, until when it is tried again, and what is said about it. No I/O."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path

from headstart.errors import StoreError

STOPPED_S = 30.0  # how long nothing is stored after the medium refused
BUSY_S = 2.0  # and how long after another process was too long about it: a slow disk stores less, and goes on
FULL = {errno.ENOSPC, errno.EDQUOT}
SHORT = {errno.EMFILE, errno.ENFILE}  # of open files
GONE = {errno.EIO, errno.ENODEV, errno.ENXIO, errno.ESTALE, errno.EROFS}
ONLY_READABLE = {errno.EROFS, errno.EACCES, errno.EPERM}
LOST = {errno.ENOENT, errno.ESTALE, errno.ENOTDIR, errno.ELOOP}  # the last: something else stands in its place


# What a start meets that may be over a while later, without anybody naming another directory or moving a file.
PASSING = FULL | SHORT | GONE | ONLY_READABLE
_PASSING_REASONS = {"busy", "full"}  # not "hangs": each try would leave a thread behind


def may_pass(error: StoreError | OSError) -> bool:
    """Whether a directory that could not be opened is worth another try."""
    if isinstance(error, OSError):
        return error.errno in PASSING
    return error.facts.get("errno") in PASSING or error.facts.get("reason") in _PASSING_REASONS


def why(error: StoreError | OSError | ValueError) -> str:
    """Return in a few words, without a path, why a directory could not be opened: as `told`."""
    code = error.errno if isinstance(error, OSError) else getattr(error, "facts", {}).get("errno")
    if code:
        return os.strerror(code)
    return str(getattr(error, "facts", {}).get("why") or "the log says why")


def told(error: OSError) -> str:
    """Return what the medium said, without a path: whoever asks for the server's health reads it."""
    return os.strerror(error.errno) if error.errno else "an error without a number"


log = logging.getLogger(__name__)


class Pause:
    """Whether a directory takes anything now. Said once, until something was stored again."""

    def __init__(self, root: Path, clock: Callable[[], float]) -> None:
        self.why = ""
        self._root = root
        self._clock = clock
        self._until = 0.0

    @property
    def holds(self) -> bool:
        """Whether it is too early to try again."""
        return bool(self.why) and self._clock() < self._until

    def begin(self, why: str, *, for_s: float = STOPPED_S) -> None:
        """Store nothing for a while."""
        if not self.why:
            log.warning(
                "disk tier %s: nothing is stored for now (%s); reading goes on, and it is tried again every %d s",
                self._root,
                why,
                for_s,
            )
        self.why = why
        self._until = self._clock() + for_s

    def begin_for_good(self, why: str) -> None:
        """Store nothing as long as the directory is open."""
        log.warning("disk tier %s: nothing is stored (%s); what is there is read", self._root, why)
        self.why, self._until = why, math.inf

    def end(self) -> None:
        if self.why:
            self.why = ""
            log.warning("disk tier %s: storing again", self._root)
