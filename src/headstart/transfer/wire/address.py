"""Where a worker listens for others: "ipc:///path" on its own machine, "tcp://host:port" beyond it."""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import struct
from contextlib import suppress

from headstart.config import parse_endpoint
from headstart.errors import ConfigError, WireError

_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def is_local(address: str) -> bool:
    """Whether only this machine's processes are reached by an address. Raises ConfigError for what is none."""
    host, port = parse_endpoint(address)
    if port is None or host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(address: str) -> tuple[socket.socket, str]:
    """Return a listening socket and the address that others reach it by. Raises ConfigError where it cannot be had.

    A path is of its owner alone; what an earlier process left there is replaced, unless somebody still listens."""
    host, port = parse_endpoint(address)
    try:
        if port is None:
            _remove_left(host)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            listener.bind(host)
            os.chmod(host, 0o600)  # nobody connects before it listens
            listener.listen(_BACKLOG)
            return listener, address
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server(("" if host == "*" else host, port), family=family, backlog=_BACKLOG)
        bound = listener.getsockname()
        named = f"[{bound[0]}]" if family == socket.AF_INET6 else bound[0]
        return listener, f"tcp://{named}:{bound[1]}"
    except OSError as error:
        raise ConfigError(
            f"nothing can listen on {address}: {error.strerror or error}; choose another handoff.listen", key="handoff.listen"
        ) from error


def leave(address: str) -> None:
    """Remove what `listen` made. Never raises."""
    host, port = parse_endpoint(address)
    if port is None:
        with suppress(OSError):
            os.unlink(host)


def connect(address: str, *, timeout_s: float) -> socket.socket:
    """Return a connected socket. Raises WireError(reason="unreachable"), also for a path at which another user listens: what
    came from there would be believed."""
    try:
        host, port = parse_endpoint(address)
        if port is None:
            connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connected.settimeout(timeout_s)
                connected.connect(host)
                _require_own(connected, host)
            except BaseException:
                connected.close()
                raise
            return connected
        return socket.create_connection((host, port), timeout_s)
    except (OSError, ConfigError) as error:
        raise WireError(f"no worker answers at {address[:128]}: {error}", reason="unreachable") from error


def _require_own(connected: socket.socket, path: str) -> None:
    """Raise PermissionError unless this user listens there, or root."""
    if hasattr(socket, "SO_PEERCRED"):
        _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    else:
        user = os.stat(path).st_uid
    if user not in (0, os.geteuid()):
        raise PermissionError(f"user {user} listens there, not this one")


def _remove_left(path: str) -> None:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return  # binding says that it is in use
    except OSError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.settimeout(1.0)
        probe.connect(path)
    except ConnectionRefusedError:
        with suppress(OSError):
            os.unlink(path)
    except OSError:
        return
    finally:
        probe.close()
