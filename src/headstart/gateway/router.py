"""All that a router has, whoever asks: its workers, prompts, accounts, and who gave which answer."""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Mapping
from urllib.parse import quote

from headstart.api.accounts import Accounts
from headstart.api.behalf import headers_for
from headstart.api.errors import ModelNotFound, NotReady, NoWorker
from headstart.api.keyring import Caller
from headstart.api.plumbing import Bodies
from headstart.api.streaming import STALL_S
from headstart.gateway.apart import Apart
from headstart.gateway.connections import Lost
from headstart.gateway.decisions import Decisions
from headstart.gateway.fleet import Fleet
from headstart.gateway.metrics import Metrics
from headstart.gateway.prompts import Prompts
from headstart.gateway.sending import Said, Sending
from headstart.gateway.worker import Worker

KEEPALIVE_S = 10.0
_PLACES = 1 << 16  # answers of which it is remembered who gave them
_ASK_S = 60.0  # for what needs no engine
_LOOK_UP_S = 5.0  # in which a worker says whether it has an answer
_UNSENT_BYTES = 1 << 30  # of bodies that may have to be sent once more: of all requests without a token
_NAME_CHARACTERS = 256


class Router:
    """All that the router has. `headers`: that workers know it by. For the event loop."""

    def __init__(
        self,
        fleet: Fleet,
        prompts: Prompts,
        *,
        accounts: Accounts | None = None,
        aliases: Mapping[str, str] | None = None,
        patience_s: float = 30.0,
        keepalive_s: float = KEEPALIVE_S,
        stall_s: float = STALL_S,
        sending: Sending | None = None,
    ) -> None:
        self.fleet = fleet
        self.prompts = prompts
        self.accounts = accounts or Accounts()
        self.decisions = Decisions()
        self.metrics = Metrics(fleet)
        self.bodies = Bodies()
        self.unsent = Bodies(_UNSENT_BYTES)
        self.sending = sending or Apart(fleet)
        self.keepalive_s = keepalive_s
        self.stall_s = stall_s
        self.patience_s = patience_s
        self.created = int(time.time())
        self.closing = False
        self.in_flight = 0
        self._aliases = dict(aliases or {})
        self._places: OrderedDict[str, tuple[str, str]] = OrderedDict()  # id of an answer → worker, tenant

    async def close(self) -> None:
        """End all that runs besides requests. Twice is fine."""
        self.closing = True
        await self.fleet.close()
        await asyncio.to_thread(self.prompts.close)
        await asyncio.to_thread(self.accounts.close)

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests and return when those in flight have ended, or after `timeout_s`."""
        self.closing = True
        ends = time.monotonic() + timeout_s
        while self.in_flight and time.monotonic() < ends:
            await asyncio.sleep(0.05)

    def ended(self) -> None:
        """One request that was in flight is not any more."""
        self.in_flight -= 1

    def require_open(self) -> None:
        """Raise NotReady when the router goes down."""
        if self.closing:
            raise NotReady("the router is shutting down", code="shutting_down", retry_after_s=5)

    def meant(self, model: str | None) -> str | None:
        """Return the name that workers know. Raises ModelNotFound where there are several models and it is none."""
        name = self._aliases.get(model or "", model)
        if self.fleet.serves(name):
            return name
        models = self.fleet.models()
        if (self.fleet.one_model or not models) and len(name or "") <= _NAME_CHARACTERS:
            return name
        there = ", ".join(map(repr, sorted(models)))
        raise ModelNotFound(
            f"there is no model {(name or '')[:64]!r} here; the workers have {there}", code="model_not_found", param="model"
        )

    def named(self, id: str, worker: str, tenant: str) -> None:
        """Remember who gave an answer."""
        if _is_name(id):
            self._places[id] = worker, tenant
            while len(self._places) > _PLACES:
                self._places.popitem(last=False)

    def places(self, id: str, caller: Caller) -> list[Worker]:
        """Return who may know of an answer; nobody, where it is known to be another tenant's. Of answers that were given before
        the router started all are asked that can tell tenants apart."""
        if not _is_name(id):
            return []
        if (found := self._places.get(id)) is not None:
            worker = self.fleet.workers.get(found[0])
            return [worker] if worker is not None and found[1] == caller.tenant else []
        return [one for one in self.fleet.workers.values() if one.alive and one.ours and (one.trusted or caller.key is None)]

    async def known_place(self, id: str, caller: Caller) -> str | None:
        """Return the worker that has the answer `id`, asking them where nobody remembers; None where none has."""
        if id in self._places:
            found = self.places(id, caller)
            return found[0].id if found else None
        asked = self.places(id, caller)
        for worker, has in zip(asked, await asyncio.gather(*(self._has(one, id, caller) for one in asked)), strict=True):
            if has:
                self.named(id, worker.id, caller.tenant)
                return worker.id
        return None

    async def _has(self, worker: Worker, id: str, caller: Caller) -> bool:
        try:
            return (await self.ask(worker, "GET", f"/v1/responses/{id}", caller, timeout_s=_LOOK_UP_S)).status == 200
        except NoWorker:
            return False

    def headers(self, worker: Worker, caller: Caller) -> dict[str, str]:
        """Return what a worker is told beside a body."""
        told = {**self.fleet.headers, "content-type": "application/json"}
        return told | headers_for(caller) if worker.trusted else told

    async def ask(
        self, worker: Worker, method: str, path: str, caller: Caller, body: bytes | None = None, *, timeout_s: float = _ASK_S
    ) -> Said:
        """Ask a worker for what is no generation. Raises NoWorker where it does not answer."""
        url = worker.address.url + quote(path)
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self.fleet.connections.ask(method, url, headers=self.headers(worker, caller), body=body)
        except (Lost, TimeoutError, ValueError) as error:
            self.fleet.doubt(worker)
            raise NoWorker("the worker does not answer; try again in a moment", code="no_worker", retry_after_s=2) from error
        return Said(answer.status, {"content-type": answer.kind}, answer.content)


def _is_name(id: str) -> bool:
    """Whether this can be the name of an answer; what is none could be a path that workers are not to be asked for."""
    return re.fullmatch(rf"[A-Za-z0-9_:.-]{{1,{_NAME_CHARACTERS}}}", id) is not None and id.strip(".") != ""
