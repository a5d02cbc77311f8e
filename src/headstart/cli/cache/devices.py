"""`devices`: which directories are one cache, and adding, draining and removing one beside a running server."""

from __future__ import annotations

import json
from pathlib import Path

import click

from headstart.cli.settings import chosen_config
from headstart.tier.devices import add_device, devices_of, drain_device, remove_device
from headstart.tier.devices.changing import ASK_S
from headstart.tier.devices.listing import name_of
from headstart.tier.disk.directory import MARKER
from headstart.tier.lookup_thread import ask_apart

_PATH = click.Path(path_type=Path)


@click.command()
@click.argument("directory", type=_PATH, required=False)
@click.option("--add", "added", type=_PATH, metavar="PATH", help="let this directory be one more device; made where missing")
@click.option(
    "--drain", "drained", type=_PATH, metavar="PATH", help="let nothing new go there, and carry over what is worth it"
)
@click.option("--remove", "removed", type=_PATH, metavar="PATH", help="take a drained or dead device out; its files stay")
@click.option("--force", is_flag=True, help="remove it though it is not drained: what only it has is a miss from then on")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=_PATH, help="TOML file with the server's settings")
def devices(
    directory: Path | None,
    added: Path | None,
    drained: Path | None,
    removed: Path | None,
    force: bool,
    as_json: bool,
    config_file: Path | None,
) -> int:
    """Tell which devices the cache in DIRECTORY (any one of them; default: cache.directory) lies on, after adding, draining or
    removing one. A running server follows within seconds, and does the carrying over when it has nothing else to do."""
    if len([path for path in (added, drained, removed) if path is not None]) > 1:
        raise click.UsageError("give one of --add, --drain and --remove at a time")
    home = (directory or chosen_config(config_file, {}).cache.directories[0]).expanduser()
    if added is not None:
        add_device(home, added.expanduser())
    if drained is not None:
        drain_device(home, drained.expanduser())
    if removed is not None:
        remove_device(home, removed.expanduser(), even_if_not_drained=force)
    entries = devices_of(home)
    there = ask_apart({entry: (entry.path / MARKER).exists for entry in entries}, patience_s=ASK_S)  # one may hang
    found = [
        {"name": name_of(entry.id), "path": str(entry.path), "state": entry.state, "there": there[entry] is True}
        for entry in entries
    ]
    if as_json:
        click.echo(json.dumps({"devices": found}))
        return 0
    for one in found:
        away = "" if one["there"] or one["state"] == "removed" else "  (not there)"
        click.echo(f"{one['state']:9} {one['name'] or '-':8}  {one['path']}{away}")
    return 0
