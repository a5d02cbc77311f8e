"""Computing prompts for others: who asks is checked, and gets the KV as it is computed, and the first token.

A thread for each connection, and one that takes them in. Nothing that another worker sends or fails to do costs more than its
own connection: what is wrong is a counter, and the request is ended in the engine as soon as nobody is there who wants it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from threading import Lock, Thread, current_thread

import numpy as np

from headstart.block.identity import Identity
from headstart.block.keys import chain_keys
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import Engine, TokenEvent
from headstart.engine.handoff.asking import LEAST_ASK_BYTES, Asked, Result, asked, encoded
from headstart.engine.handoff.outgoing import Outgoing, Part
from headstart.errors import RequestError, WireError
from headstart.metrics import Counters
from headstart.transfer.wire.address import leave, listen
from headstart.transfer.wire.messages import Accept, Ask, Beat, End, Pieces, Refuse, Sealing, Taken, Told
from headstart.transfer.wire.remote import Reached, RemoteMemory
from headstart.transfer.wire.session import Session
from headstart.transfer.wire.window import Places, Window

_log = logging.getLogger(__name__)

MOST_CONNECTIONS = 64
BEAT_S = 0.5  # so often something is said at least, and it is seen whether the other side is still there
_CLOSE_S = 10.0
_MOST_WINDOW_BYTES = 1 << 30
_ROOT_BYTES = 32


class PrefillServer:
    """Listens on `addresses` and asks `engine`, whose KV `cache` knows how to name. `serves`: whether prompts are computed for
    others now; `identity`: of an adapter's blocks; `memory`: with it KV goes by NIXL to who lends its own."""

    def __init__(
        self,
        engine: Engine,
        cache: PrefixCache,
        *,
        addresses: Sequence[str],
        secret: bytes,
        timeout_s: float,
        counters: Counters,
        serves: Callable[[], bool],
        identity: Callable[[str | None], Identity | None],
        wake: Callable[[], None],
        memory: RemoteMemory | None = None,
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._secret = secret
        self._timeout_s = timeout_s
        self._counters = counters
        self._serves = serves
        self._identity = identity
        self._wake = wake
        self._memory = memory
        self._lock = Lock()
        self._closed = False
        self._connections: dict[Thread, socket.socket] = {}
        self._listeners: list[socket.socket] = []
        bound = []
        try:
            for address in addresses:
                listener, at = listen(address)
                self._listeners.append(listener)
                bound.append(at)
        except BaseException:
            for listener in self._listeners:
                listener.close()
            for at in bound:
                leave(at)
            raise
        self.addresses = tuple(bound)
        for listener in self._listeners:
            Thread(target=self._take_in, args=(listener,), name="handoff-listen", daemon=True).start()

    def close(self) -> None:
        """Take nobody in any more, and end what is under way. Twice is fine."""
        with self._lock:
            self._closed = True
            connections = dict(self._connections)
        for listener in self._listeners:
            with suppress(OSError):  # wakes the thread that waits in it
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for address in self.addresses:
            leave(address)
        for connected in connections.values():
            with suppress(OSError):
                connected.shutdown(socket.SHUT_RDWR)
        ends = time.monotonic() + _CLOSE_S
        for thread in connections:
            thread.join(max(0.0, ends - time.monotonic()))

    def _take_in(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # too many open files, which will be fewer
                continue
            with self._lock:
                taken = not self._closed and len(self._connections) < MOST_CONNECTIONS
                if taken:
                    thread = Thread(target=self._serve, args=(connected,), name="handoff-prefill", daemon=True)
                    try:
                        thread.start()  # waits for the lock before it leaves
                        self._connections[thread] = connected
                    except RuntimeError:  # no more threads can be had
                        taken = False
            if not taken:
                self._counters.add("handoff_refused_busy")
                connected.close()

    def _serve(self, connected: socket.socket) -> None:
        try:
            with ExitStack() as stack:
                session = Session(connected, secret=self._secret, timeout_s=self._timeout_s, listening=True)
                stack.callback(session.close)
                self._answer(session, stack)
        except WireError as error:
            self._counters.add(f"handoff_given_up_{error.reason}")
            _log.info("a prompt was not handed over: %s", error.message)
        except Exception:  # noqa: BLE001 - the thread's outer edge
            self._counters.add("handoff_faults")
            _log.exception("handing a prompt over failed unexpectedly")
        finally:
            with self._lock:
                self._connections.pop(current_thread(), None)

    def _answer(self, session: Session, stack: ExitStack) -> None:
        info = self._engine.info
        most = LEAST_ASK_BYTES + 4 * info.context_tokens + info.vocabulary
        message, descriptor = session.receive_with_descriptor(most=most)
        window: Window | Reached | None = None
        try:
            if not isinstance(message, Ask) or message.have < 0:
                raise WireError("something else was expected, namely what to compute", reason="garbage")
            if descriptor is not None and 0 < message.window <= _MOST_WINDOW_BYTES:
                window = Window.of(descriptor, message.window)
                stack.callback(window.close)
        finally:
            if descriptor is not None:
                os.close(descriptor)
        what = asked(message.request)
        why = self._why_not(message, what)
        if why is not None:
            self._counters.add(f"handoff_refused_{why.reason}")
            session.send(why)
            return
        if message.have < 0:
            raise WireError(f"{message.have} pieces cannot be there already", reason="garbage")
        tokens = what.tokens
        pieces = max(0, len(tokens) - 1) // self._cache.representation.piece_tokens
        out = Outgoing(self._cache.representation, have=message.have, pieces=pieces, wake=self._wake)
        stack.callback(out.close)
        id = f"handoff-{uuid.uuid4().hex}"
        try:
            self._engine.submit(what.request(id, out), out.told)
        except RequestError as error:
            self._counters.add("handoff_refused_request")
            session.send(Refuse("request", error.message))
            return
        stack.callback(self._engine.abort, id)  # unknown by then, unless nobody wants it any more
        session.send(Accept())
        if window is None and message.remote is not None and self._memory is not None and session.keyed:
            window = self._memory.reach(message.remote)
            if window is not None:
                stack.callback(window.close)
        keys = chain_keys(np.asarray(tokens, "<u4"), root=message.root, salt=what.salt, shared_tokens=what.shared_tokens)
        _Sending(self._cache, session, out, keys, window, self._counters, self._timeout_s).run()

    def _why_not(self, ask: Ask, what: Asked) -> Refuse | None:
        """Return why a prompt is not computed for who asks, None where it is."""
        if not self._serves():
            return Refuse("role", "this worker decodes and computes no prompts for others now")
        representation = self._cache.representation
        if representation.state != "none" or representation.varies:
            return Refuse("model", f"{self._engine.info.model} keeps states beside its KV, which are not handed over")
        if what.adapter is not None and what.adapter not in self._engine.info.adapters:
            return Refuse("model", f"there is no adapter {what.adapter[:64]!r} here")
        identity = self._identity(what.adapter) or self._cache.identity
        if ask.root != identity.root():
            return Refuse("model", f"this worker serves {self._engine.info.model} with other weights or settings")
        if ask.representation != representation.digest:
            return Refuse("representation", "this worker lays KV down in another way (dtype, layout or shard)")
        return None


class _Sending:
    """One prompt on its way out."""

    def __init__(
        self,
        cache: PrefixCache,
        session: Session,
        out: Outgoing,
        keys: Sequence[bytes],
        window: Window | Reached | None,
        counters: Counters,
        timeout_s: float,
    ) -> None:
        self._representation = cache.representation
        self._session = session
        self._out = out
        self._keys = keys
        self._window = window
        self._places = None if window is None else Places(window.nbytes)
        self._timeout_s = timeout_s
        self._counters = counters
        self._sealing = Sealing(session.key, self._representation.digest, keyed=session.keyed)
        self._first_told = False

    def run(self) -> None:
        """Send until there is nothing more to come. Raises WireError when the other side is gone, or does not take it."""
        ended = False
        while not (ended and self._out.empty):
            self._listen()
            what = self._out.next(BEAT_S)
            if what is None:
                self._beat()
            elif isinstance(what, TokenEvent):
                ended = ended or what.finish is not None
                self._session.send(Told(encoded(_result(what))))
                if what.finish is not None:
                    self._first_told = True
            else:
                try:
                    self._send(what)
                finally:
                    self._out.sent(what)
        self._session.send(End())
        self._counters.add("handoff_given")
        try:  # who closes first must be the one who reads
            while True:
                self._take(timeout_s=None)
        except WireError as error:
            if error.reason != "lost":
                raise

    def _send(self, part: Part) -> None:
        data = part.bytes_of(self._representation)
        key = self._keys[(part.first + part.count) * self._representation.blocks_per_piece - 1]
        at = self._place(data.nbytes)
        check = self._sealing.check([data], key=key, layer=part.layer)
        if at is not None and self._window is not None:
            # For half as long as the other side waits for anything: what is left is for sending.
            if not self._window.put(data, at, timeout_s=self._timeout_s / 2, waiting=self._beat):
                at, self._window = None, None  # sent, as all that comes; what was put there before is still given back
                self._counters.add("handoff_nixl_lost")
            elif isinstance(self._window, Reached):
                self._counters.add("handoff_nixl_bytes", data.nbytes)
        payload = [] if at is not None else [data.data]
        self._session.send(Pieces(part.layer, part.first, part.count, check, at), payload)
        self._counters.add("handoff_sent_bytes", data.nbytes)
        if not self._first_told:
            self._counters.add("handoff_sent_early_bytes", data.nbytes)  # while the prompt was still being computed

    def _beat(self) -> None:
        self._session.send(Beat())

    def _place(self, nbytes: int) -> int | None:
        """Return where bytes go in the other side's memory, once there is room; None where they are sent."""
        if self._places is None or self._window is None or nbytes > self._window.nbytes // 2:
            return None
        while (at := self._places.take(nbytes)) is None:
            self._take(timeout_s=None)
        return at

    def _listen(self) -> None:
        """Take what the other side says, which is what it has taken; or that it is gone."""
        while self._session.waiting:
            self._take(timeout_s=None)

    def _take(self, *, timeout_s: float | None) -> None:
        message = self._session.receive(timeout_s=timeout_s, most=_SHORT_BYTES)
        if not isinstance(message, Taken) or self._places is None:
            raise WireError(f"{type(message).__name__} was not expected", reason="garbage")
        self._places.free(message.places)


_SHORT_BYTES = 1024


def _result(event: TokenEvent) -> Result:
    return Result(event.token, event.finish, event.receipt, event.error, event.logprobs, event.progress)
