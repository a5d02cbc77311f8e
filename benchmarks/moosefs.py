"""A real MooseFS cluster for tests/cluster, the demo and benchmarks: a master, several chunk servers, and mounts in network
namespaces of their own.

MooseFS refuses 127.0.0.1, so the servers live in a network namespace with an address of their own, and each client in another
one with a link to it. A mount is made by a client in its namespace and seen by everybody. Everything is removed at the end.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

PACKAGES = ("moosefs-master", "moosefs-chunkserver", "moosefs-client")
PROGRAMS = ("mfsmaster", "mfschunkserver", "mfsmount")
Say = Callable[[str], None]
_SERVER = "10.77.0.1"
_TRIES = 20


class Forbidden(Exception):
    """This machine does not let one be started; says why."""


@dataclass
class Client:
    """A machine's view: `path` is its mount, `before` runs a command in its network."""

    path: Path
    namespace: str
    process: subprocess.Popen[bytes]

    @property
    def before(self) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.namespace}"]

    def stop(self) -> None:
        """Let the mount hang: whoever asks it waits until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


@dataclass
class MooseFS:
    """A running cluster."""

    folder: Path
    namespace: str
    _stack: ExitStack = field(default_factory=ExitStack)
    _clients: int = 0

    def mount(self, *options: str) -> Client:
        """Mount it on another machine."""
        self._clients += 1
        number, namespace = self._clients, f"{self.namespace}c{self._clients}"
        _run("ip", "netns", "add", namespace)
        self._stack.callback(_try, "ip", "netns", "del", namespace)
        link, far = f"h{os.getpid() % 100000}v{number}", f"h{os.getpid() % 100000}w{number}"
        _run("ip", "-n", self.namespace, "link", "add", link, "type", "veth", "peer", "name", far, "netns", namespace)
        near_address, far_address = f"10.78.{number}.1", f"10.78.{number}.2"
        _run("ip", "-n", self.namespace, "addr", "add", f"{near_address}/30", "dev", link)
        _run("ip", "-n", namespace, "addr", "add", f"{far_address}/30", "dev", far)
        for where, name in ((self.namespace, link), (namespace, far), (namespace, "lo")):
            _run("ip", "-n", where, "link", "set", name, "up")
        _run("ip", "-n", namespace, "route", "add", "default", "via", near_address)
        path = self.folder / f"mount{number}"
        path.mkdir()
        command = ["mfsmount", "-f", str(path), "-H", _SERVER, *(word for option in options for word in ("-o", option))]
        log = self.folder / f"mount{number}.log"
        self._stack.callback(_unmount, path)
        command = ["nsenter", f"--net=/run/netns/{namespace}", *command]
        for _ in range(_TRIES):  # the master may not listen yet
            process = _start(self._stack, command, log)
            if _within(30, partial(_mounted_or_ended, path, process)) and os.path.ismount(path):
                return Client(path, namespace, process)
            time.sleep(1)
        logs = "\n".join(f"{log.name}: {log.read_text()[-600:]}" for log in sorted(self.folder.glob("*.log")))
        raise Forbidden(f"mfsmount failed:\n{logs}")


@contextmanager
def cluster(
    *, chunk_servers: int = 3, say: Callable[[str], None] = lambda line: None, parent: Path | None = None
) -> Iterator[MooseFS]:
    """Start a cluster whose servers keep what they have below `parent`, the usual place for temporary files unless told. Raises
    Forbidden where this machine does not allow it."""
    _require(say)
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="headstart-moosefs-", dir=parent))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        namespace = f"hs{os.getpid()}"
        try:
            _run("ip", "netns", "add", namespace)
            stack.callback(_try, "ip", "netns", "del", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run("ip", "-n", namespace, "addr", "add", f"{_SERVER}/32", "dev", "lo")
            _start_master(stack, folder, namespace)
            for number in range(chunk_servers):
                _start_chunk_server(stack, folder, namespace, number)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            raise Forbidden(f"the cluster could not be started: {said}") from error
        moosefs = MooseFS(folder, namespace)
        stack.enter_context(moosefs._stack)
        first = moosefs.mount()
        if not _within(90, lambda: _writable(first.path)):
            logs = "\n".join(path.read_text()[-400:] for path in sorted(folder.glob("*.log")))
            raise Forbidden(f"nothing can be written to the cluster:\n{logs}")
        yield moosefs


def _start_master(stack: ExitStack, folder: Path, namespace: str) -> None:
    data = folder / "master"
    data.mkdir()
    (data / "metadata.mfs").write_bytes(b"MFSM NEW")
    (folder / "exports.cfg").write_text("* / rw,alldirs,admin,maproot=0:0\n* . rw\n")
    (folder / "topology.cfg").write_text("")
    lines = {
        "WORKING_USER": "root",
        "WORKING_GROUP": "root",
        "DATA_PATH": data,
        "EXPORTS_FILENAME": folder / "exports.cfg",
        "TOPOLOGY_FILENAME": folder / "topology.cfg",
        "LOCK_MEMORY": 0,
        **{f"{name}_LISTEN_HOST": _SERVER for name in ("MATOML", "MATOCS", "MATOCL")},
    }
    _write(folder / "master.cfg", lines)
    _start(stack, [*_in(namespace), "mfsmaster", "-f", "-c", str(folder / "master.cfg"), "start"], folder / "master.log")


def _start_chunk_server(stack: ExitStack, folder: Path, namespace: str, number: int) -> None:
    data, disk = folder / f"chunks{number}", folder / f"disk{number}"
    data.mkdir()
    disk.mkdir()
    (folder / f"hdd{number}.cfg").write_text(f"{disk}\n")
    lines = {
        "WORKING_USER": "root",
        "WORKING_GROUP": "root",
        "DATA_PATH": data,
        "HDD_CONF_FILENAME": folder / f"hdd{number}.cfg",
        "HDD_LEAVE_SPACE_DEFAULT": "64MiB",
        "HDD_FSYNC_BEFORE_CLOSE": 0,
        "MASTER_HOST": _SERVER,
        "BIND_HOST": _SERVER,
        "CSSERV_LISTEN_HOST": _SERVER,
        "CSSERV_LISTEN_PORT": 9422 + 100 * number,
        "LOCK_MEMORY": 0,
    }
    _write(folder / f"chunks{number}.cfg", lines)
    command = [*_in(namespace), "mfschunkserver", "-f", "-c", str(folder / f"chunks{number}.cfg"), "start"]
    _start(stack, command, folder / f"chunks{number}.log")


def _require(say: Callable[[str], None]) -> None:
    if os.geteuid() != 0:
        raise Forbidden("only root may mount a MooseFS")
    if not Path("/dev/fuse").exists():
        raise Forbidden("there is no /dev/fuse")
    if not all(map(shutil.which, (*PROGRAMS, "ip"))):
        say(f"installing {', '.join(PACKAGES)}")
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        waiting = ["-o", "DPkg::Lock::Timeout=200"]  # for somebody else who installs something
        for command in (
            ["apt-get", "update", "-qq"],
            ["apt-get", "install", "-y", "-qq", *waiting, "--no-install-recommends", *PACKAGES, "iproute2"],
        ):
            try:
                subprocess.run(command, env=environment, capture_output=True, timeout=300)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise Forbidden(f"MooseFS cannot be installed: {error}") from error
    missing = [program for program in (*PROGRAMS, "ip") if shutil.which(program) is None]
    if missing:
        raise Forbidden(f"{', '.join(missing)} cannot be installed here ({' '.join(PACKAGES)})")


def _start(stack: ExitStack, command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def _unmount(path: Path) -> None:
    _try("umount", "--lazy", str(path))


def _mounted_or_ended(path: Path, process: subprocess.Popen[bytes]) -> bool:
    return os.path.ismount(path) or process.poll() is not None


def _writable(path: Path) -> bool:
    try:
        probe = path / "probe"
        probe.write_bytes(b"x" * 4096)
        descriptor = os.open(probe, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        probe.unlink()
    except OSError:
        return False
    return True


def _within(seconds: float, holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.1)
    return False


def _in(namespace: str) -> list[str]:
    return ["nsenter", f"--net=/run/netns/{namespace}"]


def _write(path: Path, lines: dict[str, object]) -> None:
    path.write_text("".join(f"{key} = {value}\n" for key, value in lines.items()))


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def _try(*command: str) -> None:
    subprocess.run(command, capture_output=True, timeout=60)
