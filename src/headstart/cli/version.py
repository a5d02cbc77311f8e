"""`headstart version`: what a bug report needs to say."""

from __future__ import annotations

import json
import platform
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from importlib.util import find_spec

import click

from headstart import __version__
from headstart.block.representation import FORMAT_VERSION
from headstart.transfer import native


@click.command()
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
def version(as_json: bool) -> None:
    """Tell the versions of headstart and what it stands on."""
    facts: dict[str, str | int | None] = {
        "headstart": __version__,
        "cache format": FORMAT_VERSION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": _installed("torch"),
        "transformers": _installed("transformers"),
        "libllama": _installed("xllamacpp"),
        "disk reader": "Python" if native.reader() is None else "C",
        "attention": "torch" if find_spec("headstart.engine.torch._attention") is None else "C",
    }
    if as_json:
        click.echo(json.dumps({name.replace(" ", "_"): fact for name, fact in facts.items()}))
        return
    for name, fact in facts.items():
        click.echo(f"{name:13} {'not installed' if fact is None else fact}")


def _installed(package: str) -> str | None:
    try:
        return installed(package)
    except PackageNotFoundError:
        return None
