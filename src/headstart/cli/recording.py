"""The proxy of `headstart record`, once it has its address. Apart from the command, whose --help answers at once."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import click
import httpx
import uvicorn

from headstart.api.access import HostCheck
from headstart.api.recorder import Recorder, RecordFile

DRAIN_S = 10


def serve(to: str, listener: socket.socket, host: str, keeping: RecordFile) -> int:
    """Pass on what comes to `listener` until a signal ends it; return the exit code."""
    return asyncio.run(_serve(to, listener, host, keeping))


async def _serve(to: str, listener: socket.socket, host: str, keeping: RecordFile) -> int:
    recorder = Recorder(httpx.URL(to), keeping)
    config = uvicorn.Config(
        HostCheck(recorder, host=host),
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=DRAIN_S,
    )
    shown, port = (f"[{host}]" if ":" in host else host), listener.getsockname()[1]
    click.echo(f"recording on http://{shown}:{port} into {keeping.path}; then: headstart lint {keeping.path}", err=True)
    try:
        await _Server(config).serve(sockets=[listener])
    finally:
        await recorder.close()
        click.echo(f"{recorder.kept:,} requests kept", err=True)
    return 0


class _Server(uvicorn.Server):
    """One that a signal ends and nothing more: what is still to be kept is kept."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield
