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


def devices(
    directory: Path | None,
    added: Path | None,
    drained: Path | None,
    removed: Path | None,
    force: bool,
    as_json: bool,
    config_file: Path | None,
) -> int:
    if len([path for path in (added, drained, removed) if path is not None]) > 1:
        raise click.UsageError("give one of --add, --drain and --remove at a time")
    home = (directory or chosen_config(config_file, {}).cache.directories[0]).expanduser()
    if added is not None:
        add_device(home, added.expanduser())
    if drained is not None:
        drain_device(home, drained.expanduser())
    if removed is not None:
        before = devices_of(home)
        remove_device(home, removed.expanduser(), even_if_not_drained=force)
        gone = removed.expanduser().absolute()
        home = next((one.path for one in before if one.path != gone and one.state != "removed"), home)  # it is alone now
        if gone in {path.absolute() for path in chosen_config(config_file, {}).cache.directories}:
            click.echo(
                f"cache.directory still names {gone}: take it out and name {home}, or the next server that is started with it "
                "alone begins an empty cache there",
                err=True,
            )
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
