"""What was said so far, for requests that go on from an earlier answer by its id. Bounded, in memory, a tenant's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from headstart.api.errors import NoSuchResponse

MOST = 1024  # answers
MOST_BYTES = 64 << 20  # of their conversations, as JSON


@dataclass(frozen=True, slots=True)
class _Kept:
    tenant: str
    messages: bytes


class Conversations:
    """The latest ones. For the event loop's thread alone."""

    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def keep(self, id: str, tenant: str, messages: Sequence[Any]) -> None:
        """Keep a conversation that ends with answer `id`. What was used least lately goes for it."""
        kept = _Kept(tenant, msgspec.json.encode(list(messages)))
        self._kept[id] = kept
        self._bytes += len(kept.messages)
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            _, gone = self._kept.popitem(last=False)
            self._bytes -= len(gone.messages)

    def find(self, id: str, tenant: str) -> tuple[Any, ...]:
        """Return the messages up to answer `id`. Raises NoSuchResponse for what is not kept, or is another tenant's."""
        kept = self._kept.get(id)
        if kept is None or kept.tenant != tenant:
            raise NoSuchResponse(
                f"there is no response {id[:64]!r}; the latest {self._most} are kept, unless store is false, while it runs",
                code="previous_response_not_found",
                param="previous_response_id",
            )
        self._kept.move_to_end(id)
        return tuple(msgspec.json.decode(kept.messages))
