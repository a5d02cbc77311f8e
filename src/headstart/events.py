"""KV events: which blocks are stored here, and which no longer, in the form of vLLM's ZMQ stream, so that routers can follow.

    PUB     (topic, sequence number as 8 bytes big endian, batch)              every batch once, in order
    ROUTER  ("", number) ─▶ ("", topic, number, batch) … ("", "", -1, "")       what was missed, from that number on

A batch is a msgpack array [time, events, data_parallel_rank], an event a map with its "type" (vLLM 0.32,
`vllm/distributed/kv_events.py`). A subscriber that does not read loses batches and sees it by the numbers; nothing here waits
for one.

Which events there are to tell is `cache.telling`'s; this file knows their form and the sockets.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headstart.config import parse_endpoint
from headstart.errors import MissingExtra

MEMORY, STORAGE = "CPU", "STORAGE"  # media, as vLLM calls them
KEPT_BATCHES = 10_000  # for those who ask what they missed
KEPT_BYTES = 64 << 20
_WAITING_BATCHES = 10_000  # for each subscriber; one that is slower loses batches
_REPLAY_SEND_MS = 1000  # how long somebody who asked for what was missed may keep others waiting by not reading
_END = (-1).to_bytes(8, "big", signed=True)
_REQUEST_FRAMES = 3


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Blocks that are there from now on, one behind the other in a prompt. `block_hashes`: the first 16 bytes of each key.
    `parent_block_hash`: of the block before the first, None where a prompt begins. `lora_name`: digest of the adapter."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Blocks that are no longer there."""

    block_hashes: list[bytes]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, gc=False, frozen=True):
    """Forget everything that was told before: what is there is told anew behind this."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, frozen=True):
    ts: float
    events: Sequence[Event]
    data_parallel_rank: int | None = None


class Publisher:
    """The two sockets: batches at `endpoint`, what was missed at the next port (of ipc:///path at ipc:///path.replay).

    Used by one thread, except `wake`. Close it there, too."""

    def __init__(self, endpoint: str, *, topic: str = "") -> None:
        """Raises OSError where an address is taken, ConfigError for what is none, MissingExtra."""
        parse_endpoint(endpoint)
        try:
            import zmq
        except ImportError as error:
            raise MissingExtra("KV events need pyzmq: pip install 'headstart[events]'", extra="events") from error
        self._zmq = zmq
        self._topic = topic.encode()
        self._encoder = msgspec.msgpack.Encoder()
        self._kept: deque[tuple[int, bytes]] = deque()
        self._kept_bytes = 0
        self.next_number = 0
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._context = zmq.Context()
        self._publish = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        try:
            for one in (self._publish, self._replay):
                one.setsockopt(zmq.LINGER, 0)
            self._publish.setsockopt(zmq.SNDHWM, _WAITING_BATCHES)
            self._replay.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._replay.setsockopt(zmq.SNDTIMEO, _REPLAY_SEND_MS)
            self.endpoint = self._bind(self._publish, endpoint)
            self.replay_endpoint = self._bind(self._replay, _replay_of(self.endpoint if _free(endpoint) else endpoint))
        except BaseException:
            self.close()
            raise
        self._poller = zmq.Poller()
        self._poller.register(self._replay, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def wake(self) -> None:
        """End a `wait` of the publisher's thread. From any thread; never waits."""
        try:
            self._waker.send(b"\0")
        except OSError:  # it has been woken often enough, or is closed
            return

    def wait(self, timeout_s: float) -> None:
        """Return when there is something to answer, somebody called `wake`, or the time is over."""
        self._poller.poll(int(timeout_s * 1000))
        try:
            while self._woken.recv(4096):
                pass
        except OSError:
            return

    def publish(self, events: Sequence[Event]) -> None:
        """Send a batch to whoever listens. Never waits for one."""
        number, payload = self.next_number, self.encode(events)
        self.next_number += 1
        self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while len(self._kept) > KEPT_BATCHES or self._kept_bytes > KEPT_BYTES:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def encode(self, events: Sequence[Event]) -> bytes:
        return self._encoder.encode(Batch(time.time(), events, 0))

    def asked(self) -> tuple[bytes, int] | None:
        """Return who asks for what was missed, and from which number on; None where nobody does."""
        while True:
            try:
                frames = self._replay.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return None
            if len(frames) == _REQUEST_FRAMES and len(frames[2]) == 8:
                return frames[0], int.from_bytes(frames[2], "big")

    def holds(self, number: int) -> bool:
        """Whether everything from that number on can be sent again."""
        first = self._kept[0][0] if self._kept else self.next_number
        return first <= number <= self.next_number

    def again(self, client: bytes, number: int) -> None:
        """Send the batches from that number on once more, to one who asked."""
        self._send(client, ((one, payload) for one, payload in self._kept if one >= number))

    def instead(self, client: bytes, batches: Iterable[Sequence[Event]]) -> None:
        """Send batches that stand for all up to the last one that was published, and bear its number."""
        number = max(0, self.next_number - 1)
        self._send(client, ((number, self.encode(events)) for events in batches))

    def close(self) -> None:
        for one in (self._publish, self._replay):
            one.close(0)
        self._context.term()
        self._waker.close()
        self._woken.close()

    def _send(self, client: bytes, batches: Iterable[tuple[int, bytes]]) -> None:
        try:
            for number, payload in batches:
                self._replay.send_multipart((client, b"", self._topic, number.to_bytes(8, "big"), payload))
            self._replay.send_multipart((client, b"", b"", _END, b""))
        except self._zmq.ZMQError:
            return  # it went away, or does not read; it will ask again

    def _bind(self, one: Any, endpoint: str) -> str:
        if "[" in endpoint:
            one.setsockopt(self._zmq.IPV6, 1)
        try:
            one.bind(endpoint)
        except self._zmq.ZMQError as error:
            raise OSError(error.errno, f"{endpoint}: {error.strerror}") from error
        return str(one.getsockopt_string(self._zmq.LAST_ENDPOINT))


def _free(endpoint: str) -> bool:
    """Whether the operating system chooses the port."""
    return parse_endpoint(endpoint)[1] == 0


def _replay_of(endpoint: str) -> str:
    if endpoint.startswith("ipc://"):
        return f"{endpoint}.replay"
    host, port = endpoint.rsplit(":", 1)
    return f"{host}:{int(port) + 1}"
