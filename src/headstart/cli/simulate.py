"""`headstart simulate`: what a fleet would make of a trace under the router's rule, and under others."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from headstart.errors import MissingExtra

if TYPE_CHECKING:
    from collections.abc import Callable

    from headstart.cli.progress import OnProgress
    from headstart.simulate.fleet import Fleet
    from headstart.simulate.planned import Planned
    from headstart.simulate.result import Result
    from headstart.simulate.trace import Trace


@click.command()
@click.argument("trace", type=click.Path(exists=True, path_type=Path))
@click.option("--workers", type=click.IntRange(1, 1024), default=8, show_default=True, help="how many engines there are")
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="RULE",
    help="headstart, round-robin, least-loaded, prefix-only or dynamo, again for more; without it all are compared",
)
@click.option(
    "--faster",
    type=click.FloatRange(min=0, min_open=True),
    default=1.0,
    show_default=True,
    help="bring requests this much closer",
)
@click.option("--requests", type=click.IntRange(min=1), help="take only so many; of a folder so many sessions")
@click.option("--kv-tokens", default="400K", show_default=True, metavar="TOKENS", help="what an engine's memory holds")
@click.option("--pool-tokens", metavar="TOKENS", help="what a pool that all can read holds; without it there is none")
@click.option(
    "--speeds", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON file with an engine's speeds"
)
@click.option(
    "--plan",
    "cluster",
    type=click.Path(dir_okay=False, path_type=Path),
    help="let the planner of this cluster.toml start and drain workers, beginning with --workers",
)
@click.option("--seed", type=int, default=0, show_default=True, help="of ties")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="draw first tokens into this .svg or .png")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def simulate(
    trace: Path,
    workers: int,
    rules: tuple[str, ...],
    faster: float,
    requests: int | None,
    kv_tokens: str,
    pool_tokens: str | None,
    speeds: Path | None,
    cluster: Path | None,
    seed: int,
    plot: Path | None,
    as_json: bool,
) -> int:
    """Replay TRACE on a fleet of engines that are a few numbers, on a virtual clock, through the code that decides in the
    router. TRACE is Mooncake's JSON lines, an agent session, or a folder of sessions. Prints first token, time per token,
    hit rate by tier, utilisation, and the largest share of a worker over the mean."""
    from headstart.cli.progress import shown_progress
    from headstart.simulate.fleet import NAMES, Fleet, read_speeds, simulate
    from headstart.simulate.result import json_of, lines_of, result_of
    from headstart.simulate.trace import read, tokens_of

    for unknown in set(rules) - set(NAMES):
        raise click.BadParameter(f"no rule {unknown!r}; there are {', '.join(NAMES)}", param_hint="--rule")
    fleet = Fleet(
        workers,
        speeds=read_speeds(speeds),
        kv_tokens=tokens_of(kv_tokens),
        pool_tokens=None if pool_tokens is None else tokens_of(pool_tokens),
    )
    asked = read(trace, limit=requests).faster(faster)
    total = sum(len(session) for session in asked.sessions)
    results, firsts = [], {}
    with shown_progress() as on_progress:
        for name in rules or NAMES:
            run = simulate(asked, fleet, name, seed=seed, on_request=partial(_told, on_progress, name, total))
            results.append(result_of(name, run))
            firsts[name] = sorted(job.first_s - job.sent_s for job in run.jobs)
        made = None if cluster is None else _planned(cluster, asked, fleet, seed, partial(_told, on_progress, "planner", total))
    if made is not None:
        results.append(result_of("planner", made.run, seconds=made.worker_s))
        firsts["planner"] = sorted(job.first_s - job.sent_s for job in made.run.jobs)
    if plot is not None:
        _draw(plot, firsts, results)
    if as_json:
        told = {"trace": trace.name, "workers": workers, "faster": faster, "rules": [json_of(one) for one in results]}
        if made is not None:
            told["planner"] = {"worker_hours": made.worker_s / 3600, "most": made.most, "actions": _actions(made)}
        click.echo(json.dumps(told))
    else:
        click.echo("\n".join(lines_of(results)))
        if made is not None:
            click.echo("\n".join(f"{when} {action}" for when, action in _actions(made)))
            fixed_hours = workers * results[-1].span_s / 3600
            click.echo(
                f"{made.worker_s / 3600:.2f} worker hours, up to {made.most} workers; {workers} all along: {fixed_hours:.2f}"
            )
    return 0


def _planned(cluster: Path, trace: Trace, fleet: Fleet, seed: int, on_request: Callable[[int], None]) -> Planned:
    """Return what the fleet becomes under the planner of a cluster's file; without one in it, under the usual planner."""
    from headstart.gateway.cluster_file import PlannerTable, read_cluster
    from headstart.simulate.planned import simulate_planned

    planner = read_cluster(cluster).planner or PlannerTable()
    return simulate_planned(
        trace,
        fleet,
        targets=planner.targets,
        limits=planner.limits,
        delays=planner.delays,
        look_s=planner.every_s,
        seed=seed,
        on_request=on_request,
    )


def _actions(made: Planned) -> list[tuple[str, str]]:
    """Return when what was done, as hours, minutes and seconds since the trace began."""
    return [
        (f"{int(at_s) // 3600:02}:{int(at_s) // 60 % 60:02}:{int(at_s) % 60:02}", str(action)) for at_s, action in made.actions
    ]


def _told(on_progress: OnProgress, rule: str, total: int, done: int) -> None:
    on_progress(rule, done / total)


def _draw(path: Path, firsts: dict[str, list[float]], results: list[Result]) -> None:
    """Draw which share of the requests had their first token after how long, a line a rule."""
    try:
        import matplotlib

        matplotlib.use("agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise MissingExtra("--plot needs matplotlib: pip install matplotlib", extra="matplotlib") from error
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name, seconds in firsts.items():
        axes.plot(seconds, [100 * (n + 1) / len(seconds) for n in range(len(seconds))], label=name)
    axes.set_xscale("log")
    axes.set_xlabel("seconds until the first token")
    axes.set_ylabel("% of requests")
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(f"{results[0].requests:,} requests")
    figure.savefig(path)
    pyplot.close(figure)
