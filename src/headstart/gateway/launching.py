"""What starts and ends workers: said in one form, done by local processes (`launching_local`) or by Ray (`launching_ray`).

A worker is a command that serves HTTP. Where its words name `{host}`, `{port}` or `{folder}` (a folder of the worker's own)
these are put in; without `{port}` the port is the system's choice, and the server says on a line of its log where it listens,
as `headstart serve --port 0` does.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

State = Literal["starting", "up", "down", "stopping"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A worker to be. `cpus`, `gpus`, `resources`: what it takes of a machine, for those who place workers."""

    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Launched:
    """A worker that was started. `state`: starting until it is known where it listens, up, down until it is started again,
    stopping; `restarts`: how often it was started anew; `where`: its process or machine and its log, for people; `why`: what
    one that died had said last, and the signal that ended it, where that is known."""

    name: str
    spec: Spec
    state: State
    url: str | None
    restarts: int
    where: str
    why: str = ""


class Launcher(Protocol):
    """Nothing here waits for a worker; `tend`, called every second or so, is when things happen."""

    def start(self, spec: Spec) -> str:
        """Start a worker that is kept running; return its name. Raises HeadstartError where that is impossible."""

    def stop(self, name: str) -> None:
        """Let a worker end, and kill it when it does not. Of one that is unknown nothing."""

    def workers(self) -> Sequence[Launched]:
        """Return all that were started and have not ended for good, in the order of their names."""

    def tend(self) -> None:
        """Start again what died, kill what does not end, forget what has ended."""

    def close(self) -> None:
        """End all workers and wait for it. Without it they go on, and the next launcher of the same place has them."""


def filled(command: Sequence[str], *, host: str, folder: Path) -> tuple[list[str], str | None]:
    """Return the command's words with host, folder and a free port in them, and the address; None where the server chooses its
    port."""
    command = [word.replace("{host}", host).replace("{folder}", str(folder)) for word in command]
    if not any("{port}" in word for word in command):
        return command, None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as free:
        port = str(free.getsockname()[1])
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    return [word.replace("{port}", port) for word in command], url


def announced(log: bytes) -> str | None:
    """Return where a server of ours says that it listens.

    >>> announced(b"2026-11-30 12:00:00 I listening on http://127.0.0.1:4711, loading smollm2-135m")
    'http://127.0.0.1:4711'
    """
    for line in log.decode(errors="replace").splitlines():
        _, found, rest = line.partition("listening on http://")
        if found:
            return "http://" + rest.split()[0].rstrip(",;.") if rest.split() else None
    return None
