"""One authenticated connection between two workers: a handshake, then frames, each with a deadline, a bound and a check.

    who connects  ─ "HSWIRE", version, nonce ─▶  who listens
                  ◀─ "HSWIRE", version, nonce, proof ─
                  ─ proof ─▶                                 then frames both ways:  length │ check │ message

A proof shows that the other side has the same secret, which may be none. From secret and both nonces comes the session's key;
with it every frame is checked, together with its number and direction, so that nothing of another session, or of this one a
second time, passes. Whatever is wrong raises `WireError`, and the connection is then of no further use.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from headstart.errors import WireError
from headstart.transfer.wire.messages import VERSION, Message, decode, encode

MOST_FRAME_BYTES = 1 << 20
_MAGIC = b"HSWIRE"
_NONCE_BYTES = 32
_PROOF_BYTES = 32
_CHECK_BYTES = 16
_HELLO = struct.Struct(f"<6sH{_NONCE_BYTES}s")
_FRAME = struct.Struct(f"<I{_CHECK_BYTES}s")
_LEAST_RATE = 1 << 20  # bytes a second: who sends slower than that has stalled


class Session:
    """`socket`: connected, and taken over. `secret`: what both sides know, b"" for none. `timeout_s`: how long the other side
    may take to do anything. For one thread, but for `cut`."""

    def __init__(self, connected: socket.socket, *, secret: bytes, timeout_s: float, listening: bool) -> None:
        """Shake hands. Raises WireError (reason "version", "secret", "garbage", "lost", "stalled")."""
        self._socket = connected
        self._timeout_s = timeout_s
        self._sent = self._received = 0
        self._listening = listening
        if connected.family in (socket.AF_INET, socket.AF_INET6):
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = hashlib.sha256(secret).digest()
        deadline = time.monotonic() + timeout_s
        nonce = os.urandom(_NONCE_BYTES)
        try:
            if listening:
                theirs = self._hello(deadline)
                nonces = theirs + nonce
                self._write([_HELLO.pack(_MAGIC, VERSION, nonce), _proof(key, b"listens", nonces)], deadline)
                self._prove(key, b"connects", nonces, deadline)
            else:
                self._write([_HELLO.pack(_MAGIC, VERSION, nonce)], deadline)
                nonces = nonce + self._hello(deadline)
                self._prove(key, b"listens", nonces, deadline)
                self._write([_proof(key, b"connects", nonces)], deadline)
        except BaseException:
            self.close()
            raise
        self.key = _proof(key, b"session", nonces)
        self.keyed = bool(secret)

    def send(self, message: Message, payload: Sequence[memoryview] = (), *, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and behind it bytes or descriptors. Raises WireError when they are not taken in time."""
        body = encode(message)
        head = _FRAME.pack(len(body), self._check(body, self._sent, mine=True))
        self._sent += 1
        nbytes = sum(part.nbytes for part in payload)
        deadline = time.monotonic() + self._timeout_s + nbytes / _LEAST_RATE
        if descriptors:
            self._socket.settimeout(self._timeout_s)
            try:
                sent = socket.send_fds(self._socket, [head + body], list(descriptors))
            except OSError as error:
                raise _lost(error) from error
            self._write([(head + body)[sent:]], deadline)
        else:
            self._write([head + body, *payload], deadline)

    def receive(self, *, timeout_s: float | None = None, most: int = MOST_FRAME_BYTES) -> Message:
        """Return the next message of at most `most` bytes. Raises WireError(reason="stalled") when none has come in time."""
        deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
        return self._frame(self._read(_FRAME.size, deadline), deadline, most)

    def receive_with_descriptor(self, *, most: int) -> tuple[Message, int | None]:
        """Return the next message and the descriptor that came with it, which the caller closes."""
        if self._socket.family != getattr(socket, "AF_UNIX", None):
            return self.receive(most=most), None
        deadline = time.monotonic() + self._timeout_s
        self._socket.settimeout(self._timeout_s)
        try:
            head, descriptors, _, _ = socket.recv_fds(self._socket, _FRAME.size, 1)
        except OSError as error:
            raise _lost(error) from error
        try:
            if not head:
                raise WireError("the other worker closed the connection", reason="lost")
            head += bytes(self._read(_FRAME.size - len(head), deadline))
            return self._frame(head, deadline, most), descriptors[0] if descriptors else None
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise

    def receive_bytes(self, into: memoryview) -> None:
        """Fill `into` with what follows a message."""
        self._fill(into, time.monotonic() + self._timeout_s + into.nbytes / _LEAST_RATE)

    @property
    def waiting(self) -> bool:
        """Whether something has come, if only the end of the connection."""
        asked = select.poll()
        asked.register(self._socket, select.POLLIN)
        return bool(asked.poll(0))

    @property
    def local(self) -> bool:
        """Whether descriptors can be sent."""
        return self._socket.family == getattr(socket, "AF_UNIX", None)

    def cut(self) -> None:
        """End the connection, whatever waits on it, from any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.cut()
        self._socket.close()

    def _hello(self, deadline: float) -> bytes:
        magic, version, nonce = _HELLO.unpack(self._read(_HELLO.size, deadline))
        if magic != _MAGIC:
            raise WireError("what connected does not speak this protocol", reason="garbage")
        if version != VERSION:
            raise WireError(
                f"the other worker speaks version {version} of the handoff, this one {VERSION}; give both the same headstart",
                reason="version",
            )
        return bytes(nonce)

    def _prove(self, key: bytes, who: bytes, nonces: bytes, deadline: float) -> None:
        if not hmac.compare_digest(bytes(self._read(_PROOF_BYTES, deadline)), _proof(key, who, nonces)):
            raise WireError(
                "the other worker has another handoff.secret, or none; give all workers the same file", reason="secret"
            )

    def _check(self, body: bytes, number: int, *, mine: bool) -> bytes:
        head = struct.pack("<?Q", self._listening == mine, number)
        return hashlib.blake2b(head + body, digest_size=_CHECK_BYTES, key=self.key).digest()

    def _frame(self, head: bytes | bytearray, deadline: float, most: int) -> Message:
        length, check = _FRAME.unpack(head)
        if length > most:
            raise WireError(f"a message of {length} bytes was announced, {most} are the most", reason="garbage")
        body = bytes(self._read(length, deadline))
        if not hmac.compare_digest(check, self._check(body, self._received, mine=False)):
            raise WireError("a message is not what was sent", reason="corrupt")
        self._received += 1
        try:
            return decode(body)
        except msgspec.DecodeError as error:
            raise WireError(f"a message cannot be read: {error}", reason="garbage") from error

    def _read(self, nbytes: int, deadline: float) -> bytearray:
        data = bytearray(nbytes)
        self._fill(memoryview(data), deadline)
        return data

    def _fill(self, view: memoryview, deadline: float) -> None:
        while view.nbytes:
            try:
                self._until(deadline)
                count = self._socket.recv_into(view)
            except OSError as error:
                raise _lost(error) from error
            if not count:
                raise WireError("the other worker closed the connection", reason="lost")
            view = view[count:]

    def _write(self, parts: Sequence[bytes | memoryview], deadline: float) -> None:
        for part in parts:
            view = memoryview(part).cast("B")
            while view.nbytes:
                try:
                    self._until(deadline)
                    view = view[self._socket.send(view) :]
                except OSError as error:
                    raise _lost(error) from error

    def _until(self, deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._socket.settimeout(left_s)


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hashlib.blake2b(who + nonces, digest_size=_PROOF_BYTES, key=key).digest()


def _lost(error: OSError) -> WireError:
    if isinstance(error, TimeoutError):
        return WireError("the other worker has stalled", reason="stalled")
    return WireError(f"the connection to the other worker is lost: {error.strerror or error}", reason="lost")
