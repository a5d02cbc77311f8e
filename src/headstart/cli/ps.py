"""`headstart ps` and `headstart top`: the workers of a router, once or again and again."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.cluster_choice import router_of

if TYPE_CHECKING:
    from rich.table import Table

_FILE = click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
_ROUTER = click.option("--router", metavar="URL", help="ask this router, whoever started it")
_KEY = click.option("--api-key", envvar="HEADSTART_API_KEY", help="an operator's key, where the router asks for keys")
_HEADS = (
    "worker",
    "role",
    "state",
    "running",
    "waiting",
    "hits",
    "prefill/s",
    "decode/s",
    "first token",
    "a token",
    "requests",
    "failed",
)


@click.command()
@_FILE
@_ROUTER
@_KEY
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def ps(file: Path | None, router: str | None, api_key: str | None, as_json: bool) -> int:
    """List the workers of FILE's cluster, or of the one in the default directory: roles, states, queues, hit rates by tier,
    speeds, times of the latest requests (p50 / p90)."""
    from headstart.gateway.router_client import RouterClient

    with RouterClient(router_of(file, router), api_key) as asked:
        workers = asked.workers()
        if as_json:
            click.echo(json.dumps({"router": asked.url, "workers": workers}))
            return 0
    rows = [_HEADS, *(row_of(one) for one in workers)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADS))]
    for row in rows:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


@click.command()
@_FILE
@_ROUTER
@_KEY
@click.option(
    "--every", type=click.FloatRange(min=0.1, max=3600), default=1.0, show_default=True, help="seconds between two looks"
)
@click.option("--count", type=click.IntRange(min=1), help="end after so many looks")
def top(file: Path | None, router: str | None, api_key: str | None, every: float, count: int | None) -> int:
    """Show what `headstart ps` lists, again and again until Ctrl-C."""
    from rich.console import Console
    from rich.live import Live

    from headstart.errors import NoServer
    from headstart.gateway.router_client import RouterClient

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    looks = 0
    with (
        RouterClient(router_of(file, router), api_key) as asked,
        Live(console=console, auto_refresh=False, screen=console.is_terminal) as live,
    ):
        while True:
            try:
                live.update(_table(asked.url, asked.workers()), refresh=True)
            except NoServer as error:
                if not looks:
                    raise
                live.update(error.message, refresh=True)
            looks += 1
            if count is not None and looks >= count:
                return 0
            time.sleep(every)


def row_of(told: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a worker's cells, in the order of the heads."""
    return (
        str(told.get("id", "?")),
        str(told.get("role", "?")),
        str(told.get("state", "?")),
        str(told.get("running", 0)),
        str(told.get("waiting", 0)),
        _hits(told),
        _rate(told.get("prefill_tokens_per_s")),
        _rate(told.get("decode_tokens_per_s")),
        _times(told.get("first_token_s")),
        _times(told.get("token_s")),
        str(told.get("requests", 0)),
        str(told.get("failures", 0)),
    )


def _table(url: str, workers: Sequence[Mapping[str, Any]]) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    ready = sum(one.get("state") == "ready" for one in workers)
    table = Table(title=f"{url}: {ready} of {len(workers)} workers ready", title_justify="left", box=SIMPLE, pad_edge=False)
    for head in _HEADS:
        table.add_column(head, no_wrap=True)
    for one in workers:
        table.add_row(*row_of(one))
    return table


def _hits(told: Mapping[str, Any]) -> str:
    """Return which share of the prompts' tokens each tier gave."""
    tokens = told.get("input_tokens") or 0
    hits = {str(tier): count for tier, count in (told.get("hit_tokens") or {}).items() if count}
    if not hits:
        return "-"
    if not tokens:
        return " ".join(f"{tier} {count:,}" for tier, count in hits.items())
    return " ".join(f"{tier} {min(1.0, count / tokens):.0%}" for tier, count in hits.items())


def _rate(value: Any) -> str:
    return f"{value:,.0f}" if value else "-"


def _times(told: Any) -> str:
    found = [told.get(name) for name in ("p50", "p90")] if isinstance(told, dict) else [None]
    return " / ".join("-" if one is None else _seconds(one) for one in found)


def _seconds(value: float) -> str:
    return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.1f} s"
