"""Which blocks are worth a write, so that an SSD's writes stay within a budget a day. Pure but for what it remembers.

A fifth of the budget is there at once, the rest accrues over the day. While more than half of that fifth is left, a prompt is
written whole (up to half of what is left). As it runs short, the blocks that are least likely to be used again go first:

    seen before, in a prompt that was not kept         written while there is budget at all
    new, in a session that came back                   at most a quarter of what is left, from the first block on
    new                                                at most a 64th of what is left, from the first block on

On a trace of real conversations three quarters of all blocks are never used again, but nothing tells which: those that are used
again are mostly used again for the first time, so waiting for a second sight costs 42 % of the hits there. Prompts are alike at
their beginning, hence heads before tails; and a block without those before it is of no use, hence a run from the first one on.
Measured figures: `docs/benchmarks.md`, "A write budget".
"""

from __future__ import annotations

from collections.abc import Sequence

DAY_S = 86_400.0
BURST = 0.2  # of the budget may be spent at once, the rest accrues evenly: no 24 hours get more than one budget
_PLENTY_SHARE, _KNOWN_SESSION_SHARE, _NEW_SHARE = 1 / 2, 1 / 4, 1 / 64  # of what is left, to one prompt
_MARK_EVERY = 8  # blocks: keys are chained, so a prompt that was seen up to a block was seen up to all before it
_REMEMBERED = 1 << 16  # marks, and sessions, in each of two generations


class Admission:
    """Decides for one tier. Not safe from many threads.

    >>> admission = Admission(budget_bytes=1000, spent_bytes=920, now_s=0.0)
    >>> keys = [bytes([n]) * 16 for n in range(4)]
    >>> admission.admit(keys, present=0, block_bytes=1, session="", now_s=0.0)  # a 64th of the 80 that are left
    1
    >>> admission.admit(keys, present=0, block_bytes=1, session="", now_s=0.0)  # the second time
    4
    """

    def __init__(self, *, budget_bytes: int, spent_bytes: int, now_s: float) -> None:
        """`budget_bytes`: what may be written in 24 hours, of which `spent_bytes` were in the last."""
        if budget_bytes < 1:
            raise ValueError(f"a write budget of {budget_bytes} bytes a day admits nothing")
        self._budget_bytes = budget_bytes
        self._burst_bytes = BURST * budget_bytes
        self._level_bytes = min(self._burst_bytes, max(0.0, float(budget_bytes - spent_bytes)))
        self._updated_s = now_s
        self._marks = _Remembered()
        self._sessions = _Remembered()

    @property
    def level_bytes(self) -> float:
        """What may be written now."""
        return self._level_bytes

    def admit(self, keys: Sequence[bytes], *, present: int, block_bytes: int, session: str, now_s: float, own: int = 0) -> int:
        """Return how many of a prompt's blocks, from the first on, are to be in the tier when `present` of them are there
        already; at least `present`. `keys`: of all its blocks. `session`: "" where unknown. Takes what it admits off the
        budget; `refund` gives back what was not written after all. `own`: so many blocks the same request brought before, as
        long prompts are saved in several goes; that these were seen, and its session, counts for nothing."""
        self._accrue(now_s)
        wanted = len(keys)
        marked = self._seen(keys)
        seen = max(present, marked if marked > own else 0)
        known_session = bool(session) and self._came_back(session.encode("utf-8", "surrogatepass"), again=own > 0)
        self._remember(keys)
        if wanted <= present:
            return present
        seen_bytes = min((seen - present) * block_bytes, self._level_bytes)
        left = self._level_bytes - seen_bytes
        allowed = int(seen_bytes // block_bytes) if block_bytes else wanted
        if present + allowed >= seen:
            plenty = left >= self._burst_bytes / 2
            share = _PLENTY_SHARE if plenty else _KNOWN_SESSION_SHARE if known_session else _NEW_SHARE
            allowed += int(min(wanted - seen, left * share // block_bytes)) if block_bytes else wanted
        self._level_bytes -= allowed * block_bytes
        return min(wanted, present + allowed)

    def keeps_new(self, *, block_bytes: int, now_s: float) -> bool:
        """Return whether of a prompt that nobody has seen a block would be admitted now. Changes nothing."""
        level = min(self._burst_bytes, self._level_bytes + self._accrued(now_s))
        return _keeps_new(level, burst_bytes=self._burst_bytes, block_bytes=block_bytes)

    def refund(self, nbytes: int) -> None:
        """Give back what was admitted and not written."""
        self._level_bytes = min(self._burst_bytes, self._level_bytes + nbytes)

    def cap(self, spent_bytes: int) -> None:
        """Note what all processes together are known to have written in the last 24 hours."""
        self._level_bytes = min(self._level_bytes, max(0.0, float(self._budget_bytes - spent_bytes)))

    def _accrue(self, now_s: float) -> None:
        self._level_bytes = min(self._burst_bytes, self._level_bytes + self._accrued(now_s))
        self._updated_s = now_s

    def _accrued(self, now_s: float) -> float:
        return (1 - BURST) * self._budget_bytes * max(0.0, now_s - self._updated_s) / DAY_S

    def _came_back(self, session: bytes, *, again: bool) -> bool:
        """Return whether a session had an earlier request. `again`: this is a request's second save, or a later one."""
        came_back = session + b"\0"
        if not again and self._sessions.remember(session):
            self._sessions.remember(came_back)
        return came_back in self._sessions

    def _seen(self, keys: Sequence[bytes]) -> int:
        """Return how many blocks from the first on were in an earlier prompt, as far as marks tell."""
        for count in _marked(len(keys)):
            if keys[count - 1][:8] in self._marks:
                return count
        return 0

    def _remember(self, keys: Sequence[bytes]) -> None:
        for count in _marked(len(keys)):
            if self._marks.remember(keys[count - 1][:8]):
                return  # and so were those before it


def keeps_new(written: Sequence[tuple[float, int]], *, budget_bytes: int, block_bytes: int, now_s: float) -> bool:
    """Return, for who only sees what was `written` when (seconds, bytes), whether of a prompt that nobody has seen a block
    would be admitted now. What was written and is gone again is not seen.

    >>> keeps_new([], budget_bytes=6400, block_bytes=1, now_s=DAY_S)
    True
    >>> keeps_new([(DAY_S - 60, 1270)], budget_bytes=6400, block_bytes=1, now_s=DAY_S)  # of 1,280 that come at once
    False
    >>> keeps_new([(DAY_S - 60, 1270)], budget_bytes=6400, block_bytes=1, now_s=DAY_S + 3600)
    True
    """
    burst_bytes, since_s = BURST * budget_bytes, now_s - DAY_S
    level, at_s, spent = burst_bytes, since_s, 0
    for time_s, nbytes in sorted(written):
        if since_s <= time_s <= now_s:
            level = min(burst_bytes, level + (1 - BURST) * budget_bytes * (time_s - at_s) / DAY_S)
            level, at_s, spent = max(0.0, level - nbytes), time_s, spent + nbytes
    level = min(burst_bytes, level + (1 - BURST) * budget_bytes * (now_s - at_s) / DAY_S, max(0.0, float(budget_bytes - spent)))
    return _keeps_new(level, burst_bytes=burst_bytes, block_bytes=block_bytes)


def _keeps_new(level_bytes: float, *, burst_bytes: float, block_bytes: int) -> bool:
    share = _PLENTY_SHARE if level_bytes >= burst_bytes / 2 else _NEW_SHARE
    return level_bytes * share >= block_bytes


def _marked(blocks: int) -> list[int]:
    """Return the counts of blocks behind which a mark stands, the longest first."""
    return [blocks, *range((blocks - 1) // _MARK_EVERY * _MARK_EVERY, 0, -_MARK_EVERY)] if blocks else []


class _Remembered:
    """The latest things, at least `_REMEMBERED` and at most twice as many of them."""

    def __init__(self) -> None:
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def __contains__(self, thing: bytes) -> bool:
        return thing in self._young or thing in self._old

    def remember(self, thing: bytes) -> bool:
        """Return whether it was known already."""
        known = thing in self
        self._young.add(thing)
        if len(self._young) >= _REMEMBERED:
            self._old, self._young = self._young, set()
        return known
