"""The router's HTTP application: the dialects of a server of ours, with workers in place of an engine, and the admin API.

body ─▶ dialect: Ask ─▶ prompts: tokens, keys ─▶ forward: a worker ─▶ its answer, as it comes
          keys, limits, usage log: `api.accounts`, once, here
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import sample
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart import __version__
from headstart.api.access import HostCheck, KeyCheck, caller_of, require_json
from headstart.api.accounts import Account, Accounts
from headstart.api.ask import Ask
from headstart.api.behalf import headers_for
from headstart.api.dialects import chat, completions, messages, responses
from headstart.api.dialects.base import KEEPALIVE, About, Dialect, Shape
from headstart.api.errors import (
    DeadlinePassed,
    ModelNotFound,
    NoSuchReceipt,
    NoSuchResponse,
    NotReady,
    NoWorker,
    ReaderTooSlow,
    request_id_of,
)
from headstart.api.keyring import Caller
from headstart.api.plumbing import (
    BODY_BYTES,
    HANDLERS,
    INLINE_BYTES,
    Bodies,
    RequestId,
    json_response,
    on_error,
    on_gone,
    read_body,
    unless_gone,
)
from headstart.api.streaming import STALL_S
from headstart.errors import RequestError
from headstart.gateway.admin import Admin
from headstart.gateway.apart import Apart
from headstart.gateway.asking import answer_of
from headstart.gateway.decisions import Asked, Decisions
from headstart.gateway.fleet import Fleet
from headstart.gateway.forward import Flight
from headstart.gateway.metrics import CONTENT_TYPE, Metrics
from headstart.gateway.prompts import Prompts
from headstart.gateway.sending import Order, Refused, Said, Sending
from headstart.gateway.worker import Worker

log = logging.getLogger("headstart")

KEEPALIVE_S = 10.0
_PLACES = 1 << 16  # answers of which it is remembered who gave them
_ASK_S = 60.0  # for what needs no engine
_LOOK_UP_S = 5.0  # in which a worker says whether it has an answer
_UNSENT_BYTES = 1 << 30  # of bodies that may have to be sent once more: of all requests without a token
_NAME_CHARACTERS = 256
_PASSED = (
    *("accept", "anthropic-version", "anthropic-beta", "traceparent", "tracestate"),
    *("x-headstart-priority", "x-headstart-session", "x-headstart-retention"),
)


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

    def require_open(self) -> None:
        """Raise NotReady when the router goes down."""
        if self.closing:
            raise NotReady("the router is shutting down", code="shutting_down", retry_after_s=5)

    def meant(self, model: str | None) -> str | None:
        """Return the name that workers know. Raises ModelNotFound where there are several models and it is none."""
        name = self._aliases.get(model or "", model)
        models = self.fleet.models()
        if name in models or ((self.fleet.one_model or not models) and len(name or "") <= _NAME_CHARACTERS):
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
        request = self.fleet.client.build_request(
            method, worker.address.url + quote(path), content=body, headers=self.headers(worker, caller)
        )
        try:
            async with asyncio.timeout(timeout_s):
                response = await answer_of(self.fleet.client, request)
        except (httpx.HTTPError, TimeoutError, ValueError) as error:
            self.fleet.doubt(worker)
            raise NoWorker("the worker does not answer; try again in a moment", code="no_worker", retry_after_s=2) from error
        return Said(response.status_code, {"content-type": response.headers["content-type"]}, response.content)


def build_app(router: Router, *, host: str) -> ASGIApp:
    """Return the application. `host`: the address it listens on."""
    fleet, accounts = router.fleet, router.accounts

    async def health(request: Request) -> Response:
        states = [worker.state(fleet.clock()) for worker in fleet.workers.values()]
        ready = states.count("ready")
        status = "closing" if router.closing else "ok" if ready else "loading"
        told = {"status": status, "workers": len(states), "ready": ready, "models": sorted(fleet.models())}
        code = 200 if status == "ok" else 503
        return json_response(told, code, None if code == 200 else {"retry-after": "2"})

    async def ready(request: Request) -> Response:
        answer = await health(request)
        return json_response({"ready": answer.status_code == 200}, answer.status_code)

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def scrape(request: Request) -> Response:
        caller_of(request).require_operator()
        return Response(await asyncio.to_thread(router.metrics.exposition), media_type=CONTENT_TYPE)

    def model_object(name: str) -> dict[str, Any]:
        context = fleet.models()[name].context_tokens
        told = {"id": name, "object": "model", "created": router.created, "owned_by": "headstart"}
        return told | ({} if context is None else {"max_model_len": context})

    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": [model_object(name) for name in sorted(fleet.models())]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in fleet.models():
            raise ModelNotFound(f"there is no model {name[:64]!r} here", code="model_not_found", param="model")
        return json_response(model_object(name))

    async def asking_any(request: Request) -> Response:
        """Pass on what any worker can say: tokens of a text, how many a prompt would have."""
        require_json(request.headers)
        router.require_open()
        caller = caller_of(request)
        with accounts.admitted(caller), router.bodies.holding() as more:
            body = await read_body(request, more, most=caller.body_bytes(BODY_BYTES))
            named = _field(body, "model") if len(body) <= INLINE_BYTES else await asyncio.to_thread(_field, body, "model")
            able = fleet.able(router.meant(named if isinstance(named, str) else None))
            for worker in sample(able, min(2, len(able))):
                try:
                    return _as_said(await router.ask(worker, "POST", request.url.path, caller, body))
                except NoWorker:
                    continue
        raise NoWorker("no worker is there that could say; try again in a moment", code="no_worker", retry_after_s=2)

    async def asking_who_knows(request: Request) -> Response:
        """Pass on what only the worker knows that answered: receipts, why, what was said, cancelling it."""
        caller = caller_of(request)
        id = request.path_params["id"]
        said: Said | None = None
        for worker in router.places(id, caller):
            try:
                said = await router.ask(worker, request.method, request.url.path, caller)
            except NoWorker:
                continue
            if said.status != 404:
                break
        if said is None:
            raise NoSuchReceipt(f"there is no request {id[:64]!r}, or its worker is gone", code="not_found")
        return _as_said(said)

    def answering(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        return partial(answer, dialect)

    async def answer(dialect: Dialect, request: Request) -> Response:
        require_json(request.headers)
        router.require_open()
        caller = caller_of(request)
        account = accounts.open(caller, endpoint=request.url.path, id=f"refused-{uuid.uuid4().hex}", headers=request.headers)
        router.in_flight += 1
        streaming = False
        flight: Flight | None = None
        try:
            ask, flight = await begun(dialect, request, account)
            if not ask.stream:
                said = await unless_gone(request, flight.whole())
                return await on_gone(request, ClientDisconnect()) if said is None else _as_said(said)
            events = flight.stream(router.keepalive_s)
            try:
                first = await unless_gone(request, _next(events))
                if first is None:
                    account.left()
                    return await on_gone(request, ClientDisconnect())
                streaming = True
            finally:
                if not streaming:
                    await events.aclose()
            return _Passing(router, flight, events, first[0], lambda: dialect.shape(ask, _about(flight, account, request)))
        except Refused as refused:
            return _as_said(refused.said)
        except RequestError as error:
            if not account.closed:
                router.metrics.ended("refused", first_token_s=None, retries=0)
            account.refused(error)
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            account.left()
            raise
        except BaseException:
            account.failed()
            raise
        finally:
            if not streaming:
                router.in_flight -= 1
                if flight is not None:
                    flight.order.let_go()

    async def begun(dialect: Dialect, request: Request, account: Account) -> tuple[Ask, Flight]:
        caller = account.caller
        with router.bodies.holding() as more:
            body = await read_body(request, more, most=caller.body_bytes(BODY_BYTES))
            if len(body) <= INLINE_BYTES:
                ask = dialect.parse(body, request.headers)
            else:
                ask = await asyncio.to_thread(dialect.parse, body, request.headers)
            ask = replace(ask, caller=caller)
            model = router.meant(ask.model)
            account.model = model or next(iter(fleet.models()), "")
            account.session, account.retention = ask.handling.session or ask.caching.session, ask.handling.retention
            account.max_tokens = ask.max_tokens
            pinned = None if ask.previous is None else await router.known_place(ask.previous, caller)
            if ask.previous is not None and pinned is None and caller.key is not None:
                # A worker that knows no tenants would go on from anybody's.
                raise NoSuchResponse(
                    f"there is no response {ask.previous[:64]!r}, or its worker is gone; send the whole conversation instead",
                    code="previous_response_not_found",
                    param="previous_response_id",
                )
            able = fleet.able(model)
            salt = None if caller.key is None else _text_salt(ask)
            apart = None if all(one.trusted for one in able) else salt
            known = await router.prompts.of(
                ask,
                root=fleet.root_of(model),
                salt=caller.salt(ask.salt) if apart is None else apart,
                among=able,
                headers=fleet.headers,
            )
        account.tokenised(known.tokens)
        router.metrics.prepared(known.made_s)
        id = request_id_of(request.scope) or uuid.uuid4().hex
        asked = Asked(id, caller.tenant, account.arrived, account.model, known.tokens, known.by, account.session)
        router.decisions.keep(asked)
        deadlines = [one for one in (ask.handling.deadline_s, accounts.deadline_s) if one is not None]
        deadline_s = min(deadlines) - account.tokenise_s if deadlines else None
        if deadline_s is not None and deadline_s <= 0:
            raise DeadlinePassed("the prompt was not tokenised within the deadline", code="deadline_exceeded")
        path = request.url.path
        injects = ask.stream and dialect in (chat, completions) and not ask.include_usage
        if injects:
            work = partial(_with, body, usage=True)
            body = work() if len(body) <= INLINE_BYTES else await asyncio.to_thread(work)
        with ExitStack() as held:
            held.enter_context(router.unsent.holding())(len(body))
            unsent = held.pop_all()
        bodies = [body]
        limited = _limited(ask)
        passed = {name: request.headers[name] for name in _PASSED if name in request.headers} | {"x-request-id": id}
        ends_s = None if deadline_s is None else time.monotonic() + deadline_s

        def body_for(worker: Worker) -> bytes:
            return bodies[0] if salt is None or worker.trusted else _with(bodies[0], salt=salt)

        def let_go() -> None:
            bodies.clear()
            unsent.close()

        def headers(worker: Worker) -> dict[str, str]:
            told = passed | ({} if worker.trusted else limited) | router.headers(worker, caller)
            if ends_s is not None:
                told["x-headstart-deadline"] = f"{max(0.001, ends_s - time.monotonic()):.3f}"
            return told

        def on_named(answer: str, worker: str) -> None:
            router.named(answer, worker, caller.tenant)
            router.decisions.answered(asked, answer)

        order = Order(
            path=path,
            model=model,
            known=known,
            asked=asked,
            stream=ask.stream,
            body_for=body_for,
            headers_for=headers,
            pinned=pinned,
            let_go=let_go,
        )
        flight = Flight(
            fleet,
            router.sending,
            order,
            account,
            patience_s=router.patience_s,
            deadline_s=deadline_s,
            strip_usage=injects,
            on_named=on_named,
            metrics=router.metrics,
        )
        return replace(ask, messages=None, prompt="", tools=None), flight  # what is long is not kept as long as the answer

    admin = Admin(fleet, router.decisions, accounts)
    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
            Route("/metrics", scrape),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", answering(chat), methods=["POST"]),
            Route("/v1/completions", answering(completions), methods=["POST"]),
            Route("/v1/responses", answering(responses), methods=["POST"]),
            Route("/v1/responses/{id}", asking_who_knows, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/cancel", asking_who_knows, methods=["POST"]),
            Route("/v1/messages", answering(messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", asking_any, methods=["POST"]),
            Route("/v1/chat/completions/render", asking_any, methods=["POST"]),
            Route("/v1/completions/render", asking_any, methods=["POST"]),
            Route("/v1/headstart/requests/{id}", asking_who_knows),
            Route("/v1/headstart/requests/{id}/why", asking_who_knows),
            Route("/v1/headstart/requests/{id}/tokens", asking_who_knows),
            Route("/tokenize", asking_any, methods=["POST"]),
            Route("/detokenize", asking_any, methods=["POST"]),
            *admin.routes(),
        ],
        exception_handlers=HANDLERS,
    )
    checked = KeyCheck(app, accounts, on_error=on_error)
    return RequestId(HostCheck(checked, host=host))


class _Passing(StreamingResponse):
    """A stream of a worker. A client that takes nothing for a while is cut; who goes away ends the request at the worker.
    `shape`: makes the form of what the router itself has to say."""

    def __init__(
        self,
        router: Router,
        flight: Flight,
        events: AsyncGenerator[bytes | None, None],
        first: bytes | None,
        shape: Callable[[], Shape],
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._parts(events, first, shape), media_type="text/event-stream", headers=headers)
        self._router = router
        self._flight = flight
        self._events = events

    async def _parts(
        self, events: AsyncGenerator[bytes | None, None], first: bytes | None, shape: Callable[[], Shape]
    ) -> AsyncIterator[bytes]:
        yield shape().quiet() if first is None else first
        try:
            async for event in events:
                yield shape().quiet() if event is None else event
        except Refused as refused:  # after keep-alives went out it can only be told as an event
            yield b"".join(shape().failure(_told_of(refused.said)))
        except RequestError as error:
            yield b"".join(shape().failure(error))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stall_s = self._router.stall_s

        async def send_in_time(message: Message) -> None:
            try:
                async with asyncio.timeout(stall_s):
                    await send(message)
            except TimeoutError as error:
                raise _Stalled from error

        scope["headstart.meaningless"] = KEEPALIVE
        try:
            await super().__call__(scope, receive, send_in_time)
        except _Stalled:
            self._flight.account.status = ReaderTooSlow.status
            log.info("a stream ended: its client took nothing for %g s", stall_s)
        finally:
            await self._events.aclose()
            self._flight.order.let_go()
            self._router.in_flight -= 1


class _Stalled(Exception):
    """The client does not read."""


async def _next(events: AsyncGenerator[bytes | None, None]) -> tuple[bytes | None]:
    """Return the first item, in a tuple so that None can be one."""
    async for event in events:
        return (event,)
    return (b"",)


def _about(flight: Flight, account: Account, request: Request) -> About:
    id = flight.seen.id or f"routed-{uuid.uuid4().hex}"
    return About(id, int(time.time()), account.model, request_id_of(request.scope))


def _told_of(said: Said) -> RequestError:
    """Return a worker's refusal as an error of ours."""
    try:
        error = msgspec.json.decode(said.content)["error"]
        message, code = str(error["message"]), error.get("code")
    except (msgspec.MsgspecError, ValueError, KeyError, TypeError, AttributeError):
        message, code = f"a worker answered {said.status}", None
    refusal = RequestError(message, code=code if isinstance(code, str) else "refused")
    refusal.status = said.status
    return refusal


def _as_said(said: Said) -> Response:
    return Response(said.content, said.status, dict(said.headers))


def _field(body: bytes, name: str) -> object:
    try:
        content = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        return msgspec.json.decode(content[name]) if name in content else None
    except (msgspec.MsgspecError, ValueError):
        return None


def _text_salt(ask: Ask) -> str:
    """Return a salt in letters that keeps a tenant's prompts apart in workers that know nothing of tenants."""
    own = ask.caller.salt(ask.salt)
    data = own if isinstance(own, bytes) else (own or "").encode("utf-8", "surrogatepass")
    return hashlib.sha256(b"headstart.gateway.salt\0" + data).hexdigest()


def _limited(ask: Ask) -> dict[str, str]:
    """Return how a caller with a key may have its request handled, for workers that do not know it."""
    caller, handling = ask.caller, ask.handling
    if caller.key is None:
        return {}
    retention = caller.retention if handling.retention == "default" else handling.retention
    told = {"x-headstart-priority": str(caller.priority(handling.priority)), "x-headstart-retention": retention}
    return told | ({"x-headstart-session": caller.session(handling.session)} if handling.session else {})


def _is_name(id: str) -> bool:
    """Whether this can be the name of an answer; what is none could be a path that workers are not to be asked for."""
    return re.fullmatch(rf"[A-Za-z0-9_:.-]{{1,{_NAME_CHARACTERS}}}", id) is not None and id.strip(".") != ""


def _with(body: bytes, *, usage: bool = False, salt: str | None = None) -> bytes:
    """Return a body that asks for usage in its stream, and has this salt; all else as the client wrote it."""
    content = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    if usage:
        options = msgspec.json.decode(content["stream_options"]) if "stream_options" in content else None
        told = {**(options if isinstance(options, dict) else {}), "include_usage": True}
        content["stream_options"] = msgspec.Raw(msgspec.json.encode(told))
    if salt is not None:
        content["cache_salt"] = msgspec.Raw(msgspec.json.encode(salt))
    return msgspec.json.encode(content)
