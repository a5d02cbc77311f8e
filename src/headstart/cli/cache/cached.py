"""What all verbs of `headstart cache` share: which directories, which prefixes in them, how they are opened to be changed."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import overload

import click
import numpy as np
import numpy.typing as npt

from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.asked import capacities_of
from headstart.cache.check_keys import sealing_of
from headstart.cache.prefixes import Prefix, Prefixes, Spot
from headstart.cli.settings import chosen_config
from headstart.config import CacheConfig, parse_size
from headstart.errors import ConfigError, NotThere, StoreError
from headstart.policy.retention import FOREVER_MS, Retention
from headstart.tier.base import ExtentInfo, Tier
from headstart.tier.columns import ExtentColumns
from headstart.tier.devices import Entry, devices_of
from headstart.tier.devices.rooms import rooms_of
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import MARKER
from headstart.tier.disk.look import Look
from headstart.tier.lookup_thread import ask_apart
from headstart.tier.pool import PoolTier, Timing

LEAST_DIGITS = 8  # of a key on the command line
SHOWN_DIGITS = 12
_CANDIDATES = 8
_BATCH = 256  # extents that are changed at once
_ROOM_BYTES = 256 << 20
SLACK_BYTES = 256 << 10  # that a new segment and a journal take beside an extent
_ANSWER_S = 10.0  # how long a directory is waited for


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which prefixes a command is about: those that fit all that is given; every one where nothing is."""

    tenant: str | None = None
    retention: str | None = None
    pinned: bool = False
    representation: str | None = None
    older_than: str | None = None

    @property
    def given(self) -> bool:
        return self != Wanted()

    def fits(self, cached: Cached, info: ExtentInfo, now_ms: int) -> bool:
        return (
            (self.tenant is None or info.tenant == self.tenant)
            and (self.retention is None or info.retention == self.retention)
            and (not self.pinned or is_pinned(info, now_ms))
            and (self.older_than is None or info.created_ms < now_ms - duration_ms(self.older_than))
            and (self.representation is None or cached.is_called(info.representation, self.representation))
        )


class Cached:
    """One cache, in one directory or several, as it was when it was looked at."""

    def __init__(self, looks: Sequence[Look], config: CacheConfig, *, devices: Mapping[Path, Entry] | None = None) -> None:
        """`devices`: what is known of the looks' directories as devices of a set."""
        self.looks = looks
        self.devices = devices or {}
        self.config = config
        self.now_ms = int(time.time() * 1000)
        self._columns = [look.columns() for look in looks]
        self.extents = _Extents(looks, [len(part) for part in self._columns])
        self.look_of = [look for look, part in zip(looks, self._columns, strict=True) for _ in range(len(part))]

    @cached_property
    def prefixes(self) -> Prefixes:
        return Prefixes(ExtentColumns.joined(self._columns), self.extents)

    def representation(self, digest: bytes) -> Representation | None:
        return next((found for look in self.looks if (found := look.representation(digest)) is not None), None)

    def name_of(self, digest: bytes) -> str:
        """Return a representation in words that tell it from most others, and the beginning of its digest."""
        found = self.representation(digest)
        return representation_name(found, digest)

    def is_called(self, digest: bytes, text: str) -> bool:
        return digest.hex().startswith(text.lower()) or text in self.name_of(digest)

    def listed(self, wanted: Wanted) -> list[Prefix]:
        """As `chosen`, for whoever looks at nothing else and reads nothing: what is inside prefixes is not fetched."""
        self.extents.fetch(self.prefixes.ends)
        return self.chosen(wanted)

    def chosen(self, wanted: Wanted) -> list[Prefix]:
        return [prefix for prefix in self.prefixes.all() if wanted.fits(self, prefix.info, self.now_ms)]

    def named(self, key: str, *, representation: str | None = None) -> list[Spot]:
        """Return the block that a key names; several where it is stored in several representations. Raises NotThere,
        BadParameter for what is no key or names several."""
        require_key(key)
        found = {
            full: [
                s
                for s in spots
                if representation is None or self.is_called(self.extents[s.extent].representation, representation)
            ]
            for full, spots in self.prefixes.find(key).items()
        }
        found = {full: spots for full, spots in found.items() if spots}
        if len(found) > 1:
            some = ", ".join(full.hex()[: max(SHOWN_DIGITS, len(key) + 4)] for full in list(found)[:_CANDIDATES])
            more = ", …" if len(found) > _CANDIDATES else ""
            raise click.BadParameter(f"{key} names {len(found)} blocks: {some}{more}; give more digits", param_hint="KEY")
        for spots in found.values():
            return spots
        raise NotThere(f"no stored block has a key that begins with {key}; `headstart cache ls` lists what is there", key=key)

    @contextmanager
    def opened(
        self, extents: Iterable[int], *, pinning: bool = False
    ) -> Iterator[Iterator[tuple[Tier, dict[int, ExtentInfo]]]]:
        """Open the directories in which extents lie, to change them; gives the extents in their order, some at once, with their
        tier and what that knows of them. Those that have gone since are left out. `pinning`: see `open_looked_at`."""
        wanted = list(extents)
        with ExitStack() as stack:
            tiers: dict[int, tuple[Tier, dict[str, ExtentInfo]]] = {}
            for look in {id(self.look_of[i]): self.look_of[i] for i in wanted}.values():
                tier: Tier = open_pool(look, self.config) if look.pool else open_looked_at(look, self.config, pinning=pinning)
                stack.callback(tier.close)
                tiers[id(look)] = tier, {info.where: info for info in tier.scan()}
            yield self._batches(wanted, tiers)

    def _batches(
        self, wanted: Sequence[int], tiers: dict[int, tuple[Tier, dict[str, ExtentInfo]]]
    ) -> Iterator[tuple[Tier, dict[int, ExtentInfo]]]:
        for look, some in groupby(wanted, key=lambda i: id(self.look_of[i])):
            tier, found = tiers[look]
            mine = list(some)
            for first in range(0, len(mine), _BATCH):
                batch = mine[first : first + _BATCH]
                yield tier, {i: here for i in batch if (here := found.get(self.extents[i].where)) is not None}


class _Extents(Sequence[ExtentInfo]):
    """The extents of several looks, of which a million take seconds to make: all, when the first one is asked for (later, looks
    may know of other ones), or only some before that."""

    def __init__(self, looks: Sequence[Look], counts: Sequence[int]) -> None:
        self._looks = looks
        self._counts = counts
        self._some: dict[int, ExtentInfo] = {}
        self._all: list[ExtentInfo] | None = None

    def fetch(self, places: npt.NDArray[np.int64]) -> None:
        first = 0
        for look, count in zip(self._looks, self._counts, strict=True):
            mine = places[(places >= first) & (places < first + count)]
            self._some |= dict(zip(mine.tolist(), look.extents(mine - first), strict=True))
            first += count

    def __len__(self) -> int:
        return sum(self._counts)

    @overload
    def __getitem__(self, place: int) -> ExtentInfo: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[ExtentInfo]: ...
    def __getitem__(self, place: int | slice) -> ExtentInfo | Sequence[ExtentInfo]:
        if isinstance(place, int) and (found := self._some.get(place)) is not None:
            return found
        return self._whole()[place]

    def __iter__(self) -> Iterator[ExtentInfo]:
        return iter(self._whole())

    def _whole(self) -> list[ExtentInfo]:
        if self._all is None:
            self._all = [info for look in self._looks for info in look.extents()]
        return self._all


@contextmanager
def looked(
    directories: Sequence[Path], config_file: Path | None, *, alone: bool = False, pool: Path | None = None
) -> Iterator[Cached]:
    """Look at the directories that are named, or else at those of the configuration, with the devices that belong to them;
    `alone`: without. `pool`: look at that instead. What goes wrong with a medium inside ends the command in one sentence."""
    config = chosen_config(config_file, {}).cache
    if pool is not None:
        if directories:
            raise click.UsageError("--directory and --pool are given; give one")
        with _told_in_a_sentence(pool), looked_at_pool(pool.expanduser(), config) as look:
            yield Cached([look], config)
        return
    roots = [path.expanduser() for path in directories] or list(config.directories)
    with _told_in_a_sentence(*roots), ExitStack() as stack:
        places = _answering(roots)
        entries = {} if alone else _devices(roots)
        for real, entry in entries.items():
            if entry.state != "removed" and real not in places.values():
                places[entry.path] = real
        for root in [] if directories else _taken_out(places, entries):
            del places[root]
        looks = [stack.enter_context(Look(root, retention=retention_of(config))) for root in places]
        known = {root: entries[real] for root, real in places.items() if real in entries}
        yield Cached(looks, config, devices=known)


@contextmanager
def _told_in_a_sentence(*roots: Path) -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # whoever read our output has gone
        raise
    except OSError as error:
        where = error.filename or ", ".join(map(str, roots))
        raise StoreError(f"{where}: {error.strerror or error}; check the disk, then try again") from error


def looked_at_pool(path: Path, config: CacheConfig) -> Look:
    """Look at a pool. Raises NotThere, FormatMismatch, StoreError where it does not answer."""
    _answering([path])
    return Look(path, retention=retention_of(config), pool=True, sealing=sealing_of(config))


def _taken_out(places: Mapping[Path, Path], entries: Mapping[Path, Entry]) -> list[Path]:
    """Return the configured directories that a server leaves out, as they were removed by command; none where that is all."""
    removed = [root for root, real in places.items() if real in entries and entries[real].state == "removed"]
    if len(removed) == len(places):
        return []
    for root in removed:
        click.echo(
            f"{root} was removed from this cache and is left out though cache.directory names it; --directory {root} shows it",
            err=True,
        )
    return removed


def _answering(roots: Iterable[Path]) -> dict[Path, Path]:
    """Return each directory with its real place. Raises StoreError where one does not answer."""
    answers = ask_apart({root: root.resolve for root in roots}, patience_s=_ANSWER_S)
    for root, answer in answers.items():
        if isinstance(answer, Exception):
            raise StoreError(f"cache directory {root} does not answer; check its disk or mount", path=root)
    return {root: answer for root, answer in answers.items() if isinstance(answer, Path)}


def _devices(roots: Sequence[Path]) -> dict[Path, Entry]:
    """Return the devices of the sets that `roots` belong to, by their real place; what is not there is told and left out."""
    entries: dict[Path, Entry] = {}
    for root in roots:
        try:
            entries |= {entry.path: entry for entry in devices_of(root) if entry.id}
        except OSError:
            continue  # looking at it says what is wrong
    found = {}
    for path, real in ask_apart({path: partial(_real_cache, path) for path in entries}, patience_s=_ANSWER_S).items():
        if isinstance(real, Path):
            found[real] = entries[path]
        elif entries[path].state != "removed":
            click.echo(f"device {path} is not there or does not answer; what lies on it is not seen", err=True)
    return found


def _real_cache(path: Path) -> Path | None:
    """Return the real place of a directory in which a cache lies."""
    return path.resolve() if (path / MARKER).exists() else None


@dataclass(frozen=True, slots=True)
class Share:
    """What one directory may hold by configuration, and what the cache may that it is a part of."""

    capacity_bytes: int
    whole_bytes: int


def share_of(config: CacheConfig, root: Path) -> Share:
    """Return what the configuration lets a directory take, of a size that several share its part. Raises StoreError."""
    paths = [root.absolute(), *(entry.path for entry in devices_of(root) if entry.state != "removed")]
    if root.absolute() in config.directories:
        paths += config.directories
    known = {path: room for path, room in zip(paths, rooms_of(paths), strict=True) if room is not None}
    if root.absolute() not in known:
        raise StoreError(f"cache directory {root} does not say how large its disk is; check its disk or mount", path=root)
    shares = dict(zip(known, capacities_of(config, list(known.values())), strict=True))
    return Share(shares[root.absolute()], sum(shares.values()))


def retention_of(config: CacheConfig) -> Retention:
    return Retention.of(config.retention, config.quotas)


def open_tier(root: Path, *, config: CacheConfig, capacity_bytes: int) -> DiskTier:
    """Open a directory as one more writer. What is changed would survive a power loss."""
    try:
        return DiskTier.open(root, capacity_bytes=capacity_bytes, durability="data", retention=retention_of(config))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def open_looked_at(look: Look, config: CacheConfig, *, pinning: bool = False) -> DiskTier:
    """Open a directory to change what is in it. Its capacity is at least what is there, so that opening a cache never costs
    anything in it, whatever capacity its server was given. `pinning` gives no more than that: pins are a part of the
    capacity, and those that its server finds too many hold nothing."""
    configured = share_of(config, look.root).capacity_bytes
    taken = look.charged_bytes + SLACK_BYTES if pinning else look.charged_bytes * 5 // 4 + _ROOM_BYTES
    return open_tier(look.root, config=config, capacity_bytes=max(configured, taken))


def open_pool(look: Look, config: CacheConfig) -> PoolTier:
    """Join a pool as one more writer, to change what is in it; as `open_looked_at`, it costs nothing there. Raises StoreError
    where the configuration says that nothing is changed there from here."""
    if config.pool_read_only:
        raise StoreError(f"cache.pool_read_only is set, so nothing is changed in {look.root} from here", path=look.root)
    total = shutil.disk_usage(look.root).total
    capacity_bytes = parse_size(config.pool_capacity, of_bytes=total)
    return PoolTier.open(
        look.root,
        capacity_bytes=max(capacity_bytes, look.charged_bytes * 5 // 4 + _ROOM_BYTES),
        timing=Timing.where_seen_after(config.pool_visible_s),
        retention=retention_of(config),
        sealing=sealing_of(config),
    )


def is_pinned(info: ExtentInfo, now_ms: int) -> bool:
    return info.pinned_until_ms is not None and info.pinned_until_ms > now_ms


def require_key(key: str) -> None:
    if len(key) < LEAST_DIGITS or set(key.lower()) - set("0123456789abcdef"):
        raise click.BadParameter(f"{key!r} is no key; give at least {LEAST_DIGITS} hex digits, as `ls` shows", param_hint="KEY")


def representation_name(representation: Representation | None, digest: bytes) -> str:
    short = digest.hex()[:8]
    if representation is None:
        return f"unknown@{short}"
    parts = [representation.layout, representation.dtype]
    parts += [part for part in (representation.quantisation, representation.shard) if part not in ("none", "replicated")]
    return f"{' '.join(parts)}@{short}"


def duration_ms(text: str) -> int:
    """Return milliseconds for "90s", "30m", "12h", "7d" or "2w"."""
    number, unit = text[:-1], text[-1:].lower()
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}.get(unit)
    try:
        if seconds is not None and 0 <= float(number) < 1e6:
            return int(float(number) * seconds * 1000)
    except ValueError:
        pass
    raise click.BadParameter(f'{text!r} is no time; write "90s", "30m", "12h", "7d" or "2w"')


def as_tokens(blocks: int) -> int:
    return blocks * BLOCK_TOKENS


def so_many(count: int, one: str, more: str) -> str:
    """Return a count with its words.

    >>> so_many(1, "extent is", "extents are"), so_many(0, "extent is", "extents are")
    ('1 extent is', '0 extents are')
    """
    return f"{count} {one if count == 1 else more}"


def as_bytes(nbytes: int) -> str:
    """Return a size for people.

    >>> as_bytes(1023), as_bytes(3 << 19), as_bytes((1 << 20) - 1)
    ('1023 B', '1.5 MiB', '1.0 MiB')
    """
    size, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while len(units) > 1 and size >= 1023.5:  # which is told as 1024
        size /= 1024
        del units[0]
    unit = units[0]
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def as_age(ms: int) -> str:
    seconds = max(ms, 0) / 1000
    for unit, length in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"


def as_time(ms: int | None) -> str | None:
    """Return a time as ISO 8601 in UTC; None for none, and for one that never comes."""
    if ms is None or ms >= FOREVER_MS:
        return None
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"


def table(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> Iterator[str]:
    """Yield lines of columns, the first row being the headings; `right` names the columns of numbers."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))]
        yield "  ".join(cells).rstrip()
