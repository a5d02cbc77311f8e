"""/router/…: the workers, their roles, who comes and goes; what was decided. For this machine's own, or an operator's key."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headstart.api.access import caller_of, is_loopback, require_json
from headstart.api.accounts import Accounts
from headstart.api.dialects.fields import decoded_as
from headstart.api.errors import Forbidden
from headstart.api.plumbing import json_response, read_body
from headstart.errors import ConfigError, RequestError
from headstart.gateway.decisions import Decisions
from headstart.gateway.fleet import Fleet
from headstart.gateway.worker import ROLES, Address, Role, Worker

_BODY_BYTES = 64 << 10
_MOST_DECISIONS = 1000
_DRAIN_S = 3600.0


class NoSuchWorker(RequestError):
    """The router knows no worker of this id."""

    status = 404


class _New(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    role: str = "both"
    events: str | None = None
    replay: str | None = None


class _Changed(msgspec.Struct, forbid_unknown_fields=True):
    role: str | None = None
    draining: bool | None = None


class Admin:
    def __init__(self, fleet: Fleet, decisions: Decisions, accounts: Accounts) -> None:
        self._fleet = fleet
        self._decisions = decisions
        self._accounts = accounts
        self._draining: set[asyncio.Task[None]] = set()

    def routes(self) -> list[Route]:
        return [
            Route("/router/workers", self._workers, methods=["GET", "POST"]),
            Route("/router/workers/{id}", self._worker, methods=["GET", "PATCH", "DELETE"]),
            Route("/router/decisions", self._asked),
        ]

    async def _workers(self, request: Request) -> Response:
        self._require_operator(request)
        if request.method == "GET":
            return json_response({"workers": [self._told(one) for one in self._fleet.workers.values()]})
        new = await self._body(request, _New)
        try:
            address = Address.of(new.url, role=new.role, events=new.events, replay=new.replay)
            there = address.id in self._fleet.workers
            return json_response(self._told(self._fleet.add(address)), 200 if there else 201)
        except ConfigError as error:
            raise RequestError(error.message, code="invalid_worker") from error

    async def _worker(self, request: Request) -> Response:
        self._require_operator(request)
        id = request.path_params["id"]
        worker = self._fleet.workers.get(id)
        if worker is None:
            there = ", ".join(self._fleet.workers) or "none"
            raise NoSuchWorker(f"there is no worker {id[:64]!r}; there are {there}", code="no_such_worker")
        if request.method == "PATCH":
            changed = await self._body(request, _Changed)
            if changed.role is not None:
                await self._fleet.change_role(worker, _role(changed.role))
            if changed.draining is not None:
                self._fleet.set_draining(worker, changed.draining)
        elif request.method == "DELETE":
            if request.query_params.get("now") in ("1", "true"):
                self._fleet.remove(worker)
                return Response(status_code=204)
            worker.draining = True
            task = asyncio.get_running_loop().create_task(self._fleet.drain(worker, _DRAIN_S))
            self._draining.add(task)
            task.add_done_callback(self._draining.discard)
            return json_response(self._told(worker), 202)
        return json_response(self._told(worker))

    async def _asked(self, request: Request) -> Response:
        self._require_operator(request)
        if (id := request.query_params.get("request")) is not None:
            asked = self._decisions.find(id)
            if asked is None:
                raise NoSuchDecision(
                    f"there is no request {id[:64]!r}; the latest {_MOST_DECISIONS} are remembered", code="not_found"
                )
            return json_response(asked.told())
        limit = request.query_params.get("limit", "20")
        if not limit.isdecimal() or not 1 <= int(limit) <= _MOST_DECISIONS:
            raise RequestError(f"limit is {limit[:32]!r}; give 1 to {_MOST_DECISIONS}", param="limit")
        return json_response({"decisions": [one.told() for one in self._decisions.latest(int(limit))]})

    def _told(self, worker: Worker) -> dict[str, Any]:
        return worker.told(self._fleet.clock())

    async def _body(self, request: Request, form: type[Any]) -> Any:
        require_json(request.headers)
        return decoded_as(await read_body(request, lambda nbytes: None, most=_BODY_BYTES), form)

    def _require_operator(self, request: Request) -> None:
        """Raise Forbidden for who may not: without keys, whoever comes from another machine."""
        caller_of(request).require_operator()
        client = request.client
        if self._accounts.keyring is None and not caller_of(request).routed and not (client and is_loopback(client.host)):
            raise Forbidden(
                "workers are seen to from this machine, or with a key that was made with headstart keys add --operator",
                code="forbidden",
            )


class NoSuchDecision(RequestError):
    """Nobody here remembers where a request of this name went."""

    status = 404


def _role(role: str) -> Role:
    if role not in ROLES:
        raise RequestError(f"there is no role {role[:32]!r}; there are {', '.join(ROLES)}", param="role")
    return role  # type: ignore[return-value]  # one of them
