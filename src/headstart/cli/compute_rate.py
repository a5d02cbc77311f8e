"""How fast a model computes prompts on this machine: it is opened without a cache, and asked for nothing but a prompt."""

from __future__ import annotations

import random
from dataclasses import replace
from threading import Event

from headstart.cli.opening import open_model
from headstart.cli.progress import OnProgress
from headstart.config import Config
from headstart.engine.base import Engine, GenerationRequest, TokenEvent
from headstart.errors import ModelError

TOKENS = 1024
_WARM_TOKENS = 64
_WAIT_S = 600.0


def measure(config: Config, *, on_progress: OnProgress) -> tuple[int, float]:
    """Return how many tokens were computed, and how many a second. Raises ModelError or MissingExtra."""
    config = replace(config, cache=replace(config.cache, enabled=False), server=replace(config.server, keys=None))
    engine = open_model(config, on_progress=on_progress).engine
    try:
        on_progress("computing a prompt", None)
        tokens = min(TOKENS, engine.info.context_tokens - 1)
        _seconds(engine, min(tokens, _WARM_TOKENS))
        return tokens, tokens / _seconds(engine, tokens)
    finally:
        engine.close()


def _seconds(engine: Engine, tokens: int) -> float:
    numbers, ended = random.Random(tokens), Event()
    last: list[TokenEvent] = []

    def on_event(event: TokenEvent) -> None:
        if event.finish is not None:
            last.append(event)
            ended.set()

    prompt = tuple(numbers.randrange(engine.info.vocabulary) for _ in range(tokens))
    engine.submit(GenerationRequest(f"doctor-{tokens}", prompt, max_tokens=1, use_cache=False), on_event)
    if not ended.wait(_WAIT_S):
        raise ModelError(f"a prompt of {tokens} tokens was not computed in {_WAIT_S:.0f} s; try a smaller model")
    receipt = last[0].receipt
    if last[0].error is not None or receipt is None or receipt.first_token_s is None:
        raise ModelError(f"a prompt of {tokens} tokens was not computed: {last[0].error or 'no token came'}")
    return receipt.first_token_s
