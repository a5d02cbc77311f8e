"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p from the request's own generator."""

from __future__ import annotations

import torch
from torch import Tensor

from headstart.engine.base import Sampling


class Sampler:
    """One request's choices. Equal seeds give equal tokens for equal logits, whatever runs beside it."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._generator: torch.Generator | None = None
        if not self.greedy:
            self._generator = torch.Generator()  # on the CPU, so that a seed means the same on every device
            if sampling.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(sampling.seed % (1 << 63))

    @property
    def greedy(self) -> bool:
        return self._sampling.temperature == 0

    def draw(self, logits: Tensor) -> int:
        """Return a token drawn from float32 logits [vocabulary]; only for requests that are not greedy."""
        scores = logits.to("cpu") / self._sampling.temperature
        if 0 < self._sampling.top_k < scores.numel():
            least = scores.topk(self._sampling.top_k).values[-1]
            scores = scores.masked_fill(scores < least, float("-inf"))
        shares, tokens = scores.softmax(dim=-1).sort(descending=True, stable=True)
        if self._sampling.top_p < 1:
            # Keep the fewest tokens whose shares reach top_p: those before which less than top_p has come together.
            shares = shares.masked_fill(shares.cumsum(dim=-1) - shares >= self._sampling.top_p, 0.0)
        return int(tokens[torch.multinomial(shares, 1, generator=self._generator)])


def choose(logits: Tensor, samplers: list[Sampler]) -> list[int | None]:
    """Return each row's next token, or None where the logits are not finite (a broken checkpoint, an overflow)."""
    best = logits.max(dim=-1)
    tokens: list[int | None] = []
    for row, (value, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        if not float("-inf") < value < float("inf"):  # NaN compares false
            tokens.append(None)
        else:
            tokens.append(token if samplers[row].greedy else samplers[row].draw(logits[row]))
    return tokens
