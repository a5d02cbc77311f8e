"""docs/reference.md is complete: its tables are what the code says, and every endpoint, metric and error stands in it.

A table that is out of date fails with the lines that belong between its marks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib import import_module
from inspect import isclass
from pathlib import Path

import click
import pytest

from headstart import errors
from headstart.api import errors as api_errors
from headstart.api.metrics import _KINDS
from headstart.cli import INTERRUPTED, cache, cli
from headstart.cli.diff import DIFFERS
from headstart.cli.doctor import UNWELL
from headstart.cli.lazy import LazyGroup
from headstart.cli.lint import BROKEN
from headstart.config import settings
from headstart.errors import HeadstartError, RequestError
from headstart.gateway import admin

ROOT = Path(__file__).parent.parent
REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
ROOMS = ("engine", "cache", "tier")  # whose counters /metrics shows, as headstart_<room>_<counter>


def commands() -> Iterator[str]:
    yield "| command | option | |"
    yield "|---|---|---|"
    shared = {setting.flag for setting in settings().values()} | {"--config"}
    for name, about, command in _verbs(cli, "headstart"):
        yield f"| `{name}{''.join(f' {word}' for word in _arguments(command))}` | | {about} |"
        for option in command.params:
            if isinstance(option, click.Option) and not shared & set(option.opts):
                yield f"| | `{option.opts[0]}` | {option.help} |"


def _verbs(group: LazyGroup, prefix: str) -> Iterator[tuple[str, str, click.Command]]:
    for name, (_, about) in group.lazy.items():
        command = group.get_command(click.Context(group), name)
        assert command is not None
        yield f"{prefix} {name}", about, command
        if isinstance(command, LazyGroup):
            yield from _verbs(command, f"{prefix} {name}")


def _arguments(command: click.Command) -> Iterator[str]:
    for param in command.params:
        if isinstance(param, click.Argument) and param.name:
            word = param.metavar or param.name.upper()
            yield word if param.required or word.startswith("[") else f"[{word}]"


def configuration() -> Iterator[str]:
    yield "| key | flag | default | |"
    yield "|---|---|---|---|"
    for key, setting in settings().items():
        default = {"None": "none", "()": "none", "True": "true", "False": "false"}.get(str(setting.default), setting.default)
        yield f"| `{key}` | `{setting.flag}` | {default} | {setting.help} |"


def raised() -> Iterator[str]:
    yield "| error | exit code | HTTP status | |"
    yield "|---|---|---|---|"
    for module in (errors, api_errors, admin):
        for name, kind in vars(module).items():
            if isclass(kind) and issubclass(kind, HeadstartError) and kind.__module__ == module.__name__:
                status = str(kind.status) if issubclass(kind, RequestError) else ""
                about = (kind.__doc__ or "").partition("\n")[0].strip()
                yield f"| `{name}` | {kind.exit_code} | {status} | {about} |"


@pytest.mark.parametrize("table", [commands, configuration, raised], ids=lambda table: table.__name__)
def test_a_table_says_what_the_code_says(table: Callable[[], Iterator[str]]) -> None:
    name = table.__name__
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end of {name} -->", REFERENCE, re.DOTALL)
    assert found, f"docs/reference.md has no marks for the table {name}"
    want = "\n".join(table())
    assert found[1].strip() == want, f"between the marks of {name} belongs:\n{want}"


def test_every_exit_code_is_told() -> None:
    codes = {kind.exit_code for kind in vars(errors).values() if isclass(kind) and issubclass(kind, HeadstartError)}
    for code in codes | {0, INTERRUPTED, cache.INCOMPLETE, cache.REPAIRED, cache.DAMAGED, DIFFERS, BROKEN, UNWELL}:
        assert f"| {code} | " in REFERENCE.partition("## Exit codes")[2].partition("## ")[0], code


def test_every_endpoint_is_told() -> None:
    applications = ("api/app.py", "gateway/app.py", "gateway/admin.py")
    source = "".join((ROOT / "src/headstart" / file).read_text() for file in applications)
    paths = re.findall(r'Route\("([^"]+)"', source)
    assert len(paths) >= 7
    for path in paths:
        assert f"{path.replace(':path', '')}`" in REFERENCE, path


def counters() -> Iterator[str]:
    """Every counter that the source names, as the metric that it becomes; many show only once something goes wrong."""
    for room in ROOMS:
        for file in sorted((ROOT / "src" / "headstart" / room).rglob("*.py")):
            text = file.read_text()
            adding = "\n".join(re.findall(r"counters\.add\(\s*(.*)", text) + re.findall(r'late=(".*)', text))
            for found in re.findall(r'f?"([a-z_]+)', adding):
                counter = found.rstrip("_")
                kind = next((kind for kind in _KINDS if counter == kind or counter.startswith(kind + "_")), counter)
                yield f"headstart_{room}_{kind}"


def test_every_metric_is_told() -> None:
    module = import_module("headstart.api.metrics")
    own = re.findall(r'"((?:headstart|vllm:)_?[a-z_]+)"', Path(str(module.__file__)).read_text())
    histograms = [
        f"vllm:{name}" for name in re.findall(r'(?:seconds|tokens)\("([a-z_0-9]+)"', Path(str(module.__file__)).read_text())
    ]
    shown = {"headstart_engine_prompt_tokens", "headstart_engine_generated_tokens"}  # under vLLM's names
    shown |= {f"headstart_engine_cached_{tier}_tokens" for tier in ("memory", "disk")}
    rooms = {f"headstart_{room}" for room in ROOMS}  # the prefixes themselves
    router = re.findall(r'"(headstart_router_[a-z_]+)"', (ROOT / "src/headstart/gateway/metrics.py").read_text())
    wanted = {*own, *histograms, *counters(), *router} - shown - rooms
    assert len(wanted) > 40
    told = set(re.findall(r"`((?:headstart_|vllm:)[a-z_0-9]+)", REFERENCE))
    assert sorted(wanted - told) == []
    tier = {f"headstart_tier_{measure}" for measure in ("capacity_bytes", "allocated_bytes", "live_bytes", "extents", "blocks")}
    assert sorted(told - wanted - tier) == []
