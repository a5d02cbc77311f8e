"""Ask an engine of ours, and wait for what its threads do at their own pace."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

from headstart.engine.base import Engine, GenerationRequest, Progress, TokenEvent

_numbers = itertools.count()


class Answer:
    """Collects one request's events; `result()` waits for the last."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.steps: list[Progress] = []  # of the prompt
        self.last: TokenEvent | None = None
        self.first_token = Event()
        self._ended = Event()

    def __call__(self, event: TokenEvent) -> None:
        assert self.last is None, "an event after the last"
        if event.progress is not None:
            self.steps.append(event.progress)
        if event.token is not None:
            self.tokens.append(event.token)
            self.first_token.set()
        if event.finish is not None:
            self.last = event
            self._ended.set()

    def result(self) -> TokenEvent:
        assert self._ended.wait(60), "the request did not end"
        assert self.last is not None
        return self.last


def ask(engine: Engine, prompt: Sequence[int], max_tokens: int = 8, *, id: str = "", **more: Any) -> Answer:
    answer = Answer()
    engine.submit(GenerationRequest(id or f"request-{next(_numbers)}", tuple(prompt), max_tokens, **more), answer)
    return answer


def some_tokens(count: int, seed: int = 1, vocabulary: int = 512) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(count)]


def in_threads(work: Callable[[int], None], count: int = 4) -> None:
    """Have `count` threads do work(0), work(1), …, all at once, and return when all have ended."""
    threads = [Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def eventually(what: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Return once `what()` is true: for what another thread does at its own pace."""
    until = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < until, "it did not come to pass"
        time.sleep(0.001)
