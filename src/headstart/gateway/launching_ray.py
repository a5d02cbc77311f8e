"""Workers on a Ray cluster: each an actor that runs the worker's process. Where it runs, that it is started again and what it
may use of a machine is Ray's business.

An actor ends when its process does, and Ray starts it anew, there or elsewhere. When an actor is killed its process goes with
it. Actors are named and detached: they outlive whoever started them, and the next launcher of the same namespace finds them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headstart.config import environment_with
from headstart.errors import HeadstartError, MissingExtra
from headstart.gateway.launching import Launched, Spec, announced, filled

_LOG_BYTES = 64 << 10
_ASK_S = 60.0  # in which Ray answers what it is asked about its actors


@dataclass(slots=True)
class _Actor:
    spec: Spec
    handle: Any
    asked: Any = None  # what the actor was asked and has not said yet
    asked_s: float = 0.0
    url: str | None = None
    where: str = ""
    began: str = ""
    restarts: int = 0
    stopping_s: float | None = None


class RayLauncher:
    """`address`: of the Ray cluster, None: the one that this machine belongs to, and else a new one of this machine alone.
    Raises MissingExtra without Ray."""

    def __init__(
        self,
        name: str,
        *,
        address: str | None = None,
        grace_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise MissingExtra("workers on several machines need Ray: pip install 'headstart[ray]'", extra="ray") from error
        self._ray = ray
        self._namespace = f"headstart-{name}"
        self._grace_s = grace_s
        self._clock = clock
        self._own = not ray.is_initialized()
        if self._own:
            try:
                ray.init(
                    address=address,
                    namespace=self._namespace,
                    log_to_driver=False,
                    include_dashboard=False,
                    logging_level="error",
                )
            except (ConnectionError, ValueError, RuntimeError) as error:
                raise HeadstartError(f"the Ray cluster at {address or 'this machine'} cannot be reached: {error}") from error
        self._class = ray.remote(Runner)
        self._actors: dict[str, _Actor] = {}
        self._count = 0
        for told in ray.util.list_named_actors(all_namespaces=True):
            if told["namespace"] == self._namespace:
                handle = ray.get_actor(told["name"], namespace=self._namespace)
                try:
                    spec = ray.get(handle.spec.remote(), timeout=_ASK_S)
                except ray.exceptions.RayError:
                    ray.kill(handle, no_restart=True)  # it has no place or no machine, and nobody could say what it is
                else:
                    self._actors[told["name"]] = _Actor(_spec(spec), handle)

    def start(self, spec: Spec) -> str:
        while (name := f"{spec.role}-{self._count + 1}") in self._actors:
            self._count += 1
        self._count += 1
        handle = self._class.options(
            name=name,
            namespace=self._namespace,
            lifetime="detached",
            max_restarts=-1,
            max_concurrency=2,
            num_cpus=spec.cpus,
            num_gpus=spec.gpus,
            resources=dict(spec.resources),
        ).remote(json.dumps(asdict(spec)))
        self._actors[name] = _Actor(spec, handle)
        return name

    def stop(self, name: str) -> None:
        actor = self._actors.get(name)
        if actor is None or actor.stopping_s is not None:
            return
        actor.stopping_s = self._clock()
        actor.url = None
        actor.asked = actor.handle.stop.remote(self._grace_s)

    def workers(self) -> Sequence[Launched]:
        return [
            Launched(
                name,
                one.spec,
                "stopping" if one.stopping_s is not None else "up" if one.url else "down" if one.began else "starting",
                one.url,
                one.restarts,
                one.where or "not placed yet",
            )
            for name, one in sorted(self._actors.items())
        ]

    def tend(self) -> None:
        """Ask each actor, without waiting, where its process listens; kill those that do not end."""
        for name, actor in list(self._actors.items()):
            if actor.asked is None:
                actor.asked, actor.asked_s = actor.handle.look.remote(), self._clock()
            done, _ = self._ray.wait([actor.asked], timeout=0)
            late = actor.stopping_s is not None and self._clock() - actor.stopping_s > 2 * self._grace_s
            if not done and not late:
                if self._clock() - actor.asked_s > _ASK_S:
                    actor.url = None  # it is being started again somewhere, or waits for a place
                continue
            told = None
            if done:
                with suppress(self._ray.exceptions.RayError):
                    told = self._ray.get(actor.asked)
            actor.asked = None
            if actor.stopping_s is not None:
                self._ray.kill(actor.handle, no_restart=True)
                del self._actors[name]
            elif told is None:
                actor.url = None
            else:
                if actor.began and told["began"] != actor.began:
                    actor.restarts += 1
                actor.url, actor.where, actor.began = told["url"], told["where"], told["began"]

    def close(self) -> None:
        for name in list(self._actors):
            self.stop(name)
        until_s = self._clock() + 3 * self._grace_s
        while self._actors and self._clock() < until_s:
            self.tend()
            time.sleep(0.02)
        if self._own:
            self._ray.shutdown()


class Runner:
    """The actor: starts a worker's process where Ray put it, and ends when that does. Runs in Ray's process, not in ours."""

    def __init__(self, spec: str) -> None:
        import ray

        self._told = spec
        own = _spec(json.loads(spec))
        host = ray.util.get_node_ip_address()
        self._folder = Path(tempfile.mkdtemp(prefix="headstart-worker-"))
        command, self._url = filled(own.command, host=host, folder=self._folder)
        self._log = self._folder / "log"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "headstart.gateway.child",
                    str(self._folder / "process.json"),
                    "--with-parent",
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment_with(own.environment),
            )
        self._where = f"{host}, process {self._process.pid}, log {self._log}"
        self._began = f"{host} {self._process.pid} {time.time()}"
        self._stopping = False
        threading.Thread(target=self._watch, daemon=True).start()

    def spec(self) -> Any:
        return json.loads(self._told)

    def look(self) -> dict[str, Any]:
        if self._url is None:
            with self._log.open("rb") as log:
                self._url = announced(log.read(_LOG_BYTES))
        return {"url": self._url, "where": self._where, "began": self._began}

    def stop(self, grace_s: float) -> None:
        self._stopping = True
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._stopping:
            tail = self._log.read_bytes()[-2000:].decode(errors="replace")
            print(f"worker ended with code {code}; the end of its log, {self._log}:\n{tail}", file=sys.stderr, flush=True)
            time.sleep(1.0)  # Ray starts it again at once
            os._exit(1)


def _spec(told: dict[str, Any]) -> Spec:
    return Spec(**{**told, "command": tuple(told["command"])})
