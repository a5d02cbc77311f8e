"""One request on its way: to a worker, to another one where nothing was answered yet, and back as it comes.

asked ─▶ sent ─▶ opening held back ─▶ first token ─▶ passed on as it comes ─▶ ended
  ▲       │ refused, busy, down,           │
  └───────┘ broken, garbled                └─ the worker is lost: a clear error, in the client's dialect
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from headstart.api.accounts import Account
from headstart.api.errors import DeadlinePassed, GenerationFailed, NoWorker, TooManyWaiting, WorkerFailed
from headstart.errors import RequestError
from headstart.gateway.answers import Garbled, Mark, Seen, events_of
from headstart.gateway.connections import MOST_BYTES, parts_of
from headstart.gateway.fleet import Fleet
from headstart.gateway.metrics import Metrics
from headstart.gateway.sending import Kind, Missed, Nobody, Order, Refused, Said, Sending, Sent

T = TypeVar("T")
log = logging.getLogger("headstart")

_BROKEN = 3  # workers that may fail on one request: it may be the request
_LOOK_S = 0.25
_HELD_BYTES = 1 << 20  # of events that open a stream; with more it has begun
_UNREAD = 64  # events that may wait for a client that reads slowly
_SLACK_S = 2.0  # that a worker has to say itself that a deadline has passed
_PASSED = ("content-type", "x-headstart-canonical", "retry-after", "retry-after-ms", "x-should-retry")
_OF_SERVER = ("server_error", "api_error", "overloaded_error")
_FINAL = ("deadline_exceeded", "cancelled", "request_timeout")


@dataclass(eq=False, slots=True)
class Flight:
    """`order`: what is sent. `patience_s`: how long it waits while nobody can take it. `deadline_s`: seconds that it has left,
    None for any number. `strip_usage`: the client did not ask for the chunk that has it. `on_named`: is told the answer's id
    and who gives it."""

    fleet: Fleet
    sending: Sending
    order: Order
    account: Account
    patience_s: float
    deadline_s: float | None
    strip_usage: bool
    on_named: Callable[[str, str], None]
    metrics: Metrics
    seen: Seen = field(init=False)
    told: bool = False  # something went to the client that no other worker can take back
    retries: int = 0
    first_token_s: float | None = None  # from the request's arrival
    _queue: asyncio.Queue[bytes | None] = field(default_factory=lambda: asyncio.Queue(_UNREAD))
    _failure: Exception | None = None
    _pumping: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self.seen = Seen(self.order.path)

    async def whole(self) -> Said:
        """Return the answer in one piece. Raises RequestError, and Refused."""
        try:
            said = await self._in_time(self._tried(self._take_whole))
        except asyncio.CancelledError:
            self._settle("abort")
            raise
        except (RequestError, Refused) as error:
            self._failed(error)
            raise
        self._settle(self.seen.finish)
        return said

    def begin(self) -> None:
        """Let a stream begin at the next turn of the loop, whoever reads it then."""
        self._pumping = asyncio.get_running_loop().create_task(self._pump())

    def give_up(self) -> None:
        """Let what began, and nobody reads, come to nothing."""
        if self._pumping is not None:
            self._pumping.cancel()

    async def stream(self, quiet_s: float) -> AsyncGenerator[bytes | None, None]:
        """Yield the answer that has begun as it comes, an event at a time, and None whenever nothing came for `quiet_s`. Raises
        RequestError, and Refused before anything else. Whoever ends before it does ends the request."""
        task = self._pumping
        assert task is not None
        try:
            while True:
                try:
                    async with asyncio.timeout(quiet_s):
                        item = await self._queue.get()
                except TimeoutError:
                    yield None
                    continue
                if item is None:
                    break
                yield item
            if self._failure is not None:
                raise self._failure
        finally:
            if not task.done():
                task.cancel()
                self._settle("abort")  # at once: who is cancelled may be so again at the next await
                await asyncio.wait({task})

    async def _pump(self) -> None:
        try:
            await self._in_time(self._tried(self._take_stream))
            self._settle(self.seen.finish)
        except (RequestError, Refused) as error:
            if self.told and self.seen.ended and self.seen.error is None:  # all was said but that the connection ends
                self._settle(self.seen.finish)
            else:
                self._failure = error
                self._failed(error)
        except Exception:
            log.exception("forwarding a request failed unexpectedly")
            self._failure = GenerationFailed("the router failed on this request; its log has the details", code="server_error")
            self._failed(self._failure)
        await self._queue.put(None)

    async def _in_time(self, work: Awaitable[T]) -> T:
        if self.deadline_s is None:
            return await work
        try:
            async with asyncio.timeout(self.deadline_s + _SLACK_S):
                return await work
        except TimeoutError as error:
            raise DeadlinePassed("the request was not done within its deadline", code="deadline_exceeded") from error

    async def _tried(self, take: Callable[[Sent], Awaitable[T]]) -> T:
        """Return what `take` makes of the answer of the first worker that gives one."""
        fleet = self.fleet
        until_s = fleet.clock() + self.patience_s
        but: set[str] = set()
        lacking: set[str] = set()
        broken = 0
        last: Missed | None = None
        busy: Missed | None = None
        all_lack = True
        while True:
            try:
                async with self.sending.send(self.order, but=but) as sent:
                    taken = await take(sent)
                fleet.worked(sent.worker)
                return taken
            except Missed as missed:
                last = missed
                but.add(missed.worker.id)
                broken += missed.kind in (Kind.BROKE, Kind.LACKING)
                if missed.kind is Kind.LACKING:
                    lacking.add(missed.worker.id)
                else:
                    all_lack = False
                if missed.kind is Kind.BUSY:
                    busy = missed
                self.retries += 1
                if missed.kind is Kind.BROKE:
                    fleet.failed(missed.worker, missed.why)
                if missed.kind not in (Kind.BUSY, Kind.LACKING):
                    fleet.doubt(missed.worker)
                if self.told:
                    raise WorkerFailed(
                        f"the worker that answered was lost midway ({_public(missed)}); send the request again",
                        code="worker_lost",
                    ) from missed
                if broken >= _BROKEN and all_lack and self._worth_waiting(until_s):
                    but |= {id for id, worker in fleet.workers.items() if worker.state(fleet.clock()) == "ready"}
                    lacking |= but  # the others are not asked: most likely they lack it, too
                elif broken >= _BROKEN:
                    if missed.answer is not None:
                        raise Refused(missed.answer) from missed
                    raise WorkerFailed(
                        f"{broken} workers failed on this request, the last one: {_public(missed)}", code="workers_failed"
                    ) from missed
            except Nobody:
                lack = last if all_lack and not self._worth_waiting(until_s) else None
                final = busy or lack  # who has it and has no room says more than who lacks it
                if final is not None and final.answer is not None:
                    raise Refused(final.answer) from final
                if busy is not None:
                    raise TooManyWaiting(
                        "all workers are full; try again in a moment", code="rate_limit_exceeded", retry_after_s=1
                    ) from busy
                if fleet.clock() >= until_s:
                    raise self._nobody() from last
                but = set(lacking)  # the others may be well again
                changed = fleet.changed
                try:
                    async with asyncio.timeout(_LOOK_S):
                        await changed.wait()
                except TimeoutError:
                    pass

    def _worth_waiting(self, until_s: float) -> bool:
        """Whether somebody who starts may have what others lack, while there is time."""
        return self.order.pinned is None and self.fleet.clock() < until_s and self.fleet.may_come(self.order.model)

    def _nobody(self) -> RequestError:
        if self.order.pinned is not None:
            return NoWorker(
                "the worker that has the earlier response does not answer; send the whole conversation instead",
                code="no_worker",
                retry_after_s=2,
            )
        return NoWorker("no worker is there that could take this; try again in a moment", code="no_worker", retry_after_s=2)

    async def _take_whole(self, sent: Sent) -> Said:
        said = await _said(sent)
        _require_good(sent, said, self.order.path)
        if not said.headers.get("content-type", "").startswith("application/json"):
            raise Missed(sent.worker, Kind.BROKE, "it answered something else than JSON")
        self._begin()
        try:
            self.seen.whole(msgspec.json.decode(said.content))
        except (Garbled, ValueError, RecursionError, msgspec.MsgspecError) as error:
            raise Missed(sent.worker, Kind.BROKE, f"it answered what is none: {error}") from error
        first_s = _first_token_s(sent.response.headers.get("server-timing", ""))
        if first_s is not None:
            sent.first_token(sent.sent_s + first_s)
            self.first_token_s = sent.sent_s - self.account.arrived_s + first_s
        self._measured(sent)
        self.on_named(self.seen.id, sent.worker.id)
        return said

    async def _take_stream(self, sent: Sent) -> None:
        if sent.response.status != 200:
            said = await _said(sent)
            _require_good(sent, said, self.order.path)
            raise Missed(sent.worker, Kind.BROKE, f"it answered {said.status} to a stream")
        if not sent.response.headers.get("content-type", "").startswith("text/event-stream"):
            raise Missed(sent.worker, Kind.BROKE, "it answered something else than events")
        self._begin()
        held: list[bytes] = []
        held_bytes = 0
        named = False
        try:
            async for event in events_of(parts_of(sent.response)):
                mark = self.seen.event(event)
                if mark is Mark.OPENING and not self.told and held_bytes + len(event) <= _HELD_BYTES:
                    held.append(event)
                    held_bytes += len(event)
                    continue
                if mark is Mark.FAILURE and not self.told:
                    self._failed_early(sent)
                if mark is Mark.QUIET or (mark is Mark.USAGE and self.strip_usage):
                    continue  # quiet is kept here, whatever workers do about it
                first = not self.told
                if first:
                    self._first(sent)
                    event = b"".join((*held, event))
                if not named and self.seen.id:
                    named = True
                    self.on_named(self.seen.id, sent.worker.id)
                await self._queue.put(event)
                if first:
                    await asyncio.sleep(0)  # it goes out before what came with it is looked at
        except Garbled as error:
            raise Missed(sent.worker, Kind.BROKE, error.message) from error
        if not self.seen.ended and self.seen.error is None:
            raise Missed(sent.worker, Kind.BROKE, "its stream ended amid the answer")
        self._measured(sent)

    def _begin(self) -> None:
        self.seen = Seen(self.order.path)  # of whoever answers now

    def _first(self, sent: Sent) -> None:
        self.told = True
        self.order.let_go()
        now_s = self.fleet.clock()
        sent.first_token(now_s)
        self.first_token_s = now_s - self.account.arrived_s

    def _failed_early(self, sent: Sent) -> None:
        """Raise what becomes of an answer that fails before its first token."""
        error = self.seen.error or {}
        why = str(error.get("message") or "it failed")
        code = error.get("code")
        if error.get("type") in _OF_SERVER and code not in _FINAL:
            raise Missed(sent.worker, Kind.UNREADY if code == "shutting_down" else Kind.BROKE, why)

    def _measured(self, sent: Sent) -> None:
        used = self.seen.used()
        sent.prompt_tokens, sent.output_tokens = used["prompt"], used["output"] or None
        sent.cached_tokens = used["cached_memory"] + used["cached_disk"]
        sent.last_s = self.fleet.clock()

    def _failed(self, error: RequestError | Refused) -> None:
        """Close the account of what has no answer, or the beginning of one."""
        self.account.status = error.said.status if isinstance(error, Refused) else error.status
        if not self.told:
            self._begin()  # what was said before came to nothing
        self._settle("error" if self.told or self.account.status in (500, 502) else "refused")

    def _settle(self, finish: str) -> None:
        """Close the account with what the answer says that it used, or as much as it was seen to use where it was cut before it
        could say so."""
        used = self.seen.used()
        if self.seen.begun and not self.seen.ended:
            used["prompt"] = used["prompt"] or self.order.known.tokens
            used["output"] = max(used["output"], self.seen.tokens)
        if not self.account.closed:
            self.metrics.ended(finish, first_token_s=self.first_token_s, retries=self.retries)
        if self.seen.id:
            self.account.id = self.seen.id
        self.account.settled(
            finish,  # type: ignore[arg-type]  # one of the words of the usage log
            first_token_s=self.first_token_s,
            answers=self.seen.answers,
            **used,
        )


async def _said(sent: Sent) -> Said:
    """Return all of a worker's answer. Raises Missed for one without end."""
    response = sent.response
    parts: list[bytes] = []
    size = 0
    async for part in parts_of(response):
        size += len(part)
        if size > MOST_BYTES:
            raise Missed(sent.worker, Kind.BROKE, f"it answered more than {MOST_BYTES >> 20} MiB")
        parts.append(part)
    headers = {name: response.headers[name] for name in _PASSED if name in response.headers}
    return Said(response.status, headers, b"".join(parts))


def _require_good(sent: Sent, said: Said, path: str) -> None:
    """Raise Missed for what another worker may do better, Refused for what every worker would say."""
    status = said.status
    if status == 200:
        return
    if status == 429:
        raise Missed(sent.worker, Kind.BUSY, "it is full", answer=said)
    if status in (404, 405, 501):
        if not _says_why(said):
            sent.worker.lacks.add(path)
        raise Missed(sent.worker, Kind.LACKING, f"it has no such thing ({status})", answer=said)
    if status == 503:
        raise Missed(sent.worker, Kind.UNREADY, "it takes nothing now (503)", answer=said)
    if status in (401, 403):
        raise Missed(sent.worker, Kind.BROKE, f"it refuses the router's key ({status})")
    if (status >= 500 and status != 504) or status < 400:
        raise Missed(sent.worker, Kind.BROKE, f"it answered {status}", answer=said if status >= 500 else None)
    raise Refused(said)


def _says_why(said: Said) -> bool:
    """Whether the worker answers itself. What does not say so as a dialect does is the HTTP server's word that it has no such
    path."""
    try:
        return isinstance(msgspec.json.decode(said.content, type=dict[str, Any]).get("error"), dict)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False


def _public(missed: Missed) -> str:
    """Return what went wrong in words that name no machine."""
    if missed.answer is not None:
        return f"it answered {missed.answer.status}"
    return missed.why if "//" not in missed.why and "/" not in missed.why else "it does not answer"


def _first_token_s(header: str) -> float | None:
    """Return what a server's timing says of the first token."""
    for part in header.split(","):
        name, _, duration = part.strip().partition(";dur=")
        if name == "first_token":
            try:
                return float(duration) / 1000
            except ValueError:
                return None
    return None
