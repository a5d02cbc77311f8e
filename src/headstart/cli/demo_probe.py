"""The demo's second opinion, in a process of its own: the floor of a hit, and whether two answers are the same tokens.

Reads one `ProbeRequest` as JSON from standard input and prints one `Probed` as the last line of standard output.
"""

from __future__ import annotations

import itertools
import queue
import sys
from pathlib import Path

import msgspec

Messages = list[dict[str, str]]


class ProbeRequest(msgspec.Struct):
    """`prompts[i]` was answered with `cached_tokens[i]` from the cache in directory `cache`; `other` has the same beginning.
    `compare`: a prompt to answer with and without the cache, or None."""

    model: str
    cache: str
    prompts: list[Messages]
    other: Messages
    cached_tokens: list[int]
    compare: Messages | None
    max_tokens: int


class Probed(msgspec.Struct):
    floor_s: list[float]  # median of three, a prompt
    shared_prefix_tokens: int  # that prompts[0] and `other` have in common
    same_tokens: bool


def main() -> None:
    """Answer the request on standard input."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=ProbeRequest)
    sys.stdout.buffer.write(msgspec.json.encode(answer(request)) + b"\n")


def answer(request: ProbeRequest) -> Probed:
    from headstart.cli.opening import open_model
    from headstart.config import CacheConfig, Config
    from headstart.engine.base import GenerationRequest, MeasuredEngine, TokenEvent
    from headstart.engine.exactness import same_tokens

    config = Config(model=request.model, cache=CacheConfig(directory=Path(request.cache), capacity="4GiB"))
    served = open_model(config, on_progress=lambda stage, fraction: None)
    engine = served.engine
    assert isinstance(engine, MeasuredEngine)

    def tokens(messages: Messages) -> list[int]:
        return served.renderer.chat(messages)

    def generate(prompt: list[int], *, use_cache: bool) -> list[int]:
        events: queue.Queue[TokenEvent] = queue.Queue()
        asked = GenerationRequest(
            id=f"probe-{use_cache}",
            prompt=tuple(prompt),
            max_tokens=request.max_tokens,
            stop_ids=served.renderer.stop_ids,
            use_cache=use_cache,
        )
        engine.submit(asked, events.put)
        answered: list[int] = []
        while True:
            event = events.get(timeout=900)
            if event.token is not None:
                answered.append(event.token)
            if event.finish is not None:
                return answered

    try:
        prompts = [tokens(messages) for messages in request.prompts]
        floors = [
            sorted(engine.measure_floor(prompt, cached, 3))[1]
            for prompt, cached in zip(prompts, request.cached_tokens, strict=True)
        ]
        pairs = zip(prompts[0], tokens(request.other), strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        same = True
        if request.compare is not None:
            prompt = tokens(request.compare)
            hit, plain = generate(prompt, use_cache=True), generate(prompt, use_cache=False)
            same = same_tokens(engine.next_logits, prompt, hit, plain, tolerance=1e-3)
        return Probed(floors, shared, same)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
