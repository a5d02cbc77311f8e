"""`headstart why`: what a running server reused of a request, what not, and why."""

from __future__ import annotations

import json

import click

from headstart.cli.asking import URL, asked_of


@click.command()
@click.argument("request")
@click.option("--url", default=URL, show_default=True, help="where the server listens")
@click.option("--api-key", envvar="HEADSTART_API_KEY", help="a key of the tenant whose request it was")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def why(request: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Tell what a running server reused of REQUEST, the id of an answer, from which tier, and what it did not reuse and why:
    against the nearest earlier prompt of the same tenant. To the token where the server keeps token ids
    (server.keep_prompts), else to the block."""
    from headstart.diagnose.why_show import why_lines

    told = asked_of(url, api_key, request, "why")
    if as_json:
        click.echo(json.dumps(told))
        return
    for line in why_lines(told):
        click.echo(line)
