"""One line of the usage log: what one request used, in tokens. Pure.

    prompt = cached_memory + cached_disk + computed        cached + written ≤ prompt        (as in the usage that was sent)

`engine` has what the engine's own counters were raised by for it: of several answers each with its prompt, of an answer that a
stop text ended all that was generated, and nothing of a request that never had its turn.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Finish = Literal["stop", "length", "tool_calls", "abort", "error", "refused"]


class EngineCounts(msgspec.Struct, frozen=True):
    prompt: int = 0
    cached_memory: int = 0
    cached_disk: int = 0
    generated: int = 0
    written: int = 0
    kept_output: int = 0


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """`id`: unique. `time`: when it ended, seconds since 1970. `key`: the id of the API key, never the key. `retention`: the
    class. `status`: the HTTP status, of streams that fail midway the one that stands for the failure. `requests`: more than one
    where a key was refused so often that a line stands for several."""

    id: str
    time: float
    tenant: str = ""
    key: str = ""
    model: str = ""
    endpoint: str = ""
    session: str = ""
    retention: str = "default"
    finish: Finish = "stop"
    status: int = 200
    requests: int = 1
    answers: int = 1
    prompt: int = 0
    cached_memory: int = 0
    cached_disk: int = 0
    written: int = 0
    output: int = 0
    kept_output: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0
    engine: EngineCounts = EngineCounts()

    @property
    def computed(self) -> int:
        return self.prompt - self.cached_memory - self.cached_disk


_decoder = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """Return the line, its end included."""
    return msgspec.json.encode(entry) + b"\n"


def decode(line: bytes) -> Entry | None:
    """Return what a line says; None where it is torn or no line of ours. Unknown fields are left alone."""
    if not line.endswith(b"\n"):
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
