"""`headstart pull`: fetch (and convert) a model now, so that `serve` finds it on a machine without a network."""

from __future__ import annotations

import json
from pathlib import Path

import click

from headstart.cli.progress import shown_progress
from headstart.cli.settings import chosen_config


@click.command()
@click.argument("model", required=False)
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings")
@click.option("--models-directory", metavar="DIRECTORY", help="where fetched and converted models lie")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def pull(model: str | None, config_file: Path | None, models_directory: str | None, as_json: bool) -> None:
    """Fetch MODEL ahead of time."""
    from headstart.engine.models import pull_model

    config = chosen_config(config_file, {"models_directory": models_directory}, model=model)
    stages: set[str] = set()
    with shown_progress() as on_progress:

        def noted(stage: str, fraction: float | None) -> None:
            stages.add(stage)
            on_progress(stage, fraction)

        folder = pull_model(config.model, config.models_directory, on_progress=noted)
    if as_json:
        click.echo(json.dumps({"name": folder.name, "path": str(folder.path), "note": folder.note}))
    else:
        found = "is already here and whole, in" if stages <= {"ready"} else "is in"
        click.echo(f"{folder.name} {found} {folder.path}" + (f" ({folder.note})" if folder.note else ""))
