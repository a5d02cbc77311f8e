"""From logits to the next token: greedy, or drawn with temperature, top-k and top-p from the request's own generator."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from headstart.engine.base import Sampling

_log = logging.getLogger(__name__)

_LEAST_TEMPERATURE = 1e-5  # below it, a draw takes the best anyway


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
        return self._sampling.temperature < _LEAST_TEMPERATURE

    def draw(self, logits: Tensor) -> int:
        """Return a token drawn from float32 logits [vocabulary]; only for requests that are not greedy."""
        scores = logits.to("cpu", torch.float64)  # holds every temperature and top_p that a request can name
        scores = (scores - scores.max()) / self._sampling.temperature
        if 0 < self._sampling.top_k < scores.numel():
            least = scores.topk(self._sampling.top_k).values[-1]
            scores = scores.masked_fill(scores < least, float("-inf"))
        shares, tokens = scores.softmax(dim=-1).sort(descending=True, stable=True)
        if self._sampling.top_p < 1:
            # Keep the fewest tokens whose shares reach top_p: those before which less than top_p has come together.
            beyond = shares.cumsum(dim=-1) - shares >= self._sampling.top_p
            beyond[0] = False
            shares = shares.masked_fill(beyond, 0.0)
        return int(tokens[torch.multinomial(shares, 1, generator=self._generator)])


def choose(logits: Tensor, samplers: list[Sampler]) -> list[int | str]:
    """Return each row's next token, or one sentence on why it has none. A row never costs another its token."""
    best = logits.max(dim=-1)
    chosen: list[int | str] = []
    for row, (value, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        if not float("-inf") < value < float("inf"):  # NaN compares false; a broken checkpoint, an overflow
            chosen.append("the model gave logits that are not finite; its weights or dtype are at fault")
        elif samplers[row].greedy:
            chosen.append(token)
        else:
            try:
                chosen.append(samplers[row].draw(logits[row]))
            except Exception as error:  # noqa: BLE001 - a request's outer edge; the engine counts it
                _log.exception("drawing a token failed; its request is ended")
                chosen.append(f"drawing a token failed ({type(error).__name__}); the server's log has the details")
    return chosen
