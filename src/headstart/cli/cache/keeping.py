"""`pin` and `unpin`: promises that a person makes."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from headstart.cache.prefixes import Spot
from headstart.cli.cache import INCOMPLETE
from headstart.cli.cache.cached import (
    SHOWN_DIGITS,
    Cached,
    as_time,
    duration_ms,
    is_pinned,
    looked,
)


def pin(
    keys: tuple[str, ...],
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    pool: Path | None,
    duration: str | None,
    until: str | None,
) -> int:
    if duration is not None and until is not None:
        raise click.UsageError("--for and --until are given; give one")
    with looked(directories, config_file, pool=pool) as cached:
        until_ms = cached.now_ms + duration_ms(duration) if duration is not None else _date_ms(until)
        if until_ms is not None and until_ms <= cached.now_ms:
            raise click.BadParameter("that time is over; give a later one")
        spots = [spot for key in keys for spot in cached.named(key)]
        chains = {i for spot in spots for i in cached.prefixes.chain(spot)}
        wanted = cached.prefixes.order(chains | cached.prefixes.states_of(chains))
        kept: set[int] = set()
        with cached.opened(wanted, pinning=True) as found:
            for tier, some in found:
                done = tier.pin([here.id for here in some.values()], until_ms=until_ms)
                kept.update(i for i, ok in zip(some, done, strict=True) if ok)
        pinned = [spot for spot in spots if kept.issuperset(cached.prefixes.chain(spot))]
        refused = [spot for spot in spots if spot not in pinned]
        facts: dict[str, Any] = {
            "pinned": [_key(cached, spot) for spot in pinned],
            "refused": [_key(cached, spot) for spot in refused],
            "until": as_time(until_ms),
            "bytes": sum(cached.extents[i].extent_bytes for i in kept),
        }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        how_long = f"until {facts['until']}" if until_ms is not None else "until unpinned"
        for key in facts["pinned"]:
            click.echo(f"{key[:SHOWN_DIGITS]} is pinned {how_long}")
        for key in facts["refused"]:
            click.echo(
                f"{key[:SHOWN_DIGITS]} is not pinned: it is gone, or pins would take more than half of cache.capacity; "
                "unpin others first",
                err=True,
            )
    return INCOMPLETE if refused else 0


def unpin(
    keys: tuple[str, ...], directories: tuple[Path, ...], config_file: Path | None, as_json: bool, pool: Path | None
) -> None:
    with looked(directories, config_file, pool=pool) as cached:
        prefixes = cached.prefixes
        spots = [spot for key in keys for spot in cached.named(key)]
        mine = {i for spot in spots for i in prefixes.chain(spot)}
        mine |= prefixes.states_of(mine)
        others = (i for i, info in enumerate(cached.extents) if i not in mine and is_pinned(info, cached.now_ms))
        needed = {before for i in others for before in prefixes.chain(Spot(i, 0))}
        needed |= prefixes.states_of(needed)
        with cached.opened(mine - needed) as found:
            for tier, some in found:
                tier.unpin([here.id for here in some.values()])
        unpinned = [_key(cached, spot) for spot in spots]
    if as_json:
        click.echo(json.dumps({"unpinned": unpinned, "still_pinned_extents": len(mine & needed)}))
        return
    for key in unpinned:
        click.echo(f"{key[:SHOWN_DIGITS]} is not pinned any more")


def _key(cached: Cached, spot: Spot) -> str:
    return cached.prefixes.at(spot).key.hex()


def _date_ms(text: str | None) -> int | None:
    if text is None:
        return None
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no date; write 2030-01-31 or 2030-01-31T18:00+01:00") from error
    return int((found if found.tzinfo else found.astimezone()).astimezone(UTC).timestamp() * 1000)
