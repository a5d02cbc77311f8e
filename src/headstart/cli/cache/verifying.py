"""`verify`: a scrub. Reads under leases like any reader, so it may run beside servers, at a rate that leaves them the disk."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click

from headstart.cli.cache import DAMAGED, REPAIRED
from headstart.cli.cache.cached import SHOWN_DIGITS, Cached, as_bytes, looked, open_looked_at, open_pool, so_many
from headstart.cli.progress import OnProgress, shown_progress
from headstart.config import parse_size
from headstart.errors import StoreError
from headstart.tier.base import ExtentInfo, Problem, Tier
from headstart.tier.disk.look import Look
from headstart.tier.disk.scrub import Examined, scrub

INTERRUPTED = 130


def verify(
    directories: tuple[Path, ...], config_file: Path | None, as_json: bool, pool: Path | None, rate: str, no_repair: bool
) -> int:
    rate_bytes = parse_size(rate)
    if rate_bytes < 1:
        raise click.BadParameter("a rate of 0 never ends; give one such as 256MiB")
    wrong: list[tuple[Look, Examined]] = []
    counts = {"extents": 0, "bytes": 0, "gone": 0}
    interrupted = False
    with looked(directories, config_file, pool=pool) as cached:
        mine = _believed(cached)
        total = sum(info.extent_bytes for _, some in mine for info in some)
        try:
            with shown_progress() as on_progress:
                for look, one in _examined(mine, _Throttle(rate_bytes, on_progress, total)):
                    counts["extents"] += 1
                    counts["gone"] += one.gone
                    counts["bytes"] += 0 if one.gone else one.info.extent_bytes
                    if one.fault is not None:
                        wrong.append((look, one))
        except KeyboardInterrupt:
            interrupted = True
        broken = [(look, one) for look, one in wrong if one.fault is not None and not one.fault.unreadable]
        unreadable = len(wrong) - len(broken)
        dropped, problems = (0, _unexplained(cached)) if no_repair or interrupted else _repair(cached, broken)
        facts = {
            "interrupted": interrupted,
            "extents": counts["extents"],
            "extents_in_all": sum(len(some) for _, some in mine),
            "other_keys": len(cached.extents) - sum(len(some) for _, some in mine),
            "bytes": counts["bytes"],
            "removed_meanwhile": counts["gone"],
            "faults": [_facts(look, one) for look, one in wrong],
            "unreadable": unreadable,
            "dropped": dropped,
            "problems": [{"where": problem.where, "what": problem.what} for problem in problems],
        }
    if as_json:
        click.echo(json.dumps(facts))
    else:
        _tell(facts)
    if interrupted:
        return INTERRUPTED
    if unreadable:
        return StoreError.exit_code
    if dropped < len(broken) or problems:
        return DAMAGED
    return REPAIRED if broken else 0


class _Throttle:
    """Sleeps so that no more than a rate is read, and tells how far it is."""

    def __init__(self, rate_bytes: int, on_progress: OnProgress, total_bytes: int) -> None:
        self._rate_bytes = rate_bytes
        self._on_progress = on_progress
        self._total_bytes = max(total_bytes, 1)
        self._done_bytes = 0
        self._due = time.monotonic()

    def __call__(self, nbytes: int) -> None:
        self._done_bytes += nbytes
        self._on_progress("reading", min(self._done_bytes / self._total_bytes, 1.0))
        now = time.monotonic()
        self._due = max(self._due, now - 0.1) + nbytes / self._rate_bytes
        if self._due > now:
            time.sleep(self._due - now)


def _believed(cached: Cached) -> list[tuple[Look, list[ExtentInfo]]]:
    """Return of each directory the extents whose checks can be told to be right: those made with a key that is known."""
    owned = list(zip(cached.extents, cached.look_of, strict=True))
    return [
        (look, [info for info, owner in owned if owner is look and info.check_key in look.sealing.key_ids])
        for look in cached.looks
    ]


def _examined(mine: list[tuple[Look, list[ExtentInfo]]], on_bytes: Callable[[int], None]) -> Iterable[tuple[Look, Examined]]:
    for look, some in mine:
        for one in scrub(look, some, on_bytes=on_bytes):
            yield look, one


def _unexplained(cached: Cached) -> list[Problem]:
    """Return what can be told without writing anything."""
    problems = [Problem(str(look.root), "a journal cannot be read to its end") for look in cached.looks if look.incomplete]
    return problems + [
        Problem(str(look.root), f"{look.unexplained_files} segments that no journal speaks of")
        for look in cached.looks
        if look.unexplained_files
    ]


def _repair(cached: Cached, broken: list[tuple[Look, Examined]]) -> tuple[int, list[Problem]]:
    """Drop what is wrong, and compare what is left with the files. Returns how many extents went, and what is still wrong."""
    dropped, problems = 0, []
    for look in cached.looks:
        places = {one.info.where for owner, one in broken if owner is look}
        tier: Tier = open_pool(look, cached.config) if look.pool else open_looked_at(look, cached.config)
        try:
            still = [info.id for info in tier.scan() if info.where in places]
            removed = tier.delete(still, reason="corrupt")
            dropped += removed + len(places) - len(still)  # what is gone by now is dropped too
            problems += tier.check()
        finally:
            tier.close()
    return dropped, problems


def _facts(look: Look, one: Examined) -> dict[str, Any]:
    assert one.fault is not None
    where = look.where(one.info.id)
    return {
        "key": one.info.keys[-1].hex(),
        "file": str(where[0]) if where else None,
        "offset": where[1] if where else None,
        "blocks": one.info.blocks,
        "reason": one.fault.reason,
        "what": one.fault.what,
        "unreadable": one.fault.unreadable,
    }


def _tell(facts: dict[str, Any]) -> None:
    for fault in facts["faults"]:
        what = fault["what"].removeprefix(f"{fault['file']}: ")  # some say the place themselves
        click.echo(f"{fault['key'][:SHOWN_DIGITS]}  {fault['file']}, byte {fault['offset']}: {what} ({fault['reason']})")
    for problem in facts["problems"]:
        click.echo(f"{problem['where']}: {problem['what']}")
    so_far = so_many(facts["extents"], "extent", "extents")
    if facts["interrupted"]:
        in_all = so_many(facts["extents_in_all"], "extent", "extents")
        so_far = f"interrupted after {facts['extents']} of {in_all}"
    wrong = len(facts["faults"]) - facts["unreadable"]
    problems = len(facts["problems"])
    others = f", {so_many(problems, 'other problem', 'other problems')} above" if problems else ""
    click.echo(
        f"{so_far}, {as_bytes(facts['bytes'])}: {wrong} wrong, {facts['dropped']} dropped, "
        f"{facts['unreadable']} not readable{others}"
    )
    if facts["other_keys"]:
        count = so_many(facts["other_keys"], "extent was", "extents were")
        click.echo(f"{count} written with another key, or none, and left alone; cache.check_key_file says which are believed")
