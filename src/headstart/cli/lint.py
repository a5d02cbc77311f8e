"""`headstart lint`: what whole logs would find again in an ideal cache, what they lose by which cause, what to change first."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headstart.cli.diff import prices_of
from headstart.errors import NotThere, RequestError

if TYPE_CHECKING:
    from headstart.diagnose.logs import Found, Log
    from headstart.diagnose.reading import Reading

BROKEN = 9
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILES")
@click.option("--model", metavar="MODEL", help="whose tokenizer and chat template to use: a folder with tokenizer.json, a GGUF")
@click.option("--as-sent", is_flag=True, help="with --model: leave in what a headstart server takes out (server.canonical)")
@click.option("--tenants-apart", is_flag=True, help="tenants share nothing, as those of a headstart server's keys")
@click.option("--capacity", metavar="TOKENS", help="tell also what a cache of so many tokens would find, such as 5M")
@click.option(
    "--changes", type=click.IntRange(0, 3), default=3, show_default=True, help="how many changes to replay, a pass each"
)
@click.option("--fail-on", metavar="LIMITS", multiple=True, help="shares of tokens, such as any=5%,time=0,rate=60%")
@click.option("--price", metavar="INPUT/CACHED", help="of a million input tokens, computed and cached, such as 3/0.3")
@click.option("--prefill-rate", type=click.FloatRange(min=0, min_open=True), help="tokens of prompts computed in a second")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), help="write a page with pictures too")
@click.option("--show-text", is_flag=True, help="quote what prompts say, and names of tenants and sessions")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings")
@click.option("--models-directory", metavar="DIRECTORY", help="where fetched and converted models lie")
def lint(
    files: tuple[str, ...],
    model: str | None,
    as_sent: bool,
    tenants_apart: bool,
    capacity: str | None,
    changes: int,
    fail_on: tuple[str, ...],
    price: str | None,
    prefill_rate: float | None,
    page: Path | None,
    show_text: bool,
    as_json: bool,
    config_file: Path | None,
    models_directory: str | None,
) -> int:
    """Tell what the prompts of whole logs lose, and by what. FILES are logs with a request a line (OpenAI, Anthropic, proxies,
    `headstart record`), ShareGPT, HAR, transcripts of coding agents, folders of these, or - for standard input. Exit code 0;
    9: a limit of --fail-on is broken. Without --model tokens are estimates."""
    from headstart.cli.progress import shown_progress
    from headstart.diagnose.lint import Linter, fails
    from headstart.diagnose.lint_show import json_of, lines_of
    from headstart.diagnose.logs import Log
    from headstart.diagnose.mending import best_changes, replayed

    limits = _limits(fail_on)
    prices = prices_of(price, prefill_rate)
    tokens = None if capacity is None else _tokens(capacity)
    if files.count("-") > 1:
        raise click.UsageError("standard input can be given once")
    with shown_progress() as on_progress:
        reading = _reading(model, config_file, models_directory, as_sent, tenants_apart, on_progress)
        with Log(files, read_stdin=lambda: sys.stdin.buffer) as log:
            linter = Linter(log, reading, capacity_tokens=tokens)
            done = _Done(log, on_progress)
            for found in log:
                linter.add(found)
                done.on_request("reading", found)
            result = linter.result()
            if not result.all.requests:
                raise RequestError(f"no request was found; {'; '.join(result.unread_such_as)}")
            made = replayed(
                best_changes(result, changes),
                log,
                reading,
                on_request=lambda n, found: done.on_request(f"change {n + 1}", found),
            )
    if page is not None:
        from headstart.diagnose.lint_page import page_of

        try:
            page.write_text(page_of(result, made, prices, text=show_text), encoding="utf-8")
        except OSError as error:
            raise NotThere(f"{page} cannot be written: {error.strerror}", path=page, errno=error.errno) from error
    broken = fails(result, limits)
    if as_json:
        click.echo(json.dumps({**json_of(result, made, prices, text=show_text), "broken_limits": broken}))
    else:
        for line in lines_of(result, made, prices, text=show_text):
            click.echo(line)
        for sentence in broken:
            click.echo(f"limit broken: {sentence}", err=True)
    return BROKEN if broken else 0


class _Done:
    """How much of all files is read, for a bar that moves by at least a thousandth."""

    def __init__(self, log: Log, on_progress: Callable[[str, float | None], None]) -> None:
        self._size = max(1, log.size_bytes)
        self._on_progress = on_progress
        self._stage = ""
        self._files: dict[int, int] = {}
        self._shown = 0.0

    def on_request(self, stage: str, found: Found) -> None:
        if stage != self._stage:
            self._stage, self._files, self._shown = stage, {}, -1.0
        self._files[found.locator.file] = found.done_bytes
        fraction = sum(self._files.values()) / self._size
        if fraction - self._shown >= 0.001:
            self._shown = fraction
            self._on_progress(stage, min(1.0, fraction))


def _reading(
    model: str | None,
    config_file: Path | None,
    models_directory: str | None,
    as_sent: bool,
    tenants_apart: bool,
    on_progress: Callable[[str, float | None], None],
) -> Reading:
    from headstart.diagnose.reading import Reading

    if model is None:  # nothing is known of the server
        return Reading(tenants_apart=tenants_apart)
    from headstart.cli.rendering import renderer_of
    from headstart.cli.settings import chosen_config

    config = chosen_config(config_file, {"models_directory": models_directory}, model=model)
    rules = frozenset() if as_sent else frozenset(config.server.canonical_rules)
    return Reading(renderer_of(config, on_progress=on_progress), rules, tenants_apart)


def _limits(told: tuple[str, ...]) -> dict[str, float]:
    from headstart.diagnose.causes import Cause

    limits: dict[str, float] = {}
    for part in ",".join(told).split(","):
        if not part.strip():
            continue
        name, _, share = part.partition("=")
        name, share = name.strip(), share.strip() or "0"
        if name not in {"any", "rate", *Cause}:
            raise click.UsageError(f"--fail-on names {name!r}; give any, rate, or a cause such as {Cause.TIME}")
        try:
            limits[name] = float(share.removesuffix("%")) / (100 if share.endswith("%") else 1)
        except ValueError:
            raise click.UsageError(f"--fail-on {part!r}: give a share, such as {name}=5%") from None
        if not 0 <= limits[name] <= 1:
            raise click.UsageError(f"--fail-on {part!r}: a share is between 0 and 100%")
    return limits


def _tokens(told: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgb]?)", told.strip().lower())
    if found is None or float(found[1]) == 0:
        raise click.UsageError(f"--capacity is {told!r}; give a number of tokens, such as 5M")
    return int(float(found[1]) * _FACTORS[found[2]])
