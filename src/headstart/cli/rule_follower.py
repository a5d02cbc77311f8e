"""The rules of tiers of a server that runs: read again when its configuration file changes, or on SIGHUP.

Only `cache.tiering` is followed; all else waits for a restart. A file that is wrong, in whatever place, changes nothing: the
rules that held before go on to hold, and the log, /health and the metrics say so.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread

from headstart.cache.prefix_cache import PrefixCache
from headstart.config import Config
from headstart.errors import ConfigError
from headstart.policy.rule_text import parse_rules

LOOK_S = 1.0
_ENDS_S = 5.0  # a file on a mount that hangs keeps no server from ending
log = logging.getLogger("headstart")


class RuleFollower:
    """`load` reads the configuration anew, flags and environment on top, and raises ConfigError."""

    def __init__(self, file: Path, load: Callable[[], Config]) -> None:
        self._file = file.expanduser()
        self._load = load
        self._seen = _state_of(self._file)
        self._look = Event()
        self._asked = False
        self._ended = False
        self._rules = load().cache.tiering.rules
        self._thread: Thread | None = None

    def start(self, cache: PrefixCache) -> None:
        """Follow for a cache that was opened with the rules of the beginning."""
        self._thread = Thread(target=self._run, args=(cache,), name="tiering-rules", daemon=True)
        self._thread.start()

    def look_now(self, *_: object) -> None:
        """Read the file anew, changed or not; for a signal."""
        self._asked = True
        self._look.set()

    def close(self) -> None:
        self._ended = True
        self._look.set()
        if self._thread is not None:
            self._thread.join(_ENDS_S)

    def _run(self, cache: PrefixCache) -> None:
        while True:
            self._look.wait(LOOK_S)
            self._look.clear()
            if self._ended:
                return
            state = _state_of(self._file)
            if state != self._seen or self._asked:
                self._asked = False
                self._seen = state
                try:
                    self._read(cache)
                except Exception as error:  # the thread's outer edge: the next file may be right again
                    log.exception("the rules of cache.tiering could not be read again")
                    cache.refuse_rules(f"{type(error).__name__}: {error}")

    def _read(self, cache: PrefixCache) -> None:
        try:
            rules = self._load().cache.tiering.rules
            policy = parse_rules(rules)
        except ConfigError as error:
            log.error("%s; until then the rules of cache.tiering hold that were read before", error.message)
            cache.refuse_rules(error.message)
            return
        if rules != self._rules or cache.tiering.refused:
            self._rules = rules
            cache.apply_rules(policy)
            log.info("the rules of cache.tiering were read again: %d", len(rules))


def _state_of(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file does."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
