"""`headstart route`: stand in front of any number of workers, and give each request to the one that answers it soonest.

bind ─▶ "listening on http://…" ─▶ workers are asked how they are ─▶ requests ─▶ SIGTERM ─▶ running requests end ─▶ exit 0
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headstart.cli.settings import chosen_config, config_options

if TYPE_CHECKING:
    from headstart.config import Config
    from headstart.gateway.connections import Connections
    from headstart.gateway.prompts import Prompts
    from headstart.gateway.worker import Address
    from headstart.render import Renderer

log = logging.getLogger("headstart")

_OF_ENGINES = ("max_waiting", "strict_models", "answers", "keep_prompts", "role")  # settings of servers that have one
DRAIN_S = 30.0  # running requests may end in this time after SIGTERM; then they are cut


@click.command()
@click.option("--worker", "named", multiple=True, metavar="URL", help="a worker's address, again for more; see route.addresses")
@click.option("--pool", type=click.Path(path_type=Path), help="the pool that the workers share: what it has is known then")
@config_options("server", "route", without=[f"server.{name}" for name in _OF_ENGINES])
def route(named: tuple[str, ...], pool: Path | None, config_file: Path | None, **flags: Any) -> int:
    """Route requests to workers: servers of ours, vLLM, SGLang, or whatever else speaks OpenAI's API. Each goes to the one that
    will answer it soonest, by what it holds, its queue and its speed; a worker that fails is taken out, and what it had not
    begun to answer is sent to another. GET /router/workers tells how they are."""
    from headstart.cli.serving import bound
    from headstart.errors import ConfigError
    from headstart.gateway.worker import Address

    if pool is not None:
        flags["cache__pool"] = pool
    config = chosen_config(config_file, flags)
    addresses = [Address.parse(text) for text in (*config.route.addresses.split(), *named)]
    if len({one.id for one in addresses}) > config.route.max_workers:
        raise ConfigError(f"there are more than {config.route.max_workers} workers; raise route.max_workers")
    logging.basicConfig(format="%(asctime)s %(levelname).1s %(message)s", level=logging.WARNING)
    log.setLevel(logging.INFO)
    with bound(config.server) as listener:
        return asyncio.run(_run(config, addresses, listener))


async def _run(config: Config, addresses: list[Address], listener: socket.socket) -> int:
    import uvicorn

    from headstart.api.behalf import read_secret
    from headstart.api.connections import connection_type
    from headstart.cli import INTERRUPTED
    from headstart.cli.serving import KEEP_ALIVE_S, accounts_of, url_of
    from headstart.config import parse_aliases
    from headstart.gateway.app import build_app
    from headstart.gateway.fleet import Fleet
    from headstart.gateway.router import Router

    server = config.server
    secret = None if server.router_key is None else read_secret(server.router_key)
    accounts = accounts_of(replace(server, router_key=None))  # the router's clients have keys; the secret is for its workers
    fleet = Fleet(
        max_workers=config.route.max_workers,
        blocks=config.route.blocks,
        poll_s=config.route.poll_s,
        dead_after_s=config.route.dead_after_s,
        stuck_after_s=config.route.stuck_after_s,
        headers={} if secret is None else {"authorization": f"Bearer {secret}"},
    )
    prompts = await asyncio.to_thread(_prompts, config, fleet.connections)
    aliases = parse_aliases(server.alias)
    router = Router(fleet, prompts, accounts=accounts, aliases=aliases, patience_s=config.route.patience_s)
    for address in addresses:
        fleet.add(address)
    settings = uvicorn.Config(
        build_app(router, host=server.host),
        http=connection_type(),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(DRAIN_S) + 5,
    )
    running = _server_class()(settings)
    stopped: list[signal.Signals] = []
    draining: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()

    def stop(number: signal.Signals) -> None:
        stopped.append(number)
        running.handle_exit(number, None)
        draining.append(loop.create_task(router.drain(DRAIN_S)))

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    log.info("listening on %s, routing to %d workers", url_of(listener), len(addresses))
    try:
        await running.serve(sockets=[listener])
    finally:
        await router.close()
    log.info("stopped")
    return INTERRUPTED if stopped[:1] == [signal.SIGINT] else 0


def _prompts(config: Config, client: Connections) -> Prompts:
    """Return what makes tokens and keys, by the configured tokenizer and pool. Raises ModelError, ConfigError."""
    from headstart.api.shared import SharedFile, SharedPrefixes
    from headstart.gateway.prompts import Prompts

    renderer = _renderer(config)
    shared = SharedPrefixes()
    if config.server.shared_prefixes is not None and renderer is not None:
        shared = SharedFile(config.server.shared_prefixes, renderer)
    tier = None
    if config.cache.pool is not None:
        from headstart.cache.open import open_pool

        tier = open_pool(replace(config.cache, pool_read_only=True), config.cache.pool)
    return Prompts(client, renderer=renderer, rules=config.server.canonical_rules, shared=shared, pool=tier)


def _renderer(config: Config) -> Renderer | None:
    if not config.route.tokenizer:
        return None
    from headstart.cli.progress import stage_lines
    from headstart.cli.rendering import renderer_of

    stages = stage_lines(lambda stage: log.info("%s …", stage))
    renderer = renderer_of(replace(config, model=config.route.tokenizer), on_progress=stages)
    renderer.warm_up()
    return renderer


def _server_class() -> Any:
    import uvicorn

    class Server(uvicorn.Server):
        """One whose signals come by the loop."""

        def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
            return nullcontext()

    return Server
