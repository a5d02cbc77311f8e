"""The served model through its life (loading, ready, failed, closing) and its requests in flight.

The bridge between two worlds: the engine calls back on its own thread, the server lives on an event loop. Everything here
runs on the loop, except `progress`, `ready` and `failed`, which the loading thread calls, and templates and tokenisers,
which run in a small pool so that a long prompt does not hold up other streams.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

from headstart.api.errors import GenerationFailed, ModelNotFound, NotReady, TooManyWaiting
from headstart.api.metrics import Metrics
from headstart.api.openai import Ask, usage_of
from headstart.api.served import Served
from headstart.cache.prefix_cache import CacheStatistics
from headstart.engine.base import FinishReason, GenerationRequest, Receipt, TokenEvent
from headstart.errors import HeadstartError, RequestError
from headstart.render import TextStream

log = logging.getLogger("headstart")
T = TypeVar("T")

KEEPALIVE_S = 10.0
RECEIPT_WAIT_S = 10.0  # how long an answer that ended on a stop text waits for the engine's last word
BODIES_BYTES = 128 << 20  # of all bodies that are being read, parsed or tokenised
_LINES_ONCE = 256  # different remarks on requests that are logged before the log falls silent
_NOT_LOADED = "the model could not be loaded; the server's log says why"


@dataclass(frozen=True, slots=True)
class Loading:
    stage: str
    progress: float | None  # 0 … 1, None where it cannot be known


class Service:
    """`max_waiting` bounds the requests that wait for the engine, those being tokenised included."""

    def __init__(self, *, max_waiting: int = 256, keepalive_s: float = KEEPALIVE_S) -> None:
        self.keepalive_s = keepalive_s
        self.metrics = Metrics(self)
        self.created = int(time.time())
        self._max_waiting = max_waiting
        self._state: Loading | Served | HeadstartError = Loading("starting", None)
        self._closing = False
        self._preparing = 0
        self._flights: dict[str, Generation] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="headstart-render")
        self._logged: set[str] = set()
        self._body_bytes = 0
        self._told_of_tools = False

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self._state = Loading(stage, fraction)

    def ready(self, served: Served) -> None:
        self._state = served

    def failed(self, error: HeadstartError) -> None:
        self._state = error

    @property
    def served(self) -> Served | None:
        return self._state if isinstance(self._state, Served) else None

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status and what /health says. Paths are for the log: whoever reaches the port reads this."""
        state = self._state
        if isinstance(state, Loading):
            return 503, {"status": "loading", "stage": state.stage, "progress": state.progress}
        if isinstance(state, HeadstartError):
            return 503, {"status": "failed", "error": _NOT_LOADED}
        if failure := state.engine.failed:
            return 503, {"status": "failed", "error": failure}
        info = state.engine.info
        status = {"status": "closing" if self._closing else "ok", "model": state.name, "note": state.note}
        said, *why = info.cache.split("; ")
        told = [
            part for part in why if part.startswith("cache.")
        ]  # of a setting; what went wrong with a tier names its directory
        cache = "; ".join([said, *told, *(["the server's log says why"] if len(told) < len(why) else [])])
        paused = [] if state.cache is None else paused_tiers(state.cache.statistics())
        cache = "; ".join([cache, *paused])
        facts = {"device": info.device, "dtype": info.dtype, "context_tokens": info.context_tokens, "cache": cache}
        return 503 if self._closing else 200, status | facts

    def require_served(self) -> Served:
        """Return the model. Raises NotReady while it loads, when it could not be loaded, and when the server goes down."""
        state = self._state
        if self._closing:
            raise NotReady("the server is shutting down", code="shutting_down", retry_after_s=5)
        if isinstance(state, Loading):
            done = "" if state.progress is None else f" ({state.progress:.0%})"
            raise NotReady(f"the model is still loading: {state.stage}{done}", code="model_loading", retry_after_s=2)
        if isinstance(state, HeadstartError):
            raise NotReady(_NOT_LOADED, code="model_failed")
        if failure := state.engine.failed:
            raise NotReady(failure, code="engine_failed")
        return state

    def model_object(self, name: str | None = None) -> dict[str, Any]:
        """Return what /v1/models says of the served model. Raises ModelNotFound for another `name`."""
        served = self.require_served()
        if name is not None and name != served.name:
            raise ModelNotFound(f"there is no model {name!r} here; this server has {served.name!r}", code="model_not_found")
        return {
            "id": served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "max_model_len": served.engine.info.context_tokens,
        }

    async def start(self, ask: Ask) -> Generation:
        """Tokenise and submit. Raises RequestError for whatever can be known before the first token."""
        served = self.require_served()
        self._log_ignored("unknown field", ask.ignored)
        if ask.model is not None and ask.model != served.name:
            self._log_ignored("unknown model name", [ask.model])
        if served.engine.load().waiting + self._preparing >= self._max_waiting:
            raise TooManyWaiting(
                f"{self._max_waiting} requests are waiting already; try again in a moment",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self._preparing += 1
        try:
            prompt = await self.off_loop(_prompt_ids, served, ask)
            if ask.tools and not self._told_of_tools:
                self._told_of_tools = True
                self._log_once(await self.off_loop(_about_tools, served, ask, prompt))
            self.require_served()  # the server may have begun to go down meanwhile
            generation = Generation(self, served, ask, _request(served, ask, prompt))
            generation.submit()
        finally:
            self._preparing -= 1
        return generation

    async def off_loop(self, work: Callable[..., T], *arguments: object) -> T:
        """Return what `work` returns, run beside the loop, a few at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)

    @contextmanager
    def holding_body(self) -> Iterator[Callable[[int], None]]:
        """Count the bytes of one body while it is held: call what is given with each piece's size.

        It raises TooManyWaiting where all bodies together would be more than BODIES_BYTES."""
        mine = 0

        def more(nbytes: int) -> None:
            nonlocal mine
            mine += nbytes
            self._body_bytes += nbytes
            if self._body_bytes > BODIES_BYTES:
                raise TooManyWaiting(
                    "the requests that are being read are too large together; try again in a moment",
                    code="rate_limit_exceeded",
                    retry_after_s=1,
                )

        try:
            yield more
        finally:
            self._body_bytes -= mine

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, let those in flight end, abort what is left after `timeout_s`.

        Requests that are being tokenised are told that they came too late, but they are told."""
        self._closing = True
        if self._flights:
            running = (
                "1 request still runs, it has"
                if len(self._flights) == 1
                else f"{len(self._flights)} requests still run, they have"
            )
            log.info("shutting down: %s %g seconds", running, timeout_s)
        ends = time.monotonic() + timeout_s
        while (self._flights or self._preparing) and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for generation in list(self._flights.values()):
            generation.abort()

    def close(self) -> None:
        self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def landed(self, generation: Generation) -> None:
        self._flights.pop(generation.id, None)

    def took_off(self, generation: Generation) -> None:
        self._flights[generation.id] = generation

    def _log_ignored(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            self._log_once(f"ignoring {what} {name[:64]!r}")

    def _log_once(self, line: str) -> None:
        if line not in self._logged and len(self._logged) < _LINES_ONCE:
            self._logged.add(line)
            log.info("%s", line)


class Generation:
    """One request in flight: its text as it comes, then `finish`, `receipt` and `completion_tokens`.

    Use as a context manager: leaving it before the end, for whatever reason, aborts the request in the engine."""

    def __init__(self, service: Service, served: Served, ask: Ask, request: GenerationRequest) -> None:
        self.id = request.id
        self.finish: FinishReason | None = None
        self.receipt: Receipt | None = None
        self.error: str | None = None
        self.completion_tokens = 0
        self._service = service
        self._engine = served.engine
        self._request = request
        self._text = TextStream(served.renderer, ask.stop)
        self._read = False  # whether the text has been taken to its end, or nobody takes it any more
        self._reported = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[TokenEvent] = asyncio.Queue()  # bounded by max_tokens, which the context bounds

    def submit(self) -> None:
        self._engine.submit(self._request, self._on_event)
        self._service.took_off(self)

    def abort(self) -> None:
        self._engine.abort(self.id)

    async def pieces(self) -> AsyncIterator[str | None]:
        """Yield text as it comes, and None whenever `keepalive_s` passed without any. Raises GenerationFailed."""
        try:
            while True:
                try:
                    async with asyncio.timeout(self._service.keepalive_s):
                        event = await self._events.get()
                except TimeoutError:
                    yield None
                    continue
                if event.token is not None:
                    self.completion_tokens += 1
                    if text := self._text.push(event.token):
                        yield text
                    if self._text.stopped and event.finish is None:
                        await self._stop()
                        return
                if event.finish is not None:
                    break
            if text := self._text.finish():
                yield text
            if self._text.stopped:
                self.finish = "stop"
        finally:
            self._read = True
            self._report()
        if event.finish == "error":
            raise GenerationFailed(event.error or "the engine failed", code="generation_failed")
        if event.finish == "abort":
            raise NotReady("the request was aborted because the server is shutting down", code="shutting_down", retry_after_s=5)

    def usage(self) -> dict[str, Any]:
        receipt = self.receipt or Receipt(len(self._request.prompt), 0, 0, 0, 0, 0.0, 0.0, 0.0, None, 0.0)
        return usage_of(receipt, completion_tokens=self.completion_tokens)

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.receipt is None:
            self.abort()
        self._read = True
        self._report()

    def _report(self) -> None:
        """Count and log the request, once, when the engine has ended it and its text is out: only then is it known how it
        ended and how many tokens the client was told of, which may be fewer than the engine made behind a stop text."""
        if self._reported or not self._read or self.receipt is None or self.finish is None:
            return
        self._reported = True
        receipt = self.receipt
        if self.finish != "abort":  # of an answer that was cut off nobody was told
            receipt = replace(receipt, completion_tokens=self.completion_tokens)
        self._service.metrics.observe(self.finish, receipt)
        log.info("%s", _request_line(self.id, self.finish, receipt, self.error))

    async def _stop(self) -> None:
        """A stop text appeared: the engine need not go on, but its receipt says what was cached."""
        self.finish = "stop"
        self.abort()
        with_receipt_by = self._loop.time() + RECEIPT_WAIT_S
        while self.receipt is None and (left := with_receipt_by - self._loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._events.get()
            except TimeoutError:
                return

    def _on_event(self, event: TokenEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._receive, event)
        except RuntimeError:  # the loop is closed: nobody is left to tell
            self._service.landed(self)

    def _receive(self, event: TokenEvent) -> None:
        self._events.put_nowait(event)
        if event.finish is not None:
            self.finish = self.finish or event.finish
            self.receipt = event.receipt
            self.error = event.error
            self._service.landed(self)
            self._report()


def _prompt_ids(served: Served, ask: Ask) -> tuple[int, ...]:
    """Return the prompt's token ids. Takes a while for a long prompt. Raises RequestError naming the place."""
    context = served.engine.info.context_tokens
    if ask.kind == "chat":
        return tuple(served.renderer.chat(ask.messages, tools=ask.tools, context_tokens=context))
    return tuple(served.renderer.completion(ask.prompt, context_tokens=context))


def _about_tools(served: Served, ask: Ask, prompt: tuple[int, ...]) -> str:
    """Return what becomes of the tools in `prompt`: a template without a place for them says nothing."""
    try:
        ignored = _prompt_ids(served, replace(ask, tools=None)) == prompt
    except RequestError:  # the template takes these messages with their tools alone
        ignored = False
    if ignored:
        return f"the chat template of {served.name} has no place for tools; they are ignored"
    return "tools enter the prompt, but what a model answers to them is given as text, not as tool_calls, yet"


def _request(served: Served, ask: Ask, prompt: tuple[int, ...]) -> GenerationRequest:
    return served.request(
        f"{'chatcmpl' if ask.kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}",
        prompt,
        max_tokens=ask.max_tokens,
        temperature=ask.temperature,
        top_p=ask.top_p,
        top_k=ask.top_k,
        seed=ask.seed,
        salt=ask.salt,
        prompt_param="messages" if ask.kind == "chat" else "prompt",
    )


def _request_line(request_id: str, finish: FinishReason, receipt: Receipt, error: str | None) -> str:
    """One line a request: what came from where, how soon, how fast."""
    new = receipt.prompt_tokens - receipt.cached_tokens
    ttft = "none" if receipt.first_token_s is None else f"{receipt.first_token_s:.3f} s"
    decode_s = receipt.total_s - (receipt.first_token_s or 0.0)
    answered = receipt.completion_tokens
    rate = f", {(answered - 1) / decode_s:.1f} tokens/s" if answered > 1 and decode_s > 0 else ""
    return (
        f"{request_id} prompt {receipt.prompt_tokens}, cached {receipt.cached_memory_tokens} from memory and "
        f"{receipt.cached_disk_tokens} from disk, new {new}; first token {ttft}; "
        f"{answered} token{'' if answered == 1 else 's'}{rate}; {finish}"
        + "".join(f"; {note}" for note in (error, *receipt.notes) if note)
    )


def paused_tiers(statistics: CacheStatistics) -> list[str]:
    """Return a sentence for every tier that stores nothing now, and for every device of one that does not take part."""
    said = [
        f"nothing is stored in the tier {tier.name!r} for now, what is there is still read: {tier.paused}"
        for tier in statistics.tiers
        if tier.paused
    ]
    return said + [
        f"device {device.name} of the tier {tier.name!r} takes nothing for now: {device.paused}"
        for tier in statistics.tiers
        for device in tier.devices
        if device.paused
    ]
