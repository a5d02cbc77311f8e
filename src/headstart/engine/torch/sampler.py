"""From logits to the next token: greedy, or drawn with temperature, min-p, top-k and top-p from the request's own generator.

    logits ─▶ log probabilities, where they are asked for
       └────▶ penalties ─▶ bias ─▶ no end before `min_tokens` ─▶ what is allowed
                 ┌──────────────────────────────────────────────────────┘
                 ├────▶ the best one
                 └────▶ temperature ─▶ min-p ─▶ top-k ─▶ top-p ─▶ one drawn

One look at a step's logits finds each row's best token and whether the row is finite. A greedy row without penalties or bias
needs no more than that; any other is worked on by itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from headstart.engine.base import Constraint, Logprobs, Sampling
from headstart.engine.serving.parts import Choice

_log = logging.getLogger(__name__)

_LEAST_TEMPERATURE = 1e-5  # below it, a draw takes the best anyway


class Sampler:
    """One request's choices. Equal seeds give equal tokens for equal logits, whatever runs beside it.

    `logprobs`, `continued`: as in `GenerationRequest`. `stop_ids` are not chosen before `min_tokens` tokens were."""

    def __init__(
        self,
        sampling: Sampling,
        *,
        prompt: Sequence[int] = (),
        logprobs: int | None = None,
        min_tokens: int = 0,
        stop_ids: Collection[int] = (),
        constraint: Constraint | None = None,
        continued: Sequence[int] = (),
    ) -> None:
        self.logprobs = logprobs
        self._continued = tuple(continued)
        self._sampling = sampling
        self._prompt = prompt
        self._stop_ids = tuple(stop_ids)
        self._unended = min_tokens if stop_ids else 0  # tokens to be chosen before one may be the last
        self._constraint = constraint
        self._penalties: _Penalties | None = None
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

    def choose(self, logits: Tensor, best: int) -> int:
        """Return the next token for float32 logits [vocabulary], of which `best` has the largest, and remember it."""
        if self._continued:
            self._go_on(like=logits)
        scores = self._adjusted(logits)
        if self.greedy and scores is not logits:
            best = int(scores.argmax())
        token = best if self.greedy else self.draw(scores)
        self._remember(token)
        return token

    def _remember(self, token: int) -> None:
        if self._penalties is not None:
            self._penalties.count(token)
        if self._constraint is not None:
            self._constraint.accept(token)
        self._unended = max(0, self._unended - 1)

    def _go_on(self, *, like: Tensor) -> None:
        """Be as if the tokens that were chosen elsewhere had been chosen here. `like`: logits [vocabulary]."""
        continued, self._continued = self._continued, ()
        self._penalise(like)
        for token in continued:
            if self._generator is not None:  # a draw takes as many numbers from it whatever the shares are
                torch.multinomial(torch.ones(like.numel(), dtype=torch.float64), 1, generator=self._generator)
            self._remember(token)

    def draw(self, logits: Tensor) -> int:
        """Return a token drawn from float32 logits [vocabulary]; only for requests that are not greedy."""
        scores = logits.to("cpu", torch.float64)  # holds every temperature and top_p that a request can name
        scores = (scores - scores.max()) / self._sampling.temperature
        if self._sampling.min_p > 0:
            scores = scores.masked_fill(scores < math.log(self._sampling.min_p), float("-inf"))  # the best one's is 0
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

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Return the logits with all that acts on them before a token is taken; themselves where nothing does."""
        sampling = self._sampling
        self._penalise(logits)
        if self._penalties is not None:
            logits = self._penalties.of(logits)
        if sampling.logit_bias:
            tokens, added = zip(*sampling.logit_bias, strict=True)
            logits = logits.index_add(0, _on(tokens, logits), logits.new_tensor(added))
        ended = logits
        if self._unended:
            ends = [token for token in self._stop_ids if token < len(logits)]  # a tokenizer may know more than the model
            logits = logits.index_fill(0, _on(ends, logits), float("-inf"))
        if self._constraint is not None and (allowed := self._constraint.allowed()) is not None:
            forbidden = ~_bits(allowed, like=logits)
            held = logits.masked_fill(forbidden, float("-inf"))
            if self._unended and not bool((held > float("-inf")).any()):  # nothing may come but the end
                held = ended.masked_fill(forbidden, float("-inf"))
            logits = held
        return logits

    def _penalise(self, like: Tensor) -> None:
        """Begin to count tokens where a penalty needs that."""
        sampling = self._sampling
        if self._penalties is None and (
            sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
        ):
            self._penalties = _Penalties(sampling, self._prompt, like=like)


class _Penalties:
    """What a request's prompt and answer so far cost their tokens. `like`: logits [vocabulary]."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int], *, like: Tensor) -> None:
        self._sampling = sampling
        self._counts = torch.zeros_like(like)  # in the answer
        self._seen = torch.zeros_like(like, dtype=torch.bool)  # in prompt or answer
        self._seen[_on(prompt, like)] = True

    def count(self, token: int) -> None:
        self._counts[token] += 1
        self._seen[token] = True

    def of(self, logits: Tensor) -> Tensor:
        sampling = self._sampling
        if sampling.repetition_penalty != 1:
            repeated = torch.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
            logits = torch.where(self._seen, repeated, logits)
        return logits - sampling.frequency_penalty * self._counts - sampling.presence_penalty * (self._counts > 0)


def _bits(mask: bytes, *, like: Tensor) -> Tensor:
    """Return a mask's bits as booleans, False beyond its end, on the device of logits [vocabulary]."""
    packed = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
    bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
    flags = torch.zeros(like.numel(), dtype=torch.bool)
    count = min(like.numel(), bits.numel())
    flags[:count] = bits.flatten()[:count].bool()
    return flags.to(like.device)


def _on(tokens: Sequence[int], logits: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.long, device=logits.device)


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | str]:
    """Return each row's next token, or one sentence on why it has none. A row never costs another its token."""
    best = logits.max(dim=-1)
    chosen: list[Choice | str] = []
    for row, (value, token) in enumerate(zip(best.values.tolist(), best.indices.tolist(), strict=True)):
        if not float("-inf") < value < float("inf"):  # NaN compares false; a broken checkpoint, an overflow
            chosen.append("the model gave logits that are not finite; its weights or dtype are at fault")
            continue
        try:
            chosen.append(Choice(samplers[row].choose(logits[row], token)))
        except Exception as error:  # noqa: BLE001 - a request's outer edge; the engine counts it
            _log.exception("choosing a token failed; its request is ended")
            chosen.append(f"choosing a token failed ({type(error).__name__}); the server's log has the details")
    return _told(chosen, logits, samplers)


def _told(chosen: list[Choice | str], logits: Tensor, samplers: Sequence[Sampler]) -> list[Choice | str]:
    """Add log probabilities where they were asked for, all rows at once."""
    wanted = [(row, one) for row, one in enumerate(chosen) if samplers[row].logprobs is not None and isinstance(one, Choice)]
    if not wanted:
        return chosen
    logs = logits[[row for row, _ in wanted]].log_softmax(dim=-1)
    own = logs.gather(1, _on([one.token for _, one in wanted], logits).unsqueeze(1)).squeeze(1).tolist()
    likeliest = logs.topk(min(logits.shape[1], max(samplers[row].logprobs or 0 for row, _ in wanted)))
    values, tokens = likeliest.values.tolist(), likeliest.indices.tolist()
    for index, (row, one) in enumerate(wanted):
        top = zip(tokens[index], values[index], strict=True)
        chosen[row] = Choice(one.token, Logprobs(own[index], tuple(top)[: samplers[row].logprobs]))
    return chosen
