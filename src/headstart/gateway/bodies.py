"""What the router reads of a body, and the little that it puts in: all else passes as the client wrote it."""

from __future__ import annotations

import hashlib

import msgspec

from headstart.api.ask import Ask
from headstart.api.keyring import Caller


def field_of(body: bytes, name: str) -> object:
    """Return one field of a body; None where it has none, or is no object."""
    try:
        content = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(content[name]) if name in content else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


def text_salt(ask: Ask, caller: Caller) -> str:
    """Return a salt in letters that keeps a tenant's prompts apart in workers that know nothing of tenants."""
    own = caller.salt(ask.salt)
    data = own if isinstance(own, bytes) else (own or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"headstart.gateway.salt\0" + data).hexdigest()


def limited(ask: Ask, caller: Caller) -> dict[str, str]:
    """Return how a caller with a key may have its request handled, for workers that do not know it."""
    handling = ask.handling
    if caller.key is None:
        return {}
    retention = caller.retention if handling.retention == "default" else handling.retention
    told = {"x-headstart-priority": str(caller.priority(handling.priority)), "x-headstart-retention": retention}
    return told | ({"x-headstart-session": caller.session(handling.session)} if handling.session else {})


def with_more(body: bytes, *, usage: bool = False, salt: str | None = None, has_stream_options: bool = True) -> bytes:
    """Return a body that asks for usage in its stream, and has this salt; all else as the client wrote it.
    `has_stream_options`: whether it may have such a field, for which a long one is searched.

    What is put in goes to the end, so that nothing before it has to be read. Where the body may have such a field already it is
    read and written again: of two of one name the last counts, but not in every parser."""
    more: dict[str, object] = {}
    if usage:
        more["stream_options"] = {"include_usage": True}
    if salt is not None:
        more["cache_salt"] = salt
    if not more:
        return body
    escaped = salt is not None and b"\\u" in body  # a name can be written so, too
    rest = body.rstrip()
    searched = more.keys() - ({"stream_options"} if not has_stream_options else set())
    if not escaped and not any(name.encode() in body for name in searched) and rest.endswith(b"}") and b":" in rest:
        return b"".join((memoryview(rest)[:-1], b",", memoryview(msgspec.json.encode(more))[1:]))
    content = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if usage and "stream_options" in content:
        options = msgspec.json.decode(content["stream_options"])
        more["stream_options"] = {**(options if isinstance(options, dict) else {}), "include_usage": True}
    return msgspec.json.encode({**content, **more})
