"""`headstart serve` at work: bind the port, load the model in the background while /health says how far it is, serve, end.

bind ─▶ "listening on http://…" ─▶ loading (503) ─▶ "ready" ─▶ SIGTERM ─▶ running requests end ─▶ saves end ─▶ exit 0
                                      └─ fails ─▶ one sentence, exit code
"""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
import threading
from types import FrameType

import uvicorn

from headstart.api.access import is_loopback
from headstart.api.accounts import Accounts
from headstart.api.app import build_app
from headstart.api.behalf import read_secret
from headstart.api.connections import connection_type
from headstart.api.keyring import Keyring
from headstart.api.served import Served
from headstart.api.service import Service
from headstart.api.streaming import STALL_S
from headstart.api.tracing import Tracing
from headstart.cache.rule_follower import RuleFollower
from headstart.cli import INTERRUPTED
from headstart.cli.opening import disk_quotas, open_model
from headstart.cli.progress import stage_lines
from headstart.config import (
    Config,
    ServerConfig,
    longest_promise_s,
    parse_aliases,
    parse_size,
)
from headstart.errors import AddressInUse, ConfigError, HeadstartError, UsageLogFailed
from headstart.ledger.log import UsageLog

log = logging.getLogger("headstart")

DRAIN_S = 10.0  # running requests may end in this time after SIGTERM; then they are aborted
KEEP_ALIVE_S = 75  # idle connections; clients' pools let go after 5 to 60 s, and whoever closes first should be the client
LOADER_WAIT_S = 10.0  # a loading thread hears of it at its next stage; one in the middle of a download is left behind


def serve(config: Config, rules: RuleFollower | None) -> int:
    """Serve as configured until a signal, and return the exit code. Raises AddressInUse, ConfigError, or why loading failed."""
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    with bound(config.server) as listener:
        return _Server(config, listener, rules).run_until_stopped()


class _Stopped(Exception):
    """The server was told to stop while the model was still loading."""


class _Server(uvicorn.Server):
    """uvicorn with a model that loads behind it and requests that may end before it goes down."""

    def __init__(self, config: Config, listener: socket.socket, rules: RuleFollower | None = None) -> None:
        self._rules = rules
        self._service = Service(
            max_waiting=config.server.max_waiting,
            accounts=accounts_of(config.server),
            aliases=parse_aliases(config.server.alias),
            strict_models=config.server.strict_models,
            canonical=config.server.canonical_rules,
            longest_promise_s=longest_promise_s(config.cache.retention),
            keep_prompts=config.server.keep_prompts,
        )
        settings = uvicorn.Config(
            build_app(self._service, host=config.server.host),
            http=connection_type(),
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=KEEP_ALIVE_S,
            # Beyond DRAIN_S uvicorn would cut connections; the seconds between let aborted requests say goodbye.
            timeout_graceful_shutdown=int(DRAIN_S) + 5,
        )
        super().__init__(settings)
        self._configuration = config
        self._listener = listener
        self._loader = threading.Thread(target=self._load, name="headstart-loader", daemon=True)
        self._failure: HeadstartError | None = None
        self._signal: int | None = None
        self._drain: asyncio.Task[None] | None = None
        self._url = url_of(listener)
        self._stages = stage_lines(lambda stage: log.info("%s …", stage))

    def run_until_stopped(self) -> int:
        """Serve until a signal, or until loading fails, which is raised. Return the exit code."""
        # Ours before uvicorn has its own, so that no signal is lost between; it raises each again once it is down, for whoever
        # stood there before, which then changes nothing any more.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.handle_exit)
        uvicorn_log = logging.getLogger("uvicorn.error")
        uvicorn_log.addFilter(self._is_worth_a_line)
        if self._rules is not None and hasattr(signal, "SIGHUP"):
            signal.signal(signal.SIGHUP, self._rules.look_now)
        log.info("listening on %s, loading %s", self._url, self._configuration.model)
        self._loader.start()
        try:
            asyncio.run(self.serve(sockets=[self._listener]))
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # one more Ctrl-C gives up on saving
            self.should_exit = True
            self._loader.join(LOADER_WAIT_S)
            if self._rules is not None:
                self._rules.close()
            if (served := self._service.served) is not None:
                served.engine.close()
            self._service.close()
            uvicorn_log.removeFilter(self._is_worth_a_line)
        if self._failure is not None:
            raise self._failure
        log.info("stopped")
        return INTERRUPTED if self._signal == signal.SIGINT else 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signal = sig
        super().handle_exit(sig, frame)

    def _is_worth_a_line(self, record: logging.LogRecord) -> bool:
        """A request that is cut because the server goes down, or its client does not read, is no bug of the application, as
        uvicorn would log it."""
        if record.msg == "ASGI callable returned without completing response.":
            return False
        cut = record.exc_info is not None and isinstance(record.exc_info[1], asyncio.CancelledError)
        return not (self.should_exit and cut)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._drain = asyncio.ensure_future(self._service.drain(DRAIN_S))
        await super().shutdown(sockets)

    def _load(self) -> None:
        try:
            served = open_model(self._configuration, on_progress=self._on_progress)
        except _Stopped:
            return
        except HeadstartError as error:
            self._fail(error)
        except Exception as error:
            log.exception("loading %s failed", self._configuration.model)
            self._fail(
                HeadstartError(f"loading {self._configuration.model} failed: {error}; this is a bug, the log has its trace")
            )
        else:
            self._service.ready(served)
            keyring, cache = self._service.accounts.keyring, served.cache
            if keyring is not None and cache is not None:
                keyring.watch(lambda keys: cache.limit_tenants(disk_quotas(self._configuration.cache, keys)))
            if self._rules is not None and cache is not None:
                self._rules.start(cache)
            log.info("ready: %s", ready_line(self._url, served))

    def _fail(self, error: HeadstartError) -> None:
        self._failure = error
        self._service.failed(error)
        self.should_exit = True

    def _on_progress(self, stage: str, fraction: float | None) -> None:
        if self.should_exit:
            raise _Stopped
        self._service.progress(stage, fraction)
        self._stages(stage, fraction)


def accounts_of(server: ServerConfig) -> Accounts:
    """Return who may ask, and what is kept of it. Raises KeysUnreadable; and UsageLogFailed where there are keys, since whoever
    gave keys away wants to know what they were used for."""
    keyring = None if server.keys is None else Keyring(server.keys)
    router_key = None if server.router_key is None else read_secret(server.router_key)
    keep_bytes = parse_size(server.usage_keep)
    usage_log = None
    try:
        usage_log = UsageLog(server.usage_log.expanduser(), keep_bytes=keep_bytes) if keep_bytes else None
    except UsageLogFailed as error:
        if keyring is not None:
            raise
        log.warning("%s; this server keeps none", error.message)
    traces = Tracing(server.traces) if server.traces else None
    return Accounts(keyring=keyring, router_key=router_key, log=usage_log, deadline_s=server.deadline_s, on_ended=traces)


def bound(server: ServerConfig) -> socket.socket:
    """Return a listening socket. Raises AddressInUse, or ConfigError for an address that is not this machine's or that others
    reach without keys or leave: by timing anyone can guess at cached prompts."""
    if server.keys is None and server.router_key is None and not server.allow_remote and not is_loopback(server.host):
        raise ConfigError(
            f"{server.host} can be reached by others, who may then use the model and guess at cached prompts; ask for keys "
            "with --keys FILE, or say --allow-remote",
            key="server.allow_remote",
            host=server.host,
        )
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        listener = socket.create_server((server.host, server.port), family=family, backlog=2048)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # whoever takes nothing is cut by the system, too, and its buffers are freed
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * STALL_S))
        return listener
    except OSError as error:
        where = f"port {server.port} of {server.host}"
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(
                f"{where} is in use; stop what listens there, or choose another with --port (0 takes a free one)",
                host=server.host,
                port=server.port,
            ) from error
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; check --host and --port") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def ready_line(url: str, served: Served) -> str:
    info = served.engine.info
    note = f" ({served.note})" if served.note else ""
    cache, _, why = info.cache.partition("; ")  # the warnings behind it stand a few lines above
    return (
        f"{url} serves {served.name}{note} on {info.device} in {info.dtype}, context {info.context_tokens:,} tokens; "
        f"cache: {cache}{' (see the warning above)' if why else ''}"
    )
