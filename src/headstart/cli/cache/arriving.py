"""What prefixes that come to a directory have in common: verified before they are written, and nothing gives way to them."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.representation import Representation
from headstart.block.whole import examine, unkeyed
from headstart.cache.moving import parts_of
from headstart.cli.cache.cached import SLACK_BYTES, Cached, open_tier, representation_name, retention_of, share_of, so_many
from headstart.config import CacheConfig, parse_size
from headstart.errors import ExtentCorrupt, NotThere, StoreError, WrongRepresentation
from headstart.tier.base import Terms
from headstart.tier.disk import DiskTier
from headstart.tier.disk.directory import MARKER
from headstart.tier.disk.look import Look
from headstart.tier.disk.scrub import require_same


class Writer:
    """Writes verified extents into a tier, as long as nothing there has to give way, never one whose beginning is missing."""

    def __init__(self, tier: DiskTier, root: Path, left: Left, config: CacheConfig) -> None:
        self.stored = 0
        self.present = 0
        self._tier = tier
        self._root = root
        self._left = left
        self._retention = retention_of(config)
        self._share = share_of(config, root)
        self._min_free_bytes = parse_size(config.min_free, of_bytes=shutil.disk_usage(root).total)
        self._missing: set[bytes] = set()  # keys that were to be written and were not

    def write(self, i: int, image: memoryview, header: ExtentHeader, layout: Representation, terms: Terms) -> bool:
        """Write one extent, in parts where it is too large for the tier. False: at least a part of it is not there."""
        reason = "what it runs on from was left out" if header.parent in self._missing else ""
        outcomes: set[str] = set()
        if not reason:
            for part in parts_of(image, header, layout, most_bytes=self._tier.max_extent_bytes(layout)):
                reason = self._write(part, layout, terms, outcomes)
                if reason:
                    break
        if reason:
            self._left.out(i, reason)
            self._missing.update(header.keys)
            return False
        self.stored += "written" in outcomes
        self.present += "written" not in outcomes
        return True

    def _write(self, image: memoryview, layout: Representation, terms: Terms, outcomes: set[str]) -> str:
        """Write one image; returns why it is not there."""
        numbers = self._tier.statistics()
        free = shutil.disk_usage(self._root).free - self._min_free_bytes
        room = min(numbers.capacity_bytes - numbers.allocated_bytes, free)
        quota = self._retention.quota_bytes(
            terms.tenant, capacity_bytes=self._share.capacity_bytes, whole_bytes=self._share.whole_bytes
        )
        header = decode_header(image, layout)
        missing = not self._tier.locate(layout.digest, header.keys).holds(state=header.state_bytes > 0)
        if missing and image.nbytes + SLACK_BYTES > room:
            return "no room; let something go with `headstart cache gc --to`, or lower cache.min_free"
        if missing and quota is not None and numbers.live_bytes_by_tenant.get(terms.tenant, 0) + image.nbytes > quota:
            return "more than the tenant's quota; raise it in cache.quotas"
        outcome = self._tier.write(image, layout, terms=terms)
        outcomes.add(outcome.reason)
        return "" if outcome.stored else outcome.reason


class Left:
    """Counts what was left out, and what therefore has to be left out behind it."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        self.extents: set[int] = set()

    def out(self, i: int, reason: str) -> None:
        self.reasons[reason] += 1
        self.extents.add(i)


def verified_image(cached: Cached, i: int, layout: Representation, left: Left) -> tuple[memoryview, ExtentHeader] | None:
    """Return an extent's image if all of it is right, with checks that need no key."""
    look, info = cached.look_of[i], cached.extents[i]
    if info.check_key not in look.sealing.key_ids:
        left.out(i, "written with another key; give its file as cache.check_key_file")
        return None
    try:
        image = look.read(info.id)
        if image is None:
            left.out(i, "removed meanwhile")
            return None
        header = examine(image, layout, look.sealing)
        require_same(header, info)
        header = unkeyed(image, header, layout)
    except ExtentCorrupt:
        left.out(i, "damaged; `headstart cache verify` drops it")
    except (OSError, StoreError):
        left.out(i, "not readable")
    else:
        return image, header
    return None


def require_served(tier: DiskTier, layout: Representation, root: Path, *, others: Sequence[Path]) -> None:
    """Refuse what nobody on this cache could read. `others`: directories that belong to it as well."""
    served = {info.representation: tier.representation(info.representation) for info in tier.scan()}
    if layout.digest not in served:
        for other in (path for path in others if path != root and (path / MARKER).exists()):
            with Look(other) as look:
                served |= {info.representation: look.representation(info.representation) for info in look.extents()}
    if served and layout.digest not in served:
        names = ", ".join(sorted(representation_name(found, digest) for digest, found in served.items()))
        raise WrongRepresentation(
            f"the file has representation {representation_name(layout, layout.digest)}, {root} serves {names}: "
            "no engine there could read it; give --any-representation if one will"
        )


def open_target(root: Path, config: CacheConfig, capacity: str | None) -> DiskTier:
    """Open a directory with its capacity, or with what it takes already: opening it must not cost anything there."""
    total = shutil.disk_usage(root).total
    capacity_bytes = share_of(config, root).capacity_bytes if capacity is None else parse_size(capacity, of_bytes=total)
    if (root / MARKER).exists():
        with Look(root) as look:
            capacity_bytes = max(capacity_bytes, look.charged_bytes + SLACK_BYTES)
    return open_tier(root, config=config, capacity_bytes=capacity_bytes)


def require_directory(root: Path) -> None:
    """Make sure that a directory is there, and either a cache or empty: none is made, and nobody else's is written to."""
    try:
        inside = [path.name for path in root.iterdir()]
    except FileNotFoundError as error:
        raise NotThere(f"there is no directory {root}; make it first, or name another", path=root) from error
    except OSError as error:
        raise StoreError(f"{root} cannot be used: {error.strerror}; name another directory", path=root) from error
    if inside and MARKER not in inside:
        raise StoreError(f"{root} is no cache and not empty; name an empty directory or a cache", path=root)


def say(facts: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(sentence)
    for reason, count in facts["left_out"].items():
        click.echo(f"{so_many(count, 'extent was', 'extents were')} left out: {reason}", err=True)
