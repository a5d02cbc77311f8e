"""`python -m headstart.gateway.child FILE [--with-parent] COMMAND…`: write down who runs, then become COMMAND.

The process itself writes its number and start time, before it is what it was started for. So there is no moment in which a
server runs that nobody could find again, and where FILE's folder is gone already nothing is started at all.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def started_of(pid: int) -> str | None:
    """Return when a running process began, in words that only it has; None where there is none, or where it has ended and only
    waits to be asked for its exit code."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None if Path("/proc/self/stat").exists() else _asked(pid)
    return None if fields[0] in ("Z", "X") else f"{fields[19]} {_boot()}"


def _boot() -> str:
    """Return which boot of this machine it is: start times are counted from there."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _asked(pid: int) -> str | None:
    """The same from `ps`, where there is no /proc."""
    told = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True).stdout.split(None, 1)
    return told[1].strip() if len(told) == 2 and not told[0].startswith("Z") else None


def main(arguments: list[str]) -> None:
    path, command = Path(arguments[0]), arguments[1:]
    if command[0] == "--with-parent":
        command = command[1:]
        _end_with_parent()
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"pid": os.getpid(), "started": started_of(os.getpid())}))
    new.replace(path)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


def _end_with_parent() -> None:
    """Have the system end this process when its parent does, however that ends. Linux only; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    import ctypes

    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_DEATH_SIGNAL, signal.SIGTERM)
    if os.getppid() != parent:  # it ended meanwhile
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
