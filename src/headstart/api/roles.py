"""The role of this worker among others, for whoever runs it: asked for, and changed while it runs."""

from __future__ import annotations

from typing import Any

import msgspec

from headstart.api.served import Served
from headstart.engine.base import Role, RoledEngine
from headstart.errors import RequestError


class RoleChange(msgspec.Struct, forbid_unknown_fields=True):
    """What is sent to change it."""

    role: Role


class RoleAnswer(msgspec.Struct):
    """`addresses`: where other workers ask for prompts. `changes`: whether the role can be changed here."""

    role: Role
    addresses: list[str]
    changes: bool


def role_of(served: Served) -> dict[str, Any]:
    """Return the role as it is now."""
    engine = served.engine
    if not isinstance(engine, RoledEngine):
        return {"role": "both", "addresses": [], "changes": False}
    return {"role": engine.role, "addresses": list(engine.addresses), "changes": True}


def change_role(served: Served, body: bytes) -> dict[str, Any]:
    """Change the role to what `body` says: what is under way ends as it began. Raises RequestError."""
    try:
        role = msgspec.json.decode(body, type=RoleChange).role
    except msgspec.DecodeError as error:
        raise RequestError(f'a role is changed by {{"role": "both"}}, "prefill" or "decode": {error}', param="role") from error
    engine = served.engine
    if not isinstance(engine, RoledEngine):
        raise RequestError(
            "this server was started without [handoff], so it takes and gives no prompts; start it with --handoff-listen, or "
            "with --role decode",
            code="no_roles",
            param="role",
        )
    if role == "prefill" and not engine.addresses:
        raise RequestError(
            "nobody can ask this worker for prompts, because it listens nowhere; start it with --handoff-listen", param="role"
        )
    engine.role = role
    return role_of(served)
