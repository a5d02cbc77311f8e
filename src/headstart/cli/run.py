"""`headstart run`: one answer in the terminal, as it is generated, and one line about where its prompt came from."""

from __future__ import annotations

import json
import queue
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.progress import shown_progress
from headstart.cli.settings import chosen_config, config_options
from headstart.errors import HeadstartError

if TYPE_CHECKING:
    from headstart.api.served import Served
    from headstart.engine.base import GenerationRequest, Receipt, TokenEvent

EVENT_WAIT_S = 3600.0  # one step of a model may take long on a small machine, but not this long


@click.command()
@click.argument("prompt")
@click.option("--system", metavar="TEXT", help="system prompt before the question")
@click.option("--max-tokens", type=click.IntRange(min=1), help="limit of the answer")
@click.option("--temperature", type=click.FloatRange(min=0), help="0 is greedy  [default: the model's own]")
@click.option("--seed", type=int, help="equal seeds give equal answers")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of text")
@config_options("", "cache", "cache.tiering", "engine")
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
    from headstart.cli.opening import open_model

    messages = [{"role": "system", "content": system}] if system else []
    question = sys.stdin.read() if prompt == "-" else prompt
    if not question.strip():
        raise click.UsageError("the prompt is empty; write a question")
    messages.append({"role": "user", "content": question})
    with shown_progress() as on_progress:
        model = open_model(config, on_progress=on_progress)
    try:
        said = {"temperature": temperature, "seed": seed}
        request = model.request(
            "run",
            tuple(model.renderer.chat(messages)),
            max_tokens=max_tokens,
            sampling={name: value for name, value in said.items() if value is not None},
        )
        text, last = _answer(model, request, show=not as_json)
    finally:
        model.engine.close()
    if last.finish == "error" or last.receipt is None:
        raise HeadstartError(f"the engine gave up: {last.error or 'without a reason'}")
    if as_json:
        click.echo(json.dumps(_facts(text, last.finish, last.receipt)))
    else:
        click.echo(_line(last.receipt), err=True)


def _answer(model: Served, request: GenerationRequest, *, show: bool) -> tuple[str, TokenEvent]:
    """Return the whole text, shown as it comes if wanted, and the last event."""
    from headstart.render import TextStream

    events: queue.SimpleQueue[TokenEvent] = queue.SimpleQueue()
    model.engine.submit(request, events.put)
    stream = TextStream(model.renderer)
    text: list[str] = []
    ended = False
    while not ended:
        try:
            event = events.get(timeout=EVENT_WAIT_S)
        except queue.Empty as error:
            raise HeadstartError(f"the engine gave no token for {EVENT_WAIT_S:.0f} s") from error
        ended = event.finish is not None
        piece = stream.push(event.token) if event.token is not None else ""
        text.append(piece + (stream.finish() if ended else ""))
        if show:
            click.echo(text[-1], nl=ended)
    return "".join(text), event


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
