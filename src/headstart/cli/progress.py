"""What a command is doing while it takes long: a bar on a terminal, a line for each stage elsewhere. On stderr always."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click

OnProgress = Callable[[str, float | None], None]


@contextmanager
def shown_progress() -> Iterator[OnProgress]:
    """Give a function that takes a stage's name and its fraction, where that is known. The bar is gone afterwards."""
    if not sys.stderr.isatty():
        yield stage_lines(lambda line: click.echo(line, err=True))
        return
    # Not above: it takes longer to import than short commands take altogether.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def on_progress(stage: str, fraction: float | None) -> None:
            bars.update(task, description=stage, total=None if fraction is None else 1.0, completed=fraction or 0.0)

        yield on_progress


def stage_lines(say: Callable[[str], None]) -> OnProgress:
    """Return a function that says each stage once, when it begins."""
    last = ""

    def on_progress(stage: str, fraction: float | None) -> None:
        nonlocal last
        if stage != last:
            last = stage
            say(stage)

    return on_progress
