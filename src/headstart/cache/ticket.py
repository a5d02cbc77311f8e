"""What became of a save, told to whoever asked for it once its source is free."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from threading import Condition

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SaveResult:
    """Tokens of the prompt that are in the slowest tier that it goes to and that takes writes now (`stored_tokens`), new bytes
    written, and, when something was not kept, why: "queue-full", "full", "error", "closed", "forked" …"""

    stored_tokens: int
    written_bytes: int
    reason: str | None


class Ticket:
    """What became of a save. `wait(timeout_s) -> SaveResult`; `done`; never raises for a medium that failed."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._condition = Condition()
        self._result: SaveResult | None = None
        self._callbacks: list[Callable[[Ticket], None]] = []

    @property
    def done(self) -> bool:
        """True once nothing is read from the source any more."""
        return self._result is not None

    @property
    def refused(self) -> bool:
        """Whether it is known that nothing comes of it."""
        return self._result is not None and self._result.reason is not None and not self._result.stored_tokens

    def wait(self, timeout_s: float = 30.0) -> SaveResult:
        """Return what became of the save; with reason "timeout" while it is still under way after `timeout_s`."""
        if os.getpid() != self._pid:  # whoever saves is in the parent, and may have held the lock when it forked
            return self._result or SaveResult(stored_tokens=0, written_bytes=0, reason="forked")
        with self._condition:
            self._condition.wait_for(lambda: self._result is not None, timeout_s)
            return self._result or SaveResult(stored_tokens=0, written_bytes=0, reason="timeout")

    def add_done_callback(self, callback: Callable[[Ticket], None]) -> None:
        """Call back once the source may go (at once if that is so already)."""
        with self._condition:
            if self._result is None:
                self._callbacks.append(callback)
                return
        self._call(callback)

    def finish(self, result: SaveResult) -> None:
        """Settle the ticket. The first result counts."""
        with self._condition:
            if self._result is not None:
                return
            self._result = result
            callbacks, self._callbacks = self._callbacks, []
            self._condition.notify_all()
        for callback in callbacks:
            self._call(callback)

    def __repr__(self) -> str:
        return f"<Ticket {self._result or 'of a save under way'}>"

    def _call(self, callback: Callable[[Ticket], None]) -> None:
        try:
            callback(self)
        except BaseException:  # noqa: BLE001 - an engine's mistake must not end the saver's thread
            _log.exception("a callback of a ticket failed")
