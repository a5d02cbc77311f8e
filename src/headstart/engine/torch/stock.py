"""Models that our own attention and KV memory do not serve: run as they are, each request with transformers' own cache.

Nothing of them is kept in the prefix cache; all else (scheduling, sampling, aborts, bounded memory) is as for every model. How
one is run is found by trying: the first of these that gives the logits of a plain run over the whole text.

    CHUNKS   the prompt in chunks, then token by token, with the model's own cache
    WHOLE    the prompt at once, then token by token: its cache takes no chunks, or its numbers depend on the whole length
    ANEW     everything again for each token: it has no cache that could be kept apart for each request
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headstart.engine.torch.attention import Step
from headstart.engine.torch.facts import (
    CANNOT_RUN,
    PROBE_CHUNKS,
    ModelFacts,
    first_line,
    name_of_cache,
    probe_tokens,
    signature,
)
from headstart.engine.torch.kv_memory import KVShape, LayerViews
from headstart.errors import ModelError

_log = logging.getLogger(__name__)


class Way(enum.Enum):
    CHUNKS = enum.auto()
    WHOLE = enum.auto()
    ANEW = enum.auto()


@dataclass(frozen=True, slots=True)
class StockShape(KVShape):
    """How much a request keeps, as measured on a short text. No layer lies in our memory: a region is only counted."""

    fixed: int = 0
    each: int = 8

    @property
    def token_bytes(self) -> int:
        return self.each

    def region_bytes(self, tokens: int) -> int:
        return self.fixed + tokens * self.each


@dataclass(slots=True)
class StockKept:
    """What one request keeps: its tokens, and the model's own cache for those of them that were computed."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    cache: Any = None


class StockModel:
    """See `TorchModel`, whose door this has. Safe for one thread at a time. `why`: one sentence on what keeps it from being
    cached. Raises ModelError for a model that cannot be run even so."""

    def __init__(self, module: Any, *, name: str, why: str, at_once: bool = False) -> None:
        """`at_once`: prompts are never cut, whatever a short text says."""
        self.module = module
        self.name = name
        self.why = why
        facts = ModelFacts.of(module)
        self.context_tokens, self.vocabulary = facts.context_tokens, facts.vocabulary
        self.device, self.dtype, self.layers = facts.device, facts.dtype, facts.layers
        self._cache_name = name_of_cache(module)
        self._takes = frozenset(signature(module).parameters)
        self._ropes = [_Rope(one) for one in module.modules() if hasattr(one, "original_max_seq_len")]
        self.way, self.shape = self._tried([Way.WHOLE, Way.ANEW] if at_once else list(Way))

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], step: Step, *, rows: Sequence[int]) -> Tensor:
        """Return float32 logits [len(rows), vocabulary] of the given rows of a packed batch, on the model's device."""
        if step.before_layer is not None:
            step.before_layer(0)  # the one place where a step may be given up
        logits = []
        for one in step.segments:
            assert isinstance(one.kv, LayerViews)
            if one.first == 0:
                one.kv.stock = StockKept()
            kept = one.kv.stock
            if kept is None or one.first != len(kept.tokens):
                raise RuntimeError(f"a request is asked to go on from token {one.first}, where it does not stand")
            kept.tokens += tokens[one.rows]
            wanted = [one.first + row - one.start for row in rows if one.start <= row < one.start + one.count]
            if wanted or self.way is Way.CHUNKS:
                logits += self._advance(kept, wanted)
        return torch.stack(logits) if logits else torch.empty(0, self.vocabulary, device=self.device)

    @torch.inference_mode()
    def next_logits(self, tokens: Sequence[int], *, chunk_tokens: int = 1024) -> Tensor:
        """Return float32 logits [vocabulary] for the token after `tokens`, computed at once."""
        return self._run(tokens, 0, None, keep=False)[0][-1]

    def _advance(self, kept: StockKept, wanted: Iterable[int]) -> list[Tensor]:
        """Compute the tokens that were not yet; return the logits at the positions `wanted`, which are among those."""
        first = 0 if self.way is Way.ANEW else kept.computed
        logits, kept.cache = self._run(kept.tokens[first:], first, kept.cache, keep=self.way is not Way.ANEW)
        kept.computed = len(kept.tokens)
        return [logits[position - first] for position in wanted]

    def _run(self, tokens: Sequence[int], first: int, cache: Any, *, keep: bool) -> tuple[Tensor, Any]:
        """Return float32 logits [tokens, vocabulary] of tokens that follow the `first` ones, which are in `cache`, and with
        `keep` the cache for all of them. What kind of cache it is, the model decides."""
        for rope in self._ropes:
            rope.forget()
        given: dict[str, Any] = {"use_cache": keep} if "use_cache" in self._takes else {}
        if cache is not None and self._cache_name is not None:
            given[self._cache_name] = cache
        if "position_ids" in self._takes:
            given["position_ids"] = torch.arange(first, first + len(tokens), device=self.device).unsqueeze(0)
        output = self.module(torch.tensor([list(tokens)], device=self.device), **given)
        if keep and (self._cache_name is None or getattr(output, self._cache_name, None) is None):
            raise TypeError("it hands out no cache")
        logits: Tensor = output.logits[0]
        return logits.float(), getattr(output, self._cache_name or "", None) if keep else None

    @torch.inference_mode()
    def _tried(self, ways: Sequence[Way]) -> tuple[Way, StockShape]:
        """Return the first way that is right for a short text, and what the model keeps then."""
        tokens = probe_tokens(self.vocabulary)
        head = PROBE_CHUNKS[0]
        try:
            want, _ = self._run(tokens, 0, None, keep=False)
            apart = float((self._run(tokens[:head], 0, None, keep=False)[0] - want[:head]).abs().max())
        except CANNOT_RUN as error:
            raise ModelError(f"{self.name} cannot be run by transformers itself: {first_line(error)}") from error
        allowed = (1e-3 if self.dtype in (torch.float32, torch.float64) else 0.1) * max(1.0, float(want.abs().max()))
        if not apart <= allowed:  # also when either is NaN
            raise ModelError(
                f"{self.name} gives logits that are not finite, or that depend on later tokens; a decoder gives neither"
            )
        for way in ways:
            self.way = way
            try:
                ends, got, shape = self._answered(tokens)
            except CANNOT_RUN as error:
                _log.info("%s cannot be run %s: %s", self.name, way.name, first_line(error))
                continue
            if float((got - want[ends]).abs().max()) <= allowed:
                return way, shape
        raise ModelError(f"{self.name} gives other logits each time that it is run, so it cannot be served")

    def _answered(self, tokens: Sequence[int]) -> tuple[list[int], Tensor, StockShape]:
        """Return where logits were asked for, those logits, and what is kept, for a request that comes in chunks while another
        one runs."""
        one, other = StockKept(), StockKept()
        ends, logits, sizes = [], [], [0]
        for chunk in PROBE_CHUNKS if self.way is Way.CHUNKS else (sum(PROBE_CHUNKS[:-1]), PROBE_CHUNKS[-1]):
            here = slice(len(one.tokens), len(one.tokens) + chunk)
            one.tokens += tokens[here]
            ends.append(len(one.tokens) - 1)
            logits += self._advance(one, ends[-1:])
            other.tokens += tokens[::-1][here]
            self._advance(other, ends[-1:])
            sizes.append(sum(tensor.nbytes for tensor in _tensors(one.cache, depth=6)))
        each = max(sizes[-1] - sizes[-2], 8)  # for the last token
        shape = StockShape((), self.dtype, fixed=max(0, sizes[-1] - each * len(tokens)), each=each)
        return ends, torch.stack(logits), shape


class _Rope:
    """A RoPE module whose frequencies follow the longest text that it has seen: they must follow the request's alone."""

    def __init__(self, module: Any) -> None:
        self._module = module
        names = [name for name in vars(module) if name.endswith(("max_seq_len_cached", "attention_scaling"))]
        self._values = {name: getattr(module, name) for name in names}
        self._buffers = dict(module.named_buffers(recurse=False))

    def forget(self) -> None:
        for name, value in {**self._values, **self._buffers}.items():
            setattr(self._module, name, value)


def _tensors(kept: Any, depth: int) -> Iterator[Tensor]:
    """Yield the tensors in an object of any class, as deep as caches go."""
    if isinstance(kept, Tensor):
        yield kept
    elif depth:
        inner = (
            kept
            if isinstance(kept, list | tuple)
            else (kept if isinstance(kept, dict) else getattr(kept, "__dict__", {})).values()
        )
        for part in inner:
            yield from _tensors(part, depth - 1)
