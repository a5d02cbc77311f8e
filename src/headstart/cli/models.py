"""`headstart models`: what can be served here by name, without fetching anything."""

from __future__ import annotations

import json
from dataclasses import asdict

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def models(as_json: bool) -> None:
    """List the aliases, and the GGUF models that Ollama, LM Studio and the Hugging Face cache have here."""
    from headstart.config import model_places
    from headstart.engine.local_models import local_models
    from headstart.engine.models import ALIASES

    found = local_models(model_places())
    if as_json:
        listed = [{**asdict(model), "path": str(model.path)} for model in found]
        click.echo(json.dumps({"aliases": list(ALIASES), "models": listed}))
        return
    rows = [(name, "", "alias") for name in ALIASES]
    rows += [(model.name, f"{model.nbytes / (1 << 20):,.0f} MiB", model.source) for model in found]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, size, source in rows:
        click.echo(f"{name:{widths[0]}}  {size:>{widths[1]}}  {source}")
