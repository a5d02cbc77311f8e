"""Taking a prompt's KV from the worker that computes it: verified piece by piece, put where `match` finds it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from headstart.cache.arriving import Arrival
from headstart.engine.handoff.asking import Result, result
from headstart.errors import WireError
from headstart.metrics import Counters
from headstart.transfer.wire.messages import MOST_RUN_BYTES, Accept, Ask, Beat, End, Pieces, Refuse, Sealing, Taken, Told
from headstart.transfer.wire.remote import Lent, RemoteMemory
from headstart.transfer.wire.session import Session
from headstart.transfer.wire.window import Window

WINDOW_BYTES = 64 << 20  # of shared memory, for each prompt on its way
_AGAIN = 4  # times as many bytes as a prompt has may come: a pass that is given up is sent once more


class Receiving:
    """One prompt on its way in. `on_result` is called with what the other worker tells, as it does. For one thread."""

    def __init__(
        self,
        session: Session,
        arrival: Arrival,
        *,
        vocabulary: int,
        counters: Counters,
        on_result: Callable[[Result], None],
        patience_s: float,
        left_s: float | None = None,
        memory: RemoteMemory | None = None,
    ) -> None:
        """`patience_s`: how long the other side may say that it is there and get no further; `left_s`: until the request's
        deadline, None for none. `memory`: what a worker of another machine writes into, where there is NIXL."""
        self._ends_s = None if left_s is None else time.monotonic() + left_s
        self._patience_s = patience_s
        self._got_further_s = time.monotonic()
        self._session = session
        self._arrival = arrival
        self._vocabulary = vocabulary
        self._counters = counters
        self._on_result = on_result
        self._representation = arrival.prompt.representation
        self._sealing = Sealing(session.key, self._representation.digest, keyed=session.keyed)
        self._memory = memory
        self._window: Window | Lent | None = None
        self._scratch = bytearray()
        self._bytes = 0
        self._piece_bytes = sum(filter(None, self._representation.layer_bytes))
        self._most_bytes = _AGAIN * self._piece_bytes * arrival.pieces

    def run(self, root: bytes, request: bytes) -> None:
        """Ask, and take all that comes. Raises WireError (reason "refused_…" where the other side does not want to): what has
        been put in place by then is good."""
        made = Window.make(WINDOW_BYTES) if self._session.local else None
        lent = None if self._session.local or self._memory is None else self._memory.lend()
        have = self._arrival.stored_tokens // self._representation.piece_tokens
        try:
            if made is not None:
                self._window = made[0]
            elif lent is not None:
                self._window = lent
            nbytes = 0 if made is None else WINDOW_BYTES
            try:
                remote = None if lent is None else lent.remote
                ask = Ask(root, self._representation.digest, have, nbytes, request, remote)
                self._session.send(ask, descriptors=[] if made is None else [made[1]])
            finally:
                if made is not None:
                    os.close(made[1])
            message = self._session.receive()
            if isinstance(message, Refuse):
                raise WireError(f"the other worker refused: {message.why[:512]}", reason=f"refused_{_word(message.reason)}")
            if not isinstance(message, Accept):
                raise WireError(f"{type(message).__name__} was not expected", reason="garbage")
            while not isinstance(message := self._session.receive(), End):
                self._take(message)
        finally:
            if self._window is not None:
                self._window.close()

    def _take(self, message: object) -> None:
        if isinstance(message, Pieces):
            self._pieces(message)
            self._got_further_s = time.monotonic()
        elif isinstance(message, Told):
            self._on_result(result(message.result, vocabulary=self._vocabulary))
        elif not isinstance(message, Beat):
            raise WireError(f"{type(message).__name__} was not expected", reason="garbage")
        if self._ends_s is not None and time.monotonic() > self._ends_s:
            raise WireError("the request's deadline has passed", reason="late")
        if time.monotonic() - self._got_further_s > self._patience_s:
            raise WireError(f"the other worker has got no further for {self._patience_s:g} s", reason="stalled")

    def _pieces(self, message: Pieces) -> None:
        if message.count > max(1, MOST_RUN_BYTES // self._piece_bytes):
            raise WireError(f"a run of {message.count} pieces was announced, which is too long", reason="garbage")
        try:
            place = self._arrival.place(message.layer, message.first, message.count)
        except ValueError as error:
            raise WireError(str(error), reason="garbage") from error
        begun_s = time.monotonic()
        nbytes = self._arrival.nbytes(message.layer, message.count)
        self._bytes += nbytes
        if self._bytes > self._most_bytes:
            raise WireError("the other worker sends the same again and again", reason="garbage")
        wanted = place is not None
        if place is None:
            place = self._room(nbytes)
        if message.at is None:
            self._session.receive_bytes(place)
        else:
            self._copy(message.at, place)
        key = self._arrival.key_of(message.first + message.count - 1)
        if self._sealing.check([place], key=key, layer=message.layer) != message.check:
            raise WireError("pieces are not what was sent", reason="corrupt")
        self._counters.add("handoff_received_bytes", nbytes)
        self._counters.add("handoff_received_us", round(1e6 * (time.monotonic() - begun_s)))
        if wanted:
            self._arrival.landed(message.layer, message.first)

    def _copy(self, at: int, place: memoryview) -> None:
        window = self._window
        if window is None or not 0 <= at <= at + place.nbytes <= window.view.nbytes:
            raise WireError("pieces were said to be where no memory of this prompt is", reason="garbage")
        np.copyto(np.frombuffer(place, np.uint8), np.frombuffer(window.view, np.uint8, place.nbytes, at))
        self._session.send(Taken(1))

    def _room(self, nbytes: int) -> memoryview:
        """Return memory for bytes that are read only to get to what is behind them."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        return memoryview(self._scratch)[:nbytes]


def _word(reason: str) -> str:
    """A counter's name is made of it."""
    return reason if reason in ("role", "model", "representation", "request") else "other"
