"""A request whose prompt another worker computes: asked for there, told as it comes, gone on with here.

ask there ─▶ first token ─▶ told at once ─▶ all KV is here ─▶ the engine goes on behind that token
   └─ refused, lost, stalled, wrong ─▶ what came whole is used, the engine computes the rest
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

from headstart.block.identity import Identity
from headstart.cache.arriving import Arrival
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import FinishReason, GenerationRequest, Receipt, TokenEvent
from headstart.engine.handoff.asking import Asked, Result, cached_of, encoded, joined
from headstart.engine.handoff.receiving import Receiving
from headstart.engine.serving.door import ServingEngine
from headstart.errors import ConfigError, RequestError, WireError
from headstart.metrics import Counters
from headstart.tier.base import Terms
from headstart.transfer.wire.address import connect, is_local
from headstart.transfer.wire.remote import RemoteMemory
from headstart.transfer.wire.session import Session

_log = logging.getLogger(__name__)

_CONNECT_S = 2.0
_MOST_ADDRESSES = 4
_PATIENCE = 6  # times the timeout: so long another worker may say that it is there and get no further


@dataclass(frozen=True, slots=True)
class Side:
    """What all requests of a worker have in common. `identity`: of an adapter's blocks; None: the cache's own. `memory`: for
    what workers of other machines write by NIXL."""

    inner: ServingEngine[Any]
    cache: PrefixCache
    counters: Counters
    secret: bytes
    timeout_s: float
    identity: Callable[[str | None], Identity | None]
    memory: RemoteMemory | None


class Taking:
    """One request whose prompt is computed elsewhere. `forget` is called when this side has done with it."""

    def __init__(
        self,
        side: Side,
        request: GenerationRequest,
        on_event: Callable[[TokenEvent], None],
        *,
        forget: Callable[[], None],
    ) -> None:
        self._side = side
        self._forget = forget
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
        counters = self._side.counters
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
        request, side = self._request, self._side
        identity = side.identity(request.adapter)
        self._arrival = arrival = side.cache.expect(
            request.prompt,
            salt=request.salt,
            shared_tokens=request.shared_tokens,
            identity=identity,
            terms=Terms(request.retention, request.tenant, request.session, request.keep_s),
        )
        if arrival is None:
            raise WireError("this worker has no memory tier to take KV in, or its model keeps states", reason="no_room")
        self._stored = arrival.stored_by_tier
        if arrival.stored_tokens == arrival.pieces * side.cache.representation.piece_tokens:
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
                vocabulary=side.inner.info.vocabulary,
                counters=side.counters,
                on_result=self._on_result,
                patience_s=_PATIENCE * side.timeout_s,
                left_s=(left_s := self._left_s()),
                memory=side.memory,
            )
            asked = Asked.of(request, deadline_s=left_s)
            receiving.run((identity or side.cache.identity).root(), encoded(asked))
            return True
        finally:
            with self._lock:
                self._session = None
            session.close()
            side.counters.add("handoff_tokens", arrival.arrived_tokens)
            if arrival.dropped:
                side.counters.add("handoff_dropped_runs", arrival.dropped)

    def _connected(self) -> Session:
        lost: WireError | None = None
        for address in self._addresses():
            try:
                connected = connect(address, timeout_s=min(_CONNECT_S, self._side.timeout_s))
                return Session(connected, secret=self._side.secret, timeout_s=self._side.timeout_s, listening=False)
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
        if not self._side.secret and not all(local.values()):
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
        return len(self._request.prompt) + 1 >= self._side.inner.info.context_tokens

    def _go_on(self) -> None:
        """Give the rest to the engine: behind the first token where there is one, else all of it."""
        request, first = self._request, self._told
        if self._aborted:
            self._end(TokenEvent(None, "abort", self._receipt()))
            return
        if first is not None and (first.token is None or request.max_tokens == 1 or self._full):
            finish: FinishReason = "stop" if first.token is None else "length"
            self._end(TokenEvent(first.token, finish, self._receipt(), logprobs=first.logprobs))
            return
        deadline_s = self._left_s()
        if deadline_s is not None and deadline_s <= 0:
            self._end(TokenEvent(None, "abort", self._receipt()))
            return
        continued = () if first is None or first.token is None else (first.token,)
        self._side.inner.submit(
            replace(
                request,
                prefill_at=None,
                continued=continued,
                deadline_s=deadline_s,
                progress=request.progress and not continued,
            ),
            self._on_inner,
        )
        self._forget()
        if self._aborted:
            self._side.inner.abort(request.id)

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
        base = empty
        if told is not None:
            base = replace(told, prompt_tokens=len(self._request.prompt), completion_tokens=tokens, written_tokens=0)
        cached = (0, 0) if told is None else cached_of(len(self._request.prompt), told, self._stored)
        now = time.monotonic() - self._started_s
        whole = joined(base, told, cached, first_token_s=self._token_s, total_s=now)
        return replace(whole, notes=(*self._notes, *whole.notes), taken=False)

    def _end(self, event: TokenEvent) -> None:
        """Tell the last event of a request that the engine here never got."""
        if self._arrival is not None:
            self._arrival.release()
            self._arrival = None
        self._forget()
        self._emit(event)

    def _emit(self, event: TokenEvent) -> None:
        try:
            self._on_event(event)
        except Exception:  # noqa: BLE001 - the edge to whoever asked
            self._side.counters.add("handoff_faults")
            _log.exception("the receiver of request %s failed; the request is ended", self._request.id)
            self._aborted = True

    def _left_s(self) -> float | None:
        deadline_s = self._request.deadline_s
        return None if deadline_s is None else deadline_s - (time.monotonic() - self._started_s)
