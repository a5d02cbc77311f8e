"""The router's HTTP application: the dialects of a server of ours, with workers in place of an engine, and the admin API.

body ─▶ dialect: Ask ─▶ prompts: tokens, keys ─▶ forward: a worker ─▶ its answer, as it comes
          keys, limits, usage log: `api.accounts`, once, here
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from random import sample
from typing import Any

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headstart import __version__
from headstart.api.access import HostCheck, KeyCheck, caller_of, require_json
from headstart.api.accounts import Account
from headstart.api.ask import Ask
from headstart.api.dialects import chat, completions, messages, responses
from headstart.api.dialects.base import About, Dialect
from headstart.api.errors import (
    DeadlinePassed,
    ModelNotFound,
    NoSuchReceipt,
    NoSuchResponse,
    NoWorker,
    request_id_of,
)
from headstart.api.plumbing import (
    BODY_BYTES,
    HANDLERS,
    INLINE_BYTES,
    RequestId,
    json_response,
    on_error,
    on_gone,
    read_body,
    unless_gone,
)
from headstart.errors import RequestError
from headstart.gateway.admin import Admin
from headstart.gateway.bodies import field_of, limited, text_salt, with_more
from headstart.gateway.decisions import Asked
from headstart.gateway.forward import Flight
from headstart.gateway.metrics import CONTENT_TYPE
from headstart.gateway.passing import Passing, as_said
from headstart.gateway.router import Router
from headstart.gateway.sending import Order, Refused, Said
from headstart.gateway.worker import Worker

_INLINE_BYTES = 4 * INLINE_BYTES  # a prompt of 32k tokens and more, whose way to a thread takes longer than its parsing
_PASSED = frozenset(
    (
        *("accept", "anthropic-version", "anthropic-beta", "traceparent", "tracestate"),
        *("x-headstart-priority", "x-headstart-session", "x-headstart-retention"),
    )
)


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
            named = field_of(body, "model") if len(body) <= INLINE_BYTES else await asyncio.to_thread(field_of, body, "model")
            able = fleet.able(router.meant(named if isinstance(named, str) else None))
            for worker in sample(able, min(2, len(able))):
                try:
                    return as_said(await router.ask(worker, "POST", request.url.path, caller, body))
                except NoWorker:
                    continue
        raise NoWorker("no worker is there that could say; try again in a moment", code="no_worker", retry_after_s=2)

    async def asking_who_knows(request: Request) -> Response:
        """Pass on what only the worker knows that answered: receipts, why, what was said, cancelling it."""
        caller = caller_of(request)
        id = request.path_params["id"]
        method = "GET" if request.method == "HEAD" else request.method  # whose body the server leaves out
        said: Said | None = None
        for worker in router.places(id, caller):
            try:
                said = await router.ask(worker, method, request.url.path, caller)
            except NoWorker:
                continue
            if said.status != 404:
                break
        if said is None:
            raise NoSuchReceipt(f"there is no request {id[:64]!r}, or its worker is gone", code="not_found")
        return as_said(said)

    def answering(dialect: Dialect) -> Callable[[Request], Awaitable[Response | Passing]]:
        return partial(answer, dialect)

    async def answer(dialect: Dialect, request: Request) -> Response | Passing:
        require_json(request.headers)
        router.require_open()
        caller = caller_of(request)
        account = accounts.open(caller, endpoint=request.url.path, id=f"refused-{uuid.uuid4().hex}", headers=request.headers)
        router.in_flight += 1
        streaming = False
        flight: Flight | None = None
        try:
            ask, flight = await begun(dialect, request, account)
            if ask.stream:
                flight.begin()
                await asyncio.sleep(0)  # a worker has it before the rest is put together
            router.metrics.prepared(flight.order.known.made_s)
            ask = replace(ask, messages=None, prompt="", tools=None)  # what is long is not kept as long as the answer
            if not ask.stream:
                said = await unless_gone(request, flight.whole())
                return await on_gone(request, ClientDisconnect()) if said is None else as_said(said)
            streaming = True
            return Passing(
                flight,
                lambda: dialect.shape(ask, _about(flight, account, request)),
                quiet_s=router.keepalive_s,
                stall_s=router.stall_s,
                on_end=router.ended,
            )
        except Refused as refused:
            return as_said(refused.said)
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
                router.ended()
                if flight is not None:
                    flight.give_up()
                    flight.order.let_go()

    async def begun(dialect: Dialect, request: Request, account: Account) -> tuple[Ask, Flight]:
        caller = account.caller
        with router.bodies.holding() as more:
            body = await read_body(request, more, most=caller.body_bytes(BODY_BYTES))
            if len(body) <= _INLINE_BYTES:
                ask = dialect.parse(body, request.headers)
            else:
                ask = await asyncio.to_thread(dialect.parse, body, request.headers)
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
            salt = None if caller.key is None else text_salt(ask, caller)
            apart = None if salt is None or all(one.trusted for one in fleet.able(model)) else salt
            knowing = router.prompts.of(
                ask,
                root=fleet.root_of(model),
                salt=caller.salt(ask.salt) if apart is None else apart,
                among=partial(fleet.able, model),
                headers=fleet.headers,
            )
            # While another thread does that: all that does not depend on it.
            id = request_id_of(request.scope) or uuid.uuid4().hex
            allowed = limited(ask, caller)
            passed = {name: value for name, value in request.headers.items() if name in _PASSED} | {"x-request-id": id}
            deadlines = [one for one in (ask.handling.deadline_s, accounts.deadline_s) if one is not None]
            injects = ask.stream and dialect in (chat, completions) and not ask.include_usage
            if injects:
                body = with_more(body, usage=True, has_stream_options=ask.has_stream_options)
            bodies = [body]
            known = await knowing
        account.tokenised(known.tokens)
        asked = Asked(id, caller.tenant, account.arrived, account.model, known.tokens, known.by, account.session)
        router.decisions.keep(asked)
        deadline_s = min(deadlines) - account.tokenise_s if deadlines else None
        if deadline_s is not None and deadline_s <= 0:
            router.metrics.prepared(known.made_s)
            raise DeadlinePassed("the prompt was not tokenised within the deadline", code="deadline_exceeded")
        with ExitStack() as held:
            held.enter_context(router.unsent.holding())(len(body))
            unsent = held.pop_all()
        ends_s = None if deadline_s is None else time.monotonic() + deadline_s

        def body_for(worker: Worker) -> bytes:
            return bodies[0] if salt is None or worker.trusted else with_more(bodies[0], salt=salt)

        def let_go() -> None:
            bodies.clear()
            unsent.close()

        def headers(worker: Worker) -> dict[str, str]:
            told = passed | ({} if worker.trusted else allowed) | router.headers(worker, caller)
            if ends_s is not None:
                told["x-headstart-deadline"] = f"{max(0.001, ends_s - time.monotonic()):.3f}"
            return told

        def on_named(answer: str, worker: str) -> None:
            router.named(answer, worker, caller.tenant)
            router.decisions.answered(asked, answer)

        order = Order(
            path=request.url.path,
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
        return ask, flight

    admin = Admin(fleet, router.decisions, accounts)
    app = Starlette(
        routes=[  # those first that are asked for most: each is tried in turn
            Route("/v1/chat/completions", answering(chat), methods=["POST"]),
            Route("/v1/completions", answering(completions), methods=["POST"]),
            Route("/v1/responses", answering(responses), methods=["POST"]),
            Route("/v1/messages", answering(messages), methods=["POST"]),
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
            Route("/metrics", scrape),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/responses/{id}", asking_who_knows, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/cancel", asking_who_knows, methods=["POST"]),
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


def _about(flight: Flight, account: Account, request: Request) -> About:
    id = flight.seen.id or f"routed-{uuid.uuid4().hex}"
    return About(id, int(time.time()), account.model, request_id_of(request.scope))
