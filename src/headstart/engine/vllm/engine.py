"""An Engine in front of a vLLM server: requests go to its `/v1/completions` as token ids, tokens come back as a stream.

    submit ─▶ loop's thread: POST, read lines ─▶ events        vLLM ends: its requests end with "error", it is started again
    abort  ─▶ the task is cancelled, the connection closed, vLLM stops computing

The one thread runs an event loop; callbacks are called on it. What a server says about one request ends that request only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event, Lock, Thread
from typing import Any

import httpx
import msgspec

from headstart.engine.base import EngineInfo, EngineLoad, FinishReason, GenerationRequest, Receipt, TokenEvent
from headstart.engine.serving.limits import refuse_impossible
from headstart.engine.vllm.process import VLLMProcess
from headstart.engine.vllm.speaking import Reading, asked
from headstart.errors import ModelError, RequestError
from headstart.metrics import Counters

_log = logging.getLogger(__name__)

_CLOSE_S = 10.0  # for requests to be told that they are aborted
_LOOK_S = 0.5
_STARTS, _STARTS_WITHIN_S = 3, 600.0  # a server that ends oftener is left as it is
_NOTE = "vLLM does not say which of the cached tokens came from its memory and which from disk"
_FINISHES: dict[str | None, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


@dataclass(slots=True)
class _Flight:
    request: GenerationRequest
    on_event: Callable[[TokenEvent], None]
    submitted_s: float
    first_token_s: float | None = None
    last_token_s: float = 0.0
    longest_gap_s: float = 0.0
    tokens: int = 0
    finish: FinishReason = "abort"  # unless it comes to another end
    task: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Restarts:
    times: list[float] = field(default_factory=list)

    def may(self, now: float) -> bool:
        self.times = [one for one in self.times if now - one < _STARTS_WITHIN_S]
        self.times.append(now)
        return len(self.times) <= _STARTS


class VLLMEngine:
    """See `engine.base.Engine`. Takes over the process, which runs and answers already."""

    cache = None  # it is in vLLM's processes

    def __init__(self, process: VLLMProcess, info: EngineInfo, *, model: str) -> None:
        """`model`: the name under which vLLM serves it."""
        self.info = info
        self.failed: str | None = None
        self._process = process
        self._model = model
        self._counters = Counters()
        self._lock = Lock()
        self._flights: dict[str, _Flight] = {}
        self._closing = Event()
        self._loop = asyncio.new_event_loop()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )
        self._thread = Thread(target=self._run, name="vllm-requests", daemon=True)
        self._thread.start()
        self._watcher = Thread(target=self._watch, name="vllm-watch", daemon=True)
        self._watcher.start()

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        refuse_impossible(request, self.info)
        if request.constraint is not None:
            raise RequestError("answers of vLLM cannot be held to a form here yet; ask for text", param="response_format")
        flight = _Flight(request, on_event, time.monotonic())
        with self._lock:
            if self.failed is not None:
                raise RequestError(self.failed, code="engine_failed")
            if self._closing.is_set():
                raise RequestError("the engine is shutting down; send the request again later", code="shutting_down")
            if request.id in self._flights:
                raise RequestError(f"a request with id {request.id!r} is still running; use another id", param="id")
            self._flights[request.id] = flight
            self._loop.call_soon_threadsafe(self._begin, flight)

    def abort(self, request_id: str) -> None:
        with self._lock:
            flight = self._flights.get(request_id)
        if flight is not None:
            self._loop.call_soon_threadsafe(self._cancel, flight)

    def load(self) -> EngineLoad:
        with self._lock:
            flights = list(self._flights.values())
        waiting = sum(flight.first_token_s is None for flight in flights)
        return EngineLoad(len(flights) - waiting, waiting, 0, 0, self._counters.snapshot())

    def close(self) -> None:
        if self._closing.is_set():
            return
        with self._lock:
            self._closing.set()
            for flight in self._flights.values():
                self._loop.call_soon_threadsafe(self._cancel, flight)
        deadline = time.monotonic() + _CLOSE_S
        while self._flights and time.monotonic() < deadline:
            time.sleep(0.01)
        self._watcher.join(_CLOSE_S)  # it may be starting it again
        self._process.end()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)

    # The loop's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._client.aclose())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    def _begin(self, flight: _Flight) -> None:
        reading = Reading(flight.request)
        flight.task = self._loop.create_task(self._fly(flight, reading))
        flight.task.add_done_callback(lambda _: self._end(flight, reading))  # also when it is cancelled before it begins

    def _cancel(self, flight: _Flight) -> None:
        if flight.task is not None:
            flight.task.cancel()

    async def _fly(self, flight: _Flight, reading: Reading) -> None:
        try:
            async with asyncio.timeout(flight.request.deadline_s):
                flight.finish = await self._ask(flight, reading)
        except TimeoutError:
            return
        except (httpx.HTTPError, msgspec.DecodeError, OSError) as error:
            flight.finish = "error"
            reading.error = reading.error or f"vLLM broke off: {str(error) or type(error).__name__}"
        except Exception as error:  # noqa: BLE001 - a request's outer edge
            flight.finish = "error"
            self._counters.add("engine_faults")
            _log.exception("request %s failed", flight.request.id)
            reading.error = f"an internal error ended this request: {error}"

    async def _ask(self, flight: _Flight, reading: Reading) -> FinishReason:
        body = asked(flight.request, model=self._model)
        async with self._client.stream("POST", f"{self._process.url}/v1/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                reading.error = f"vLLM answered {response.status_code}: {_said(await response.aread())}"
                return "error"
            async for line in response.aiter_lines():
                for token, told in reading.take(line):
                    self._tell(flight, TokenEvent(token, logprobs=told))
        if reading.error is None and reading.finish not in _FINISHES:
            reading.error = f"vLLM ended the answer: {reading.finish or 'it broke off'}"
        return "error" if reading.error is not None else _FINISHES[reading.finish]

    def _tell(self, flight: _Flight, event: TokenEvent) -> None:
        now = time.monotonic() - flight.submitted_s
        if flight.first_token_s is None:
            flight.first_token_s = now
        else:
            flight.longest_gap_s = max(flight.longest_gap_s, now - flight.last_token_s)
        flight.last_token_s = now
        flight.tokens += 1
        self._counters.add("generated_tokens")
        flight.on_event(event)

    def _end(self, flight: _Flight, reading: Reading) -> None:
        request, finish = flight.request, flight.finish
        cached_tokens = min(reading.cached_tokens, len(request.prompt))
        self._counters.add("prompt_tokens", len(request.prompt))
        self._counters.add("cached_memory_tokens", cached_tokens)
        with self._lock:
            del self._flights[request.id]
        receipt = Receipt(
            prompt_tokens=len(request.prompt),
            completion_tokens=flight.tokens,
            cached_memory_tokens=cached_tokens,
            cached_disk_tokens=0,
            bytes_read=0,
            queue_s=0.0,
            match_s=0.0,
            load_s=0.0,
            first_token_s=flight.first_token_s,
            total_s=time.monotonic() - flight.submitted_s,
            notes=(_NOTE,) if cached_tokens else (),
            longest_gap_s=flight.longest_gap_s,
            tiers_told=not cached_tokens,
        )
        flight.on_event(TokenEvent(None, finish, receipt, reading.error if finish == "error" else None))

    # The watcher's thread.

    def _watch(self) -> None:
        """Start vLLM again when it has ended, unless it does so too often."""
        restarts = _Restarts()
        while not self._closing.wait(_LOOK_S):
            if self._process.alive:
                continue
            words = self._process.last_words()
            if not restarts.may(time.monotonic()):
                within = f"{_STARTS + 1} times within {_STARTS_WITHIN_S / 60:.0f} minutes"
                self.failed = f"vLLM ended {within}, last: {words}; restart the server"
                _log.error("%s", self.failed)
                return
            self.failed = f"vLLM ended and is being started again: {words}"
            _log.error("%s", self.failed)
            self._counters.add("restarts")
            try:
                self._process.end(timeout_s=1.0)  # its workers, and what of it may hang
                self._process.start(on_progress=self._still_wanted)
            except _NotWanted:
                return
            except (ModelError, OSError) as error:
                self.failed = f"vLLM ended and could not be started again: {error}; restart the server"
                _log.error("%s", self.failed)
                return
            self.failed = None
            _log.info("vLLM answers again")

    def _still_wanted(self, _: str) -> None:
        if self._closing.is_set():
            raise _NotWanted


class _NotWanted(Exception):
    """The engine was closed while vLLM was being started again."""


def _said(body: bytes) -> str:
    """Return the sentence of an error's body."""
    try:
        found: Any = msgspec.json.decode(body)
        return str((found.get("error") or found).get("message") or found)[:500]
    except (msgspec.DecodeError, AttributeError):
        return body[:200].decode(errors="replace") or "nothing"
