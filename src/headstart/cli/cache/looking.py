"""`ls`, `show`, `stat`, `du`: what is there. They change nothing, and work on a read-only file system."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import click

from headstart.block.extent import ExtentHeader
from headstart.block.whole import examine
from headstart.cache.asked import capacities_of, write_budget_bytes
from headstart.cache.budget import used_up
from headstart.cache.prefixes import Prefix, Spot
from headstart.cli.cache import DAMAGED
from headstart.cli.cache.cached import (
    SHOWN_DIGITS,
    Cached,
    Wanted,
    as_age,
    as_bytes,
    as_time,
    as_tokens,
    is_pinned,
    looked,
    require_key,
    so_many,
    table,
)
from headstart.config import CacheConfig, parse_size
from headstart.errors import HeadstartError, NotThere
from headstart.policy.admission import keeps_new
from headstart.tier.devices.rooms import room_of
from headstart.tier.disk.scrub import require_same

_FIRST_TOKENS = 16  # that `show` tells
REASONS = {  # words that journals hold
    "capacity": "others needed the room (capacity)",
    "quota": "its tenant was at its quota (quota)",
    "min-free": "somebody else needed the room, see cache.min_free (min-free)",
    "full": "the disk was full (full)",
    "lost": "its file went or was cut (lost)",
    "policy": "a rule of cache.tiering drops it (policy)",
    "expired": "it was older than its class may grow (expired)",
    "user": "`headstart cache rm` (user)",
    "corrupt": "its bytes were not what was written there (corrupt)",
    "joined": "it is part of a longer run now (joined)",
    "moved": "it was carried to another directory (moved)",
}
_SORTS = {
    "used": lambda prefix: prefix.info.last_used,
    "bytes": lambda prefix: prefix.nbytes,
    "tokens": lambda prefix: prefix.blocks,
    "created": lambda prefix: prefix.info.created_ms,
}


def ls(
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    pool: Path | None,
    limit: int | None,
    sort: str,
    **wanted: Any,
) -> None:
    with looked(directories, config_file, pool=pool) as cached:
        found = sorted(cached.listed(Wanted(**wanted)), key=_SORTS[sort], reverse=True)
        shown = [_facts(cached, prefix) for prefix in found[:limit]]
    if as_json:
        click.echo(json.dumps({"prefixes": shown, "total": len(found)}))
        return
    rows = [("KEY", "TOKENS", "BYTES", "CLASS", "TENANT", "AGE", "USED", "PINNED", "REPRESENTATION")]
    for fact in shown:
        rows.append(
            (
                fact["key"][:SHOWN_DIGITS],
                str(fact["tokens"]),
                as_bytes(fact["bytes"]),
                fact["class"],
                fact["tenant"] or "-",
                as_age(cached.now_ms - fact["created_ms"]),
                str(fact["last_used"]),
                _pinned(fact),
                fact["representation"],
            )
        )
    for line in table(rows, right=(1, 2, 5, 6)):
        click.echo(line)
    if len(shown) < len(found):
        click.echo(f"{len(found) - len(shown)} more", err=True)


def _facts(cached: Cached, prefix: Prefix) -> dict[str, Any]:
    info = prefix.info
    return {
        "key": prefix.key.hex(),
        "tokens": as_tokens(prefix.blocks),
        "bytes": prefix.nbytes,
        "own_bytes": prefix.own_bytes,
        "class": info.retention,
        "tenant": info.tenant,
        "created_ms": info.created_ms,
        "last_used": info.last_used,
        "pinned": is_pinned(info, cached.now_ms),
        "pinned_until": as_time(info.pinned_until_ms) if is_pinned(info, cached.now_ms) else None,
        "representation": cached.name_of(info.representation),
    }


def _pinned(facts: dict[str, Any]) -> str:
    return f"until {facts['pinned_until'] or 'unpinned'}" if facts["pinned"] else "-"


def show(
    key: str,
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    pool: Path | None,
    representation: str | None,
) -> int:
    require_key(key)
    with looked(directories, config_file, pool=pool) as cached:
        try:
            spots = cached.named(key, representation=representation)
        except NotThere as error:
            removals = _removals(cached, key)
            if not removals:
                raise NotThere(
                    f"no stored block has a key that begins with {key}, and no removal of one is remembered: it was never "
                    "written here, or went long ago",
                    key=key,
                ) from error
            if as_json:
                click.echo(json.dumps({"prefixes": [], "removals": removals}))
            else:
                for removal in removals:
                    what = "quarantined" if removal["quarantined"] else "removed"
                    why = REASONS.get(removal["reason"], removal["reason"])
                    click.echo(f"{removal['key'][:SHOWN_DIGITS]} was {what} at {removal['time']}: {why}")
            return NotThere.exit_code
        found = [_whole_facts(cached, spot) for spot in spots]
    if as_json:
        click.echo(json.dumps({"prefixes": found, "removals": []}))
    else:
        for facts in found:
            _tell(facts)
    return DAMAGED if any("fault" in extent for facts in found for extent in facts["extents"]) else 0


def _removals(cached: Cached, key: str) -> list[dict[str, Any]]:
    """Return what is remembered of blocks that were removed, the latest first."""
    wanted = key.lower()[:32]
    found = []
    for look in cached.looks:
        for removal in look.removals():
            prefixes = removal.prefixes.hex()
            keys = [prefixes[at : at + 32] for at in range(0, len(prefixes), 32)]
            for one in keys:
                if one.startswith(wanted):
                    found.append(
                        {
                            "key": one,
                            "time": as_time(removal.time_ms),
                            "reason": removal.reason,
                            "quarantined": removal.quarantined,
                        }
                    )
    return found[::-1]


def _whole_facts(cached: Cached, spot: Spot) -> dict[str, Any]:
    prefix = cached.prefixes.at(spot)
    chain = cached.prefixes.chain(spot)
    used = cached.prefixes.used_blocks(chain, spot)
    layout = cached.representation(prefix.info.representation)
    facts = _facts(cached, prefix)
    facts["representation_digest"] = prefix.info.representation.hex()
    facts["kind"] = layout.kind if layout else None
    facts["layout"] = layout.layout if layout else None
    facts["dtype"] = layout.dtype if layout else None
    facts["layers"] = layout.layers if layout else None
    facts["piece_tokens"] = layout.piece_tokens if layout else None
    facts["guaranteed"] = prefix.info.guaranteed_until_ms > cached.now_ms
    facts["guaranteed_until"] = as_time(prefix.info.guaranteed_until_ms or None)
    facts["expires"] = as_time(prefix.info.expires_ms)
    facts["continued_by"] = len(cached.prefixes.continuing(spot) - {spot.extent})
    facts["extents"] = [_extent_facts(cached, i, blocks) for i, blocks in zip(chain, used, strict=True)]
    first = next((extent for extent in facts["extents"] if extent.get("first_tokens")), None)
    facts["first_tokens"] = first["first_tokens"] if first is not None and first is facts["extents"][0] else []
    return facts


def _extent_facts(cached: Cached, i: int, used_blocks: int) -> dict[str, Any]:
    info, look = cached.extents[i], cached.look_of[i]
    where = look.where(info.id)
    facts: dict[str, Any] = {
        "file": str(where[0]) if where else None,
        "offset": where[1] if where else None,
        "bytes": info.extent_bytes,
        "blocks": info.blocks,
        "used_blocks": used_blocks,
        "class": info.retention,
        "tenant": info.tenant,
        "last_used": info.last_used,
        "created": as_time(info.created_ms),
    }
    layout = cached.representation(info.representation)
    if info.check_key not in look.sealing.key_ids:
        return facts | {"not_read": "it was written with another key, or none, than cache.check_key_file has"}
    try:
        image = look.read(info.id)
        if image is None:
            return facts | {"fault": "it was removed while it was looked at"}
        if layout is not None:
            header: ExtentHeader = examine(image, layout, look.sealing)
            require_same(header, info)
            facts |= {
                "key": header.keys[used_blocks - 1].hex(),
                "check": header.algorithm.name,
                "state_bytes": header.state_bytes,
                "salted_or_contents": any(header.extras),
                "first_tokens": header.tokens[:_FIRST_TOKENS].tolist(),
            }
    except (HeadstartError, OSError) as error:
        facts["fault"] = str(error)
    return facts


def _tell(facts: dict[str, Any]) -> None:
    last = facts["extents"][-1]
    click.echo(f"key             {last.get('key', facts['key'])}")
    click.echo(f"tokens          {facts['tokens']}  (begins {' '.join(map(str, facts['first_tokens'][:8]))} …)")
    click.echo(f"bytes           {as_bytes(facts['bytes'])}, {as_bytes(facts['own_bytes'])} for this prefix alone")
    click.echo(f"continued by    {so_many(facts['continued_by'], 'prefix', 'prefixes')}")
    terms = _terms(last)
    differ = "  (of its last block; where others have others, it stands with their extent)"
    click.echo(f"class, tenant   {terms}{differ if any(_terms(one) != terms for one in facts['extents']) else ''}")
    click.echo(f"representation  {facts['representation']}: {facts['kind']}, {so_many(facts['layers'], 'layer', 'layers')}")
    promised = f"until {facts['guaranteed_until']}" if facts["guaranteed"] else "nothing, it goes when room is needed"
    click.echo(f"promised        {promised}; expires {facts['expires'] or 'never'}")
    click.echo(f"pinned          {_pinned(facts)}")
    for extent in facts["extents"]:
        state = f", {_terms(extent)}" if _terms(extent) != terms else ""
        state += f"  WRONG: {extent['fault']}" if "fault" in extent else ""
        state += f"  not looked into: {extent['not_read']}" if "not_read" in extent else ""
        click.echo(
            f"extent          {extent['file']}, byte {extent['offset']}: {extent['used_blocks']} of {extent['blocks']} blocks, "
            f"{as_bytes(extent['bytes'])}, written {extent['created']}{state}"
        )


def _terms(facts: dict[str, Any]) -> str:
    return f"{facts['class']}, {facts['tenant'] or '-'}"


def stat(directories: tuple[Path, ...], config_file: Path | None, as_json: bool, pool: Path | None) -> None:
    with looked(directories, config_file, pool=pool) as cached:
        facts = _stat(cached)
    if as_json:
        click.echo(json.dumps(facts))
        return
    for device in facts["devices"]:
        click.echo(f"{device['directory']}{'' if device['state'] == 'active' else '  (' + device['state'] + ')'}")
        click.echo(
            f"  charged      {as_bytes(device['charged_bytes'])} of {as_bytes(device['capacity_bytes'])} by configuration"
        )
        click.echo(
            f"  free         {as_bytes(device['free_bytes'])} of {as_bytes(device['file_system_bytes'])} on the file system"
        )
        extents = so_many(device["extents"], "extent", "extents")
        click.echo(f"  segments     {device['segments']}, {extents}, {as_bytes(device['live_bytes'])} alive")
        if device["paused"]:
            click.echo(f"  not storing  {device['paused']}")
        if device["unexplained_files"] or device["incomplete"]:
            click.echo(
                f"  not seen     {so_many(device['unexplained_files'], 'file', 'files')} of which no journal speaks; "
                "the next opening reads what is there"
            )
    click.echo(f"prefixes       {facts['prefixes']:,}, {facts['pinned_prefixes']:,} pinned; {facts['tokens']:,} tokens stored")
    for name in ("class", "tenant", "representation"):
        for value, nbytes in facts[f"live_bytes_by_{name}"].items():
            click.echo(f"{name:14} {value or '-'}: {as_bytes(nbytes)}")
    if facts["removed"]:
        removed = ", ".join(f"{count} {reason}" for reason, count in facts["removed"].items())
        click.echo(f"lately removed {removed}")


def _stat(cached: Cached) -> dict[str, Any]:
    prefixes = cached.prefixes.all()
    devices = []
    config, rooms = cached.config, [room_of(look.root) for look in cached.looks]
    if any(look.pool for look in cached.looks):
        capacities = [parse_size(config.pool_capacity, of_bytes=room.total_bytes) for room in rooms]
        budget = ""
    else:
        capacities = capacities_of(config, rooms)
        budget = _budget_used_up(cached)
    for look, capacity_bytes in zip(cached.looks, capacities, strict=True):
        mine = [info for info, owner in zip(cached.extents, cached.look_of, strict=True) if owner is look]
        usage = shutil.disk_usage(look.root)
        entry = cached.devices.get(look.root)
        devices.append(
            {
                "directory": str(look.root),
                "state": "active" if entry is None else entry.state,
                "paused": "" if look.pool else _paused(config, look.root, usage.free, usage.total) or budget,
                "capacity_bytes": capacity_bytes,
                "charged_bytes": look.charged_bytes,
                "live_bytes": sum(info.extent_bytes for info in mine),
                "extents": len(mine),
                "segments": look.segments,
                "free_bytes": usage.free,
                "file_system_bytes": usage.total,
                "unexplained_files": look.unexplained_files,
                "incomplete": look.incomplete,
            }
        )
    removed = Counter(removal.reason or "earlier" for look in cached.looks for removal in look.removals())
    return {
        "devices": devices,
        "prefixes": len(prefixes),
        "tokens": as_tokens(sum(info.blocks for info in cached.extents)),
        "pinned_prefixes": sum(is_pinned(prefix.info, cached.now_ms) for prefix in prefixes),
        "live_bytes": sum(info.extent_bytes for info in cached.extents),
        "charged_bytes": sum(look.charged_bytes for look in cached.looks),
        **{f"live_bytes_by_{name}": sums for name, sums in _sums(cached).items() if name != "directory"},
        "removed": dict(removed.most_common()),
    }


def _paused(config: CacheConfig, root: Path, free_bytes: int, total_bytes: int) -> str:
    """Return why a server stores nothing in a directory now, as far as that can be seen from outside; "" where it does."""
    if os.statvfs(root).f_flag & os.ST_RDONLY:
        return "its file system is read-only; remount it, and restart a server that was started on it like that"
    min_free_bytes = parse_size(config.min_free, of_bytes=total_bytes)
    if free_bytes <= min_free_bytes:
        return f"cache.min_free keeps {as_bytes(min_free_bytes)} free for others; free space, or lower it"
    return ""


def _budget_used_up(cached: Cached) -> str:
    """Return what is said where the day's writes are spent, by what was written and is still there; else ""."""
    budget_bytes = write_budget_bytes(cached.config, [look.root for look in cached.looks])
    if budget_bytes is None or not cached.extents:
        return ""
    block_bytes = max(info.extent_bytes // max(1, info.blocks) for info in cached.extents)
    written = [(info.created_ms / 1000, info.extent_bytes) for info in cached.extents]
    if keeps_new(written, budget_bytes=budget_bytes, block_bytes=block_bytes, now_s=cached.now_ms / 1000):
        return ""
    return used_up(budget_bytes)


def du(directories: tuple[Path, ...], config_file: Path | None, as_json: bool, pool: Path | None, by: tuple[str, ...]) -> None:
    with looked(directories, config_file, pool=pool) as cached:
        sums = {name: values for name, values in _sums(cached).items() if not by or name in by}
        total = sum(info.extent_bytes for info in cached.extents)
        charged = sum(look.charged_bytes for look in cached.looks)
    if as_json:
        click.echo(
            json.dumps({"total_bytes": total, "charged_bytes": charged, **{f"by_{name}": s for name, s in sums.items()}})
        )
        return
    rows = [("BYTES", "BY", "")]
    for name, values in sums.items():
        rows += [(as_bytes(nbytes), name, value or "-") for value, nbytes in values.items()]
    rows.append((as_bytes(total), "total", f"the file system charges {as_bytes(charged)}"))
    for line in table(rows, right=(0,)):
        click.echo(line)


def _sums(cached: Cached) -> dict[str, dict[str, int]]:
    """Return bytes by directory, representation, class and tenant, the largest first."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in ("directory", "representation", "class", "tenant")}
    names: dict[bytes, str] = {}
    for info, look in zip(cached.extents, cached.look_of, strict=True):
        if info.representation not in names:
            names[info.representation] = cached.name_of(info.representation)
        for name, value in (
            ("directory", str(look.root)),
            ("representation", names[info.representation]),
            ("class", info.retention),
            ("tenant", info.tenant),
        ):
            sums[name][value] += info.extent_bytes
    return {name: dict(counter.most_common()) for name, counter in sums.items()}
