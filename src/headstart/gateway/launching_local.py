"""Workers as processes of this machine: logs in files, started again when they die, found again by whoever comes next.

    <folder>/<name>/spec.json       what it is; there before the process is, gone after it
    <folder>/<name>/process.json    its number and start time, written by the process itself (`child`)
    <folder>/<name>/stopping        it is to end
    <folder>/../logs/<name>.log     what it says; kept

A launcher that is killed leaves its workers running. The next one of the same folder takes them over; none is lost, since what
has no folder cannot start (`child`), and none is mistaken for another, since a number that the system gave away again has
another start time.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from headstart.config import environment_with
from headstart.errors import HeadstartError
from headstart.gateway.child import started_of
from headstart.gateway.launching import Launched, Spec, State, announced, filled
from headstart.policy.backing_off import BackingOff

_LEAST_S, _MOST_S = 1.0, 60.0  # before one that died is started again
_WELL_S = 60.0  # after which one that runs is no longer held to have died in a row
_WRITTEN_S = 60.0  # in which a process has written down who it is; more than that it has not begun
_LOG_BYTES = 64 << 10  # of its beginning, in which a server says where it listens
_TAIL_BYTES = 2000
_KEPT_BYTES = 64 << 20  # of a log, before it begins anew


@dataclass(slots=True)
class _Process:
    spec: Spec
    folder: Path
    log: Path
    own: subprocess.Popen[bytes] | None
    began_s: float
    tries: BackingOff
    offset: int = 0
    url: str | None = None
    pid: int | None = None
    started: str | None = None
    alive: bool = True
    restarts: int = 0
    why: str = ""
    stopping_s: float | None = None


class LocalLauncher:
    """`folder`: whose workers these are; one launcher at a time. `grace_s`: in which one ends by itself when it is told to."""

    def __init__(
        self, folder: Path, *, host: str = "127.0.0.1", grace_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._folder = folder
        self._logs = folder.parent / "logs"
        self._host = host
        self._grace_s = grace_s
        self._clock = clock
        self._processes: dict[str, _Process] = {}
        self._count = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._logs.mkdir(parents=True, exist_ok=True, mode=0o700)
        for there in sorted(folder.iterdir()):
            self._take_over(there)

    def start(self, spec: Spec) -> str:
        while (self._folder / (name := f"{spec.role}-{self._count + 1}")).exists():
            self._count += 1
        self._count += 1
        folder = self._folder / name
        folder.mkdir(mode=0o700)
        (folder / "spec.json").write_text(json.dumps(asdict(spec)))
        process = self._processes[name] = _Process(
            spec, folder, self._logs / f"{name}.log", None, self._clock(), BackingOff(1, _LEAST_S, _MOST_S)
        )
        try:
            self._run(process)
        except OSError as error:
            del self._processes[name]
            shutil.rmtree(folder)
            raise HeadstartError(f"worker {name} cannot be started: {error}") from error
        return name

    def stop(self, name: str) -> None:
        process = self._processes.get(name)
        if process is None or process.stopping_s is not None:
            return
        process.stopping_s = self._clock()
        (process.folder / "stopping").touch()
        self._signal(process, signal.SIGTERM)

    def workers(self) -> Sequence[Launched]:
        return [
            Launched(name, one.spec, _state(one), one.url, one.restarts, _where(one), one.why)
            for name, one in sorted(self._processes.items())
        ]

    def tend(self) -> None:
        now_s = self._clock()
        for name, process in list(self._processes.items()):
            self._look(process, now_s)
            if process.stopping_s is not None:
                self._end(name, process, now_s)
            elif not process.alive and process.tries.may(now_s):
                process.restarts += 1
                try:
                    self._run(process)
                except OSError:
                    process.tries.failed(now_s)

    def close(self) -> None:
        for name in list(self._processes):
            self.stop(name)
        until_s = self._clock() + 2 * self._grace_s + _WRITTEN_S
        while self._processes and self._clock() < until_s:
            self.tend()
            time.sleep(0.02)

    def _run(self, process: _Process) -> None:
        command, process.url = filled(process.spec.command, host=self._host, folder=process.folder)
        (process.folder / "process.json").unlink(missing_ok=True)
        if process.log.exists() and process.log.stat().st_size > _KEPT_BYTES:
            process.log.replace(process.log.with_suffix(".log.old"))
        with process.log.open("ab") as log:
            process.offset = log.tell()
            told = {"url": process.url, "offset": process.offset}
            (process.folder / "start.json").write_text(json.dumps(told))
            # In a session of its own: Ctrl-C is for whoever started it, which then ends it.
            process.own = subprocess.Popen(
                [sys.executable, "-m", "headstart.gateway.child", str(process.folder / "process.json"), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment_with(process.spec.environment),
            )
        process.pid, process.started, process.alive, process.began_s = None, None, True, self._clock()

    def _take_over(self, folder: Path) -> None:
        """Go on with what an earlier launcher started, or clear away what is left of it."""
        try:
            spec = Spec(**json.loads((folder / "spec.json").read_text()))
        except (OSError, ValueError, TypeError):
            shutil.rmtree(folder, ignore_errors=True)  # it was killed before there was anything to start
            return
        spec = Spec(**{**asdict(spec), "command": tuple(spec.command)})
        process = _Process(
            spec, folder, self._logs / f"{folder.name}.log", None, self._clock(), BackingOff(1, _LEAST_S, _MOST_S)
        )
        with suppress(OSError, ValueError):
            told = json.loads((folder / "start.json").read_text())
            process.url, process.offset = told["url"], told["offset"]
        if (folder / "stopping").exists():
            process.stopping_s = self._clock()
        self._processes[folder.name] = process
        self._look(process, self._clock())
        if process.stopping_s is not None:
            self._signal(process, signal.SIGTERM)

    def _look(self, process: _Process, now_s: float) -> None:
        """Learn who the process is, where it listens and whether it lives."""
        if not process.alive:
            return
        if process.pid is None:
            with suppress(OSError, ValueError):
                told = json.loads((process.folder / "process.json").read_text())
                process.pid, process.started = told["pid"], told["started"]
        if process.own is not None:
            alive = process.own.poll() is None
        elif process.pid is not None:
            alive = started_of(process.pid) == process.started
        else:
            alive = now_s - process.began_s < _WRITTEN_S
        if not alive:
            process.alive, process.url, process.why = False, None, _why(process)
            self._kill_rest(process)
            process.tries.failed(now_s)
        elif process.url is None:
            with suppress(OSError), process.log.open("rb") as log:
                log.seek(process.offset)
                process.url = announced(log.read(_LOG_BYTES))
        elif process.tries.failures and now_s - process.began_s > _WELL_S:
            process.tries.came()

    def _end(self, name: str, process: _Process, now_s: float) -> None:
        if process.alive:
            assert process.stopping_s is not None
            if now_s - process.stopping_s > self._grace_s:
                self._signal(process, signal.SIGKILL)
            elif process.own is None:
                self._signal(process, signal.SIGTERM)  # whoever was taken over may have been told by nobody
            return
        shutil.rmtree(process.folder, ignore_errors=True)
        del self._processes[name]

    def _signal(self, process: _Process, number: signal.Signals) -> None:
        """Signal the process, if it is still the one that was started; when killing all that it started, too."""
        pid = process.own.pid if process.own is not None else process.pid
        if pid is None or (process.own is None and started_of(pid) != process.started):
            return
        if process.own is not None and process.own.poll() is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(pid, number) if number == signal.SIGKILL else os.kill(pid, number)

    def _kill_rest(self, process: _Process) -> None:
        """Kill what a worker that has ended started and left behind; its group has the worker's number."""
        if process.pid is not None and started_of(process.pid) is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)


def _where(process: _Process) -> str:
    return f"log {process.log}" if process.pid is None else f"process {process.pid}, log {process.log}"


def _why(process: _Process) -> str:
    """Return how a process that is gone ended: by which signal, where that is known, and what it had said last."""
    said = _last_line(process.log)
    code = process.own.returncode if process.own is not None else None
    if code is None or code >= 0:
        return said
    by = next((one.name for one in signal.Signals if one == -code), f"signal {-code}")
    return f"killed by {by}; the last that it said: {said or 'nothing'}"


def _last_line(log: Path) -> str:
    with suppress(OSError), log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = [line for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
    return ""


def _state(process: _Process) -> State:
    if process.stopping_s is not None:
        return "stopping"
    if not process.alive:
        return "down"
    return "up" if process.url is not None else "starting"
