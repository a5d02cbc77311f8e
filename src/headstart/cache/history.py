"""What became of the latest saves, by block: waiting, written, or not, and why. Bounded; for whoever asks why one was missing.

    save submitted ──▶ pending ──▶ stored, up to some block │ refused from there on: "full", "budget", "queue-full" …

Of a save the names of its blocks are kept, 8 bytes each. They are made by `name_ended`, which the saver's thread calls between
two saves, or when somebody asks before that: whoever submits must not wait for a hash, also where the save is refused.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np
import numpy.typing as npt

from headstart.block.keys import BLOCK_TOKENS, BlockKey
from headstart.cache.ticket import SaveResult, Ticket

_MOST_SAVES = 4096
_MOST_BLOCKS = 1 << 18
_MOST_UNNAMED = 64  # each keeps its tokens
_NAME_BYTES = 8
Names = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SaveFate:
    """What had become of a block's latest save at some time. `reason`: None once it was stored, "pending" until it ended, else
    why not. `time_s`: seconds since 1970 of when that was so."""

    reason: str | None
    time_s: float


class SaveHistory:
    """Safe from many threads."""

    def __init__(self, *, most_saves: int = _MOST_SAVES, most_blocks: int = _MOST_BLOCKS) -> None:
        self._most_saves = most_saves
        self._most_blocks = most_blocks
        self._lock = Lock()
        self._saves: deque[_Save] = deque()  # oldest first
        self._unnamed: deque[_Save] = deque()  # that ended, and are not counted yet
        self._blocks = 0

    def add(self, ticket: Ticket, keys_of: Callable[[], Sequence[BlockKey]], *, own_tokens: int) -> None:
        """Note a save that is about to be submitted. `keys_of` is called at most once, maybe after the source has been let go;
        its first `own_tokens` tokens were in an earlier save of the same request."""
        save = _Save(time.time(), keys_of, own_tokens // BLOCK_TOKENS)
        with self._lock:
            self._saves.append(save)
        ticket.add_done_callback(lambda done: self._end(save, done.wait(0)))

    def fates(self, keys: Sequence[BlockKey], *, at_s: float) -> list[SaveFate | None]:
        """Return for each key of a chain what had become of its latest save at `at_s`; None where none is remembered."""
        wanted = _names(keys)
        fates: list[SaveFate | None] = [None] * len(keys)
        places = {int(name): place for place, name in reversed(list(enumerate(wanted)))}
        with self._lock:
            saves = [save for save in self._saves if save.begun_s <= at_s]
        for save in saves:  # the latest has the last word
            names = save.names()
            if not len(names):
                continue
            begins = places.get(int(names[0]))  # runs of one chain overlap where either begins inside the other
            found = np.flatnonzero(names == wanted[0]) if begins is None and len(wanted) else np.empty(0, np.int64)
            if begins is None and not len(found):
                continue
            inside, first = (0, begins) if begins is not None else (int(found[0]), 0)
            for place, name in enumerate(names[inside : inside + len(wanted) - first].tolist()):
                if name == int(wanted[first + place]):
                    fates[first + place] = save.fate(inside + place, at_s)
        return fates

    def name_ended(self) -> None:
        """Make the names of the saves that ended, and forget the oldest ones where there are too many."""
        with self._lock:
            ended, self._unnamed = self._unnamed, deque()
        blocks = sum(len(save.names()) for save in ended)
        with self._lock:
            self._blocks += blocks
            while self._saves and (len(self._saves) > self._most_saves or self._blocks > self._most_blocks):
                gone = self._saves[0]
                if gone.ended_s is None or gone in self._unnamed:
                    break  # it is counted later
                self._blocks -= len(gone.names())
                self._saves.popleft()

    def _end(self, save: _Save, result: SaveResult) -> None:
        with self._lock:
            save.end(result)
            self._unnamed.append(save)
            if len(self._unnamed) > _MOST_UNNAMED:
                self._saves.remove(self._unnamed.popleft())


class _Save:
    def __init__(self, begun_s: float, keys_of: Callable[[], Sequence[BlockKey]], own_blocks: int) -> None:
        self.begun_s = begun_s
        self.ended_s: float | None = None
        self._keys_of: Callable[[], Sequence[BlockKey]] | None = keys_of
        self._own_blocks = own_blocks
        self._names: Names = np.empty(0, np.uint64)
        self._stored_blocks = 0
        self._reason: str | None = None
        self._making = Lock()

    def names(self) -> Names:
        """Return the names of the blocks that no earlier save of the request had."""
        with self._making:
            if self._keys_of is not None:
                self._names = _names(self._keys_of()[self._own_blocks :])
                self._keys_of = None  # with the tokens
            return self._names

    def end(self, result: SaveResult) -> None:
        self._stored_blocks = result.stored_tokens // BLOCK_TOKENS - self._own_blocks
        self._reason = result.reason
        self.ended_s = time.time()

    def fate(self, block: int, at_s: float) -> SaveFate:
        if self.ended_s is None or self.ended_s > at_s:
            return SaveFate("pending", self.begun_s)
        if block < self._stored_blocks:
            return SaveFate(None, self.ended_s)
        return SaveFate(self._reason or "error", self.ended_s)


def _names(keys: Sequence[BlockKey]) -> Names:
    return np.frombuffer(b"".join(key[:_NAME_BYTES] for key in keys), np.uint64)
