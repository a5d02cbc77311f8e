"""An engine without a model: answers are a pure function of prompt, seed and salt, and prefixes hit by blocks of 64 tokens.

It keeps the promises of `engine.base` (one last event with a receipt, callbacks on its own thread, abort in any state), so
everything above the engine is tested against it. Token ids are bytes: a prompt's ids are its UTF-8.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headstart.engine.base import (
    Constraint,
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerationRequest,
    Logprobs,
    Progress,
    Receipt,
    TokenEvent,
)
from headstart.errors import ContextLengthExceeded

BLOCK_TOKENS = 64
_ENDS = b'\0"}]'
_LETTERS = b"abcdefghijklmnopqrstuvwxyz "


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    on_event: Callable[[TokenEvent], None]
    submitted: float
    answer: Sequence[int] = ()
    cached_tokens: int = 0
    written_tokens: int = 0
    taken: bool = False
    sent: int = 0
    first_token_s: float | None = None
    aborted: bool = False

    @property
    def over(self) -> bool:
        deadline_s = self.request.deadline_s
        return self.aborted or (deadline_s is not None and time.monotonic() >= self.submitted + deadline_s)


@dataclass(slots=True)
class FakeEngine:
    """Of log probabilities it tells -1 for each token, and -2, -3 … for those that follow it in the alphabet of bytes.

    `answer`: text of every answer, after which it ends with "stop"; without it, letters drawn from the prompt until
    `max_tokens`. Held to something, it says what it would have said where that is allowed, else the first token that is.

    Clear `gate` to hold every request before its next token; set `fail_after` to end answers with an error
    after so many tokens."""

    context_tokens: int = 2048
    max_running: int = 8
    answer: bytes | None = None
    fail_after: int | None = None
    gate: threading.Event = field(default_factory=threading.Event)
    aborted: list[str] = field(default_factory=list)
    submitted: list[GenerationRequest] = field(default_factory=list)
    info: EngineInfo = field(init=False)
    failed: str | None = None
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: list[_Running] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)
    _stored: set[bytes] = field(default_factory=set)
    _counters: dict[str, int] = field(default_factory=dict)
    _closed: bool = False
    _thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            model="fake",
            context_tokens=self.context_tokens,
            vocabulary=256,
            device="cpu",
            dtype="none",
            layers=1,
            kv_bytes_per_token=1,
            cache="prefixes are remembered while the process lives",
        )
        self._counters = dict.fromkeys(
            ("prompt_tokens", "cached_memory_tokens", "cached_disk_tokens", "written_tokens", "generated_tokens", "steps"), 0
        )
        self.gate.set()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        if len(request.prompt) >= self.context_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(request.prompt)} tokens, the context {self.context_tokens}",
                prompt_tokens=len(request.prompt),
                context_tokens=self.context_tokens,
            )
        with self._changed:
            self.submitted.append(request)
            self._waiting.append(_Running(request, on_event, submitted=time.monotonic()))
            self._changed.notify()

    def abort(self, request_id: str) -> None:
        with self._changed:
            for running in self._waiting + self._running:
                if running.request.id == request_id:
                    running.aborted = True
                    self.aborted.append(request_id)
            self._changed.notify()

    def load(self) -> EngineLoad:
        with self._changed:
            used = sum(len(running.request.prompt) for running in self._running)
            return EngineLoad(len(self._running), len(self._waiting), used, 1 << 20, dict(self._counters))

    def close(self) -> None:
        with self._changed:
            self._closed = True
            for running in self._waiting + self._running:
                running.aborted = True
            self._changed.notify()
        self._thread.join(10)

    def _run(self) -> None:
        while True:
            with self._changed:
                while self._waiting and len(self._running) < self.max_running:
                    self._running.append(self._admit(self._waiting.pop(0)))
                if not self._running and not self._waiting:
                    if self._closed:
                        return
                    self._changed.wait(1.0)
                    continue
                turn = list(self._running)
                doomed = [running for running in self._waiting if running.over]
                self._waiting = [running for running in self._waiting if not running.over]
            for running in doomed:
                self._end(running, "abort")
            for running in turn:
                if self._step(running):
                    with self._changed:
                        self._running.remove(running)
            if not self.gate.is_set():
                with self._changed:
                    self._changed.wait(0.01)

    def _admit(self, running: _Running) -> _Running:
        request = running.request
        prompt = request.prompt
        seed = b"" if request.sampling.temperature == 0 else str(request.sampling.seed).encode()
        digest = hashlib.sha256(bytes(prompt) + seed).digest()
        drawn = bytes(_LETTERS[digest[i % 32] % len(_LETTERS)] for i in range(request.max_tokens))
        running.answer = drawn if self.answer is None else self.answer
        for end in range(BLOCK_TOKENS, len(prompt) if request.use_cache else 0, BLOCK_TOKENS):
            if self._key(request, prompt[:end]) not in self._stored:
                break
            running.cached_tokens = end
        running.taken = True
        self._counters["prompt_tokens"] += len(prompt)
        self._counters["cached_memory_tokens"] += running.cached_tokens
        return running

    def _step(self, running: _Running) -> bool:
        """Give one token; True once the request has ended."""
        if running.over:
            return self._end(running, "abort")
        if not self.gate.is_set():
            return False
        request = running.request
        if running.sent == 0:
            kept = len(request.prompt) if request.keep_tokens is None else min(request.keep_tokens, len(request.prompt))
            for end in range(BLOCK_TOKENS, kept + 1 if request.use_cache else 0, BLOCK_TOKENS):
                self._stored.add(self._key(request, request.prompt[:end]))
            if request.use_cache:
                running.written_tokens = max(0, kept // BLOCK_TOKENS * BLOCK_TOKENS - running.cached_tokens)
                self._counters["written_tokens"] += running.written_tokens
            if request.progress:
                count = len(request.prompt)
                running.on_event(TokenEvent(None, progress=Progress(count, running.cached_tokens, count, 0.0)))
        if request.max_tokens == 0:
            return self._end(running, "length")
        if self.fail_after is not None and running.sent >= self.fail_after:
            return self._end(running, "error", error="the fake engine was told to fail")
        if running.sent >= len(running.answer):
            if request.constraint is None:
                return self._end(running, "stop")
            running.answer = (*running.answer, 0)  # what must follow still does
        if running.first_token_s is None:
            running.first_token_s = time.monotonic() - running.submitted
        token = running.answer[running.sent]
        if request.constraint is not None:
            token = _held_to(request.constraint, token)
            if token in request.stop_ids:
                return self._end(running, "stop")
        told = None
        if request.logprobs is not None:
            told = Logprobs(-1.0, tuple(((token + place) % 256, -1.0 - place) for place in range(request.logprobs)))
        so_far = None if running.sent else self._receipt(running)
        running.on_event(TokenEvent(token, logprobs=told, so_far=so_far))
        running.sent += 1
        with self._changed:
            self._counters["generated_tokens"] += 1
            self._counters["steps"] += 1
        return self._end(running, "length") if running.sent >= request.max_tokens else False

    def _end(self, running: _Running, finish: FinishReason, *, error: str | None = None) -> bool:
        running.on_event(TokenEvent(None, finish, self._receipt(running), error))
        return True

    def _receipt(self, running: _Running) -> Receipt:
        return Receipt(
            prompt_tokens=len(running.request.prompt),
            completion_tokens=running.sent,
            cached_memory_tokens=running.cached_tokens,
            cached_disk_tokens=0,
            bytes_read=0,
            queue_s=0.0,
            match_s=0.0,
            load_s=0.0,
            first_token_s=running.first_token_s,
            total_s=time.monotonic() - running.submitted,
            written_tokens=running.written_tokens,
            taken=running.taken,
        )

    @staticmethod
    def _key(request: GenerationRequest, prefix: Sequence[int]) -> bytes:
        shared = len(prefix) <= request.shared_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        return hashlib.sha256(repr((None if shared else request.salt, tuple(prefix))).encode()).digest()


def _held_to(constraint: Constraint, token: int) -> int:
    """Return `token` if it may come next, else the first one that may, best one that ends something."""
    allowed = constraint.allowed()
    if allowed is not None and not allowed[token // 8] >> token % 8 & 1:
        token = next(other for other in (*_ENDS, *range(256)) if allowed[other // 8] >> other % 8 & 1)
    constraint.accept(token)
    return token
