"""Tools of a request with their pieces, made once for all requests that have the same: they are most of an agent's request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from headstart.diagnose.requests import Piece

_MOST = 64


@dataclass(slots=True)
class Described:
    """`written` is for whoever writes tools as text: what came of it."""

    tools: list[dict[str, Any]]
    pieces: tuple[Piece, ...]
    written: Any = field(default=None, compare=False)


class Remembered:
    """The latest lists of tools, `_MOST` of them. Safe from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._known: OrderedDict[tuple[object, bytes], Described] = OrderedDict()

    def get(self, tools: list[dict[str, Any]], paths: Sequence[object], make: Callable[[], tuple[Piece, ...]]) -> Described:
        """Return `tools` described; `paths`: what else their pieces depend on."""
        try:
            key = (tuple(paths), msgspec.json.encode(tools))
        except (TypeError, ValueError, OverflowError, RecursionError):  # what JSON in UTF-8 cannot hold
            return Described(tools, make())
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = Described(tools, make())
                if len(self._known) > _MOST:
                    self._known.popitem(last=False)
            else:
                self._known.move_to_end(key)
            return found
