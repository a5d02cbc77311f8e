"""On whose behalf a router asks a worker. The router knows its clients by their keys, and the worker knows the router by a
secret that both have in a file; only what comes with that secret is believed of what the header here says.

    client ──key──▶ router ──secret, x-headstart-caller: {"id":"k3f9c2a1","tenant":"acme","class":"agent"}──▶ worker
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from pathlib import Path

import msgspec

from headstart.api.errors import WrongKey
from headstart.api.keyring import Caller
from headstart.api.keys import Key
from headstart.config import made_by, warn_of_readers
from headstart.errors import KeysUnreadable

HEADER = "x-headstart-caller"
_LEAST_CHARACTERS = 16
_TOLD = ("id", "tenant", "class", "priority", "operator")


def read_secret(file: Path) -> str:
    """Return the secret in a file. Raises KeysUnreadable, also for one that could be guessed."""
    try:
        text = file.expanduser().read_text(encoding="utf-8").strip()
        warn_of_readers(file.expanduser())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise KeysUnreadable(
            f"the router's key in {file} cannot be read: {why}; make one: {made_by(file)}", path=file
        ) from error
    if len(text) < _LEAST_CHARACTERS or not text.isascii() or not text.isprintable() or " " in text:
        raise KeysUnreadable(
            f"{file} holds no key of at least {_LEAST_CHARACTERS} letters and digits on one line; make one: {made_by(file)}",
            path=file,
        )
    return text


def headers_for(caller: Caller) -> dict[str, str]:
    """Return what tells a worker whose a request is; nothing where nobody has a name."""
    if caller.key is None:
        return {}
    fields = msgspec.to_builtins(caller.key)
    return {HEADER: json.dumps({name: fields[name] for name in _TOLD if name in fields}, separators=(",", ":"))}


def routed(headers: Mapping[str, str], secret: str) -> Caller | None:
    """Return whose a request is that came from the router; None where it did not. Raises WrongKey where that cannot be read."""
    kind, _, given = headers.get("authorization", "").partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), secret.encode()):
        return None
    told = headers.get(HEADER)
    if told is None:
        return Caller(routed=True)
    try:
        key = msgspec.convert({"hash": "0" * 64, **json.loads(told)}, Key)
    except (ValueError, TypeError, msgspec.ValidationError) as error:
        raise WrongKey(f"{HEADER} cannot be read: {error}; router and worker should be of one version") from error
    return Caller(key.tenant, key, routed=True)
