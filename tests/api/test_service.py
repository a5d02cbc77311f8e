"""What happens to requests in flight when the server goes down, seen from inside."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from api.serving import ByteRenderer, served
from headstart.api import plumbing
from headstart.api.dialects import chat, completions
from headstart.api.errors import NotReady, TooManyWaiting
from headstart.api.service import Service
from headstart.api.usage import Usage
from headstart.engine.base import Receipt
from headstart.render import Renderer
from headstart.testing.fake_engine import FakeEngine


def test_draining_lets_requests_end_and_takes_no_more() -> None:
    engine = FakeEngine(answer=b"a whole answer")

    async def scenario() -> str:
        service = Service()
        service.ready(served(engine))
        generation = await service.start(completions.parse(b'{"prompt": "x", "max_tokens": 50}', {}))
        with generation:
            draining = asyncio.ensure_future(service.drain(timeout_s=10))
            text = "".join([piece.text async for piece in generation.pieces() if piece])
            await draining
        assert generation.answers[0].finish == "stop"
        with pytest.raises(NotReady, match="shutting down"):
            await service.start(completions.parse(b'{"prompt": "x"}', {}))
        service.close()
        return text

    assert asyncio.run(scenario()) == "a whole answer"
    assert engine.aborted == []
    engine.close()


def test_draining_aborts_what_does_not_end_in_time() -> None:
    engine = FakeEngine()
    engine.gate.clear()

    async def scenario() -> None:
        service = Service()
        service.ready(served(engine))
        generation = await service.start(completions.parse(b'{"prompt": "x"}', {}))
        with generation:
            await service.drain(timeout_s=0)
            with pytest.raises(NotReady, match="aborted because the server is shutting down"):
                _ = [piece async for piece in generation.pieces()]
        assert generation.answers[0].finish == "abort"
        service.close()

    asyncio.run(scenario())
    engine.close()


class ToolRenderer(ByteRenderer):
    """Its template has a place for tools."""

    def write(self, messages: Sequence[object], *, tools: Sequence[object] | None = None, **more: Any) -> str:
        return f"{tools}" + super().write(messages)


@pytest.mark.parametrize(
    ("renderer", "says"),
    [
        (ByteRenderer(), "the chat template of fake has no place for tools; they are ignored"),
        (
            ToolRenderer(),
            "how fake writes calls of tools is not known, so they are given as text; name its family with --answers",
        ),
    ],
)
def test_what_becomes_of_tools_is_told_once(renderer: ByteRenderer, says: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="headstart")
    engine = FakeEngine(answer=b"yes")
    tool = '{"type": "function", "function": {"name": "f"}}'
    body = f'{{"messages": [{{"role": "user", "content": "x"}}], "tools": [{tool}]}}'.encode()

    async def scenario() -> None:
        service = Service()
        service.ready(dataclasses.replace(served(engine), renderer=cast(Renderer, renderer)))
        for _ in range(2):
            with await service.start(chat.parse(body, {})) as generation:
                _ = [piece async for piece in generation.pieces()]
        service.close()

    asyncio.run(scenario())
    engine.close()
    assert [record.getMessage() for record in caplog.records if "tools" in record.getMessage()] == [says]


class SlowRenderer(ByteRenderer):
    """Tokenises only once it is told to."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()

    def completion(self, prompt: str | Sequence[int], *, context_tokens: int | None = None) -> list[int]:
        self.begun.set()
        assert self.go_on.wait(20)
        return super().completion(prompt)


def test_draining_waits_for_a_request_that_is_being_tokenised_and_refuses_it() -> None:
    engine, renderer = FakeEngine(), SlowRenderer()

    async def scenario() -> None:
        service = Service()
        service.ready(dataclasses.replace(served(engine), renderer=cast(Renderer, renderer)))
        starting = asyncio.ensure_future(service.start(completions.parse(b'{"prompt": "x"}', {})))
        await asyncio.to_thread(renderer.begun.wait, 20)
        draining = asyncio.ensure_future(service.drain(timeout_s=20))
        await asyncio.sleep(0)
        assert not draining.done()
        renderer.go_on.set()
        with pytest.raises(NotReady, match="shutting down"):
            await starting
        await draining
        service.close()

    asyncio.run(scenario())
    assert engine.submitted == []
    engine.close()


def test_bodies_are_bounded_together_and_forgotten_when_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plumbing, "BODIES_BYTES", 100)
    service = Service()
    with service.bodies.holding() as first, service.bodies.holding() as second:
        first(60)
        with pytest.raises(TooManyWaiting, match="too large together") as caught:
            second(41)
        assert caught.value.retry_after_s == 1
    with service.bodies.holding() as again:
        again(100)
    service.close()


def test_hit_and_miss_always_add_up_to_the_prompt() -> None:
    receipt = Receipt(
        prompt_tokens=100,
        completion_tokens=7,
        cached_memory_tokens=10,
        cached_disk_tokens=54,
        bytes_read=1,
        queue_s=0,
        match_s=0,
        load_s=0,
        first_token_s=None,
        total_s=0,
    )
    usage = chat.usage_object(Usage.of(receipt, output_tokens=7))
    assert (usage["prompt_cache_hit_tokens"], usage["prompt_cache_miss_tokens"], usage["total_tokens"]) == (64, 36, 107)
    assert all(isinstance(value, int) for value in usage["prompt_tokens_details"].values())
