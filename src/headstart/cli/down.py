"""`headstart down`: end a cluster that `headstart up` started, also where that was killed."""

from __future__ import annotations

from pathlib import Path

import click

from headstart.cli.cluster_choice import folder_of


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
def down(file: Path | None) -> int:
    """End the router, the workers and the planner of FILE (a cluster.toml), or of the cluster in the default directory. Running
    requests may end first."""
    from headstart.cli.progress import shown_progress
    from headstart.gateway.cluster import end

    folder = folder_of(file)
    with shown_progress() as on_progress:
        there = end(folder, on_wait=lambda what: on_progress(what, None))
    click.echo(f"ended the cluster in {folder}" if there else f"no cluster runs in {folder}")
    return 0
