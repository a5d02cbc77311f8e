"""`headstart plan`: the planner in front of a router that something else started workers for."""

from __future__ import annotations

import logging
import time
from datetime import datetime
from pathlib import Path

import click

from headstart.cli.cluster_choice import router_of

log = logging.getLogger("headstart")


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--router", metavar="URL", help="look at this router, whoever started it")
@click.option("--api-key", envvar="HEADSTART_API_KEY", help="an operator's key, where the router asks for keys")
@click.option("--dry-run", is_flag=True, help="only tell what would be done, and why")
@click.option("--looks", type=click.IntRange(min=1), help="end after so many looks; without it it goes on")
def plan(file: Path | None, router: str | None, api_key: str | None, dry_run: bool, looks: int | None) -> int:
    """Look at a router's workers and say what the targets of FILE's [planner] need, and why: which to move to another role, to
    drain, and how many to start. It moves and drains through the router; it starts and ends no processes, which is
    `headstart up`'s, so starts are only told."""
    from headstart.gateway.cluster_file import PlannerTable, read_cluster
    from headstart.gateway.planning import Looking
    from headstart.gateway.router_client import RouterClient
    from headstart.policy.planning import Planner

    table = (None if file is None else read_cluster(file).planner) or PlannerTable()
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    with RouterClient(router_of(file, router), api_key) as asked:
        asked.workers()  # raises at once where there is no router
        looking = Looking(asked, Planner(table.targets, table.limits, table.delays), dry_run=dry_run)
        done = 0
        while True:
            made = looking.look(now_s=time.monotonic(), local=datetime.now())
            for need in made.needs:
                click.echo(str(need))
            done += 1
            if looks is not None and done >= looks:
                return 0
            time.sleep(table.every_s)
