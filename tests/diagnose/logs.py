"""Logs for tests of `lint`: conversations whose faults are known, in every form that is read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diagnose.pairs import LINES, SYSTEM, TOOLS
from headstart.diagnose.lint import Lint, Linter
from headstart.diagnose.logs import Log
from headstart.diagnose.reading import Reading
from headstart.render import Renderer

Body = dict[str, Any]


def turns(
    count: int, *, system: Callable[[int], str] = lambda n: SYSTEM, tools: Callable[[int], Any] = lambda n: TOOLS
) -> list[Body]:
    """The requests of one conversation, each with everything that was said before."""
    said: list[Body] = []
    requests = []
    for n in range(count):
        said = [*said, {"role": "user", "content": f"Question {'abcdefghij'[n]}: {LINES[n]}"}]
        requests.append({"model": "m", "messages": [{"role": "system", "content": system(n)}, *said], "tools": tools(n)})
        said = [*said, {"role": "assistant", "content": f"As for {'abcdefghij'[n]}: {LINES[n + 20]}"}]
    return requests


def clock(n: int) -> str:
    return f"It is 10:{n + 10}:00 now.\n{SYSTEM}"


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def linted(*paths: Path, renderer: Renderer | None = None, reading: Reading | None = None, **more: Any) -> Lint:
    with Log([str(path) for path in paths], read_stdin=lambda: open(__file__, "rb")) as log:
        linter = Linter(log, reading or Reading(renderer), **more)
        for found in log:
            linter.add(found)
        return linter.result()
