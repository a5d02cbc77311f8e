"""`headstart why`: what a running server reused of a request, what not, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import click

from headstart.cli.asking import URL, asked_of, decision_of


@click.command()
@click.argument("request")
@click.option("--url", default=URL, show_default=True, help="where the server listens")
@click.option(
    "--api-key", envvar="HEADSTART_API_KEY", help="a key of the tenant whose request it was; with --router an operator's"
)
@click.option("--router", metavar="URL", help="ask this router instead: which worker got the request, and why")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def why(request: str, url: str, api_key: str | None, router: str | None, as_json: bool) -> None:
    """Tell what a running server reused of REQUEST, the id of an answer, from which tier, and what it did not reuse and why:
    against the nearest earlier prompt of the same tenant. To the token where the server keeps token ids
    (server.keep_prompts), else to the block."""
    from headstart.diagnose.why_show import why_lines

    told = asked_of(url, api_key, request, "why") if router is None else decision_of(router, api_key, request)
    if as_json:
        click.echo(json.dumps(told))
        return
    for line in why_lines(told) if router is None else _decision_lines(told):
        click.echo(line)


def _decision_lines(told: dict[str, Any]) -> Iterator[str]:
    """Yield where a request went, and what each worker would have been worth."""
    yield f"{told['request']}: {told['tokens']:,} tokens (by {told['tokens_by']}) of {told['model'] or 'the model'}"
    for attempt in told["attempts"]:
        yield f"{attempt['worker']}: {attempt['reason']} ({attempt['outcome']})"
        yield f"  {'worker':<28} {'first token':>12} {'waiting':>9} {'reading':>9} {'computing':>10} {'cost':>9} {'reused':>9}"
        for one in attempt["scores"]:
            seconds = [f"{one[name]:.3f} s" for name in ("first_token_s", "wait_s", "read_s", "compute_s", "cost")]
            first, wait, read, compute, cost = seconds
            yield f"  {one['worker']:<28} {first:>12} {wait:>9} {read:>9} {compute:>10} {cost:>9} {one['reused_tokens']:>9,}"
        for worker, reason in attempt["left_out"].items():
            yield f"  {worker:<28} left out: {reason}"
