"""RoPE whose frequencies depend on how long the whole text is, held still: a key must not depend on what comes after it.

    longrope (Phi-3, Phi-4)    a list of factors for texts of up to the length that was first trained, and another one beyond
    dynamic                    frequencies that grow with every token beyond that length

transformers looks at the longest text of a batch and chooses anew in each pass. An engine whose longest text stays within that
length never sees a change, and neither does its KV. Beyond it, longrope's other list is taken for texts of every length, as
servers do that keep KV at all; which list it is goes into the representation, so that nobody reads the other one's keys.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

import torch

from headstart.engine.torch.facts import context_of

_FOLLOWS = frozenset({"dynamic", "longrope"})


def moves(config: Any, context_tokens: int) -> str | None:
    """Return in one sentence why the model's KV cannot be kept while texts are up to `context_tokens` long; None if it can."""
    within = min((tokens for kind, tokens in _followers(config) if kind == "dynamic"), default=context_tokens)
    if context_tokens <= within:
        return None
    return (
        "its dynamic RoPE makes KV depend on the length of the whole text; with engine.context of at most "
        f"{within} it would not"
    )


def hold_still(model: torch.nn.Module, context_tokens: int) -> str:
    """Have positions embedded as in a text of `context_tokens` tokens whatever the length of a batch; return in a few words how
    that is, empty for models whose positions are always embedded alike."""
    if not _followers(model.config):
        return ""
    module: Any
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        by_layer = kinds if isinstance(kinds, dict) else {None: kinds}
        if not _FOLLOWS & {kind for kind in by_layer.values() if isinstance(kind, str)}:
            continue
        last = torch.tensor([[context_tokens - 1]], device=next(model.parameters()).device)
        for layer_type in by_layer:
            named = {} if layer_type is None else {"layer_type": layer_type}
            module(last.float(), position_ids=last, **named)  # it chooses what it takes for that length, …
        module.forward = partial(inspect.unwrap(type(module).forward), module)  # … and from now on takes it without choosing
        for layer_type in by_layer:
            _require_still(module, last, {} if layer_type is None else {"layer_type": layer_type})
    beyond = [tokens for kind, tokens in _followers(model.config) if kind == "longrope" and context_tokens > tokens]
    return f"RoPE for more than {beyond[0]} tokens" if beyond else "RoPE for short texts"


def _require_still(module: Any, last: torch.Tensor, named: dict[str, str]) -> None:
    """Raise ValueError where a position is still embedded by what stands beside it, as in a module that chooses by itself."""
    first = torch.arange(min(8, int(last) + 1), device=last.device)[None]
    beside = torch.cat([first, last], dim=1)
    alone = module(first.float(), position_ids=first, **named)
    for one, other in zip(alone, module(beside.float(), position_ids=beside, **named), strict=True):
        if not torch.equal(one, other[:, : first.shape[1]]):
            raise ValueError(f"{type(module).__name__} embeds a position by the length of the text")


def _followers(config: Any) -> list[tuple[str, int]]:
    """Return the kinds of RoPE that follow the length, and up to how many tokens each is what it was first trained with."""
    text = config.get_text_config()
    ropes = getattr(text, "rope_parameters", None) or {}
    found = []
    for one in (ropes, *ropes.values()):
        kind = str(one.get("rope_type")) if isinstance(one, dict) else ""
        if kind in _FOLLOWS:
            first = one.get("original_max_position_embeddings") if kind == "longrope" else text.max_position_embeddings
            found.append((kind, int(first or context_of(text))))
    return found
