"""Conversations that may go on soon, and what they said so far: what an idle engine has brought to memory. For one thread."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.block.identity import Identity
from headstart.policy.expecting import Pace, expected

_MOST_SESSIONS = 256
_MOST_TOKENS = 4 << 20  # of all of them: 16 MiB


@dataclass(slots=True)
class _Session:
    pace: Pace
    tokens: array[int]
    salt: str | bytes | None
    shared_tokens: int
    identity: Identity | None
    looked_for: bool = False  # since its last request


Promote = Callable[[Sequence[int], str | bytes | None, int, Identity | None], bool]


class Conversations:
    """`promote(tokens, salt, shared_tokens, identity)` brings a prefix to memory and says whether it will;
    False: not now, or it is there."""

    def __init__(self, promote: Promote) -> None:
        self._promote = promote
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._tokens = 0

    def went_on(
        self,
        *,
        tenant: str,
        session: str,
        tokens: Sequence[int],
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None,
        started_s: float,
        ended_s: float,
    ) -> None:
        """Note that a conversation's request has ended, with all that is in it now."""
        before = self._sessions.pop((tenant, session), None)
        pace = Pace(ended_s)
        if before is not None:
            self._tokens -= len(before.tokens)
            pace = before.pace.after(started_s=started_s, ended_s=ended_s)
        self._sessions[tenant, session] = _Session(pace, array("I", tokens), salt, shared_tokens, identity)
        self._tokens += len(tokens)
        while len(self._sessions) > _MOST_SESSIONS or (self._tokens > _MOST_TOKENS and len(self._sessions) > 1):
            self._tokens -= len(self._sessions.popitem(last=False)[1].tokens)

    def look_ahead(self, now_s: float) -> bool:
        """Have the prefix of one that may go on now brought to memory; once after each of its requests. Returns whether one
        is on its way."""
        waiting = [one for one in self._sessions.values() if not one.looked_for]
        for i in expected([one.pace for one in waiting], now_s=now_s):
            one = waiting[i]
            one.looked_for = True
            if self._promote(one.tokens, one.salt, one.shared_tokens, one.identity):
                return True
        return False
