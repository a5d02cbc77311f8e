"""`export`, `import`, `move`: prefixes on their way to other directories and machines. All is verified before it is written."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.representation import Representation
from headstart.block.whole import examine, part_of
from headstart.cache.prefixes import Spot
from headstart.cli.cache import INCOMPLETE
from headstart.cli.cache.cached import (
    Cached,
    Wanted,
    as_bytes,
    cache_options,
    capacity_of,
    is_pinned,
    looked,
    open_tier,
    representation_name,
    wanted_options,
)
from headstart.cli.progress import OnProgress, shown_progress
from headstart.cli.settings import chosen_config
from headstart.config import CacheConfig, parse_size
from headstart.errors import ExtentCorrupt, NotThere, StoreError, WrongRepresentation
from headstart.tier.base import ExtentId, Terms
from headstart.tier.devices import devices_of, drain_device
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import MARKER
from headstart.tier.disk.exchange import CarriedFile, write_file
from headstart.tier.disk.look import Look
from headstart.tier.disk.scrub import require_same

_SLACK_BYTES = 256 << 10  # that a new segment and a journal take beside an extent
_PATH = click.Path(path_type=Path)


class _Left:
    """Counts what was left out, and what therefore has to be left out behind it."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.extents: set[int] = set()

    def out(self, i: int, reason: str) -> None:
        self.reasons[reason] += 1
        self.extents.add(i)


@click.command()
@click.argument("keys", metavar="[KEY...]", nargs=-1)
@click.argument("file", type=_PATH)
@cache_options
@wanted_options
@click.option("--all", "everything", is_flag=True, help="every prefix")
def export(
    keys: tuple[str, ...],
    file: Path,
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    everything: bool,
    **options: Any,
) -> int:
    """Write the prefixes that end with the blocks KEY, or all that fit the options, into FILE, which must not be there yet. It
    holds token ids and so is as confidential as the prompts."""
    wanted = Wanted(**options)
    filters = wanted.given and wanted != Wanted(representation=wanted.representation)
    if bool(keys) + (everything or filters) != 1:
        raise click.UsageError("say what to export: either keys, or options such as --tenant, or --all")
    with looked(directories, config_file) as cached:
        if keys:
            spots = [spot for key in keys for spot in cached.named(key, representation=wanted.representation)]
        else:
            spots = [prefix.spot for prefix in cached.chosen(wanted)]
        if not spots:
            raise NotThere("no stored prefix fits; `headstart cache ls` lists what is there")
        layout = _one_representation(cached, spots)
        needed: Counter[int] = Counter()
        for spot in spots:
            chain = cached.prefixes.chain(spot)
            for i, blocks in zip(chain, cached.prefixes.used_blocks(chain, spot), strict=True):
                needed[i] = max(needed[i], blocks)
        left = _Left()
        with shown_progress() as on_progress:
            images = _images(cached, layout, needed, left, on_progress)
            nbytes = write_file(file, layout, images, now_ms=cached.now_ms)
    facts = {
        "file": str(file),
        "bytes": nbytes,
        "prefixes": len(spots),
        "extents": len(needed) - len(left.extents),
        "left_out": dict(left.reasons),
        "representation": representation_name(layout, layout.digest),
    }
    _say(facts, as_json, f"{facts['extents']} extents of {len(spots)} prefixes, {as_bytes(nbytes)}, are in {file}")
    return INCOMPLETE if left.extents else 0


def _one_representation(cached: Cached, spots: Sequence[Spot]) -> Representation:
    digests = {cached.extents[spot.extent].representation for spot in spots}
    if len(digests) > 1:
        names = ", ".join(sorted(map(cached.name_of, digests)))
        raise WrongRepresentation(f"a file holds one representation, these prefixes have {names}; choose with --representation")
    (digest,) = digests
    layout = cached.representation(digest)
    if layout is None:
        raise StoreError(f"no journal says how {digest.hex()[:8]} is laid down; run `headstart cache verify`", digest=digest)
    return layout


def _images(
    cached: Cached, layout: Representation, needed: Counter[int], left: _Left, on_progress: OnProgress
) -> Iterator[memoryview]:
    """Yield the images of extents, each behind the one that it runs on from, cut behind the last block that is needed."""
    for n, i in enumerate(cached.prefixes.order(needed)):
        on_progress("exporting", n / len(needed))
        if int(cached.prefixes.parents[i]) in left.extents:
            left.out(i, "what it runs on from was left out")
            continue
        verified = _verified(cached, i, layout, left)
        if verified is None:
            continue
        image, header = verified
        pieces = -(-needed[i] // layout.blocks_per_piece)
        if pieces * layout.blocks_per_piece < len(header.keys) and layout.state == "none":
            image = part_of(image, header, layout, first_piece=0, pieces=pieces)
        yield image


def _verified(cached: Cached, i: int, layout: Representation, left: _Left) -> tuple[memoryview, ExtentHeader] | None:
    """Return an extent's image if all of it is right."""
    look, info = cached.look_of[i], cached.extents[i]
    try:
        image = look.read(info.id)
        if image is None:
            left.out(i, "removed meanwhile")
            return None
        header = examine(image, layout)
        require_same(header, info)
    except ExtentCorrupt:
        left.out(i, "damaged; `headstart cache verify` drops it")
    except (OSError, StoreError):
        left.out(i, "not readable")
    else:
        return image, header
    return None


@click.command("import")
@click.argument("file", type=_PATH)
@cache_options
@click.option("--tenant", metavar="NAME", default="", help="whose the prefixes are from now on  [default: nobody's]")
@click.option("--capacity", metavar="SIZE", help="that the cache may have  [default: cache.capacity]")
@click.option("--any-representation", is_flag=True, help="also one that nothing in the cache has")
@click.option("--dry-run", is_flag=True, help="only verify the file, and tell what is in it")
def import_(
    file: Path,
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    tenant: str,
    capacity: str | None,
    any_representation: bool,
    dry_run: bool,
) -> int:
    """Take in the prefixes that `export` wrote into FILE. Everything in it is verified before anything is written. What does
    not fit beside what is there is left out: make room first with `gc --to`."""
    with CarriedFile(file) as carried, shown_progress() as on_progress:
        extents = blocks = done = 0
        for one in carried.extents():
            extents, blocks, done = extents + 1, blocks + len(one.header.keys), done + one.image.nbytes
            on_progress("verifying", done / carried.size)
        name = representation_name(carried.representation, carried.representation.digest)
        facts: dict[str, Any] = {
            "file": str(file),
            "dry_run": dry_run,
            "representation": name,
            "extents": extents,
            "blocks": blocks,
            "stored": 0,
            "present": 0,
            "left_out": {},
        }
        if dry_run:
            _say(facts, as_json, f"{file} is right: {extents} extents of {blocks} blocks, {name}")
            return 0
        with _target(directories, config_file, capacity) as (tier, root):
            if not any_representation:
                _require_served(tier, carried.representation, root)
            left = _Left()
            writer = _Writer(tier, root, left)
            for n, one in enumerate(carried.extents()):
                on_progress("writing", n / max(extents, 1))
                terms = Terms(retention=one.header.retention, tenant=tenant)
                writer.write(n, one.image, one.header, carried.representation, terms)
    facts |= {"stored": writer.stored, "present": writer.present, "left_out": dict(left.reasons)}
    _say(facts, as_json, f"{writer.stored} of {extents} extents were stored in {root}, {writer.present} were there already")
    return INCOMPLETE if left.extents else 0


class _Writer:
    """Writes verified extents into a tier, as long as nothing there has to give way, never one whose beginning is missing."""

    def __init__(self, tier: DiskTier, root: Path, left: _Left) -> None:
        self.stored = 0
        self.present = 0
        self._tier = tier
        self._root = root
        self._left = left
        self._ends: dict[bytes, int] = {}  # key → how many blocks lie up to it
        self._missing: set[bytes] = set()  # keys that were to be written and were not

    def write(self, i: int, image: memoryview, header: ExtentHeader, layout: Representation, terms: Terms) -> bool:
        """Write one extent, in parts where it is too large for the tier. False: at least a part of it is not there."""
        position = self._ends.get(header.parent, 0)
        for n, key in enumerate(header.keys, start=position + 1):
            self._ends[key] = n
        reason = "what it runs on from was left out" if header.parent in self._missing else ""
        outcomes: set[str] = set()
        if not reason:
            for part, before in self._parts(image, header, layout):
                reason = self._write(part, layout, terms, position + before, outcomes)
                if reason:
                    break
        if reason:
            self._left.out(i, reason)
            self._missing.update(header.keys)
            return False
        self.stored += "written" in outcomes
        self.present += "written" not in outcomes
        return True

    def _write(self, image: memoryview, layout: Representation, terms: Terms, position: int, outcomes: set[str]) -> str:
        """Write one image; returns why it is not there."""
        numbers = self._tier.statistics()
        free = shutil.disk_usage(self._root).free
        room = min(numbers.capacity_bytes - numbers.allocated_bytes, free)
        keys = _keys_of(image, layout)
        if (self._tier.locate(layout.digest, keys).extents < 0).any() and image.nbytes + _SLACK_BYTES > room:
            return "no room; let something go with `headstart cache gc --to`"
        outcome = self._tier.write(image, layout, terms=terms, position=position)
        outcomes.add(outcome.reason)
        return "" if outcome.stored else outcome.reason

    def _parts(self, image: memoryview, header: ExtentHeader, layout: Representation) -> Iterator[tuple[memoryview, int]]:
        """Yield images that the tier can take, and how many blocks of the extent come before each."""
        largest = self._tier.max_extent_bytes(layout)
        pieces = len(header.keys) // layout.blocks_per_piece
        if image.nbytes <= largest or layout.state == "required" or pieces == 1:
            yield image, 0
            return
        step = max(1, pieces * largest // image.nbytes * 9 // 10)  # padding weighs more in a shorter one
        for first in range(0, pieces, step):
            count = min(step, pieces - first)
            yield part_of(image, header, layout, first_piece=first, pieces=count), first * layout.blocks_per_piece


def _keys_of(image: memoryview, layout: Representation) -> list[bytes]:
    return list(decode_header(image, layout).keys)


def _require_served(tier: DiskTier, layout: Representation, root: Path) -> None:
    """Refuse what nobody on this directory could read."""
    served = {info.representation for info in tier.scan()}
    if served and layout.digest not in served:
        names = ", ".join(sorted(representation_name(tier.representation(digest), digest) for digest in served))
        raise WrongRepresentation(
            f"the file has representation {representation_name(layout, layout.digest)}, {root} serves {names}: "
            "no engine there could read it; give --any-representation if one will"
        )


@contextmanager
def _target(directories: Sequence[Path], config_file: Path | None, capacity: str | None) -> Iterator[tuple[DiskTier, Path]]:
    """Open the directory that is written to: of several the one with most room."""
    config = chosen_config(config_file, {}).cache
    roots = [path.expanduser() for path in directories] or list(config.directories)
    for root in roots:
        _require_directory(root)
    root = max(roots, key=lambda root: shutil.disk_usage(root).free)
    tier = _open_target(root, config, capacity)
    try:
        yield tier, root
    finally:
        tier.close()


def _open_target(root: Path, config: CacheConfig, capacity: str | None) -> DiskTier:
    """Open a directory with its capacity, or with what it takes already: opening it must not cost anything there."""
    total = shutil.disk_usage(root).total
    capacity_bytes = capacity_of(config, root) if capacity is None else parse_size(capacity, of_bytes=total)
    if (root / MARKER).exists():
        with Look(root) as look:
            capacity_bytes = max(capacity_bytes, look.charged_bytes + _SLACK_BYTES)
    return open_tier(root, config=config, capacity_bytes=capacity_bytes)


def _require_directory(root: Path) -> None:
    """Make sure that a directory is there, and either a cache or empty: none is made, and nobody else's is written to."""
    try:
        inside = [path.name for path in root.iterdir()]
    except FileNotFoundError as error:
        raise NotThere(f"there is no directory {root}; make it first, or name another", path=root) from error
    except OSError as error:
        raise StoreError(f"{root} cannot be used: {error.strerror}; name another directory", path=root) from error
    if inside and MARKER not in inside:
        raise StoreError(f"{root} is no cache and not empty; name an empty directory or a cache", path=root)


@click.command()
@click.argument("source", type=_PATH)
@click.argument("destination", type=_PATH)
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=_PATH, help="TOML file with the server's settings")
@wanted_options
@click.option("--capacity", metavar="SIZE", help="that the destination may have  [default: cache.capacity]")
@click.option("--dry-run", is_flag=True, help="only tell what would be moved")
def move(
    source: Path,
    destination: Path,
    as_json: bool,
    config_file: Path | None,
    capacity: str | None,
    dry_run: bool,
    **options: Any,
) -> int:
    """Move the prefixes in the cache directory SOURCE, all or those that fit the options, to DESTINATION, with class, tenant,
    pins and order of use. Each is verified, written, and only then removed from SOURCE; what others there need stays as well.
    A server must know both directories, or it will not find them any more; where they are devices of one cache and all of
    SOURCE moves, nothing new goes to it from then on."""
    _require_directory(destination)
    with looked([source], config_file, alone=True) as cached:
        if source.resolve() == destination.resolve():
            raise click.UsageError("SOURCE and DESTINATION are the same directory")
        wanted_ones = Wanted(**options)
        ends = {prefix.spot.extent for prefix in cached.chosen(wanted_ones)}
        wanted = cached.prefixes.order({i for end in ends for i in cached.prefixes.chain(Spot(end, 0))})
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
            _say(facts, as_json, f"{len(ends)} prefixes would move: {len(wanted)} extents, {as_bytes(nbytes)}")
            return 0
        left = _Left()
        if not wanted_ones.given:
            _drain(source, destination)
        tier = _open_target(destination, cached.config, capacity)
        try:
            writer = _copy(cached, wanted, tier, destination, left)
        finally:
            tier.close()
        kept = {i for out in left.extents for i in cached.prefixes.chain(Spot(out, 0))}
        going = [i for i in cached.prefixes.only_for(ends) if i not in kept]
        removed = 0
        with cached.opened(going) as found:
            for here, some in found:
                removed += here.delete([info.id for info in some.values()], reason="moved")
    facts |= {"stored": writer.stored, "present": writer.present, "removed": removed, "left_out": dict(left.reasons)}
    _say(
        facts,
        as_json,
        f"{writer.stored + writer.present} of {len(wanted)} extents are in {destination}, {removed} left {source}",
    )
    return INCOMPLETE if left.extents or removed < len(going) else 0


def _drain(source: Path, destination: Path) -> None:
    """Where both are devices of one set, let nothing new go to the one that is to be emptied."""
    states = {entry.path: entry.state for entry in devices_of(destination)}
    if states.get(source.absolute()) == "active" and states.get(destination.absolute()) == "active":
        drain_device(destination, source)
        click.echo(f"nothing new goes to {source} any more", err=True)


def _copy(cached: Cached, wanted: Sequence[int], tier: DiskTier, root: Path, left: _Left) -> _Writer:
    """Write extents into a tier, with pins and order of use."""
    writer = _Writer(tier, root, left)
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
            verified = _verified(cached, i, layout, left)
            if verified is None:
                continue
            image, header = verified
            if writer.write(i, image, header, layout, Terms(retention=info.retention, tenant=info.tenant)):
                ids = dict.fromkeys(tier.locate(info.representation, header.keys).extents.tolist())
                there += [(info.last_used, ExtentId(one)) for one in ids if one >= 0]
                if is_pinned(info, cached.now_ms):
                    tier.pin([ExtentId(one) for one in ids if one >= 0], until_ms=info.pinned_until_ms)
    tier.touch([extent for _, extent in sorted(there, reverse=True)])
    return writer


def _say(facts: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(sentence)
    for reason, count in facts["left_out"].items():
        click.echo(f"{count} extents were left out: {reason}", err=True)
