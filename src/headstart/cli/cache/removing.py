"""`rm` and `gc`: letting go, on demand and by the rules. Children go before what they run on from, so that an interruption
leaves nothing that could not be found any more."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from headstart.block.whole import examine, part_of
from headstart.cache.prefixes import Spot
from headstart.cli.cache import INCOMPLETE
from headstart.cli.cache.cached import (
    SHOWN_DIGITS,
    Cached,
    Wanted,
    as_bytes,
    is_pinned,
    looked,
    open_looked_at,
    so_many,
)
from headstart.cli.progress import shown_progress
from headstart.config import parse_size
from headstart.policy.eviction import choose_victims, worth_of
from headstart.tier.base import Terms

_LISTED = 20  # prefixes that a dry run names


@dataclass(slots=True)
class Removed:
    """What became of a removal, in extents. `leased`: somebody reads them, or they could not be removed."""

    removed: int = 0
    bytes: int = 0
    shortened: int = 0
    leased: int = 0

    def __add__(self, other: Removed) -> Removed:
        return Removed(
            self.removed + other.removed,
            self.bytes + other.bytes,
            self.shortened + other.shortened,
            self.leased + other.leased,
        )


def rm(
    keys: tuple[str, ...],
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    pool: Path | None,
    everything: bool,
    dry_run: bool,
    yes: bool,
    **options: Any,
) -> int:
    wanted = Wanted(**options)
    if bool(keys) + wanted.given + everything != 1:
        raise click.UsageError("say what is to go: either keys, or options such as --tenant or --older-than, or --all")
    with looked(directories, config_file, pool=pool) as cached:
        spots = [spot for key in keys for spot in cached.named(key)]
        if keys:
            ends = {end for spot in spots for end in cached.prefixes.continuing(spot)}
        else:
            ends = {prefix.spot.extent for prefix in cached.chosen(wanted)}
        pinned = _pinned(cached)
        refused = {end for end in ends if end in pinned}
        going = cached.prefixes.only_for(ends - refused)
        if not keys:  # what is found elsewhere as well has no prefix of its own, but may be somebody's
            chosen = set(going)
            going += [
                i
                for i, info in enumerate(cached.extents)
                if cached.prefixes.found_elsewhere(i) and i not in chosen and wanted.fits(cached, info, cached.now_ms)
            ]
        going = [i for i in going if i not in pinned]
        cuts, keyed = _cuts(cached, spots, set(going))
        if not dry_run and not yes and len(ends - refused) > 1:
            nbytes = sum(cached.extents[i].extent_bytes for i in going)
            raise click.UsageError(
                f"{so_many(len(ends - refused), 'prefix', 'prefixes')} of {as_bytes(nbytes)} would go; "
                "look with --dry-run, or give --yes"
            )
        done = Removed()
        if not dry_run:
            done = _remove(cached, going, reason="user") + _shorten(cached, cuts)
        names = [cached.prefixes.at(Spot(i, cached.extents[i].blocks - 1)).key.hex() for i in sorted(ends - refused)]
        facts = {
            "dry_run": dry_run,
            "prefixes": names,
            "extents": len(going) if dry_run else done.removed,
            "bytes": sum(cached.extents[i].extent_bytes for i in going) if dry_run else done.bytes,
            "shortened_extents": len(cuts) if dry_run else done.shortened,
            "pinned_prefixes": len(refused),
            "leased_extents": done.leased,
            "left_for_their_key": [cached.extents[i].where for i in keyed],
        }
    _tell(facts, as_json)
    return INCOMPLETE if refused or keyed or done.leased or (cuts and not dry_run and done.shortened < len(cuts)) else 0


def _tell(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts))
        return
    verb = "would go" if facts["dry_run"] else "went"
    if facts["dry_run"]:
        for name in facts["prefixes"][:_LISTED]:
            click.echo(f"{name[:SHOWN_DIGITS]} would go")
        if len(facts["prefixes"]) > _LISTED:
            click.echo(f"… and {len(facts['prefixes']) - _LISTED} more")
    prefixes = so_many(len(facts["prefixes"]), "prefix", "prefixes")
    click.echo(f"{prefixes} {verb}: {so_many(facts['extents'], 'extent', 'extents')}, {as_bytes(facts['bytes'])}")
    if facts["shortened_extents"]:
        would = ("would be", "would be") if facts["dry_run"] else ("was", "were")
        cut = so_many(facts["shortened_extents"], f"extent {would[0]}", f"extents {would[1]}")
        click.echo(f"{cut} cut behind what others need")
    if facts["pinned_prefixes"]:
        pinned = so_many(facts["pinned_prefixes"], "pinned prefix stays", "pinned prefixes stay")
        click.echo(f"{pinned}; `headstart cache unpin` first", err=True)
    if facts["leased_extents"]:
        click.echo(_being_read(facts["leased_extents"]), err=True)
    if kept := facts["left_for_their_key"]:
        left = so_many(len(kept), "extent stays whole: it was", "extents stay whole: they were")
        click.echo(
            f"{left} written with another key; give its file as cache.check_key_file ({'; '.join(kept[:_LISTED])})", err=True
        )


def _pinned(cached: Cached) -> set[int]:
    """Return the extents that are pinned, and those that they run on from."""
    found: set[int] = set()
    for i, info in enumerate(cached.extents):
        if is_pinned(info, cached.now_ms):
            found.update(cached.prefixes.chain(Spot(i, 0)))
    return found


def _cuts(cached: Cached, spots: Iterable[Spot], going: set[int]) -> tuple[dict[int, int], list[int]]:
    """Return the extents that hold a named block and stay because others need their beginning, with the pieces that those
    need; and those of them that stay whole, because their key is not known here."""
    cuts: dict[int, int] = {}
    keyed: list[int] = []
    pinned = _pinned(cached)
    for spot in spots:
        if spot.extent in going or spot.extent in pinned:
            continue
        layout = cached.representation(cached.extents[spot.extent].representation)
        if layout is None or layout.state == "required":
            continue
        pieces = -(-cached.prefixes.needed_blocks(spot.extent, going) // layout.blocks_per_piece)
        if 0 < pieces * layout.blocks_per_piece <= spot.position:
            if cached.extents[spot.extent].check_key in cached.look_of[spot.extent].sealing.key_ids:
                cuts[spot.extent] = pieces
            else:
                keyed.append(spot.extent)
    return cuts, sorted(set(keyed))


def _remove(cached: Cached, going: Sequence[int], *, reason: str) -> Removed:
    """Remove extents, in that order."""
    done = Removed()
    with shown_progress() as on_progress, cached.opened(going) as found:
        for tier, some in found:
            on_progress("removing", (done.removed + done.leased) / max(len(going), 1))
            tier.delete([here.id for here in some.values()], reason=reason)
            for here in some.values():
                if tier.info(here.id) is not None:
                    done.leased += 1
                else:
                    done.removed += 1
                    done.bytes += here.extent_bytes
    return done


def _shorten(cached: Cached, cuts: dict[int, int]) -> Removed:
    """Cut extents behind so many of their pieces."""
    done = Removed()
    with cached.opened(cuts) as found:
        for tier, some in found:
            for i, here in some.items():
                layout = cached.representation(here.representation)
                whole = None if layout is None else cached.look_of[i].read(cached.extents[i].id)
                if layout is None or whole is None:
                    continue
                image = part_of(whole, examine(whole, layout, cached.look_of[i].sealing), layout, first_piece=0, pieces=cuts[i])
                if not tier.delete([here.id], reason="user"):
                    done.leased += 1
                    continue
                # Only now: while the whole extent is there, its beginning counts as present.
                terms = Terms(retention=here.retention, tenant=here.tenant)
                done.shortened += tier.write(image, layout, terms=terms).stored
                done.bytes += here.extent_bytes - image.nbytes
    return done


def gc(
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    pool: Path | None,
    target: str | None,
    seconds: float | None,
    dry_run: bool,
) -> int:
    with looked(directories, config_file, pool=pool) as cached:
        pinned = _pinned(cached)
        expired = {
            i
            for i, info in enumerate(cached.extents)
            if info.expires_ms is not None and info.expires_ms <= cached.now_ms and i not in pinned
        }
        above, missing_bytes = _above(cached, target, pinned, expired) if target is not None else ([], 0)
        going = expired | set(above)
        nbytes = sum(cached.extents[i].extent_bytes for i in going)
        done, joined = Removed(removed=len(going), bytes=nbytes), 0
        interrupted = False
        if not dry_run:
            last_first = cached.prefixes.order(going)[::-1]
            done = _remove(cached, [i for i in last_first if i in expired], reason="expired")
            done += _remove(cached, [i for i in last_first if i not in expired], reason="capacity")
            try:
                joined = _tend(cached, seconds)
            except KeyboardInterrupt:
                interrupted = True
    facts = {
        "dry_run": dry_run,
        "expired_extents": len(expired),
        "extents": done.removed,
        "bytes": done.bytes,
        "leased_extents": done.leased,
        "missing_bytes": missing_bytes,
        "joined_extents": joined,
        "interrupted": interrupted,
    }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        verb = "would go" if dry_run else "went"
        went = so_many(done.removed, f"extent {verb}", f"extents {verb}")
        click.echo(f"{went} ({len(expired)} too old): {as_bytes(done.bytes)}")
        if joined:
            click.echo(f"{so_many(joined, 'short run was', 'short runs were')} joined to longer ones")
        if done.leased:
            click.echo(_being_read(done.leased), err=True)
        if missing_bytes:
            click.echo(f"{target} is not reached by {as_bytes(missing_bytes)}: the rest is pinned; unpin some", err=True)
    if interrupted:
        return 130
    return INCOMPLETE if done.leased or missing_bytes else 0


def _above(cached: Cached, target: str, pinned: set[int], expired: set[int]) -> tuple[list[int], int]:
    """Return what to let go so that no more than the target is taken, and how many bytes it is missed by even so."""
    target_bytes = parse_size(target)
    # What was let go in a pool before is charged for some minutes yet, and is not to be let go of twice.
    in_pool = any(look.pool for look in cached.looks)
    charged = sum(info.extent_bytes for info in cached.extents) if in_pool else sum(look.charged_bytes for look in cached.looks)
    needed = charged - target_bytes - sum(cached.extents[i].extent_bytes for i in expired)
    if needed <= 0 or not cached.extents:
        return [], 0
    infos = cached.extents
    held = np.array([i in pinned or i in expired for i in range(len(infos))], np.bool_)
    worth = worth_of(
        last_used=np.array([info.last_used for info in infos], np.int64),
        promised_ms=np.array([info.guaranteed_until_ms for info in infos], np.int64),
        held=held,
        parents=cached.prefixes.parents,
        now_ms=cached.now_ms,
    )
    nbytes = np.array([info.extent_bytes for info in infos], np.int64)
    chosen = choose_victims(worth=worth, nbytes=nbytes, needed_bytes=needed).tolist()
    missed = needed - int(nbytes[chosen].sum()) if pinned else 0  # else all goes; what is left are the cache's own files
    return [int(i) for i in chosen], max(missed, 0)


def _tend(cached: Cached, seconds: float | None) -> int:
    """Have every directory do its upkeep until there is none left, or for so long; returns how many short runs were joined."""
    deadline = None if seconds is None else time.monotonic() + seconds
    joined = 0
    with shown_progress() as on_progress:
        for look in cached.looks:
            if look.pool:
                continue  # whoever collects there does it
            on_progress(f"upkeep of {look.root}", None)
            tier = open_looked_at(look, cached.config)
            try:
                tier.take_up_all()
                while (deadline is None or time.monotonic() < deadline) and tier.tend():
                    pass
            finally:
                joined += tier.statistics().counters.get("joined_extents", 0)
                tier.close()
    return joined


def _being_read(extents: int) -> str:
    return f"{so_many(extents, 'extent is being read and stays', 'extents are being read and stay')}; try again"
