"""`headstart usage`: what tenants used, added up from the usage log, also of a server that runs."""

from __future__ import annotations

import csv
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from headstart.cli.settings import chosen_config
from headstart.ledger.reading import ENGINE_SUMS, GROUPS, SUMS, Reading, Sums, add_up, entries


def _checked_groups(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    for name in names:
        if name not in GROUPS:
            raise click.BadParameter(f"{name!r} is none of {', '.join(GROUPS)}")
    return names


def _checked_time(context: click.Context, option: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no date; write 2030-01-31 or 2030-01-31T18:00+01:00") from error
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp()


@click.command()
@click.option("--by", callback=_checked_groups, default="tenant", help="groups, such as tenant,day  [default: tenant]")
@click.option("--tenant", metavar="NAME", help="only of this tenant")
@click.option("--since", metavar="TIME", callback=_checked_time, help="only what ended at or after then, in UTC")
@click.option("--until", metavar="TIME", callback=_checked_time, help="only what ended before then, in UTC")
@click.option("--csv", "as_csv", is_flag=True, help="print comma-separated values")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object, with the engine's own counts")
@click.option(
    "--usage-log",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="folder of the log  [default: server.usage_log]",
)
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings")
def usage(
    by: tuple[str, ...],
    tenant: str | None,
    since: float | None,
    until: float | None,
    as_csv: bool,
    as_json: bool,
    directory: Path | None,
    config_file: Path | None,
) -> None:
    """Add up the usage log: requests, and tokens of prompts and answers. Cached and computed make up the prompts."""
    if as_csv and as_json:
        raise click.UsageError("choose one of --csv and --json")
    reading = Reading()
    where = directory or chosen_config(config_file, {}).server.usage_log
    wanted = (
        one
        for one in entries(where, reading)
        if (tenant is None or one.tenant == tenant)
        and (since is None or one.time >= since)
        and (until is None or one.time < until)
    )
    groups = add_up(wanted, by)
    if as_json:
        rows = [{**dict(zip(by, group, strict=True)), **sums.counts} for group, sums in groups.items()]
        click.echo(
            json.dumps(
                {"by": by, "rows": rows, "total": _total(groups), "torn_lines": reading.torn, "wrong_lines": reading.wrong}
            )
        )
    elif as_csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow([*by, *SUMS, *ENGINE_SUMS])
        writer.writerows([*group, *sums.counts.values()] for group, sums in groups.items())
    else:
        _show(groups, by)
    if reading.wrong and not as_json:
        click.echo(f"{reading.wrong} lines are none of the usage log's and were left out", err=True)


def _total(groups: dict[tuple[str, ...], Sums]) -> dict[str, int]:
    return {name: sum(sums.counts[name] for sums in groups.values()) for name in (*SUMS, *ENGINE_SUMS)}


def _show(groups: dict[tuple[str, ...], Sums], by: tuple[str, ...]) -> None:
    rows: list[list[str]] = [[*by, *SUMS]]
    rows += [[*(name or "-" for name in group), *(f"{sums.counts[name]:,}" for name in SUMS)] for group, sums in groups.items()]
    if len(groups) != 1:
        total: dict[str, Any] = _total(groups)
        rows.append([*(["total", *[""] * (len(by) - 1)] if by else []), *(f"{total[name]:,}" for name in SUMS)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if i < len(by) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
