"""What one engine asks another for: the part of a request that another worker needs, and what it tells of it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np

from headstart.engine.base import FinishReason, GenerationRequest, KVSink, Logprobs, Progress, Receipt, Sampling
from headstart.errors import WireError

LEAST_ASK_BYTES = 1 << 16  # beside the prompt and what is allowed first


class Asked(msgspec.Struct, frozen=True):
    """Fields of `GenerationRequest`. `prompt`: u32. `allowed`: what the first token may be, see `Constraint.allowed`."""

    prompt: bytes
    sampling: Sampling
    stop_ids: tuple[int, ...]
    salt: bytes | None
    shared_tokens: int
    min_tokens: int
    logprobs: int | None
    priority: int
    tenant: str
    session: str
    retention: str
    deadline_s: float | None
    adapter: str | None
    keep_tokens: int | None
    keep_s: float
    memory_only: bool
    progress: bool
    allowed: bytes | None

    @classmethod
    def of(cls, request: GenerationRequest, *, deadline_s: float | None) -> Asked:
        salt = request.salt
        return cls(
            prompt=np.asarray(request.prompt, "<u4").tobytes(),
            sampling=request.sampling,
            stop_ids=tuple(sorted(request.stop_ids)),
            salt=salt.encode("utf-8", "surrogatepass") if isinstance(salt, str) else salt,  # as keys are made of it
            shared_tokens=request.shared_tokens,
            min_tokens=request.min_tokens,
            logprobs=request.logprobs,
            priority=request.priority,
            tenant=request.tenant,
            session=request.session,
            retention=request.retention,
            deadline_s=deadline_s,
            adapter=request.adapter,
            keep_tokens=request.keep_tokens,
            keep_s=request.keep_s,
            memory_only=request.memory_only,
            progress=request.progress,
            allowed=None if request.constraint is None else request.constraint.allowed(),
        )

    @property
    def tokens(self) -> tuple[int, ...]:
        if len(self.prompt) % 4:
            raise WireError("a prompt is no run of token ids", reason="garbage")
        return tuple(np.frombuffer(self.prompt, "<u4").tolist())

    def request(self, id: str, sink: KVSink) -> GenerationRequest:
        """Return what the engine is asked: the prompt and one token."""
        return GenerationRequest(
            id=id,
            prompt=self.tokens,
            max_tokens=1,
            sampling=self.sampling,
            stop_ids=frozenset(self.stop_ids),
            salt=self.salt,
            shared_tokens=self.shared_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            priority=self.priority,
            tenant=self.tenant,
            session=self.session,
            retention=self.retention,
            deadline_s=self.deadline_s,
            adapter=self.adapter,
            keep_tokens=self.keep_tokens,
            keep_s=self.keep_s,
            memory_only=self.memory_only,
            progress=self.progress,
            constraint=None if self.allowed is None else _First(self.allowed),
            sink=sink,
        )


class Result(msgspec.Struct, frozen=True):
    """A `TokenEvent`, of the one token that was asked for or of the way there."""

    token: int | None = None
    finish: FinishReason | None = None
    receipt: Receipt | None = None
    error: str | None = None
    logprobs: Logprobs | None = None
    progress: Progress | None = None


def encoded(value: Asked | Result) -> bytes:
    return msgspec.msgpack.encode(value)


def asked(data: bytes) -> Asked:
    """Raises WireError for what is no request."""
    try:
        return msgspec.msgpack.decode(data, type=Asked)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"what is asked for cannot be read: {error}", reason="garbage") from error


def result(data: bytes, *, vocabulary: int) -> Result:
    """Raises WireError for what can be no result."""
    try:
        found = msgspec.msgpack.decode(data, type=Result)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"what came of a prompt cannot be read: {error}", reason="garbage") from error
    if found.token is not None and not 0 <= found.token < vocabulary:
        raise WireError(f"token {found.token} is none of this model's", reason="garbage")
    return found


def cached_of(prompt_tokens: int, told: Receipt | None, stored: dict[str, int]) -> tuple[int, int]:
    """Return what counts as cached of a prompt, (from memory, from disk): the more of what the other worker had, and this one.

    What came from the other worker is none; and what both had counts once.

    >>> cached_of(100, None, {"memory": 64}), cached_of(100, None, {"disk": 64, "memory": 0})
    ((64, 0), (0, 64))
    """
    memory = stored.get("memory", 0)
    disk = sum(stored.values()) - memory
    if told is not None and told.cached_tokens > memory + disk:
        memory, disk = told.cached_memory_tokens, told.cached_disk_tokens
    memory = min(max(0, memory), prompt_tokens)
    return memory, min(max(0, disk), prompt_tokens - memory)


def joined(
    receipt: Receipt, told: Receipt | None, cached: tuple[int, int], *, first_token_s: float | None, total_s: float
) -> Receipt:
    """Return the receipt of a request whose prompt another worker computed (`told`, where it said so) and that was gone on with
    here: each token counts once. The times are those that only this worker has measured."""
    memory, disk = cached
    written = receipt.written_tokens + (0 if told is None else told.written_tokens)  # what came from there is known here
    return replace(
        receipt,
        cached_memory_tokens=memory,
        cached_disk_tokens=disk,
        written_tokens=min(written, receipt.prompt_tokens - memory - disk),
        bytes_read=receipt.bytes_read if told is None else told.bytes_read,
        decision=receipt.decision if told is None else told.decision,
        first_token_s=first_token_s,
        total_s=total_s,
    )


class _First:
    """The constraint of a first token."""

    def __init__(self, mask: bytes) -> None:
        self._mask = mask

    def allowed(self) -> bytes | None:
        return self._mask

    def accept(self, token: int) -> None:
        """Nothing comes behind it."""
