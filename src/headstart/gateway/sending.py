"""Where a request is sent and how: chosen, sent, watched until it ends. The one place that another way of sending replaces.

    async with sending.send(order, but=…) as sent:      a worker has it, and its answer begins
        …                                               what comes is the caller's to pass on
                                                        whatever goes wrong with the worker meanwhile is raised as Missed

A way that takes two steps (one worker computes the prompt, another goes on) is another `Sending`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from headstart.gateway.connections import Lost, NotTaken, Response
from headstart.gateway.decisions import Asked, Attempt
from headstart.gateway.fleet import Fleet
from headstart.gateway.prompts import Known
from headstart.gateway.worker import Worker

_PRESUMED_AFTER_S = 0.02  # when a prompt of some length is being computed, and no first token is on its way


class Kind(Enum):
    """How a worker missed a request. REFUSED: it never had it. BUSY: it has no room. LACKING: it has not what the request asks
    for, and another may. UNREADY: it is starting or ending. BROKE: it had it and failed, or answered what is no answer."""

    REFUSED = auto()
    BUSY = auto()
    LACKING = auto()
    UNREADY = auto()
    BROKE = auto()


class Missed(Exception):
    """`worker` did not do what it was asked. `answer`: what it said, where it said something that a client may hear."""

    def __init__(self, worker: Worker, kind: Kind, why: str, *, answer: Said | None = None) -> None:
        super().__init__(why)
        self.worker = worker
        self.kind = kind
        self.why = why
        self.answer = answer


class Nobody(Exception):
    """No worker could take the request now."""


class Refused(Exception):
    """A worker refuses the request, and any other would: what it says is the answer."""

    def __init__(self, said: Said) -> None:
        super().__init__(said.status)
        self.said = said


@dataclass(frozen=True, slots=True)
class Said:
    """A whole answer of a worker."""

    status: int
    headers: Mapping[str, str]
    content: bytes


@dataclass(frozen=True, slots=True)
class Order:
    """A request as it is sent. `body_for`: its body for a worker, `headers_for`: and its headers. `pinned`: the only
    worker that can go on from what it refers to. `let_go`: called when it is not sent again; twice is fine."""

    path: str
    model: str | None
    known: Known
    asked: Asked
    stream: bool
    body_for: Callable[[Worker], bytes]
    headers_for: Callable[[Worker], Mapping[str, str]]
    pinned: str | None = None
    let_go: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Sent:
    """A request at a worker. `alone`: nothing else was there when it came."""

    worker: Worker
    response: Response
    attempt: Attempt
    sent_s: float
    alone: bool
    on_first_token: Callable[[], None]
    first_token_s: float | None = None
    output_tokens: int | None = None
    last_s: float | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0

    def first_token(self, now_s: float) -> None:
        """Note that its first token has come; later ones count for nothing."""
        if self.first_token_s is None:
            self.first_token_s = now_s - self.sent_s
            self.on_first_token()


class Sending(Protocol):
    def send(self, order: Order, *, but: Collection[str]) -> AbstractAsyncContextManager[Sent]:
        """Choose a worker, none of `but`, and send the request there; the context lasts as long as its answer. Raises Nobody
        before anything was sent, and Missed."""
        ...


@dataclass(slots=True)
class Direct:
    """One worker computes a request as a whole: the cheapest."""

    fleet: Fleet
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    @asynccontextmanager
    async def send(self, order: Order, *, but: Collection[str]) -> AsyncIterator[Sent]:
        fleet = self.fleet
        routing, known = fleet.routing, order.known
        worker, attempt = self._chosen(order, but)
        order.asked.tried(attempt)
        id = f"{order.asked.request}#{next(self._numbers)}"
        now_s = fleet.clock()
        alone = not routing.requests(worker.id)
        routing.sent(id, attempt.decision, tokens=known.tokens, now_s=now_s)
        # Later: of a long prompt it takes as long as the choice.
        presuming = asyncio.get_running_loop().call_later(_PRESUMED_AFTER_S, fleet.presume, worker, worker.lives, known.keys)
        worker.requests += 1
        worker.resting.tries(now_s)
        if not worker.flights:
            worker.moved_s = now_s
        sent: Sent | None = None
        expected: asyncio.TimerHandle | None = None
        try:
            async with asyncio.timeout(None) as scope:

                def lost() -> None:
                    if not scope.expired():  # told once; a second time there is nothing to tell
                        scope.reschedule(0.0)  # raises TimeoutError below, at once

                worker.flights[id] = lost
                try:
                    response = await self._begun(worker, order)
                    try:
                        first = lambda: routing.first_token(id, now_s=fleet.clock())  # noqa: E731
                        if not order.stream:  # nobody sees when its first token comes
                            first_s = max(0.0, attempt.decision.estimate.first_token_s - (fleet.clock() - now_s))
                            expected = asyncio.get_running_loop().call_later(first_s, first)
                        sent = Sent(worker, response, attempt, now_s, alone, first)
                        yield sent
                    finally:
                        response.close()
                finally:
                    worker.flights.pop(id, None)
        except Missed as missed:
            attempt.outcome = missed.why
            raise
        except Refused as refused:
            attempt.outcome = f"refused it ({refused.said.status})"
            raise
        except Lost as error:
            attempt.outcome = why = str(error)
            raise Missed(worker, Kind.REFUSED if isinstance(error, NotTaken) else Kind.BROKE, why) from error
        except TimeoutError as error:
            attempt.outcome = f"lost: {worker.why_down}"
            raise Missed(worker, Kind.BROKE, worker.why_down) from error
        except BaseException:
            attempt.outcome = "given up by its client"
            raise
        else:
            attempt.outcome = "answered"
            assert sent is not None
            self._learn(sent, order)
        finally:
            if expected is not None:
                expected.cancel()
            if attempt.outcome != "answered":  # so soon: it computed nothing
                presuming.cancel()
            output = None if sent is None else sent.output_tokens
            routing.finished(id, answer=output, now_s=fleet.clock())

    def _chosen(self, order: Order, but: Collection[str]) -> tuple[Worker, Attempt]:
        fleet, known = self.fleet, order.known
        able = fleet.able(order.model, but=but, role=("both", "decode")) or fleet.able(order.model, but=but)
        able = [one for one in able if order.path not in one.lacks] or able  # who says so is the one to say it
        if order.pinned is not None:
            able = [one for one in able if one.id == order.pinned]
        if not able:
            raise Nobody
        if known.pool_blocks is not None:
            fleet.routing.stored(None, known.keys[: known.pool_blocks])
            fleet.routing.removed(None, known.keys[known.pool_blocks :])
        names = {one.id for one in able}
        decision = fleet.routing.choose(known.keys, tokens=known.tokens, now_s=fleet.clock(), among=names)
        if decision is None:
            raise Nobody
        return fleet.workers[decision.worker], Attempt(decision, self._left_out(names, but))

    def _left_out(self, names: Collection[str], but: Collection[str]) -> dict[str, str]:
        found: dict[str, str] = {}
        if len(names) == len(self.fleet.workers):
            return found
        now_s = self.fleet.clock()
        for one in self.fleet.workers.values():
            if one.id not in names:
                state = one.state(now_s)
                other = "tried before" if one.id in but else "another model, or role"
                found[one.id] = state if state != "ready" else other
        return found

    async def _begun(self, worker: Worker, order: Order) -> Response:
        url = worker.address.url + order.path
        return await self.fleet.connections.begin("POST", url, headers=order.headers_for(worker), body=order.body_for(worker))

    def _learn(self, sent: Sent, order: Order) -> None:
        """Note how long it took, for what is told of the worker and for what is expected of it."""
        now_s, worker = self.fleet.clock(), sent.worker
        worker.input_tokens += sent.prompt_tokens
        worker.cached_tokens += sent.cached_tokens
        if sent.first_token_s is None:
            return
        worker.first_tokens.add(sent.first_token_s, now_s=now_s)
        if sent.alone:
            reused, tokens = sent.cached_tokens, sent.prompt_tokens or order.known.tokens
            worker.measured.first_token(reused=reused, tokens=tokens, seconds=sent.first_token_s)
        if sent.output_tokens is not None and sent.output_tokens > 1 and sent.last_s is not None:
            steps, seconds = sent.output_tokens - 1, sent.last_s - sent.sent_s - sent.first_token_s
            worker.tokens.add(seconds / steps, now_s=now_s)
            running = max(1, self.fleet.routing.requests(worker.id))
            worker.measured.answered(steps=steps, running=running, context=running * sent.prompt_tokens, seconds=seconds)
