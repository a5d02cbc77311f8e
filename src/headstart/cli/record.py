"""`headstart record`: a proxy on loopback that passes everything on unchanged and keeps what `headstart lint` needs."""

from __future__ import annotations

import errno
import logging
import socket
from pathlib import Path
from urllib.parse import urlsplit

import click

from headstart.errors import AddressInUse, ConfigError


@click.command()
@click.option("--to", required=True, metavar="URL", help="the server that answers, such as https://api.openai.com")
@click.option("--log", "file", type=click.Path(dir_okay=False, path_type=Path), default="requests.jsonl", show_default=True,
              help="where to keep requests; appended to")  # fmt: skip
@click.option("--text", is_flag=True, help="keep requests with their texts, not only what they are known by")
@click.option("--host", default="127.0.0.1", show_default=True, help="address to listen on")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8899, show_default=True, help="port to listen on; 0: any free one"
)
@click.option("--allow-remote", is_flag=True, help="listen where other machines reach it")
def record(to: str, file: Path, text: bool, host: str, port: int, allow_remote: bool) -> int:
    """Pass requests to the server at URL, and keep of each what `headstart lint` needs: names of blocks and pieces, times, what
    the server counted. Keys and other headers are never kept. Point a client's base URL here; stop with Ctrl-C."""
    from headstart.api.access import is_loopback
    from headstart.api.recorder import RecordFile
    from headstart.cli.recording import serve

    told = urlsplit(to)
    if told.scheme not in ("http", "https") or not told.hostname or told.query:
        raise click.UsageError(f"--to is {to!r}; give the server's address, such as https://api.openai.com")
    if not is_loopback(host) and not allow_remote:
        raise ConfigError(f"--host {host} can be reached by other machines; add --allow-remote to allow it")
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING)
    keeping = RecordFile(file, text=text)
    try:
        with _bound(host, port) as listener:
            return serve(to, listener, host, keeping)
    finally:
        keeping.close()


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"port {port} is taken; give another with --port", port=port) from error
        raise ConfigError(f"--host {host} cannot be listened on: {error.strerror}") from error
    return listener
