"""A cluster of one file: its router and its workers kept running, its planner, and the end of all of them.

    <directory>/lock         held by whoever runs the cluster
    <directory>/state.json   who that is, where the router listens, what launched the workers
    <directory>/router/, workers/, logs/

What runs the cluster may be killed: router and workers go on, and the next `up` takes them over, or `down` ends them.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import IO, Any

from prometheus_client import CollectorRegistry

from headstart.errors import AddressInUse, ConfigError, HeadstartError, NotThere
from headstart.gateway.child import started_of
from headstart.gateway.cluster_file import ClusterFile
from headstart.gateway.launching import Launched, Launcher, Spec
from headstart.gateway.launching_local import LocalLauncher
from headstart.gateway.planning import Looking
from headstart.gateway.router_client import RouterClient
from headstart.policy.planning import Planner

log = logging.getLogger("headstart")

STEP_S = 0.5  # between two looks at what runs
_ENDS_S = 180.0  # in which who runs a cluster ends it when it is told to
_ROUTER_S = 15.0  # the router ends a while after the requests that it waits for
_ROUTER = "router"
_TRIES = 3  # deaths of a router or a worker before the cluster was ready at all, after which it is given up


@dataclass(frozen=True, slots=True)
class State:
    """Who runs a cluster and where. `router`: its address, "" until it listens."""

    pid: int
    started: str
    launcher: str
    ray_address: str = ""
    router: str = ""
    ready: bool = False


class Cluster:
    """Runs a cluster while it is held. `api_key`: an operator's, where the router asks for keys."""

    def __init__(
        self,
        file: ClusterFile,
        *,
        api_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
        grace_s: float = 30.0,
    ) -> None:
        self._file = file
        self._folder = file.folder
        self._clock = clock
        self._lock = _locked(self._folder)
        try:
            if file.pool is not None:
                Path(file.pool.directory).expanduser().mkdir(parents=True, exist_ok=True)
            self._routers = LocalLauncher(self._folder / "router", host=file.router.host, grace_s=grace_s + _ROUTER_S)
            self._launcher = launcher_of(self._folder, file.launcher, file.ray_address, grace_s=grace_s)
        except BaseException:
            self._lock.close()
            raise
        self._router = RouterClient("", api_key)  # its address is known once it listens
        self._given: set[str] = set()  # addresses of workers that the router was given by us
        self.metrics = CollectorRegistry()
        self._looking = self._planner()
        self._looked_s = -float("inf")
        self._written: State | None = None

    def start(self) -> None:
        """Start what is not running yet; end what an earlier one left that is no longer wanted."""
        self._write(ready=False)  # first, so that `down` knows where to look
        file = self._file
        command = [sys.executable, "-m", "headstart.cli", "route", "--host", file.router.host, "--port", str(file.router.port)]
        if file.pool is not None:
            command += ["--pool", str(Path(file.pool.directory).expanduser())]
        router = Spec(_ROUTER, (*command, *file.router.arguments))
        if [one.spec for one in self._routers.workers()] != [router]:
            self._routers.close()  # another one would stand in the new one's way
            if file.router.port:
                _require_free(file.router.host, file.router.port)
            self._routers.start(router)
        wanted = file.specs()
        _reconcile(self._launcher, wanted, keep=wanted if file.planner is not None and file.planner.enabled else ())

    def step(self) -> None:
        """See to what runs, tell the router who there is, and let the planner look when it is time."""
        self._routers.tend()
        self._launcher.tend()
        url = next((one.url for one in self._routers.workers() if one.state == "up"), None)
        self._router.url = url or ""
        if url is None:
            return
        try:
            self._give(self._router)
        except HeadstartError as error:
            log.debug("%s", error.message)  # it starts, or is started again
            return
        planner, now_s = self._file.planner, self._clock()
        if self._looking is not None and planner is not None and now_s - self._looked_s >= planner.every_s:
            self._looked_s = now_s
            self._looking.look(now_s=now_s, local=datetime.now())

    def run(self, stop: Event, *, on_ready: Callable[[str], None] = lambda url: None) -> None:
        """Step until `stop` is set; `on_ready` is told the router's address once all that the file asks for are ready.
        Raises HeadstartError where router or a worker dies again and again before that."""
        told = False
        died: dict[str, int] = {}
        while not stop.is_set():
            try:
                self.step()
            except Exception:  # what runs goes on serving, whatever keeps us from seeing to it: a full disk, or Ray's head
                if not told:
                    raise
                log.exception("seeing to router and workers failed; they go on, and it is tried again")
            for one in (*self.routers(), *self.workers()):
                if one.restarts > died.get(one.name, 0):
                    died[one.name] = one.restarts
                    log.warning("%s ended and is started again (%s): %s", one.name, one.where, one.why or "it said nothing")
                    if one.restarts >= _TRIES and not told:
                        raise HeadstartError(f"{one.name} ends again and again; {one.where}: {one.why or 'it said nothing'}")
            if not told and self._router.url and self._all_ready():
                told = True
                self._write(ready=True)
                on_ready(self._router.url)
            stop.wait(STEP_S)

    def workers(self) -> Sequence[Launched]:
        return self._launcher.workers()

    def routers(self) -> Sequence[Launched]:
        return self._routers.workers()

    def close(self) -> None:
        """End router and workers; what the router is answering ends first. Twice is fine."""
        if self._lock.closed:
            return
        try:
            self._routers.close()
            self._launcher.close()
        finally:
            self._router.close()
            (self._folder / "state.json").unlink(missing_ok=True)
            self._lock.close()

    def _give(self, router: RouterClient) -> None:
        """Tell the router of workers that have come or have another address now; have it forget addresses that are gone."""
        draining = self._looking.draining if self._looking is not None else frozenset()
        up = {
            one.url: one.spec.role
            for one in self._launcher.workers()
            if one.state == "up" and one.url is not None and one.name not in draining
        }
        told = router.workers()
        self._write(ready=self._written is not None and self._written.ready)
        known = {one["url"]: str(one["id"]) for one in told}
        alive = {one.url for one in self._launcher.workers() if one.url is not None}
        for url in sorted(self._given - alive):
            if url in known:
                router.forget(known[url])
            self._given.discard(url)
        for url, role in up.items():
            if url not in known:
                router.add(url, role)
                log.info("worker %s (%s) given to the router", url, role)
            self._given.add(url)

    def _all_ready(self) -> bool:
        """Say whether all workers that were started and are not to end are ready."""
        draining = self._looking.draining if self._looking is not None else frozenset()
        staying = [one for one in self._launcher.workers() if one.state != "stopping" and one.name not in draining]
        with suppress(HeadstartError):
            ready = {one["url"] for one in self._router.workers() if one["state"] == "ready"}
            return bool(staying) and {one.url for one in staying} <= ready
        return False

    def _planner(self) -> Looking | None:
        planner = self._file.planner
        if planner is None or not planner.enabled:
            return None
        return Looking(
            self._router,
            Planner(planner.targets, planner.limits, planner.delays),
            launcher=self._launcher,
            spec_for=self._file.spec_for,
            dry_run=planner.dry_run,
            metrics=self.metrics,
        )

    def _write(self, *, ready: bool) -> None:
        started = started_of(os.getpid()) or ""
        state = State(os.getpid(), started, self._file.launcher, self._file.ray_address, router=self._router.url, ready=ready)
        if state != self._written:
            new = self._folder / "state.new"
            new.write_text(json.dumps(asdict(state)))
            new.replace(self._folder / "state.json")
            self._written = state


def launcher_of(folder: Path, kind: str, ray_address: str, *, grace_s: float = 30.0) -> Launcher:
    """Return what starts the workers of the cluster in this folder, with those that run already."""
    if kind == "ray":
        from headstart.gateway.launching_ray import RayLauncher

        name = f"{folder.name}-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
        return RayLauncher(name, address=ray_address or None, grace_s=grace_s)
    return LocalLauncher(folder / "workers", grace_s=grace_s)


def read_state(folder: Path) -> State:
    """Return who runs the cluster of this folder. Raises NotThere where there is none."""
    try:
        return State(**json.loads((folder / "state.json").read_text()))
    except (OSError, ValueError, TypeError):
        raise NotThere(
            f"no cluster runs in {folder}; start one with headstart up, or name its cluster.toml or its --router", folder=folder
        ) from None


def end(folder: Path, *, grace_s: float = 30.0, on_wait: Callable[[str], None] = lambda what: None) -> bool:
    """End the cluster of this folder, whoever started it and however that ended; return whether there was anything to end.

    Raises HeadstartError where who runs it does not end."""
    state: State | None = None
    with suppress(NotThere):
        state = read_state(folder)
    if not folder.exists():
        return False
    there = state is not None
    if state is not None and started_of(state.pid) == state.started:
        on_wait("waiting for running requests to end")
        with suppress(ProcessLookupError):
            os.kill(state.pid, signal.SIGTERM)
        until_s = time.monotonic() + _ENDS_S
        while started_of(state.pid) == state.started:
            if time.monotonic() > until_s:
                raise HeadstartError(
                    f"process {state.pid}, which runs the cluster in {folder}, does not end; kill it, then again"
                )
            time.sleep(0.05)
    with _locked(folder):  # what it left, where it was killed
        launchers = [LocalLauncher(folder / "router", grace_s=grace_s)]
        kind, address = ("local", "") if state is None else (state.launcher, state.ray_address)
        for launcher in (*launchers, launcher_of(folder, kind, address, grace_s=grace_s)):
            there = there or bool(launcher.workers())
            launcher.close()
        (folder / "state.json").unlink(missing_ok=True)
    return there


def _locked(folder: Path) -> IO[Any]:
    """Return the held lock of a cluster's folder, which is made. Raises ConfigError where somebody holds it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = (folder / "lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise ConfigError(
            f"a cluster runs in {folder} already; end it with headstart down, or choose another directory"
        ) from None
    return lock


def _require_free(host: str, port: int) -> None:
    """Raise AddressInUse where the router could not listen."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise AddressInUse(
            f"the router cannot listen on port {port} of {host} ({error.strerror or error}); stop what listens there, or "
            "choose another router.port (0 takes a free one)",
            host=host,
            port=port,
        ) from error


def _reconcile(launcher: Launcher, wanted: Sequence[Spec], *, keep: Sequence[Spec]) -> None:
    """Start what is wanted and not there, stop what is there and neither wanted nor one more of what may stay."""
    missing = list(wanted)
    for one in launcher.workers():
        if one.state == "stopping":
            continue
        if one.spec in missing:
            missing.remove(one.spec)
        elif one.spec not in keep:
            launcher.stop(one.name)
    for spec in missing:
        launcher.start(spec)
