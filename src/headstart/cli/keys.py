"""`headstart keys`: make, list and remove API keys in the file that a server reads, also while it runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from headstart.api.keys import append_key, make_key, read_keys, remove_keys
from headstart.cli.lazy import LazyGroup
from headstart.cli.settings import chosen_config
from headstart.config import parse_size
from headstart.errors import ConfigError, NotThere

_HERE = "headstart.cli.keys"
VERBS = {
    "add": (f"{_HERE}:add", "Make a key and print it, this once."),
    "ls": (f"{_HERE}:ls", "List keys; their secrets nobody knows."),
    "rm": (f"{_HERE}:rm", "Remove keys; a running server refuses them within a second."),
}
Command = TypeVar("Command", bound=Callable[..., Any])


@click.group(cls=LazyGroup, lazy=VERBS)
def keys() -> None:
    """Make, list and remove API keys."""


def _options(command: Command) -> Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="print one JSON object"),
        click.option(
            "--keys", "file", type=click.Path(dir_okay=False, path_type=Path), help="file of keys  [default: server.keys]"
        ),
        click.option(
            "--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings"
        ),
    ):
        command = option(command)
    return command


@click.command()
@click.option("--tenant", required=True, metavar="NAME", help="whose requests, stored prefixes and usage these are")
@click.option("--class", "retention", metavar="NAME", help="retention class of its prompts unless a request says another")
@click.option("--requests-per-minute", type=click.IntRange(min=1), help="requests that may come in a minute")
@click.option("--tokens-per-minute", type=click.IntRange(min=1), help="tokens of prompts and answers in a minute")
@click.option("--in-flight", type=click.IntRange(min=1), help="requests that may run or wait at once")
@click.option("--body", metavar="SIZE", help="the largest body of a request")
@click.option(
    "--priority", type=click.IntRange(-9999, 9999), help="the highest priority that requests may ask for  [default: 0]"
)
@click.option("--disk", metavar="SIZE", help="most of the disk tier that the tenant may have, from the next start on")
@click.option("--operator", is_flag=True, help="may read /metrics, which tells of all tenants, and direct a router's workers")
@click.option("--note", metavar="TEXT", help="for people")
@_options
def add(file: Path | None, config_file: Path | None, as_json: bool, body: str | None, **fields: Any) -> None:
    """Make a key. It is printed once; the file has only its hash."""
    where = _file(file, config_file)
    said = {("class" if name == "retention" else name): value for name, value in fields.items() if value is not None}
    try:
        if body is not None:
            said["body_bytes"] = parse_size(body)
        made = make_key(said)
    except (ValueError, ConfigError) as error:
        raise click.UsageError(str(error)) from error
    append_key(where, made.key)
    if as_json:
        click.echo(json.dumps({"id": made.key.id, "key": made.text, "tenant": made.key.tenant}))
    else:
        click.echo(made.text)
        click.echo(f"{made.key.id} of {made.key.tenant} is in {where}; this is the only time that it is shown", err=True)


@click.command()
@_options
def ls(file: Path | None, config_file: Path | None, as_json: bool) -> None:
    """List keys."""
    found = list(read_keys(_file(file, config_file)).values())
    if as_json:
        told = [{name: value for name, value in msgspec.to_builtins(key).items() if name != "hash"} for key in found]
        click.echo(json.dumps({"keys": told}))
        return
    for key in found:
        limits = {
            "requests/min": key.requests_per_minute,
            "tokens/min": key.tokens_per_minute,
            "in flight": key.in_flight,
            "body bytes": key.body_bytes,
            "priority": key.priority or None,
            "disk": key.disk,
        }
        words = [f"{name} {value}" for name, value in limits.items() if value is not None]
        words += ["operator"] if key.operator else []
        words += [key.note] if key.note else []
        click.echo(f"{key.id}  {key.tenant}  {key.retention}  {key.created}  {', '.join(words)}".rstrip())


@click.command()
@click.argument("ids", metavar="ID...", nargs=-1, required=True)
@_options
def rm(ids: tuple[str, ...], file: Path | None, config_file: Path | None, as_json: bool) -> None:
    """Remove keys by their ids; all or none."""
    where = _file(file, config_file)
    if missing := [id for id in ids if id not in read_keys(where)]:
        raise NotThere(f"there is no key {missing[0]!r} in {where}; headstart keys ls lists them", path=where)
    gone = remove_keys(where, ids)
    if as_json:
        click.echo(json.dumps({"removed": gone}))
    else:
        for id in gone:
            click.echo(f"{id} is removed")


def _file(file: Path | None, config_file: Path | None) -> Path:
    named = file or chosen_config(config_file, {}).server.keys
    if named is None:
        raise click.UsageError("say where the keys are: --keys FILE, or the setting server.keys")
    return named.expanduser()
