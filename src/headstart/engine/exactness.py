"""Whether two answers are the same tokens: equal, or apart only where the model itself is undecided within the tolerance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NextLogits = Callable[[Sequence[int]], Any]  # of the reference: tokens → logits [vocabulary] of the next, an array or tensor


def same_tokens(
    next_logits: NextLogits, prompt: Sequence[int], a: Sequence[int], b: Sequence[int], *, tolerance: float
) -> bool:
    """Return True if greedy answers `a` and `b` are equal, or if where they first differ both tokens are, for the reference
    under the tokens before, within twice the tolerance of the best. What follows that place is not comparable.

    An answer that ends where the other goes on has met a stop token there; then the two best must be that close."""
    at = next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if at == len(a) == len(b):
        return True
    logits = np.asarray(next_logits([*prompt, *a[:at]]), np.float64)
    best = np.sort(logits)[-2:][::-1]
    if at == min(len(a), len(b)):
        return float(best[0] - best[1]) <= 2 * tolerance
    return all(float(best[0] - logits[token]) <= 2 * tolerance for token in (a[at], b[at]))
