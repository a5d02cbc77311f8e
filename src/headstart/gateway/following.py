"""KV events of all workers, on one thread: subscribed to, asked for again where some were missed, handed to the loop in order.

    SUB  ◀── batches, numbered ──┐
    DEALER ── from number n ──▶  ├─ worker      a gap, or a new one: asked for again; where that fails: all of it forgotten
           ◀── what was missed ──┘

A worker that restarts counts from 0 again; its events are followed anew under another incarnation, and what still comes of the
one before is dropped. The loop takes a batch before the next one is read, so a router that is busy loses batches in the socket,
sees it by the numbers and asks again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as TookTooLong
from dataclasses import dataclass, field
from functools import partial
from threading import Lock, Thread
from typing import Any

import msgspec

from headstart.errors import MissingExtra
from headstart.gateway.translating import AllBlocksCleared, BlockRemoved, BlockStored, Translator, own_keys, plane_of
from headstart.policy.routing.holders import Keys, keys_of

_WAIT_MS = 200
_REPLAY_S = 10.0  # in which all that was missed must begin to come, and go on coming
_AGAIN_S = 2.0  # between two replays of one worker that led to nothing
_WAITING_BATCHES = 20_000
_HANDED_S = 5.0
_END = -1
_log = logging.getLogger("headstart")


@dataclass(frozen=True, slots=True)
class Change:
    """What a batch comes to: first all forgotten or not, then keys with their plane that came or went, in order."""

    forget: bool
    changes: tuple[tuple[bool, int, Keys], ...]


OnChange = Callable[[Change], None]


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@dataclass(eq=False, slots=True)
class Following:
    """One worker's events, for as long as it is the same process. `gone`: nobody wants them any more."""

    name: str
    endpoint: str
    replay: str
    translator: Translator | None
    on_change: OnChange
    last: int = -1
    seen: int = -1  # the last one that came while others were asked for
    asked_s: float | None = None  # since when a replay is under way
    heard_s: float = 0.0
    due_s: float = 0.0  # when one may be asked for
    anew: bool = True  # everything is to be asked for
    gone: bool = False
    sockets: list[Any] = field(default_factory=list)


class Follower:
    """Owns the thread and all sockets. `follow` and `leave` are for the loop's thread. Raises MissingExtra."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, clock: Callable[[], float] = time.monotonic) -> None:
        try:
            import zmq
        except ImportError as error:
            raise MissingExtra("following KV events needs pyzmq: pip install 'headstart[events]'", extra="events") from error
        self._zmq = zmq
        self._loop = loop
        self._clock = clock
        self._lock = Lock()
        self._new: list[Following] = []
        self._closing = False
        self.gaps = 0
        self.batches = 0
        self._context = zmq.Context()
        self._decoder = msgspec.msgpack.Decoder(_Batch)
        self._thread = Thread(target=self._work, name="kv-following", daemon=True)
        self._thread.start()

    def follow(self, following: Following) -> None:
        """Begin. All that the worker holds is asked for first."""
        with self._lock:
            self._new.append(following)

    def leave(self, following: Following) -> None:
        """Want no more of it; nothing of it is handed over any more once this returns."""
        following.gone = True

    def close(self) -> None:
        self._closing = True
        self._thread.join(_HANDED_S + 1.0)

    # The thread.

    def _work(self) -> None:
        poller = self._zmq.Poller()
        followed: dict[Any, Following] = {}
        try:
            while not self._closing:
                with self._lock:
                    new, self._new = self._new, []
                for one in new:
                    self._open(one, poller, followed)
                for one in {one for one in followed.values() if one.gone}:
                    self._shut(one, poller, followed)
                try:
                    for socket, _ in poller.poll(_WAIT_MS):
                        self._guarded(followed[socket], partial(self._read, socket=socket))
                    for one in set(followed.values()):
                        self._guarded(one, self._look)
                except self._zmq.ZMQError as error:
                    _log.warning("following KV events: %s", error)
        except Exception:  # noqa: BLE001 - the thread's outer edge: requests are routed without events, too
            _log.exception("following KV events ended unexpectedly; what workers store is known no more until a restart")
        finally:
            for one in set(followed.values()):
                for socket in one.sockets:
                    socket.close(0)
            self._context.term()

    def _guarded(self, one: Following, work: Callable[[Following], None]) -> None:
        """Do something for one worker. What fails there costs the others nothing: all of that one is asked for anew."""
        try:
            work(one)
        except self._zmq.ZMQError:
            raise
        except Exception:  # noqa: BLE001 - the edge between one worker's events and everybody's
            _log.exception("KV events of %s failed unexpectedly; all that it holds is asked for anew", one.name)
            one.asked_s, one.anew, one.due_s = None, True, self._clock() + _AGAIN_S

    def _open(self, one: Following, poller: Any, followed: dict[Any, Following]) -> None:
        if one.gone:
            return
        try:
            live = self._context.socket(self._zmq.SUB)
            one.sockets.append(live)
            live.setsockopt(self._zmq.RCVHWM, _WAITING_BATCHES)
            live.setsockopt(self._zmq.LINGER, 0)
            live.setsockopt(self._zmq.SUBSCRIBE, b"")
            live.connect(one.endpoint)
            if one.replay:
                again = self._context.socket(self._zmq.DEALER)
                one.sockets.append(again)
                again.setsockopt(self._zmq.LINGER, 0)
                again.setsockopt(self._zmq.RCVHWM, 0)  # what was asked for is taken whole
                again.connect(one.replay)
        except self._zmq.ZMQError as error:
            _log.warning("KV events of %s at %s cannot be followed: %s", one.name, one.endpoint, error)
            for socket in one.sockets:
                socket.close(0)
            one.sockets.clear()
            return
        for socket in one.sockets:
            poller.register(socket, self._zmq.POLLIN)
            followed[socket] = one

    def _shut(self, one: Following, poller: Any, followed: dict[Any, Following]) -> None:
        for socket in one.sockets:
            poller.unregister(socket)
            del followed[socket]
            socket.close(0)
        one.sockets.clear()

    def _look(self, one: Following) -> None:
        """Ask for what was missed, where that is due."""
        now_s = self._clock()
        if one.asked_s is not None and now_s - one.heard_s > _REPLAY_S:
            one.asked_s, one.due_s, one.anew = None, now_s + _AGAIN_S, True
        if one.anew and one.asked_s is None and now_s >= one.due_s:
            self._ask_again(one, 0)

    def _ask_again(self, one: Following, number: int) -> None:
        if len(one.sockets) < 2:  # nobody can be asked: what comes from here on is what is known
            if one.last >= 0 or number:
                self._hand(one, Change(True, ()))
            one.anew = False
            return
        one.asked_s = one.heard_s = self._clock()
        one.sockets[1].send_multipart((b"", number.to_bytes(8, "big")), self._zmq.NOBLOCK)

    def _read(self, one: Following, socket: Any) -> None:
        try:
            frames = socket.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return
        if len(frames) < 3 or len(frames[-2]) != 8:
            return
        number, payload = int.from_bytes(frames[-2], "big", signed=True), frames[-1]
        if socket is not one.sockets[0]:
            one.heard_s = self._clock()
            if number == _END:
                one.asked_s, one.anew = None, False
                if one.seen > one.last:
                    self._ask_again(one, one.last + 1)
            else:
                # Of what is no longer kept others tell nothing; ours tells everything anew then, and says so.
                self._take(one, payload, forget=one.translator is not None and number > one.last + 1)
                one.last = max(one.last, number)
            return
        if one.asked_s is not None or one.anew:
            one.seen = number  # it is in what was asked for, or is asked for behind it
            return
        if number == one.last + 1 or (one.last < 0 and len(one.sockets) < 2):
            self._take(one, payload, forget=False)
            one.last = number
        elif number > one.last:
            self.gaps += 1
            if len(one.sockets) < 2:
                self._take(one, payload, forget=True)
                one.last = number
            else:
                self._ask_again(one, one.last + 1)
        elif number == 0 and one.last > 0:  # it counts from the start again: another process
            one.last, one.seen, one.anew, one.due_s = -1, -1, True, 0.0
            self._hand(one, Change(True, ()))

    def _take(self, one: Following, payload: bytes, *, forget: bool) -> None:
        try:
            batch = self._decoder.decode(payload)
            change = changed(batch.events, one.translator, forget=forget)
        except (msgspec.DecodeError, ValueError) as error:  # a ValueError: of token ids that are none
            _log.warning("KV events of %s cannot be read: %s", one.name, error)
            self._hand(one, Change(True, ()))
            return
        self.batches += 1
        self._hand(one, change)

    def _hand(self, one: Following, change: Change) -> None:
        """Give it to the loop and wait until it was taken."""
        if one.gone or self._closing or not (change.forget or change.changes):
            return

        async def take() -> None:
            if not one.gone:
                one.on_change(change)

        taking = take()
        try:
            taken = asyncio.run_coroutine_threadsafe(taking, self._loop)
        except RuntimeError:  # the loop has ended
            taking.close()
            self._closing = True
            return
        try:
            taken.result(_HANDED_S)
        except (TookTooLong, CancelledError):
            one.anew = True  # it may or may not have been taken


def changed(
    events: Sequence[BlockStored | BlockRemoved | AllBlocksCleared], translator: Translator | None, *, forget: bool = False
) -> Change:
    """Return what a batch of events comes to; `translator` None: their names are ours. What was told before everything is
    cleared counts no more."""
    changes: list[tuple[bool, int, Keys]] = []
    for event in events:
        if isinstance(event, AllBlocksCleared):
            forget, changes = True, []
            if translator is not None:
                translator.cleared()
            continue
        came = isinstance(event, BlockStored)
        keys: list[bytes]
        if translator is None:
            keys = own_keys(event.block_hashes)
        else:
            keys = translator.stored(event) if isinstance(event, BlockStored) else translator.removed(event)
        if keys:
            changes.append((came, plane_of(event.medium), keys_of(keys)))
    return Change(forget, tuple(changes))
