"""Who asks: the keys of the running server, read again when their file changes, and the caller that a key stands for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headstart.api.errors import Forbidden, WrongKey
from headstart.api.keys import Key, find, read_keys
from headstart.block.framing import frame
from headstart.config import state_of
from headstart.errors import KeysUnreadable

LOOK_S = 0.5  # how often the file is looked at, at most
_TAG_TENANT, _TAG_SALT = 1, 2
_MOST_CHARACTERS = 512  # of a key
_log = logging.getLogger("headstart")


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. Without keys everybody is the same, and has no name. `routed`: a router sent it, and said whose it
    is; the router accounts for it."""

    tenant: str = ""
    key: Key | None = None
    routed: bool = False

    @property
    def key_id(self) -> str:
        return "" if self.key is None else self.key.id

    @property
    def retention(self) -> str:
        return "default" if self.key is None else self.key.retention

    @property
    def operator(self) -> bool:
        return self.key is None or self.key.operator

    def salt(self, given: str | None) -> str | bytes | None:
        """Return the salt for what this caller asks, who may part it further by a salt of its own. No text is equal to the
        salt of a tenant, so a server without keys on the same directory cannot be asked for it either."""
        if self.key is None:
            return given
        own = b"" if given is None else frame(_TAG_SALT, given.encode("utf-8", "surrogatepass"))
        return b"\xff" + frame(_TAG_TENANT, self.tenant.encode()) + own

    def priority(self, asked: int) -> int:
        return asked if self.key is None else min(asked, self.key.priority)

    def body_bytes(self, most: int) -> int:
        """Return how large a body may be, where nobody's may be larger than `most`."""
        return most if self.key is None or self.key.body_bytes is None else min(most, self.key.body_bytes)

    def session(self, name: str) -> str:
        """Return a name for a conversation that no other tenant's has."""
        return f"{self.tenant}/{name}" if name and self.tenant else name

    def require_operator(self) -> None:
        """Raise Forbidden for whom only his own things concern."""
        if not self.operator:
            raise Forbidden(
                "this tells of all tenants; it needs a key that was made with headstart keys add --operator", code="forbidden"
            )


ANYBODY = Caller()


class Keyring:
    """The keys in `file`. For the event loop. Raises KeysUnreadable where the file cannot be read at the start; later the keys
    that were read last hold until it can be."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen = state_of(file)
        self._keys: Mapping[str, Key] = read_keys(file)
        self._look_due_s = time.monotonic() + LOOK_S
        self._on_change: Callable[[Mapping[str, Key]], None] | None = None

    def watch(self, on_change: Callable[[Mapping[str, Key]], None]) -> None:
        """Have `on_change` called with the keys, now and whenever they were read again. It must be quick."""
        self._on_change = on_change
        on_change(self._keys)

    @property
    def keys(self) -> Mapping[str, Key]:
        return self._keys

    def caller(self, authorization: str, x_api_key: str) -> Caller:
        """Return who has the key in either header; Bearer goes first. Raises WrongKey."""
        self._look()
        kind, _, text = authorization.partition(" ")
        given = text.strip() if kind.lower() == "bearer" else ""
        given = given or x_api_key.strip()
        if not given:
            raise WrongKey(
                "this server asks for an API key; send it as Authorization: Bearer KEY, or as x-api-key", code="invalid_api_key"
            )
        key = find(self._keys, given[:_MOST_CHARACTERS])
        if key is None:
            raise WrongKey("the API key is wrong; ask who runs this server for one", code="invalid_api_key")
        return Caller(key.tenant, key)

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._look_due_s:
            return
        self._look_due_s = now + LOOK_S
        state = state_of(self.file)
        if state == self._seen:
            return
        self._seen = state
        try:
            self._keys = read_keys(self.file)
        except KeysUnreadable as error:
            _log.error("%s; until then the keys hold that were read before", error.message)
        else:
            _log.info("the keys were read again: %d", len(self._keys))
            if self._on_change is not None:
                self._on_change(self._keys)
