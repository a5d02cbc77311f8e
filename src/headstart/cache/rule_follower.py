"""The rules of tiers of a process that runs: read again when its configuration file changes, or when it is asked to.

Only `cache.tiering` is followed; all else waits for a restart. A file that is wrong, in whatever place, changes nothing: the
rules that held before go on to hold, and the log, the metrics and a server's /health say so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event, Thread

from headstart.cache.prefix_cache import PrefixCache
from headstart.config import Config, config_file_of, state_of
from headstart.errors import ConfigError
from headstart.policy.rule_text import parse_rules

LOOK_S = 1.0
_ENDS_S = 5.0  # a file on a mount that hangs keeps no server from ending
log = logging.getLogger("headstart")


class RuleFollower:
    """`load` reads the configuration anew, what goes before the file on top, and raises ConfigError. `rules`: those of the
    beginning, with which the caches that are followed for were or will be opened."""

    def __init__(self, file: Path, load: Callable[[], Config], rules: Sequence[str]) -> None:
        self._file = file.expanduser()
        self._load = load
        self._rules = list(rules)
        self._seen: tuple[int, int, int] | None = None  # so the first look reads: the file may have changed since those rules
        self._look = Event()
        self._asked = False
        self._ended = False
        self._caches: Sequence[PrefixCache] = ()
        self._thread: Thread | None = None

    def start(self, *caches: PrefixCache) -> None:
        self._caches = caches
        self._thread = Thread(target=self._run, name="tiering-rules", daemon=True)
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

    def _run(self) -> None:
        while True:
            self._look.wait(LOOK_S)
            self._look.clear()
            if self._ended or all(cache.closed for cache in self._caches):
                return
            state = state_of(self._file)
            if state != self._seen or self._asked:
                self._asked = False
                self._seen = state
                try:
                    self._read()
                except Exception as error:  # the thread's outer edge: the next file may be right again
                    log.exception("the rules of cache.tiering could not be read again")
                    self._refuse(f"{type(error).__name__}: {error}")

    def _read(self) -> None:
        try:
            rules = self._load().cache.tiering.rules
            policy = parse_rules(rules)
        except ConfigError as error:
            log.error("%s; until then the rules of cache.tiering hold that were read before", error.message)
            self._refuse(error.message)
            return
        if list(rules) != self._rules or any(cache.tiering.refused for cache in self._caches):
            self._rules = list(rules)
            for cache in self._caches:
                cache.apply_rules(policy)
            log.info("the rules of cache.tiering were read again: %d", len(rules))

    def _refuse(self, why: str) -> None:
        for cache in self._caches:
            cache.refuse_rules(why)


def follow(load: Callable[[], Config], rules: Sequence[str], *caches: PrefixCache) -> None:
    """Follow $HEADSTART_CONFIG, if it is set, for caches that were opened with `rules`, until all of them are closed."""
    if (file := config_file_of(None)) is not None:
        RuleFollower(file, load, rules).start(*caches)
