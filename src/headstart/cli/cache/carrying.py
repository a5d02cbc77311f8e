"""`export` and `import`: prefixes on their way to other machines. All is verified before it is written."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from headstart.block.representation import Representation
from headstart.block.whole import part_of
from headstart.cache.prefixes import Spot
from headstart.cli.cache import INCOMPLETE
from headstart.cli.cache.arriving import Left, Writer, open_target, require_directory, require_served, say, verified_image
from headstart.cli.cache.cached import (
    Cached,
    Wanted,
    as_bytes,
    looked,
    representation_name,
    so_many,
)
from headstart.cli.progress import OnProgress, shown_progress
from headstart.cli.settings import chosen_config
from headstart.config import CacheConfig
from headstart.errors import NotThere, StoreError, WrongRepresentation
from headstart.tier.base import Terms
from headstart.tier.devices import devices_of
from headstart.tier.disk import DiskTier
from headstart.tier.disk.exchange import CarriedFile, write_file


def export(
    keys: tuple[str, ...],
    file: Path,
    directories: tuple[Path, ...],
    config_file: Path | None,
    as_json: bool,
    pool: Path | None,
    everything: bool,
    **options: Any,
) -> int:
    wanted = Wanted(**options)
    filters = wanted.given and wanted != Wanted(representation=wanted.representation)
    if bool(keys) + (everything or filters) != 1:
        raise click.UsageError("say what to export: either keys, or options such as --tenant, or --all")
    with looked(directories, config_file, pool=pool) as cached:
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
        needed.update(dict.fromkeys(cached.prefixes.states_of(needed) - needed.keys(), 0))
        left = Left()
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
    count = so_many(len(needed) - len(left.extents), "extent", "extents")
    prefixes = so_many(len(spots), "prefix", "prefixes")
    say(facts, as_json, f"{file} holds {count} of {prefixes}, {as_bytes(nbytes)}")
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
    cached: Cached, layout: Representation, needed: Counter[int], left: Left, on_progress: OnProgress
) -> Iterator[memoryview]:
    """Yield the images of extents, each behind the one that it runs on from, cut behind the last block that is needed."""
    for n, i in enumerate(cached.prefixes.order(needed)):
        on_progress("exporting", n / len(needed))
        if int(cached.prefixes.parents[i]) in left.extents:
            left.out(i, "what it runs on from was left out")
            continue
        verified = verified_image(cached, i, layout, left)
        if verified is None:
            continue
        image, header = verified
        pieces = -(-needed[i] // layout.blocks_per_piece)
        if pieces * layout.blocks_per_piece < len(header.keys) and layout.state == "none":
            image = part_of(image, header, layout, first_piece=0, pieces=pieces)
        yield image


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
    try:
        Terms(tenant=tenant)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--tenant") from error
    config = chosen_config(config_file, {}).cache
    roots = [path.expanduser() for path in directories] or list(config.directories)
    for root in [] if dry_run else roots:  # before a large file is read for nothing
        require_directory(root)
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
            holds = f"{so_many(extents, 'extent', 'extents')} of {so_many(blocks, 'block', 'blocks')}"
            say(facts, as_json, f"{file} is right: {holds}, {name}")
            return 0
        with _target(roots, config, capacity) as (tier, root):
            if not any_representation:
                require_served(tier, carried.representation, root, others=roots)
            left = Left()
            writer = Writer(tier, root, left, config)
            for n, one in enumerate(carried.extents()):
                on_progress("writing", n / max(extents, 1))
                terms = Terms(retention=one.header.retention, tenant=tenant)
                writer.write(n, one.image, one.header, carried.representation, terms)
    facts |= {"stored": writer.stored, "present": writer.present, "left_out": dict(left.reasons)}
    stored = so_many(extents, "extent", "extents")
    say(facts, as_json, f"{root} took {writer.stored} of {stored}, and had {writer.present} already")
    return INCOMPLETE if left.extents else 0


@contextmanager
def _target(roots: Sequence[Path], config: CacheConfig, capacity: str | None) -> Iterator[tuple[DiskTier, Path]]:
    """Open the directory that is written to: of several the one with most room, but none that is to be emptied."""
    taking = [root for root in roots if _takes_more(root)]
    if not taking:
        raise StoreError(f"{', '.join(map(str, roots))}: nothing new goes there, it is being drained; name another directory")
    root = max(taking, key=lambda root: shutil.disk_usage(root).free)
    tier = open_target(root, config, capacity)
    try:
        yield tier, root
    finally:
        tier.close()


def _takes_more(root: Path) -> bool:
    return all(entry.state == "active" for entry in devices_of(root) if entry.path == root.absolute())
