"""What a request used, in numbers that mean one thing. Each dialect writes its own fields from these, and only from these."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.engine.base import Receipt


@dataclass(frozen=True, slots=True)
class Usage:
    """`prompt_tokens` are all of the prompt, `cached_*` those that were verified and used, by tier; `output_tokens` what the
    client was told of. `written_tokens`: of the prompt, those that were accepted for keeping."""

    prompt_tokens: int
    cached_memory_tokens: int = 0
    cached_disk_tokens: int = 0
    written_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0  # of the output
    kept_output_tokens: int = 0  # of the output: accepted for keeping, which is no part of what is written
    clamped: bool = False  # the engine's numbers did not add up; these do

    def __post_init__(self) -> None:
        assert 0 <= self.cached_tokens <= self.prompt_tokens
        assert self.written_tokens <= self.prompt_tokens - self.cached_tokens
        assert self.reasoning_tokens <= self.output_tokens

    @classmethod
    def of(cls, receipt: Receipt, *, output_tokens: int, reasoning_tokens: int = 0, kept_output_tokens: int = 0) -> Usage:
        """Return what a receipt says. Numbers that cannot be are cut to what can, and fail no request."""
        prompt = max(0, receipt.prompt_tokens)
        memory = min(max(0, receipt.cached_memory_tokens), prompt)
        disk = min(max(0, receipt.cached_disk_tokens), prompt - memory)
        written = min(max(0, receipt.written_tokens), prompt - memory - disk)
        said = (receipt.prompt_tokens, receipt.cached_memory_tokens, receipt.cached_disk_tokens, receipt.written_tokens)
        return cls(
            prompt_tokens=prompt,
            cached_memory_tokens=memory,
            cached_disk_tokens=disk,
            written_tokens=written,
            output_tokens=output_tokens,
            reasoning_tokens=min(reasoning_tokens, output_tokens),
            kept_output_tokens=kept_output_tokens,
            clamped=said != (prompt, memory, disk, written),
        )

    @property
    def cached_tokens(self) -> int:
        return self.cached_memory_tokens + self.cached_disk_tokens
