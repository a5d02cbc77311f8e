"""Rules that others use, over the same knowledge as ours: what the simulator compares with. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from headstart.policy.routing.estimate import View

Rule = Callable[[Mapping[str, View], int, int], str]  # workers by name, tokens of the prompt, tokens of a block → name


def rule(name: str, random: Random) -> Rule:
    """Return one of `RULES`, with what it remembers. Raises ValueError for another name."""
    if name not in RULES:
        raise ValueError(f"no rule {name!r}; there are {', '.join(RULES)}")
    return RULES[name](random)


def _round_robin(random: Random) -> Rule:
    count = -1

    def choose(views: Mapping[str, View], tokens: int, block_tokens: int) -> str:
        nonlocal count
        count += 1
        names = sorted(views)
        return names[count % len(names)]

    return choose


def _least_loaded(random: Random) -> Rule:
    """Who has the fewest requests, waiting and running."""
    return lambda views, tokens, block_tokens: _least(views, random, lambda view: view.running + view.waiting)


def _prefix_only(random: Random) -> Rule:
    """Who has most of the prompt in fast memory; nobody: the one with the fewest requests."""
    return lambda views, tokens, block_tokens: _least(views, random, lambda view: (-view.memory, view.running + view.waiting))


def _dynamo(random: Random) -> Rule:
    """The linear cost that NVIDIA Dynamo documents (1.6, "router concepts"), with its defaults:

    max(blocks being prefilled + blocks of the prompt − credits, 0) + blocks being decoded
    credits: 1.0 for a block in the device's memory, 0.25 for one that only a disk has
    """

    def cost(view: View, tokens: int, block_tokens: int) -> float:
        credit = view.memory + 0.25 * (max(view.pool, view.disk) - view.memory)
        return max(view.waiting_tokens + tokens - credit, 0.0) / block_tokens + view.context / block_tokens

    return lambda views, tokens, block_tokens: _least(views, random, lambda view: cost(view, tokens, block_tokens))


def _least(views: Mapping[str, View], random: Random, cost: Callable[[View], float | tuple[float, float]]) -> str:
    costs = {name: cost(view) for name, view in views.items()}
    least = min(costs.values())
    return random.choice([name for name, one in costs.items() if one == least])


RULES: dict[str, Callable[[Random], Rule]] = {
    "round-robin": _round_robin,
    "least-loaded": _least_loaded,
    "prefix-only": _prefix_only,
    "dynamo": _dynamo,
}
