"""What an engine brings for its requests: the protocols of KV, loads and rooms."""

from __future__ import annotations

from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from headstart.block.identity import Identity
from headstart.engine.base import Logprobs

if TYPE_CHECKING:
    from headstart.engine.serving.sequence import Sequence
    from headstart.engine.serving.sharing import Offer

S = TypeVar("S", bound="Sequence")
S_contra = TypeVar("S_contra", bound="Sequence", contravariant=True)


@dataclass(frozen=True, slots=True)
class Choice:
    """A request's next token, and what was asked to be told of it."""

    token: int
    logprobs: Logprobs | None = None


class KV(Protocol):
    """KV of one request. `shared_tokens`: so many at its beginning came from another request, ready."""

    @property
    def capacity_tokens(self) -> int: ...

    @property
    def shared_tokens(self) -> int: ...

    def release(self) -> None: ...


class StateCopy(Protocol):
    """A copy of a recurrent state, with one reference."""

    @property
    def data(self) -> memoryview: ...

    def release(self) -> None: ...


class UnderWay(Protocol):
    """A load of a stored prefix. `deadline_s`: when the engine's thread must look at it again."""

    @property
    def deadline_s(self) -> float: ...


class Leaving(Protocol):
    """A save or a load that holds KV which nobody else does."""

    @property
    def done(self) -> bool: ...


class Rooms(Protocol, Generic[S]):
    """Room for requests' KV. Of the engine's thread alone."""

    def first(self, sequence: S, offer: Offer[S] | None) -> KV | None:
        """Return KV for a request that is about to run, None where there is none now."""
        ...

    def spare(self, sequence: S) -> KV | None:
        """Return KV beyond the memory's capacity; None where there is no such thing."""
        ...

    def grow(self, sequence: S) -> bool:
        """Give a request more room; False, and nothing changed, where there is none now."""
        ...

    def give_back(self, sequence: S) -> None:
        """Let go of a request's KV and copies of states; a save that still reads it is remembered."""
        ...

    def coming_free(self) -> bool:
        """Return whether memory will be given back soon by a save or load that goes on without its request."""
        ...


class Loads(Protocol[S_contra]):
    """Stored prefixes of requests. Of the engine's thread alone."""

    def start(self, sequence: S_contra) -> None: ...

    def drop(self, sequence: S_contra) -> None: ...

    def found(self, sequence: S_contra, *, memory_tokens: int, disk_tokens: int = 0) -> None: ...

    def count_hit(self, sequence: S_contra) -> None: ...

    def went_on(self, sequence: S_contra) -> None: ...

    def promote(
        self, tokens: Several[int], salt: str | bytes | None, shared_tokens: int, identity: Identity | None
    ) -> bool: ...
