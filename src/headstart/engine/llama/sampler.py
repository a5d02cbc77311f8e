"""From logits to the next token, by a chain of libllama's samplers for each request.

what is allowed ─▶ penalties on prompt and answer ─▶ penalties on the answer ─▶ bias ─▶ no end before `min_tokens`
    ┌────────────────────────────────────────────────────────────────────────────────────┘
    ├────▶ the best one
    └────▶ temperature ─▶ min-p ─▶ top-k ─▶ top-p ─▶ one drawn
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from headstart.engine.base import Constraint, Logprobs, Sampling
from headstart.engine.llama.binding import Library, LogitBias
from headstart.engine.llama.context import Context
from headstart.engine.serving.parts import Choice

_LEAST_TEMPERATURE = 1e-5  # below it, a draw takes the best anyway
_NO_SEED = 0xFFFF_FFFF  # libllama's word for: any


class Sampler:
    """One request's choices. Equal seeds give equal tokens for equal logits, whatever runs beside it. `context_tokens`: how
    many tokens prompt and answer have at most."""

    def __init__(
        self,
        library: Library,
        sampling: Sampling,
        *,
        prompt: Sequence[int],
        context_tokens: int,
        vocabulary: int,
        logprobs: int | None = None,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self._library = library
        self._logprobs = logprobs
        self._constraint = constraint
        self._stop_ids = [token for token in stop_ids if token < vocabulary]
        self._chain: int | None = library.sampler_chain_init(library.sampler_chain_default_params())
        self._end_at: int | None = None  # where in the chain stands what forbids ends
        self._unended = min_tokens if stop_ids else 0
        parts: list[int] = []
        if sampling.repetition_penalty != 1:
            repeated = library.sampler_init_penalties(vocabulary, context_tokens, sampling.repetition_penalty, 0.0, 0.0)
            for token in prompt:
                library.sampler_accept(repeated, token)
            parts.append(repeated)
        if sampling.frequency_penalty or sampling.presence_penalty:
            counts = (sampling.frequency_penalty, sampling.presence_penalty)
            parts.append(library.sampler_init_penalties(vocabulary, context_tokens, 1.0, *counts))
        if sampling.logit_bias:
            parts.append(_bias(library, vocabulary, dict(sampling.logit_bias)))
        if self._unended:
            ends = dict.fromkeys(self._stop_ids, -math.inf)
            self._end_at = len(parts)
            parts.append(_bias(library, vocabulary, ends))
        if sampling.temperature < _LEAST_TEMPERATURE:
            parts.append(library.sampler_init_greedy())
        else:
            parts.append(library.sampler_init_temp(sampling.temperature))
            if sampling.min_p > 0:
                parts.append(library.sampler_init_min_p(sampling.min_p, 1))
            if sampling.top_k:
                parts.append(library.sampler_init_top_k(sampling.top_k))
            if sampling.top_p < 1:
                parts.append(library.sampler_init_top_p(sampling.top_p, 1))
            seed = secrets.randbits(32) if sampling.seed is None else sampling.seed
            parts.append(library.sampler_init_dist(seed % _NO_SEED))
        for part in parts:
            library.sampler_chain_add(self._chain, part)

    def choose(self, context: Context, output: int) -> Choice | str:
        """Return the next token by the logits there, and remember it; or one sentence on why there is none."""
        logits = context.logits(output)
        if not np.isfinite(logits.max()) or np.isnan(logits.min()):
            return "the model gave logits that are not finite; its weights or their quantisation are at fault"
        told = None if self._logprobs is None else _log_softmax(logits)
        assert self._chain is not None
        if self._constraint is not None and (allowed := self._constraint.allowed()) is not None:
            self._hold(logits, allowed)
        token = context.sample(self._chain, output)
        if self._constraint is not None:
            self._constraint.accept(token)
        if self._unended:
            self._unended -= 1
            if not self._unended:
                self._allow_ends()
        if told is None or self._logprobs is None:
            return Choice(token)
        likeliest = np.argsort(-told, kind="stable")[: self._logprobs]
        return Choice(token, Logprobs(float(told[token]), tuple((int(one), float(told[one])) for one in likeliest)))

    def _hold(self, logits: npt.NDArray[np.float32], allowed: bytes) -> None:
        """Leave, of the logits where they lie, only what is allowed; if that is the end alone, it may come."""
        may = np.zeros(len(logits), np.bool_)
        bits = np.unpackbits(np.frombuffer(allowed, np.uint8), bitorder="little")[: len(logits)]
        may[: len(bits)] = bits != 0
        logits[~may] = -np.inf
        if self._unended:
            may[self._stop_ids] = False
            if not may.any():
                self._unended = 0
                self._allow_ends()

    def _allow_ends(self) -> None:
        self._library.sampler_free(self._library.sampler_chain_remove(self._chain, self._end_at))

    def close(self) -> None:
        chain, self._chain = self._chain, None
        if chain is not None:
            self._library.sampler_free(chain)


def _bias(library: Library, vocabulary: int, biases: dict[int, float]) -> int:
    array = (LogitBias * len(biases))(*(LogitBias(token, bias) for token, bias in biases.items()))
    return int(library.sampler_init_logit_bias(vocabulary, len(array), array))


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    logs: npt.NDArray[np.float64] = shifted - math.log(float(np.exp(shifted).sum()))
    return logs
