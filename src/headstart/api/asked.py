"""The latest prompts, so that a server can say why one of them was not found. Bounded, in memory, a tenant's own.

Of each prompt digests are kept: of its blocks (names under a secret of this process, and the keys by which they are stored) and
of its parts. Token ids are text to whoever has the tokenizer, so they are kept only where the operator says so.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256

import numpy as np
import numpy.typing as npt

from headstart.api.ask import Ask
from headstart.api.served import Served
from headstart.block.keys import BLOCK_TOKENS, BlockKey, chain_keys, token_bytes
from headstart.diagnose.fingerprints import fingerprints
from headstart.diagnose.why import Asked, Outcome
from headstart.engine.base import GenerationRequest, Receipt, StoringEngine

MOST_BYTES = 64 << 20
KEEP_S = 3600.0
_NAME_BYTES = 8


@dataclass(frozen=True, slots=True)
class Named:
    """A prompt, and how its chain of names goes on: behind `root` follow `rest` tokens without a whole block."""

    asked: Asked
    root: bytes
    rest: tuple[int, ...]


class AskedPrompts:
    """`keep_ids`: whether token ids are kept. For the event loop, but for `of`. Where it is full, the oldest prompt goes of the
    tenant that has most."""

    def __init__(
        self,
        *,
        keep_ids: bool = False,
        most_bytes: int = MOST_BYTES,
        keep_s: float = KEEP_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.keep_ids = keep_ids
        self._most_bytes = most_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._kept: dict[str, OrderedDict[str, Asked]] = {}
        self._bytes: dict[str, int] = {}
        self._running: dict[str, Named] = {}

    def of(self, served: Served, ask: Ask, request: GenerationRequest) -> Named:
        """Return what is remembered of a prompt; some milliseconds for a long one. Changes nothing."""
        prompt = np.frombuffer(token_bytes(request.prompt), "<u4")
        names = chain_keys(prompt, root=self._secret)
        asked = Asked(
            id=request.id,
            asked_s=self._clock(),
            session=request.session,
            prompt_tokens=len(prompt),
            names=_named(names),
            keys=b"".join(
                chain_keys(prompt, root=_root(served, request), salt=request.salt, shared_tokens=request.shared_tokens)
            ),
            prints=fingerprints(
                secret=self._secret,
                apart={"adapter": request.adapter, "salt": request.salt},
                tools=ask.tools,
                template=ask.template,
                messages=ask.messages,
            ),
            ids=prompt if self.keep_ids else None,
            tokens=len(prompt),
            keep_tokens=request.keep_tokens if request.use_cache else 0,
        )
        return Named(asked, names[-1] if names else self._secret, request.prompt[len(names) * BLOCK_TOKENS :])

    def begin(self, named: Named, id: str, tenant: str) -> None:
        """Remember a prompt under the id of its answer, from now on and until it is too old."""
        self._running[id] = named
        self._put(tenant, replace(named.asked, id=id))

    def end(self, id: str, tenant: str, receipt: Receipt, answer: Sequence[int]) -> None:
        """Note what became of a prompt. `answer`: the tokens that are kept behind it. One that had no turn is forgotten."""
        named = self._running.pop(id, None)
        asked = self._of(tenant).get(id)
        if asked is None or named is None:
            return
        self._forget(tenant, id)
        if not receipt.taken:
            return
        names = _named(chain_keys((*named.rest, *answer), root=named.root))
        ids = None if asked.ids is None else np.concatenate([asked.ids, np.array(answer, np.uint32)])
        self._put(
            tenant,
            replace(
                asked,
                names=np.concatenate([asked.names, names]),
                ids=ids,
                tokens=asked.prompt_tokens + len(answer),
                outcome=_outcome(asked, receipt),
            ),
        )

    def get(self, id: str, tenant: str) -> Asked | None:
        """Return a tenant's prompt; None where it is not remembered."""
        self._expire()
        return self._of(tenant).get(id)

    def find(self, id: str, tenant: str) -> tuple[Asked, list[Asked]] | None:
        """Return a tenant's prompt and those that were asked before it, oldest first; None where it is not remembered."""
        asked = self.get(id, tenant)
        if asked is None:
            return None
        return asked, sorted(
            (one for one in self._of(tenant).values() if one.asked_s < asked.asked_s), key=lambda one: one.asked_s
        )

    def _of(self, tenant: str) -> dict[str, Asked]:
        return self._kept.get(tenant) or {}

    def _put(self, tenant: str, asked: Asked) -> None:
        self._kept.setdefault(tenant, OrderedDict())[asked.id] = asked
        self._bytes[tenant] = self._bytes.get(tenant, 0) + asked.nbytes
        self._expire()
        while sum(self._bytes.values()) > self._most_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self._forget(most, next(iter(self._kept[most])))

    def _expire(self) -> None:
        since_s = self._clock() - self._keep_s
        for tenant, kept in list(self._kept.items()):
            while kept and next(iter(kept.values())).asked_s < since_s:
                self._forget(tenant, next(iter(kept)))

    def _forget(self, tenant: str, id: str) -> None:
        kept = self._kept[tenant]
        self._bytes[tenant] -= kept.pop(id).nbytes
        if not kept:
            del self._kept[tenant], self._bytes[tenant]


def _outcome(asked: Asked, receipt: Receipt) -> Outcome:
    decision = receipt.decision
    return Outcome(
        matched_s=asked.asked_s + receipt.queue_s + receipt.match_s,
        computed_s=None if receipt.first_token_s is None else asked.asked_s + receipt.first_token_s,
        memory_tokens=receipt.cached_memory_tokens,
        disk_tokens=receipt.cached_disk_tokens,
        matched_tokens=decision.matched_tokens,
        choice=decision.choice,
        load_s=decision.load_s,
        compute_s=decision.compute_s,
        tiers_told=receipt.tiers_told,
        notes=receipt.notes,
    )


def _root(served: Served, request: GenerationRequest) -> bytes:
    """Return what the keys of a prompt's stored blocks begin with; anything where nothing of ours is stored."""
    if served.cache is None:
        return sha256(repr(request.adapter).encode()).digest()
    own = served.engine.identity(request.adapter) if isinstance(served.engine, StoringEngine) else None
    return (own or served.cache.identity).root()


def _named(keys: Sequence[BlockKey]) -> npt.NDArray[np.uint64]:
    return np.frombuffer(b"".join(key[:_NAME_BYTES] for key in keys), np.uint64)
