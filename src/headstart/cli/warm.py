"""`headstart warm`: have a running server compute and keep prompts before anybody asks for them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import httpx

from headstart.cli.asking import require_address
from headstart.cli.progress import shown_progress
from headstart.errors import NoServer, RequestError

FAILED = 1
TIMEOUT_S = 3600.0  # of one prompt, which may be long on a small machine
_PATHS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions", "input": "/v1/responses"}


@dataclass(frozen=True, slots=True)
class Warmed:
    """What became of one prompt. `name` is its file, and in a file of several its line."""

    name: str
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.cached_tokens


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE…")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="where the server listens")
@click.option("--api-key", envvar="HEADSTART_API_KEY", help="the key that the prompts will be asked with")
@click.option("--ttl", metavar="TIME", help='keep them for at least so long, such as "12h"')
@click.option("--retention", metavar="CLASS", help="keep them in this class of cache.retention")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def warm(files: tuple[str, ...], url: str, api_key: str | None, ttl: str | None, retention: str | None, as_json: bool) -> int:
    """Have a running server compute the prompts in FILEs and keep them, without an answer. A file is a request's JSON body
    (chat completions, completions, responses or messages), JSON lines of such bodies, or a text; - is standard input. Exit
    code 1 if any failed."""
    require_address(url, "--url")
    bodies = [named for file in files for named in _bodies(file)]
    headers = {"x-headstart-retention": retention} if retention else {}
    if api_key:
        headers["authorization"] = f"Bearer {api_key}"
    done: list[Warmed] = []
    with shown_progress() as on_progress, httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S) as client:
        for number, (name, body) in enumerate(bodies):
            on_progress(f"warming {name}", number / len(bodies))
            done.append(_warmed(client, name, _prewarming(body, ttl)))
    failed = [one for one in done if one.error is not None]
    if as_json:
        click.echo(json.dumps({"prompts": [asdict(one) for one in done], "failed": len(failed)}))
    else:
        for one in done:
            click.echo(
                f"{one.name}: {one.error}"
                if one.error is not None
                else f"{one.name}: {one.prompt_tokens} tokens, {one.computed_tokens} computed, {one.cached_tokens} kept before"
            )
    return FAILED if failed else 0


def _bodies(file: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests in a file by name. Raises RequestError for what is none."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise RequestError(f"{file} cannot be read: {why}") from error
    if not text.strip():
        raise RequestError(f"{file} is empty; there is no prompt to warm")
    if (body := _body(text)) is not None:
        yield file, body
        return
    lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    found = [(number, _body(line)) for number, line in lines]
    if not any(body for _, body in found):
        yield file, {"prompt": text}
        return
    for number, body in found:
        if body is None:
            raise RequestError(f"{file}, line {number}, is no request; each line must be a body with messages, prompt or input")
        yield f"{file}:{number}", body


def _body(text: str) -> dict[str, Any] | None:
    """Return a request's body; also where it stands in a line of a log or a batch under `body`."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict) and isinstance(value.get("body"), dict):
        value = value["body"]
    if isinstance(value, list) and value and all(isinstance(one, dict) and "role" in one for one in value):
        value = {"messages": value}
    return value if isinstance(value, dict) and _PATHS.keys() & value.keys() else None


def _prewarming(body: dict[str, Any], ttl: str | None) -> dict[str, Any]:
    told = body.get("prompt_cache_options")
    options = {**(told if isinstance(told, dict) else {}), "prewarm": True, **({"ttl": ttl} if ttl else {})}
    return {**body, "stream": False, "n": 1, "prompt_cache_options": options}


def _path(body: dict[str, Any]) -> str:
    """Anthropic's bodies have messages, too, and what no other has: a system prompt of its own, or tools with their schema."""
    tools = body.get("tools")
    schemas = isinstance(tools, list) and any(isinstance(tool, dict) and "input_schema" in tool for tool in tools)
    if "messages" in body and ("system" in body or schemas):
        return "/v1/messages"
    return next(path for name, path in _PATHS.items() if name in body)


def _warmed(client: httpx.Client, name: str, body: dict[str, Any]) -> Warmed:
    try:
        answer = client.post(_path(body), json=body)
    except httpx.TransportError as error:
        raise NoServer(
            f"no server answers at {client.base_url} ({error}); start one with headstart serve, or say where with --url"
        ) from error
    try:
        said = answer.json()
        if answer.status_code != 200:
            return Warmed(name, error=f"{answer.status_code}: {said['error']['message']}")
        usage = said["usage"]
        if "prompt_tokens" in usage:
            return Warmed(name, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"])
        if "input_tokens_details" in usage:
            return Warmed(name, usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"])
        cached = usage["cache_read_input_tokens"]
        return Warmed(name, usage["input_tokens"] + usage["cache_creation_input_tokens"] + cached, cached)
    except (ValueError, KeyError, TypeError):
        return Warmed(name, error=f"{answer.status_code}: what answered there is no server that tells what it used")
