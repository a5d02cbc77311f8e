"""How many tokens of prompts are computed beside answers that are being written, so that nobody's stream stalls. Pure.

A step that computes a piece of a prompt beside the answers takes longer than one without. It may take `_STEPS` times as long,
by what both were measured to take: a reader then sees a slower stream while a long prompt comes in, and no pause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

_STEPS = 4.0  # decoding steps that one step may last
_WEIGHT = 0.2  # of the latest step
_MOST = 3.0  # times the average: more is an outlier, and counts as this much


@dataclass(frozen=True, slots=True)
class Pace:
    """What was measured so far, in seconds; None: nothing yet. `decode_s`: a step of answers alone; `token_s`: what each token
    of a prompt adds to a step.

    >>> pace = Pace().after(seconds=0.02, decoding=True, prompt_tokens=0).after(seconds=0.52, decoding=True, prompt_tokens=250)
    >>> pace.beside_tokens(least=16, most=1024)
    30
    """

    decode_s: float | None = None
    token_s: float | None = None

    def after(self, *, seconds: float, decoding: bool, prompt_tokens: int) -> Pace:
        """Return the pace with one more step: whether it decoded answers, and how many tokens of prompts it computed."""
        if not prompt_tokens:
            return replace(self, decode_s=_averaged(self.decode_s, seconds)) if decoding else self
        if decoding and self.decode_s is None:
            return self  # what of it was the prompt's cannot be told
        added = max(0.0, seconds - (self.decode_s or 0.0 if decoding else 0.0))
        return replace(self, token_s=_averaged(self.token_s, added / prompt_tokens))

    def beside_tokens(self, *, least: int, most: int) -> int:
        """Return how many tokens of prompts the next step may compute beside answers: `least` … `most`."""
        if self.decode_s is None or not self.token_s:
            return max(least, most // 4)
        return int(max(least, min(most, (_STEPS - 1) * self.decode_s / self.token_s)))


def _averaged(before: float | None, now: float) -> float:
    return now if before is None else before + _WEIGHT * (min(now, _MOST * before) - before)
