"""An engine whose prompts may be computed by another worker, and which computes prompts for others.

submit ─ prefill_at? ─no─▶ the engine
           │ yes
           ▼
  ask there ─▶ first token ─▶ told at once ─▶ all KV is here ─▶ the engine goes on behind that token
           └─ refused, lost, stalled, wrong ─▶ what came whole is used, the engine computes the rest
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

from headstart.block.identity import Identity
from headstart.cache.arriving import Arrival
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import Config
from headstart.engine.base import EngineLoad, FinishReason, GenerationRequest, Receipt, Role, TokenEvent
from headstart.engine.handoff.asking import Asked, Result, cached_of, encoded, joined
from headstart.engine.handoff.prefill import PrefillServer
from headstart.engine.handoff.receiving import Receiving
from headstart.engine.serving.door import ServingEngine
from headstart.engine.serving.limits import refuse_impossible
from headstart.engine.speeds import Speeds
from headstart.errors import ConfigError, RequestError, WireError
from headstart.metrics import Counters
from headstart.tier.base import Terms
from headstart.transfer.wire.address import connect, is_local
from headstart.transfer.wire.session import Session

_log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
_CONNECT_S = 2.0
_MOST_ADDRESSES = 4
_PATIENCE = 6  # times the timeout: so long another worker may say that it is there and get no further
_LEAST_SECRET_BYTES = 16


class HandoffEngine:
    """See `engine.base.Engine`; takes `inner` over, and all that is asked of it besides goes on to it. `role` may be changed at
    any time: what is under way ends as it began.

    `listen`: where others may ask for prompts, if anywhere. `secret`: what all workers know, b"" for none; only this machine's
    workers are talked to then. `timeout_s`: how long another worker may do nothing before it counts as lost."""

    def __init__(
        self,
        inner: ServingEngine[Any],
        cache: PrefixCache,
        *,
        role: Role = "both",
        listen: Sequence[str] = (),
        secret: bytes = b"",
        timeout_s: float = 10.0,
    ) -> None:
        for address in listen:
            if not secret and not is_local(address):
                raise ConfigError(
                    f"{address} can be reached by others, who would get the KV of any prompt; give all workers one "
                    "--handoff-secret FILE, or listen on this machine alone",
                    key="handoff.listen",
                )
        self.inner = inner
        self.info = inner.info
        self.role = role
        self._cache = cache
        self._secret = secret
        self._timeout_s = timeout_s
        self._counters = Counters()
        self._lock = Lock()
        self._under_way: dict[str, _Handoff] = {}
        self._closed = False
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="handoff-decode")
        self._server = None
        if listen:
            self._server = PrefillServer(
                self,
                cache,
                addresses=listen,
                secret=secret,
                timeout_s=timeout_s,
                counters=self._counters,
                serves=lambda: self.role != "decode",
                identity=self.identity,
                wake=inner.wake,
            )
        self.addresses: tuple[str, ...] = () if self._server is None else self._server.addresses

    @property
    def takes(self) -> bool:
        """See `RoledEngine`."""
        return self.role != "prefill" and self._cache.expects

    @property
    def failed(self) -> str | None:
        return self.inner.failed

    def submit(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        """See `Engine.submit`."""
        if request.prefill_at is None or self.role == "prefill" or not request.max_tokens or not request.use_cache:
            self.inner.submit(replace(request, prefill_at=None), on_event)
            return
        refuse_impossible(request, self.info)
        with self._lock:
            if request.id in self._under_way:
                raise RequestError(f"a request with id {request.id!r} is still running; use another id", param="id")
            busy = self._closed or len(self._under_way) >= MOST_AT_ONCE
            if not busy:
                handoff = self._under_way[request.id] = _Handoff(self, request, on_event)
        if busy:
            self._counters.add("handoff_busy")
            self.inner.submit(replace(request, prefill_at=None), on_event)
            return
        try:
            self._threads.submit(handoff.run)
        except RuntimeError:  # closed just now
            self._forget(request.id)
            self.inner.submit(replace(request, prefill_at=None), on_event)

    def abort(self, request_id: str) -> None:
        """See `Engine.abort`."""
        with self._lock:
            handoff = self._under_way.get(request_id)
        if handoff is not None:
            handoff.abort()
        self.inner.abort(request_id)

    def load(self) -> EngineLoad:
        """See `Engine.load`. Prompts that are computed elsewhere wait."""
        load = self.inner.load()
        with self._lock:
            waiting = len(self._under_way)
        return replace(load, waiting=load.waiting + waiting, counters=load.counters | self._counters.snapshot())

    @property
    def speeds(self) -> Speeds:
        """See `PacedEngine`."""
        return self.inner.speeds

    def waiting_tokens(self) -> int:
        """See `PacedEngine`."""
        return self.inner.waiting_tokens()

    def close(self) -> None:
        """See `Engine.close`."""
        with self._lock:
            self._closed = True
            under_way = list(self._under_way.values())
        for handoff in under_way:
            handoff.abort()
        if self._server is not None:
            self._server.close()
        self._threads.shutdown(wait=True)
        self.inner.close()

    def identity(self, adapter: str | None) -> Identity | None:
        """See `StoringEngine`."""
        named = getattr(self.inner, "identity", None)
        return None if named is None or adapter is None else named(adapter)

    def measure_floor(self, prompt: Sequence[int], cached_tokens: int, rounds: int) -> list[float]:
        """See `MeasuredEngine`."""
        floor: list[float] = self.inner.measure_floor(prompt, cached_tokens, rounds)  # type: ignore[attr-defined]
        return floor

    def next_logits(self, tokens: Sequence[int]) -> Any:
        """See `MeasuredEngine`."""
        return self.inner.next_logits(tokens)  # type: ignore[attr-defined]

    def __enter__(self) -> HandoffEngine:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _forget(self, request_id: str) -> None:
        with self._lock:
            self._under_way.pop(request_id, None)


class _Handoff:
    """One request whose prompt is computed elsewhere."""

    def __init__(self, engine: HandoffEngine, request: GenerationRequest, on_event: Callable[[TokenEvent], None]) -> None:
        self._engine = engine
        self._request = request
        self._on_event = on_event
        self._started_s = time.monotonic()
        self._lock = Lock()
        self._session: Session | None = None
        self._aborted = False
        self._arrival: Arrival | None = None
        self._told: Result | None = None  # the first token, or that the answer ended before any
        self._token_s: float | None = None
        self._stored: dict[str, int] = {}
        self._notes: list[str] = []

    def abort(self) -> None:
        """End it soon, from any thread."""
        with self._lock:
            self._aborted = True
            if self._session is not None:
                self._session.cut()

    def run(self) -> None:
        """Have the prompt computed elsewhere as far as that goes, then go on here."""
        counters = self._engine._counters
        try:
            counters.add("handoff_taken" if self._hand_over() else "handoff_needless")
        except WireError as error:
            if not self._aborted:
                counters.add(f"handoff_lost_{error.reason}")
                _log.warning("request %s: %s; computed here", self._request.id, error.message)
                self._notes.append(f"its prompt was not handed over ({error.reason}), and computed here as far as it was not")
        except Exception:  # noqa: BLE001 - the thread's outer edge: the request goes on without
            counters.add("handoff_faults")
            _log.exception("taking over the prompt of request %s failed unexpectedly; computed here", self._request.id)
        try:
            self._go_on()
        except Exception as error:  # noqa: BLE001 - the thread's outer edge: whoever asked is told
            if not isinstance(error, RequestError):
                counters.add("handoff_faults")
                _log.exception("request %s cannot be gone on with", self._request.id)
            sentence = error.message if isinstance(error, RequestError) else "an internal error ended this request"
            self._end(TokenEvent(None, "error", self._receipt(), sentence))

    def _hand_over(self) -> bool:
        """Have the prompt computed elsewhere; return whether there was anything to compute but the rest of a block."""
        request, engine = self._request, self._engine
        identity = engine.identity(request.adapter)
        self._arrival = arrival = engine._cache.expect(
            request.prompt,
            salt=request.salt,
            shared_tokens=request.shared_tokens,
            identity=identity,
            terms=Terms(request.retention, request.tenant, request.session, request.keep_s),
        )
        if arrival is None:
            raise WireError("this worker has no memory tier to take KV in, or its model keeps states", reason="no_room")
        self._stored = arrival.stored_by_tier
        if arrival.stored_tokens == arrival.pieces * engine._cache.representation.piece_tokens:
            return False
        session = self._connected()
        try:
            with self._lock:
                self._session = session
                if self._aborted:
                    return False
            receiving = Receiving(
                session,
                arrival,
                vocabulary=engine.info.vocabulary,
                counters=engine._counters,
                on_result=self._on_result,
                patience_s=_PATIENCE * engine._timeout_s,
            )
            asked = Asked.of(request, deadline_s=self._left_s())
            receiving.run((identity or engine._cache.identity).root(), encoded(asked))
            return True
        finally:
            with self._lock:
                self._session = None
            session.close()
            engine._counters.add("handoff_tokens", arrival.arrived_tokens)
            if arrival.dropped:
                engine._counters.add("handoff_dropped_runs", arrival.dropped)

    def _connected(self) -> Session:
        lost: WireError | None = None
        for address in self._addresses():
            try:
                connected = connect(address, timeout_s=min(_CONNECT_S, self._engine._timeout_s))
                return Session(connected, secret=self._engine._secret, timeout_s=self._engine._timeout_s, listening=False)
            except WireError as error:
                lost = error
        assert lost is not None
        raise lost

    def _addresses(self) -> list[str]:
        """Return where to ask, this machine's first. Raises WireError for what is no address, or none for this worker."""
        addresses = [one for part in (self._request.prefill_at or "").split(",") if (one := part.strip())]
        try:
            local = {one: is_local(one) for one in addresses}
        except ConfigError as error:
            raise WireError(f"what was named is no worker's address: {error.message}", reason="address") from error
        if not 0 < len(addresses) <= _MOST_ADDRESSES:
            raise WireError(f"{len(addresses)} addresses were named, not 1 to {_MOST_ADDRESSES}", reason="address")
        if not self._engine._secret and not all(local.values()):
            raise WireError(
                "without a handoff.secret only workers of this machine are asked for KV; give all workers one", reason="address"
            )
        return sorted(addresses, key=lambda one: not local[one])

    def _on_result(self, told: Result) -> None:
        """The other worker says how far the prompt is, or its first token: that goes to who asked before anything else."""
        if self._told is not None:
            raise WireError("a second end was told", reason="garbage")
        if told.finish is None:
            if told.progress is not None and self._request.progress:
                self._emit(TokenEvent(None, progress=told.progress))
            return
        if told.finish in ("error", "abort"):
            raise WireError(f"the other worker could not compute it: {(told.error or 'it ended it')[:512]}", reason="failed")
        self._told = told
        if told.token is not None and told.finish == "length":
            self._token_s = time.monotonic() - self._started_s
            if self._request.max_tokens > 1 and not self._full:
                self._emit(TokenEvent(told.token, logprobs=told.logprobs, so_far=self._receipt()))

    @property
    def _full(self) -> bool:
        """Whether the context ends behind the first token."""
        return len(self._request.prompt) + 1 >= self._engine.info.context_tokens

    def _go_on(self) -> None:
        """Give the rest to the engine: behind the first token where there is one, else all of it."""
        request, first = self._request, self._told
        if self._aborted:
            self._end(TokenEvent(None, "abort", self._receipt()))
            return
        if first is not None and (first.token is None or request.max_tokens == 1 or self._full):
            finish: FinishReason = "stop" if first.token is None else "length"
            if first.token is not None and request.constraint is not None:
                request.constraint.accept(first.token)
            self._end(TokenEvent(first.token, finish, self._receipt(), logprobs=first.logprobs))
            return
        deadline_s = self._left_s()
        if deadline_s is not None and deadline_s <= 0:
            self._end(TokenEvent(None, "abort", self._receipt()))
            return
        continued = () if first is None or first.token is None else (first.token,)
        self._engine.inner.submit(
            replace(
                request,
                prefill_at=None,
                continued=continued,
                deadline_s=deadline_s,
                progress=request.progress and not continued,
            ),
            self._on_inner,
        )
        self._engine._forget(request.id)
        if self._aborted:
            self._engine.inner.abort(request.id)

    def _on_inner(self, event: TokenEvent) -> None:
        """On the engine's thread: pass on what it tells, with the receipt of the whole."""
        if self._arrival is not None and (event.token is not None or event.finish is not None):
            self._arrival.release()  # the engine holds what it took, and has had the time for it
            self._arrival = None
        if event.receipt is not None:
            event = replace(event, receipt=self._whole(event.receipt))
        if event.so_far is not None:
            event = replace(event, so_far=self._whole(event.so_far))
        self._on_event(event)

    def _whole(self, receipt: Receipt) -> Receipt:
        told = None if self._told is None else self._told.receipt
        cached = cached_of(receipt.prompt_tokens, told, self._stored)
        if told is None:  # computed here; but what had arrived by then was not cached
            memory = min(cached[0], receipt.cached_memory_tokens)
            cached = memory, min(cached[1], receipt.cached_tokens - memory)
        first_s = receipt.first_token_s
        now = time.monotonic() - self._started_s
        if self._token_s is not None:
            first_s = self._token_s
        elif first_s is not None:
            first_s += now - receipt.total_s
        whole = joined(receipt, told, cached, first_token_s=first_s, total_s=now)
        return replace(whole, notes=(*self._notes, *whole.notes))

    def _receipt(self) -> Receipt:
        """Return the receipt of what has come so far, of which the engine here knows nothing."""
        told = None if self._told is None else self._told.receipt
        tokens = 1 if self._token_s is not None else 0
        empty = Receipt(len(self._request.prompt), tokens, 0, 0, 0, 0.0, 0.0, 0.0, None, 0.0, taken=False)
        base = empty if told is None else replace(told, prompt_tokens=len(self._request.prompt), completion_tokens=tokens)
        cached = (0, 0) if told is None else cached_of(len(self._request.prompt), told, self._stored)
        now = time.monotonic() - self._started_s
        whole = joined(base, told, cached, first_token_s=self._token_s, total_s=now)
        return replace(whole, notes=(*self._notes, *whole.notes), taken=False)

    def _end(self, event: TokenEvent) -> None:
        """Tell the last event of a request that the engine here never got."""
        if self._arrival is not None:
            self._arrival.release()
            self._arrival = None
        self._engine._forget(self._request.id)
        self._emit(event)

    def _emit(self, event: TokenEvent) -> None:
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - the edge to whoever asked
            self._engine._counters.add("handoff_faults")
            _log.exception("the receiver of request %s failed; the request is ended", self._request.id)
            self._aborted = True

    def _left_s(self) -> float | None:
        deadline_s = self._request.deadline_s
        return None if deadline_s is None else deadline_s - (time.monotonic() - self._started_s)


def opened(inner: ServingEngine[Any], cache: PrefixCache | None, config: Config) -> ServingEngine[Any] | HandoffEngine:
    """Return the engine as `config` asks for it: itself, or one that computes prompts for others and has them computed by
    others. Raises ConfigError."""
    settings = config.handoff
    if not (settings.listen or settings.secret or config.server.role != "both"):
        return inner
    representation = None if cache is None else cache.representation
    if cache is None or representation is None or representation.state != "none" or representation.varies:
        why = inner.info.cache if cache is None else "its states are not handed over"
        raise ConfigError(
            f"{inner.info.model} cannot hand prompts over ({why}); leave [handoff] and --role out", key="server.role"
        )
    if not cache.expects:
        why = (
            "KV that comes from others goes to a memory tier of this process's own: set cache.memory, and no cache.node_memory"
        )
        if config.server.role == "decode":
            raise ConfigError(why, key="server.role")
        _log.warning("prompts are computed for others, and none taken from them: %s", why)
    listen = [one for part in settings.listen.split(",") if (one := part.strip())]
    if config.server.role == "prefill" and not listen:
        raise ConfigError(
            'a worker that computes prompts for others must be reached: give --handoff-listen "ipc:///run/headstart.sock"',
            key="handoff.listen",
        )
    engine = HandoffEngine(
        inner,
        cache,
        role=config.server.role,
        listen=listen,
        secret=b"" if settings.secret is None else _secret(settings.secret),
        timeout_s=settings.timeout_s,
    )
    where = f", other workers ask for prompts at {', '.join(engine.addresses)}" if engine.addresses else ""
    _log.info("role %s%s", engine.role, where)
    return engine


def _secret(file: Path) -> bytes:
    try:
        secret = file.read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"handoff.secret: {file} cannot be read ({error.strerror}); write it with: openssl rand -hex 32 > {file}",
            key="handoff.secret",
        ) from error
    if len(secret) < _LEAST_SECRET_BYTES:
        raise ConfigError(
            f"handoff.secret: {file} has {len(secret)} bytes, {_LEAST_SECRET_BYTES} are the least; write it with: "
            f"openssl rand -hex 32 > {file}",
            key="handoff.secret",
        )
    return secret
