"""What was said so far, for requests that go on from an earlier answer by its id. Bounded, in memory, a tenant's own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headstart.api.errors import NoSuchResponse

MOST = 1024  # answers
MOST_BYTES = 64 << 20  # of their conversations, as JSON


@dataclass(frozen=True, slots=True)
class _Kept:
    """`told`: the answer as its client was told of it, once it was."""

    tenant: str
    messages: bytes
    told: bytes = b""

    @property
    def nbytes(self) -> int:
        return len(self.messages) + len(self.told)


class Conversations:
    """The latest ones. For the event loop's thread alone."""

    def __init__(self, *, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    def keep(self, id: str, tenant: str, messages: Sequence[Any]) -> None:
        """Keep a conversation that ends with answer `id`. What was used least lately goes for it."""
        self._put(id, _Kept(tenant, msgspec.json.encode(list(messages))))

    def tell(self, id: str, answer: Mapping[str, Any]) -> None:
        """Keep an answer as it is told, if its conversation is kept."""
        if (kept := self._kept.get(id)) is not None:
            self._put(id, replace(kept, told=msgspec.json.encode(answer)))

    def find(self, id: str, tenant: str) -> tuple[Any, ...]:
        """Return the messages up to answer `id`. Raises NoSuchResponse for what is not kept, or is another tenant's."""
        return tuple(msgspec.json.decode(self._of(id, tenant, param="previous_response_id").messages))

    def told(self, id: str, tenant: str) -> bytes:
        """Return answer `id` as it was told, as JSON. Raises NoSuchResponse."""
        kept = self._of(id, tenant)
        if not kept.told:
            raise _no_such(id, self._most, None)
        return kept.told

    def require(self, id: str, tenant: str) -> None:
        """Raise NoSuchResponse unless the answer is kept and this tenant's."""
        self._of(id, tenant)

    def forget(self, id: str, tenant: str) -> None:
        """Raises NoSuchResponse."""
        self._of(id, tenant)
        self._bytes -= self._kept.pop(id).nbytes

    def _of(self, id: str, tenant: str, *, param: str | None = None) -> _Kept:
        kept = self._kept.get(id)
        if kept is None or kept.tenant != tenant:
            raise _no_such(id, self._most, param)
        self._kept.move_to_end(id)
        return kept

    def _put(self, id: str, kept: _Kept) -> None:
        if (before := self._kept.pop(id, None)) is not None:
            self._bytes -= before.nbytes
        self._kept[id] = kept
        self._bytes += kept.nbytes
        while self._kept and (len(self._kept) > self._most or self._bytes > self._most_bytes):
            _, gone = self._kept.popitem(last=False)
            self._bytes -= gone.nbytes


def _no_such(id: str, most: int, param: str | None) -> NoSuchResponse:
    return NoSuchResponse(
        f"there is no response {id[:64]!r}; the latest {most} are kept, unless store is false, while the server runs",
        code="response_not_found" if param is None else "previous_response_not_found",
        param=param,
    )
