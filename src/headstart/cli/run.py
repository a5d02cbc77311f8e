"""`headstart run`: one answer in the terminal, as it is generated, and one line about where its prompt came from."""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import Any

import click

from headstart.cli.opening import open_model
from headstart.cli.progress import shown_progress
from headstart.cli.settings import chosen_config, config_options
from headstart.config import prefer_sleeping_threads
from headstart.engine.base import GenerationRequest, Receipt, Sampling, TokenEvent
from headstart.errors import ContextLengthExceeded, HeadstartError
from headstart.render import TextStream

EVENT_WAIT_S = 3600.0  # one step of a model may take long on a small machine, but not this long


@click.command()
@click.argument("prompt")
@click.option("--system", metavar="TEXT", help="system prompt before the question")
@click.option("--max-tokens", type=click.IntRange(min=1), help="limit of the answer")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy  [default: the model's own]")
@click.option("--seed", type=int, help="equal seeds give equal answers")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of text")
@config_options("", "cache", "engine")
def run(
    prompt: str,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    seed: int | None,
    as_json: bool,
    config_file: Path | None,
    **flags: Any,
) -> None:
    """Answer PROMPT ("-" reads it from standard input)."""
    config = chosen_config(config_file, flags)
    prefer_sleeping_threads()
    if prompt == "-":
        prompt = sys.stdin.read()
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": prompt})
    with shown_progress() as on_progress:
        model = open_model(config, on_progress=on_progress)
    try:
        ids = tuple(model.renderer.chat(messages))
        room = model.engine.info.context_tokens - len(ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(ids)} tokens, but the context of {model.name} is {model.engine.info.context_tokens}",
                prompt_tokens=len(ids),
                context_tokens=model.engine.info.context_tokens,
            )
        request = GenerationRequest(
            id="run",
            prompt=ids,
            max_tokens=min(max_tokens or room, room),
            sampling=Sampling(
                temperature=model.defaults.temperature if temperature is None else temperature,
                top_p=model.defaults.top_p,
                top_k=model.defaults.top_k,
                seed=seed,
            ),
            stop_ids=model.renderer.stop_ids,
        )
        events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
        model.engine.submit(request, events.put)
        text: list[str] = []
        stream = TextStream(model.renderer)
        while (event := events.get(timeout=EVENT_WAIT_S)).finish is None or event.token is not None:
            piece = stream.push(event.token) if event.token is not None else ""
            text.append(piece)
            if not as_json:
                click.echo(piece, nl=False)
            if event.finish is not None:
                break
        text.append(stream.finish())
        if not as_json:
            click.echo(text[-1])
    finally:
        model.engine.close()
    if event.finish == "error" or event.receipt is None:
        raise HeadstartError(f"the engine gave up: {event.error or 'without a reason'}")
    if as_json:
        click.echo(json.dumps(_facts("".join(text), event.finish, event.receipt)))
    else:
        click.echo(_line(event.receipt), err=True)


def _facts(text: str, finish: str | None, receipt: Receipt) -> dict[str, Any]:
    return {
        "text": text,
        "finish_reason": finish,
        "prompt_tokens": receipt.prompt_tokens,
        "cached_memory_tokens": receipt.cached_memory_tokens,
        "cached_disk_tokens": receipt.cached_disk_tokens,
        "completion_tokens": receipt.completion_tokens,
        "first_token_s": receipt.first_token_s,
        "total_s": receipt.total_s,
    }


def _line(receipt: Receipt) -> str:
    computed = receipt.prompt_tokens - receipt.cached_tokens
    first = "none" if receipt.first_token_s is None else f"after {receipt.first_token_s:.2f} s"
    return (
        f"[prompt {receipt.prompt_tokens} tokens: {receipt.cached_disk_tokens} from disk, {computed} computed; "
        f"first token {first}; {receipt.completion_tokens} tokens in {receipt.total_s:.2f} s]"
    )
