"""What the disk gives: `fio` on a file of its own, with huge pages under its buffers as under ours.

A file of its own, because fio writes over any file that is shorter than its `--size`. Reading runs are `--readonly`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MISSING = "fio is not installed, so there is nothing to compare with; install it (Debian: apt-get install fio) and run again"


@dataclass(frozen=True, slots=True)
class Setting:
    """How fio does it: `depth` requests in flight of one thread, or `threads` threads with one each."""

    engine: str
    depth: int = 1
    threads: int = 1

    def __str__(self) -> str:
        return f"{self.engine} {f'depth {self.depth}' if self.threads == 1 else f'{self.threads} threads'}"


@dataclass(frozen=True, slots=True)
class Rate:
    bytes_per_s: float
    cpu_s: float


def version() -> str | None:
    """Return fio's version, or None where there is none."""
    if shutil.which("fio") is None:
        return None
    return subprocess.run(["fio", "--version"], capture_output=True, text=True, check=True, timeout=20).stdout.strip()


def prepare(path: Path, nbytes: int) -> None:
    """Write the file that reading runs read."""
    _run(path, "write", Setting("psync"), request_bytes=4 << 20, nbytes=nbytes // (4 << 20) * (4 << 20))


def usable(path: Path, settings: Sequence[Setting]) -> list[Setting]:
    """Return those that run here: an engine may be missing from the kernel, or be forbidden."""
    found = []
    for setting in settings:
        try:
            read(path, setting, request_bytes=1 << 20, nbytes=16 << 20)
        except RuntimeError as error:
            print(f"left out: {error}")
        else:
            found.append(setting)
    return found


def read(path: Path, setting: Setting, *, request_bytes: int, nbytes: int) -> Rate:
    """Read requests of one size at random places, each place once."""
    return _run(path, "randread", setting, request_bytes=request_bytes, nbytes=nbytes // request_bytes * request_bytes)


def write(path: Path, setting: Setting, *, request_bytes: int, nbytes: int) -> Rate:
    """Write a new file from front to back, and sync it."""
    path.unlink(missing_ok=True)
    rate = _run(path, "write", setting, request_bytes=request_bytes, nbytes=nbytes // request_bytes * request_bytes)
    path.unlink()
    return rate


def _run(path: Path, how: str, setting: Setting, *, request_bytes: int, nbytes: int) -> Rate:
    share = nbytes // setting.threads // request_bytes * request_bytes
    command = [
        *("fio", "--name=headstart", f"--filename={path}", f"--rw={how}", "--direct=1", f"--bs={request_bytes}"),
        *(f"--ioengine={setting.engine}", f"--iodepth={setting.depth}", "--output-format=json", "--invalidate=1"),
        *(f"--numjobs={setting.threads}", "--thread=1", "--group_reporting=1", f"--size={share}", "--randrepeat=0"),
        f"--offset_increment={share}",
        *(["--readonly"] if how == "randread" else ["--end_fsync=1", "--fallocate=none"]),
    ]
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    if done.returncode:
        raise RuntimeError(f"fio {setting}: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    job: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    side = job["read" if how == "randread" else "write"]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Rate(side["bw_bytes"], cpu_s)  # its final sync included
