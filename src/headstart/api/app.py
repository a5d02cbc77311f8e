"""The HTTP application: routes, bodies, request ids, errors. `service` makes answers, `dialects` say how they are written."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headstart import __version__
from headstart.api import metrics, openapi, receipts, roles, tokens
from headstart.api.access import HostCheck, KeyCheck, caller_of, require_json
from headstart.api.accounts import Account
from headstart.api.ask import Ask
from headstart.api.dialects import chat, completions, messages, responses
from headstart.api.dialects.base import About, Dialect
from headstart.api.errors import NoSuchReceipt, request_id_of
from headstart.api.generation import Generation
from headstart.api.pieces import Piece, joined
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
from headstart.api.receipts import Times
from headstart.api.served import Served
from headstart.api.service import Service
from headstart.api.state import worker_state
from headstart.api.streaming import STALL_S, EventStream
from headstart.errors import RequestError

log = logging.getLogger("headstart")
T = TypeVar("T")


def build_app(service: Service, *, host: str, stall_s: float = STALL_S) -> ASGIApp:
    """Return the application that serves what `service` has, now and as it changes. `host`: the address it listens on;
    `stall_s`: how long a client may leave a stream unread."""

    async def health(request: Request) -> Response:
        status, content = service.health()
        return json_response(content, status, {"retry-after": "2"} if status == 503 else None)

    async def ready(request: Request) -> Response:
        status, content = service.health()
        return json_response(
            {"ready": status == 200, "status": content["status"]}, status, None if status == 200 else {"retry-after": "2"}
        )

    async def version(request: Request) -> Response:
        return json_response({"version": __version__})

    async def described(request: Request) -> Response:
        return json_response(openapi.description())

    async def scrape(request: Request) -> Response:
        caller_of(request).require_operator()
        text = await asyncio.to_thread(service.metrics.exposition)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    async def state(request: Request) -> Response:
        caller_of(request).require_operator()
        trusted = caller_of(request).routed
        return json_response(await asyncio.to_thread(worker_state, service, trusted=trusted))

    async def models(request: Request) -> Response:
        names = service.names
        return json_response({"object": "list", "data": [service.model_object(name) for name in names]})

    async def model(request: Request) -> Response:
        return json_response(service.model_object(request.path_params["name"]))

    async def receipt(request: Request) -> Response:
        id = request.path_params["id"]
        told = service.accounts.receipts.find(id, caller_of(request).tenant)
        if told is None:
            raise NoSuchReceipt(
                f"there is no request {id[:64]!r}; receipts are kept for an hour, of the latest {receipts.MOST}",
                code="not_found",
            )
        return json_response(told)

    @asynccontextmanager
    async def body_of(request: Request) -> AsyncIterator[bytes]:
        """Read the body of what needs no engine, within the limits of its caller's key."""
        caller = caller_of(request)
        with service.accounts.admitted(caller), service.bodies.holding() as more:
            yield await read_body(request, more, most=caller.body_bytes(BODY_BYTES))

    async def why(request: Request) -> Response:
        id = request.path_params["id"]
        told = await service.why(id, caller_of(request).tenant)
        if told is None:
            raise NoSuchReceipt(
                f"there is no request {id[:64]!r} that has ended; prompts are remembered for an hour, as far as there is room",
                code="not_found",
            )
        return json_response(told)

    async def token_ids(request: Request) -> Response:
        id = request.path_params["id"]
        found = service.asked.get(id, caller_of(request).tenant)
        if found is None or found.ids is None:
            why = "is remembered" if service.asked.keep_ids else "has its token ids kept (server.keep_prompts)"
            raise NoSuchReceipt(f"there is no request {id[:64]!r} that {why}", code="not_found")
        ids = found.ids[: found.prompt_tokens].tolist()
        return json_response({"id": id, "object": "headstart.tokens", "prompt_token_ids": ids})

    async def response(request: Request) -> Response:
        id, tenant = request.path_params["id"], caller_of(request).tenant
        if request.method == "DELETE":
            service.conversations.forget(id, tenant)
            return json_response({"id": id, "object": "response", "deleted": True})
        return Response(service.conversations.told(id, tenant), media_type="application/json")

    async def cancel(request: Request) -> Response:
        id = request.path_params["id"]
        service.cancel(id, caller_of(request).tenant)
        return json_response({"id": id, "object": "response", "status": "cancelled", "output": []})

    async def role(request: Request) -> Response:
        caller_of(request).require_operator()
        served = service.require_served()
        if request.method == "GET":
            return json_response(roles.role_of(served))
        require_json(request.headers)
        async with body_of(request) as body:
            return json_response(roles.change_role(served, body))

    def telling(work: Callable[[Served, bytes], Mapping[str, Any]]) -> Callable[[Request], Awaitable[Response]]:
        """Return the endpoint that answers with what `work` makes of a body, beside the loop."""

        async def tell(request: Request) -> Response:
            require_json(request.headers)
            served = service.require_served()
            async with body_of(request) as body:
                return json_response(dict(await service.off_loop(work, served, body)))

        return tell

    def asking(
        parse: Callable[[bytes, Mapping[str, str]], Ask], work: Callable[[Served, Ask], Mapping[str, Any]]
    ) -> Callable[[Request], Awaitable[Response]]:
        return telling(lambda served, body: work(served, service.prompting.as_rendered(parse(body, {}))))

    async def count(request: Request) -> Response:
        require_json(request.headers)
        served = service.require_served()
        async with body_of(request) as body:
            ask = replace(messages.parse_to_count(body, request.headers), caller=caller_of(request))
            return json_response({"input_tokens": await service.off_loop(service.count, served, ask)})

    def answering(dialect: Dialect) -> Callable[[Request], Awaitable[Response]]:
        return partial(answer, dialect)

    async def answer(dialect: Dialect, request: Request) -> Response:
        require_json(request.headers)
        service.require_served()
        caller = caller_of(request)
        id = f"refused-{uuid.uuid4().hex}"  # until it has one that its client knows
        account = service.accounts.open(caller, endpoint=request.url.path, id=id, headers=request.headers)
        try:
            ask, generation = await begun(dialect, request, account)
        except RequestError as error:
            account.refused(error)
            raise
        except (ClientDisconnect, asyncio.CancelledError):
            account.left()
            raise
        except BaseException:
            account.failed()
            raise
        with ExitStack() as until_answered:
            until_answered.enter_context(generation)
            diagnosis = partial(service.diagnosis, generation.id, ask)
            tell = partial(service.conversations.tell, generation.id)
            about = About(generation.id, int(time.time()), account.model, request_id_of(request.scope), diagnosis, tell)
            shape = dialect.shape(ask, about)
            if ask.stream:
                timing = {"server-timing": f"tokenise;dur={1000 * account.tokenise_s:.1f}"}
                stream = EventStream(generation, shape, timing | _canonical(generation), stall_s=stall_s)
                until_answered.pop_all()  # the stream ends it
                return stream
            answers = await unless_gone(request, _whole(generation))
        if answers is None:
            return await on_gone(request, ClientDisconnect())
        return json_response(shape.whole(answers, generation.usage()), headers=_timing(generation) | _canonical(generation))

    async def begun(dialect: Dialect, request: Request, account: Account) -> tuple[Ask, Generation]:
        with service.bodies.holding() as more:
            body = await read_body(request, more, most=account.caller.body_bytes(BODY_BYTES))
            # A large body would hold up everybody's streams for as long as it takes to read what stands in it.
            on_loop = len(body) <= INLINE_BYTES
            ask = (
                dialect.parse(body, request.headers)
                if on_loop
                else await service.off_loop(dialect.parse, body, request.headers)
            )
            del body
            ask = replace(ask, caller=account.caller)
            return ask, await service.start(ask, account)

    app = Starlette(
        routes=[
            Route("/health", health),
            Route("/ready", ready),
            Route("/version", version),
            Route("/openapi.json", described),
            Route("/metrics", scrape),
            Route("/v1/headstart/role", role, methods=["GET", "PATCH"]),
            Route("/v1/headstart/worker", state),
            Route("/v1/headstart/requests/{id}", receipt),
            Route("/v1/headstart/requests/{id}/why", why),
            Route("/v1/headstart/requests/{id}/tokens", token_ids),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/v1/chat/completions", answering(chat), methods=["POST"]),
            Route("/v1/completions", answering(completions), methods=["POST"]),
            Route("/v1/responses", answering(responses), methods=["POST"]),
            Route("/v1/responses/{id}", response, methods=["GET", "DELETE"]),
            Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
            Route("/v1/messages", answering(messages), methods=["POST"]),
            Route("/v1/messages/count_tokens", count, methods=["POST"]),
            Route("/v1/chat/completions/render", asking(chat.parse, tokens.rendered), methods=["POST"]),
            Route("/v1/completions/render", asking(completions.parse, tokens.rendered), methods=["POST"]),
            Route("/tokenize", telling(tokens.tokenise), methods=["POST"]),
            Route("/detokenize", telling(tokens.detokenise), methods=["POST"]),
        ],
        exception_handlers=HANDLERS,
    )
    checked = KeyCheck(app, service.accounts, on_error=on_error)
    return RequestId(HostCheck(checked, host=host))  # the id outside of everything, so that the answer to a bug has its id too


def _canonical(generation: Generation) -> dict[str, str]:
    """Return the header that names the rules of canonical form that changed something."""
    return {"x-headstart-canonical": ", ".join(sorted(generation.acted))} if generation.acted else {}


async def _whole(generation: Generation) -> list[Piece]:
    """Return each answer in one piece."""
    pieces = [piece async for piece in generation.pieces() if piece is not None]
    return [joined([piece for piece in pieces if piece.index == answer.index]) for answer in generation.answers]


def _timing(generation: Generation) -> dict[str, str]:
    receipt = generation.answers[0].receipt
    if receipt is None:
        return {}
    return {"server-timing": Times.of(receipt, tokenise_s=generation.account.tokenise_s).header}
