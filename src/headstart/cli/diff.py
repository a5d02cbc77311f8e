"""`headstart diff`: where two prompts part, why, and what that costs. Needs no model's weights, and no torch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headstart.cli.asking import URL, asked_of
from headstart.errors import RequestError

if TYPE_CHECKING:
    from headstart.diagnose.show import Prices

DIFFERS = 8
PROVIDERS = ("openai", "anthropic")


@click.command()
@click.argument("a")
@click.argument("b")
@click.option("--model", metavar="MODEL", help="whose tokenizer and chat template to use: a folder with tokenizer.json, a GGUF")
@click.option("--as-sent", is_flag=True, help="with --model: leave in what a headstart server takes out (server.canonical)")
@click.option("--provider", type=click.Choice(PROVIDERS), help="tell also which rules of its cache B breaks")
@click.option("--url", default=URL, show_default=True, help="where the server of request:ID listens")
@click.option("--api-key", envvar="HEADSTART_API_KEY", help="a key of the tenant whose requests those are")
@click.option("--price", metavar="INPUT/CACHED", help="of a million input tokens, computed and cached, such as 3/0.3")
@click.option("--prefill-rate", type=click.FloatRange(min=0, min_open=True), help="tokens of prompts computed in a second")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings")
@click.option("--models-directory", metavar="DIRECTORY", help="where fetched and converted models lie")
def diff(
    a: str,
    b: str,
    model: str | None,
    as_sent: bool,
    provider: str | None,
    price: str | None,
    prefill_rate: float | None,
    as_json: bool,
    config_file: Path | None,
    models_directory: str | None,
    url: str,
    api_key: str | None,
) -> int:
    """Tell where prompt B leaves prompt A, and why. Each is a file with a request's JSON (OpenAI or Anthropic), a text, a JSON
    list of token ids, a line of a log as FILE#ID, request:ID for one that a running server remembers (with
    server.keep_prompts), or - for standard input. Exit code 0: the same to the end of the shorter one;
    8: they differ. Without --model the requests are compared by character, and positions in tokens are estimates."""
    from headstart.diagnose.placing import side_of
    from headstart.diagnose.providers import judged_by
    from headstart.diagnose.report import report_of
    from headstart.diagnose.show import json_of, lines_of
    from headstart.diagnose.sources import Source, read_source

    if a == b == "-":
        raise click.UsageError("only one of A and B can be standard input")
    prices = prices_of(price, prefill_rate)

    def source(name: str) -> Source:
        mark, colon, id = name.partition(":")
        if (mark, colon) != ("request", ":") or Path(name).exists():
            return read_source(name, read_stdin=sys.stdin.buffer.read)
        return Source(name, ids=tuple(asked_of(url, api_key, id, "tokens")["prompt_token_ids"]))

    sources = [source(a), source(b)]
    renderer, rules = None, frozenset[str]()
    if model is not None:
        from headstart.cli.progress import shown_progress
        from headstart.cli.rendering import renderer_of
        from headstart.cli.settings import chosen_config

        config = chosen_config(config_file, {"models_directory": models_directory}, model=model)
        rules = rules if as_sent else frozenset(config.server.canonical_rules)
        with shown_progress() as on_progress:
            renderer = renderer_of(config, on_progress=on_progress)
    elif len({one.ids is None for one in sources}) == 2:
        raise RequestError("one side is token ids and the other is text; name the tokenizer with --model")
    sides = []
    for one in sources:
        conversation = one.conversation(as_sent=renderer is None, rules=rules)
        try:
            sides.append(side_of(one.name, conversation, renderer))
        except RequestError as error:
            raise RequestError(f"{one.name}: {error.message}", param=error.param) from error
    report = report_of(*sides, begin_id=None if renderer is None else renderer.begin_id)
    judged = None
    if provider is not None:
        judged = judged_by(provider, *sources, tokens=report.b_tokens)
    if as_json:
        click.echo(json.dumps(json_of(report, prices) | ({} if judged is None else {"provider": judged.json()})))
    else:
        for line in [*lines_of(report, prices), *(() if judged is None else judged.lines())]:
            click.echo(line)
    return DIFFERS if report.differs else 0


def prices_of(price: str | None, prefill_rate: float | None) -> Prices:
    """Return what --price and --prefill-rate say."""
    from headstart.diagnose.show import Prices

    if price is None:
        return Prices(prefill_tokens_s=prefill_rate)
    try:
        full, cached = (float(part) for part in price.split("/"))
    except ValueError:
        raise click.UsageError(f"--price is {price!r}; give two numbers, such as 3/0.3") from None
    if not 0 <= cached <= full < float("inf"):
        raise click.UsageError(
            f"--price is {price!r}; cached tokens must not cost more than computed ones, nor less than nothing"
        )
    return Prices(full, cached, prefill_rate)
