"""What OpenAI's chat completions and completions have in common: envelope, usage, chunks and how a stream ends. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from headstart import __version__
from headstart.api.dialects.base import DONE, KEEPALIVE, About, event
from headstart.api.errors import error_object
from headstart.api.usage import Usage
from headstart.engine.base import Progress
from headstart.errors import RequestError

_LEAST_LOG = -9999.0  # stands for what JSON cannot say: a probability of 0


@dataclass(slots=True)
class Chunks:
    """The part of a `Shape` that does not depend on what a choice looks like. `kind`: the object that a chunk is."""

    kind: ClassVar[str]
    about: About
    include_usage: bool = False

    def open(self) -> Iterator[bytes]:
        return iter(())

    def begin(self, usage: Usage) -> Iterator[bytes]:
        return iter(())

    def end(self, usage: Usage) -> Iterator[bytes]:
        if self.include_usage:
            yield event(envelope(self.about, self.kind, []) | {"usage": usage_object(usage)})
        yield DONE

    def failure(self, error: RequestError) -> Iterator[bytes]:
        yield event(error_object(error))

    def quiet(self) -> bytes:
        return KEEPALIVE

    def chunk(self, choice: dict[str, Any]) -> bytes:
        return event(self._of(choice))

    def progress(self, choice: dict[str, Any], progress: Progress) -> bytes:
        """Return a chunk that says how far the prompt is."""
        return event(self._of(choice) | {"prompt_progress": _progress_object(progress)})

    def _of(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk = envelope(self.about, self.kind, [choice])
        return chunk | {"usage": None} if self.include_usage else chunk


def envelope(about: About, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": about.id,
        "object": kind,
        "created": about.created,
        "model": about.model,
        "system_fingerprint": f"headstart-{__version__}",
        "choices": choices,
    }


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return OpenAI's and DeepSeek's fields: the same whether streamed or not, every number present also when it is 0.

    Both count cached tokens as part of the prompt; hit and miss always add up to it."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
        "prompt_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cached_memory_tokens": usage.cached_memory_tokens,
            "cached_disk_tokens": usage.cached_disk_tokens,
            "cache_write_tokens": usage.written_tokens,  # clients add it up, so never absent
        },
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens, "kept_tokens": usage.kept_output_tokens},
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
    }


def _progress_object(progress: Progress) -> dict[str, int]:
    """Return how far a prompt is as llama.cpp says it: `processed` counts cached tokens, too."""
    return {
        "total": progress.total_tokens,
        "cache": progress.cached_tokens,
        "processed": progress.processed_tokens,
        "time_ms": round(progress.seconds * 1000),
    }


def token_text(token: bytes) -> str:
    """Return the token's text; bytes that are no character stand as OpenAI writes them, \\xe2."""
    return token.decode("utf-8", "backslashreplace")


def log_or_least(logprob: float) -> float:
    return max(logprob, _LEAST_LOG)


def token_object(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": log_or_least(logprob), "bytes": list(token)}
