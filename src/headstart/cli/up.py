"""`headstart up`: run a cluster as its file says until it is told to end; `headstart down` ends one."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from headstart.gateway.cluster import Cluster
    from headstart.gateway.cluster_file import ClusterFile

log = logging.getLogger("headstart")
_KEY = "HEADSTART_API_KEY"


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--dry-run", is_flag=True, help="only tell what would be started")
@click.option("--detach", is_flag=True, help="return once all workers are ready, and leave the cluster running")
@click.option("--api-key", envvar=_KEY, help="an operator's key, where the router asks for keys")
def up(file: Path, dry_run: bool, detach: bool, api_key: str | None) -> int:
    """Start what FILE (a cluster.toml) describes: a pool, workers, a router in front of them and a planner, on this machine or
    on a Ray cluster. Workers and router that die are started again. What an earlier one left running is taken over."""
    from headstart.gateway.cluster_file import read_cluster

    cluster = read_cluster(file)
    if dry_run:
        for line in described(cluster):
            click.echo(line)
        return 0
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    return _detached(file, cluster, api_key) if detach else _run(cluster, api_key)


def _run(file: ClusterFile, api_key: str | None) -> int:
    from headstart.cli import INTERRUPTED
    from headstart.config import keep_from_children
    from headstart.gateway.cluster import Cluster

    keep_from_children(_KEY)  # it is no business of what is started here
    stop, told = threading.Event(), []
    cluster = Cluster(file, api_key=api_key)

    def end(number: int, frame: object) -> None:
        told.append(number)
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if file.planner is not None and file.planner.metrics_port is not None:
            _metrics(cluster, file.planner.metrics_port)
        cluster.start()
        log.info("workers asked for: %d; their logs are in %s", len(file.specs()), file.folder / "logs")
        cluster.run(stop, on_ready=lambda url: log.info("ready: %s routes to %d workers", url, len(file.specs())))
        log.info("ending; running requests may end first")
    finally:
        cluster.close()
        for number, handler in before.items():
            signal.signal(number, handler)
    log.info("ended")
    return INTERRUPTED if signal.SIGINT in told else 0


def _metrics(cluster: Cluster, port: int) -> None:
    """Tell the planner's metrics on a port of this machine."""
    from prometheus_client import start_http_server

    from headstart.errors import AddressInUse

    try:
        start_http_server(port, addr="127.0.0.1", registry=cluster.metrics)
    except OSError as error:
        raise AddressInUse(f"port {port} for the planner's metrics is in use; choose another planner.metrics_port") from error


def _detached(path: Path, file: ClusterFile, api_key: str | None) -> int:
    """Have another process run the cluster; return once its workers are ready. Raises HeadstartError where it ends before."""
    from headstart.cli.progress import shown_progress
    from headstart.config import environment_with
    from headstart.errors import HeadstartError, NotThere
    from headstart.gateway.child import started_of
    from headstart.gateway.cluster import State, read_state

    logs = file.folder / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    command = [sys.executable, "-m", "headstart.cli", "up", str(path)]
    told = environment_with({_KEY: api_key} if api_key else {})  # a command line is for every user to see
    with (logs / "up.log").open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True, env=told
        )
    state: State | None = None
    try:
        with shown_progress() as on_progress:
            while process.poll() is None:
                try:
                    state = read_state(file.folder)
                except NotThere:
                    state = None
                if state is not None and state.ready and state.pid == process.pid and started_of(state.pid) == state.started:
                    click.echo(f"{state.router} routes to {len(file.specs())} workers; end them with headstart down {path}")
                    return 0
                on_progress(f"until {len(file.specs())} workers are ready", None)
                time.sleep(0.1)
    except BaseException:
        process.terminate()  # whoever gave up waiting wants no cluster
        process.wait()
        raise
    said = (logs / "up.log").read_bytes()[begin:].decode(errors="replace").strip().splitlines()
    raise HeadstartError(f"the cluster did not start: {said[-1] if said else 'it said nothing'} (its log is {logs / 'up.log'})")


def described(file: ClusterFile) -> list[str]:
    """Return what `up` would do, a line each."""
    place = f"on the Ray cluster {file.ray_address or 'of this machine'}" if file.launcher == "ray" else "on this machine"
    lines = [f"directory {file.folder}"]
    if file.pool is not None:
        lines.append(f"pool {Path(file.pool.directory).expanduser()}")
    lines.append(f"router http://{file.router.host}:{file.router.port}")
    for table in file.workers:
        lines.append(f"{table.count} x {table.role} {place}: {' '.join(file.spec(table).command)}")
    planner = file.planner
    if planner is None or not planner.enabled:
        lines.append("no planner")
    else:
        says = ", only told" if planner.dry_run else ""
        lines.append(
            f"planner: first token {planner.first_token_s:g} s, a token {planner.token_s:g} s, "
            f"{planner.minimum} to {planner.maximum} workers{says}"
        )
        lines += [
            f"  {one.start} to {one.end}{' ' + ','.join(one.days) if one.days else ''}: {one.minimum} to {one.maximum}"
            for one in planner.windows
        ]
    return lines
