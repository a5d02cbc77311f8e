"""Whether a prompt is computed by another worker than the one that answers, by measured speeds. Pure.

    together:  the decoding worker computes the prompt; each of its answers waits for as long
    apart:     another one computes it, KV goes over meanwhile, and the rest of a block is computed where it arrives

A short rest of a prompt is never worth the way; a long one is where the decoding worker's answers would wait, where it has more
queued than the other, or where it is slower. Equal workers that both have nothing to do stay together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.policy.routing.estimate import View
from headstart.policy.speed import Speed

LEAST_TOKENS = 256  # of a prompt, to be computed: for fewer two processes are not worth the trouble
_WORTH = 1.1  # by which factor it must be cheaper: estimates are off by some percent
_REST_TOKENS = 64  # of a prompt's last block, computed again where it arrives


@dataclass(frozen=True, slots=True)
class Wire:
    """How fast KV goes from one worker to another: seconds by (tokens, starts). `overlapped`: the share of it that goes over
    while the prompt is computed, where that takes as long."""

    speed: Speed
    overlapped: float = 0.9


@dataclass(frozen=True, slots=True)
class Parting:
    """The prompt is computed by `worker`. `first_token_s`: until its first token. `next_token_s`: until the one behind it.
    `cost_s` and `together_s`: what is compared, in seconds of whoever waits."""

    worker: int
    first_token_s: float
    next_token_s: float
    cost_s: float
    together_s: float


def part(decode: View, prefills: Sequence[View], *, tokens: int, wire: Wire) -> Parting | None:
    """Return by whom a prompt of `tokens`, which `decode` is to answer, is best computed; None: by itself.

    What an answer waits counts as much as what this request does."""
    have = max(decode.memory, decode.disk, decode.pool)
    if tokens - have < LEAST_TOKENS:
        return None
    own_s = decode.speeds.prefill_s(have, tokens)
    together_s = decode.queued_s + own_s + decode.running * own_s
    if decode.running:
        together_s += decode.speeds.chunks(tokens - have) * decode.speeds.step.seconds(1, decode.running, decode.context)
    best: Parting | None = None
    for view in prefills:
        if view.worker == decode.worker:
            continue
        computed = max(view.memory, view.disk, view.pool)
        compute_s = view.queued_s + view.speeds.prefill_s(min(computed, tokens - 1), tokens)
        sent_s = wire.speed.seconds(tokens - have, 1)
        left_s = max(sent_s * (1 - wire.overlapped), sent_s - compute_s)
        rest_s = decode.speeds.prefill_s(max(have, tokens - _REST_TOKENS), tokens)
        cost_s = compute_s + left_s + rest_s + decode.running * rest_s
        if best is None or cost_s < best.cost_s:
            best = Parting(view.worker, compute_s, left_s + rest_s, cost_s, together_s)
    return best if best is not None and best.cost_s * _WORTH < together_s else None
