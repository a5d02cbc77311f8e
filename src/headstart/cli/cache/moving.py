"""`move`: prefixes from one directory to another of the same machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headstart.cache.prefixes import Spot
from headstart.cli.cache import INCOMPLETE
from headstart.cli.cache.arriving import Left, Writer, open_target, require_directory, say, verified_image
from headstart.cli.cache.between_tiers import move_between
from headstart.cli.cache.cached import Cached, Wanted, as_bytes, is_pinned, looked, so_many
from headstart.cli.progress import shown_progress
from headstart.tier.base import ExtentId, Terms
from headstart.tier.devices import devices_of, drain_device
from headstart.tier.disk import DiskTier


def move(
    source: Path | None,
    destination: Path | None,
    from_tier: str | None,
    to_tier: str | None,
    where: str | None,
    limit: str | None,
    directories: tuple[Path, ...],
    pool: Path | None,
    as_json: bool,
    config_file: Path | None,
    capacity: str | None,
    dry_run: bool,
    **options: Any,
) -> int:
    if from_tier is not None or to_tier is not None:
        if source or destination or Wanted(**options).given or capacity:
            raise click.UsageError("--from and --to go with --where, --limit, --directory and --pool alone")
        if from_tier is None or to_tier is None or from_tier == to_tier:
            raise click.UsageError("give both --from and --to, two tiers")
        return move_between(
            from_tier,
            to_tier,
            where=where,
            directories=directories,
            pool=pool,
            config_file=config_file,
            limit=limit,
            dry_run=dry_run,
            as_json=as_json,
        )
    if where or limit or directories or pool:
        raise click.UsageError("--where, --limit, --directory and --pool go with --from and --to")
    if source is None or destination is None:
        raise click.UsageError("give SOURCE and DESTINATION, or --from and --to")
    require_directory(destination)
    with looked([source], config_file, alone=True) as cached:
        if source.resolve() == destination.resolve():
            raise click.UsageError("SOURCE and DESTINATION are the same directory")
        wanted_ones = Wanted(**options)
        ends = {prefix.spot.extent for prefix in cached.chosen(wanted_ones)}
        chains = {i for end in ends for i in cached.prefixes.chain(Spot(end, 0))}
        wanted = cached.prefixes.order(chains | cached.prefixes.states_of(chains))
        nbytes = sum(cached.extents[i].extent_bytes for i in wanted)
        facts: dict[str, Any] = {
            "dry_run": dry_run,
            "prefixes": len(ends),
            "extents": len(wanted),
            "bytes": nbytes,
            "stored": 0,
            "present": 0,
            "removed": 0,
            "left_out": {},
        }
        if dry_run:
            prefixes = so_many(len(ends), "prefix", "prefixes")
            say(facts, as_json, f"{prefixes} would move: {so_many(len(wanted), 'extent', 'extents')}, {as_bytes(nbytes)}")
            return 0
        left = Left()
        if not wanted_ones.given:
            _drain(source, destination)
        tier = open_target(destination, cached.config, capacity)
        try:
            writer = _copy(cached, wanted, tier, destination, left)
        finally:
            tier.close()
        kept = {i for out in left.extents for i in cached.prefixes.chain(Spot(out, 0))}
        going = [i for i in cached.prefixes.only_for(ends) if i not in kept]
        removed = 0
        with cached.opened(going) as found:
            for here, some in found:
                ids = [info.id for info in some.values()]
                here.unpin(ids)  # the pins have moved
                removed += here.delete(ids, reason="moved")
    facts |= {"stored": writer.stored, "present": writer.present, "removed": removed, "left_out": dict(left.reasons)}
    say(
        facts,
        as_json,
        f"{destination} has {writer.stored + writer.present} of {so_many(len(wanted), 'extent', 'extents')}, "
        f"{removed} left {source}",
    )
    return INCOMPLETE if left.extents or removed < len(going) else 0


def _drain(source: Path, destination: Path) -> None:
    """Where both are devices of one set, let nothing new go to the one that is to be emptied."""
    states = {entry.path: entry.state for entry in devices_of(destination)}
    if states.get(source.absolute()) == "active" and states.get(destination.absolute()) == "active":
        drain_device(destination, source)
        click.echo(f"nothing new goes to {source} any more", err=True)


def _copy(cached: Cached, wanted: Sequence[int], tier: DiskTier, root: Path, left: Left) -> Writer:
    """Write extents into a tier, with pins and order of use."""
    writer = Writer(tier, root, left, cached.config)
    there: list[tuple[int, ExtentId]] = []
    with shown_progress() as on_progress:
        for n, i in enumerate(wanted):
            on_progress("moving", n / max(len(wanted), 1))
            info = cached.extents[i]
            layout = cached.representation(info.representation)
            if layout is None:
                left.out(i, "no journal says how it is laid down")
                continue
            if int(cached.prefixes.parents[i]) in left.extents:
                left.out(i, "what it runs on from was left out")
                continue
            verified = verified_image(cached, i, layout, left)
            if verified is None:
                continue
            image, header = verified
            if writer.write(i, image, header, layout, Terms(retention=info.retention, tenant=info.tenant)):
                ids = tier.locate(info.representation, header.keys).ids()
                there += [(info.last_used, one) for one in ids]
                if is_pinned(info, cached.now_ms):
                    tier.pin(ids, until_ms=info.pinned_until_ms)
    tier.touch([extent for _, extent in sorted(there, reverse=True)])
    return writer
