"""A model that is ready to answer: an engine that speaks token ids and a renderer that turns text into them and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.api.shared import SharedPrefixes
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import Engine, GenerationRequest, Sampling
from headstart.errors import ContextLengthExceeded
from headstart.render import Renderer
from headstart.render.answers import Family
from headstart.render.constraints import Constraints


@dataclass(frozen=True, slots=True)
class Served:
    """`defaults`: what the model's makers recommend for sampling; a request's own values win."""

    name: str
    engine: Engine
    renderer: Renderer
    defaults: Sampling = field(default_factory=Sampling)
    note: str | None = None
    cache: PrefixCache | None = None
    shared: SharedPrefixes = field(default_factory=SharedPrefixes)
    answers: Family | None = None  # how its answers are read; None: they are text
    constraints: Constraints = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constraints", Constraints(self.renderer))

    @property
    def names(self) -> tuple[str, ...]:
        """The model's, and those of its adapters."""
        return (self.name, *self.engine.info.adapters)

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request means by `model`, None for the model itself."""
        return model if model in self.engine.info.adapters else None

    def request(
        self,
        id: str,
        prompt: tuple[int, ...],
        *,
        max_tokens: int | None = None,
        sampling: Mapping[str, Any] | None = None,
        prompt_param: str = "messages",
    ) -> GenerationRequest:
        """Return what the engine is asked. `sampling`: fields of `Sampling`; for those that are left out the model's defaults
        hold. Raises ContextLengthExceeded.

        Clients ask for their favourite number of tokens whatever the model, so a `max_tokens` that does not fit is not
        refused: the answer ends where the context does, with finish_reason "length"."""
        context = self.engine.info.context_tokens
        room = context - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, but the context of {self.name} is {context} tokens and an answer needs "
                "at least one; shorten the prompt",
                prompt_tokens=len(prompt),
                context_tokens=context,
                param=prompt_param,
            )
        return GenerationRequest(
            id=id,
            prompt=prompt,
            max_tokens=room if max_tokens is None else min(max_tokens, room),
            sampling=replace(self.defaults, **(sampling or {})),
            stop_ids=self.renderer.stop_ids,
        )
