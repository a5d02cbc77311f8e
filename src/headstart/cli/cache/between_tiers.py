"""`move --from --to`: what a query selects, from one tier to another. Interrupted, it has lost nothing; again, it goes on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from headstart.block.representation import Representation
from headstart.cache.moving import bring, let_go, moving_out, next_batch
from headstart.cache.open import open_object_store
from headstart.cli.cache import INCOMPLETE
from headstart.cli.cache.arriving import say
from headstart.cli.cache.cached import as_bytes, looked, looked_at_pool, open_looked_at, open_pool, so_many
from headstart.cli.progress import OnProgress, shown_progress
from headstart.cli.settings import chosen_config
from headstart.config import CacheConfig, parse_size
from headstart.errors import ConfigError, StoreError
from headstart.policy.rule_text import parse_condition
from headstart.policy.tiering import Condition
from headstart.tier.base import ExtentInfo, Tier
from headstart.tier.surveying import DescribingTier, Survey, surveyed

_BUSY_S = 15.0  # how long another process that moves out of the same directory is waited for
_PASSING = ("gone", "corrupt", "unreadable", "key", "unknown")  # reasons after which the next extent is tried


@dataclass(slots=True)
class _Done:
    total_bytes: int
    moved: int = 0
    nbytes: int = 0  # that were read
    written_bytes: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


class Limit:
    """Keeps a rate: `wait` returns when so many more bytes may be read."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._next_s = time.monotonic()

    def wait(self, nbytes: int) -> None:
        if self._bytes_per_s is None:
            return
        now = time.monotonic()
        begins = max(now, self._next_s)
        self._next_s = begins + nbytes / self._bytes_per_s
        time.sleep(begins - now)


def move_between(
    source: str,
    target: str,
    *,
    where: str | None,
    directories: Sequence[Path],
    pool: Path | None,
    config_file: Path | None,
    limit: str | None,
    dry_run: bool,
    as_json: bool,
) -> int:
    """Move between tiers by their names; return the exit code. Raises UsageError, BadParameter, StoreError."""
    condition = None if where is None else _condition(where)
    rate = Limit(None if limit is None else _rate(limit))
    config = chosen_config(config_file, {}).cache
    place = _Place(config, config_file, directories, pool)
    facts: dict[str, Any] = {"dry_run": dry_run, "from": source, "to": target}
    if dry_run:
        place.require(target)
        ids, nbytes = _chosen(place.surveys(source), condition)
        what = so_many(len(ids), "extent", "extents")
        facts |= {"extents": len(ids), "bytes": nbytes, "moved": 0, "written_bytes": 0, "left_out": {}}
        say(facts, as_json, f"{what} would move from {source} to {target}: {as_bytes(nbytes)}")
        return 0
    with ExitStack() as stack:
        tiers = {name: place.open(name, stack, leaving=name == source) for name in (source, target)}
        chosen = [(tier, *_chosen(surveyed(tier, now_ms=_now_ms()), condition)) for tier in tiers[source]]
        extents, total = sum(len(ids) for _, ids, _ in chosen), sum(nbytes for *_, nbytes in chosen)
        done = _Done(total)
        with shown_progress() as on_progress:
            for tier, ids, _ in chosen:
                _move(tier, ids, _roomiest(tiers[target]), done, rate, on_progress)
    facts |= {"extents": extents, "bytes": total, "moved": done.moved, "written_bytes": done.written_bytes}
    what = so_many(extents, "extent", "extents")
    say(
        facts | {"left_out": dict(done.left_out)},
        as_json,
        f"{done.moved} of {what} moved from {source} to {target}, {as_bytes(done.written_bytes)} written",
    )
    return INCOMPLETE if done.left_out else 0


def _condition(where: str) -> Condition:
    try:
        return parse_condition(where)
    except ConfigError as error:
        raise click.BadParameter(error.message, param_hint="--where") from error


def _rate(limit: str) -> int:
    try:
        rate = parse_size(limit.strip().lower().removesuffix("/s"))
    except ConfigError as error:
        raise click.BadParameter(f"{limit!r} is no rate; write 100MB/s", param_hint="--limit") from error
    if not rate:
        raise click.BadParameter("nothing would ever move; write a rate such as 100MB/s", param_hint="--limit")
    return rate


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tiers lie that a command may mean."""

    config: CacheConfig
    config_file: Path | None
    directories: Sequence[Path]
    pool: Path | None

    def require(self, name: str) -> None:
        """Raise UsageError where nothing says where that tier lies."""
        if name == "pool" and self._pool is None:
            raise click.UsageError("there is no pool; give --pool, or set cache.pool")
        if name == "object" and not self.config.object_store:
            raise click.UsageError("there is no object store; set cache.object_store")

    def open(self, name: str, stack: ExitStack, *, leaving: bool) -> list[Tier]:
        """Return the tiers of that name, to be changed: each directory of the disk tier is one, with `leaving` also those that
        take nothing new."""
        self.require(name)
        found: list[Tier]
        if name == "object":
            try:
                found = [open_object_store(self.config, passing=True)]
            except ValueError as error:
                raise ConfigError(f"cache.object_capacity: {error}", key="cache.object_capacity") from error
        elif self._pool is not None and name == "pool":
            with looked_at_pool(self._pool, self.config) as look:
                found = [open_pool(look, self.config)]
        else:
            with looked(self.directories, self.config_file) as cached:
                states = {root: entry.state for root, entry in cached.devices.items()}
                looks = [look for look in cached.looks if leaving or states.get(look.root, "active") == "active"]
                found = [open_looked_at(look, self.config) for look in looks]
        if not found:
            raise StoreError(f"no directory of the tier {name!r} takes anything; add one with `headstart cache devices`")
        for tier in found:
            stack.callback(tier.close)
        return found

    def surveys(self, name: str) -> list[Survey]:
        """Return what rules may ask of a tier, which is only looked at."""
        self.require(name)
        if name == "object":
            tier = open_object_store(replace(self.config, object_read_only=True), passing=True)
            try:
                return list(surveyed(tier, now_ms=_now_ms()))
            finally:
                tier.close()
        with looked(
            self.directories if name == "disk" else (), self.config_file, pool=self._pool if name == "pool" else None
        ) as cached:
            return [look.survey(now_ms=cached.now_ms) for look in cached.looks]

    @property
    def _pool(self) -> Path | None:
        path = self.pool or self.config.pool
        return None if path is None else path.expanduser()


def _chosen(parts: Iterable[Survey], condition: Condition | None) -> tuple[list[int], int]:
    """Return what is to move, the least recently used first, and its bytes."""
    ids, used, nbytes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], 0
    for part in parts:
        which = np.ones(len(part), np.bool_) if condition is None else condition(part.facts)
        ids.append(part.ids[which])
        used.append(part.last_used[which])
        nbytes += int(part.facts.nbytes[which].sum())
    order = np.argsort(np.concatenate(used), kind="stable")
    return np.concatenate(ids)[order].tolist(), nbytes


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _roomiest(tiers: Sequence[Tier]) -> Tier:
    rooms = [one.capacity_bytes - one.allocated_bytes for one in (tier.statistics() for tier in tiers)]
    return tiers[rooms.index(max(rooms))]


def _move(source: Tier, ids: Sequence[int], target: Tier, done: _Done, rate: Limit, on_progress: OnProgress) -> None:
    """Move extents, some at a time; until the target takes no more."""

    def on_bytes(nbytes: int) -> None:
        rate.wait(nbytes)
        done.nbytes += nbytes
        on_progress(f"moving {as_bytes(done.total_bytes)}", min(1.0, done.nbytes / max(done.total_bytes, 1)))

    while ids:
        with _alone(source):
            count, infos = next_batch(ids, source)
            ids = ids[count:]
            representation = _representation(source, infos)
            if not infos or representation is None:
                if infos:
                    done.left_out["no journal says how it is laid down"] += len(infos)
                continue
            brought = bring(infos, source, target, representation, now_ms=_now_ms(), on_bytes=on_bytes)
            there = [info for info, one in zip(infos, brought, strict=False) if one.there]
            gone = let_go(there, source, target, with_pins=True)
        done.moved += len(gone)
        done.written_bytes += sum(one.nbytes for one in brought)
        if len(gone) < len(there):
            done.left_out["somebody reads it"] += len(there) - len(gone)
        refused = [one.reason for one in brought if not one.there]
        done.left_out.update(refused)
        if any(reason not in _PASSING for reason in refused):
            done.left_out[refused[-1]] += len(infos) - len(brought) + len(ids)
            return
        if len(brought) < len(infos):  # behind one that could not be written
            ids = [*(info.id for info in infos[len(brought) :]), *ids]


@contextmanager
def _alone(source: Tier) -> Iterator[None]:
    """Be the only one who moves out of a tier. Raises StoreError where another process is at it for too long."""
    until = time.monotonic() + _BUSY_S
    while True:
        with moving_out(source) as mine:
            if mine:
                yield
                return
        if time.monotonic() >= until:
            raise StoreError(f"another process moves out of the tier {source.name!r} for too long; try again", tier=source.name)
        time.sleep(0.05)


def _representation(tier: Tier, infos: Sequence[ExtentInfo]) -> Representation | None:
    return tier.representation(infos[0].representation) if infos and isinstance(tier, DescribingTier) else None
