"""Extents from one tier to another.

    bring:   read under a lease ─▶ verify every piece ─▶ written there, for good
    let_go:  is it there? ─▶ its promises written down ─▶ removed here

So at every moment an extent is found in one of the two. Whoever dies between them leaves it in both; it is then found there
already, and only let go here. Between processes on one directory one at a time moves out of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from headstart.block.extent import ExtentHeader
from headstart.block.representation import Representation
from headstart.block.whole import aligned, examine, part_of, unkeyed
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.base import MOVED, ExtentId, ExtentInfo, ReadRange, Terms, Tier, WriteOutcome

AT_ONCE, BATCH_BYTES = 64, 64 << 20  # extents that are moved together
_PART_BYTES = 8 << 20


@runtime_checkable
class MovedTier(Tier, Protocol):
    """A tier that several processes may move extents out of."""

    def moving(self) -> AbstractContextManager[bool]:
        """Keep other processes from moving anything out of the tier; False where one is at it now. Raises OSError."""
        ...


@runtime_checkable
class BatchedTier(Tier, Protocol):
    """A tier that writes several extents at a small part of the cost of one after the other."""

    def write_all(
        self, images: Sequence[memoryview], representation: Representation, *, terms: Sequence[Terms]
    ) -> list[WriteOutcome]:
        """As `write` for each. Where one is not stored, none behind it is tried or told of."""
        ...


@runtime_checkable
class SettledTier(Tier, Protocol):
    """A tier that promises in memory first and writes that down now and then."""

    def settle(self) -> None:
        """Return when all that was promised is written down. Raises StoreError, OSError where it is not."""
        ...


def moving_out(source: Tier) -> AbstractContextManager[bool]:
    """Be the only one who moves extents out of a tier, as far as it can tell; False where another one is at it."""
    return source.moving() if isinstance(source, MovedTier) else nullcontext(True)


@dataclass(frozen=True, slots=True)
class Brought:
    """What became of an extent. `there`: it is in the target now. `reason`: "written", "present"; or why it is not: "gone",
    "corrupt", "unreadable", "key" (its checks were made with one that is not known here), or in the target's words. `nbytes`:
    written there."""

    there: bool
    reason: str
    nbytes: int = 0


def next_batch(
    ids: Sequence[int], source: Tier, *, may: Callable[[ExtentInfo], bool] = lambda info: True
) -> tuple[int, list[ExtentInfo]]:
    """Return how many of `ids`, from the first on, to deal with now, and what is known of those that are there and `may` be
    moved: of one representation, and no more than is good to have in memory. Raises StoreError, OSError."""
    infos: list[ExtentInfo] = []
    nbytes = 0
    for looked_at, one in enumerate(ids[:AT_ONCE]):
        info = source.info(ExtentId(one))
        if info is None or not may(info):
            continue
        nbytes += info.extent_bytes
        if infos and (infos[0].representation != info.representation or nbytes > BATCH_BYTES):
            return looked_at, infos
        infos.append(info)
    return min(len(ids), AT_ONCE), infos


def bring(
    infos: Sequence[ExtentInfo],
    source: Tier,
    target: Tier,
    representation: Representation,
    *,
    now_ms: int,
    on_bytes: Callable[[int], None] = lambda nbytes: None,
) -> list[Brought]:
    """Have extents of one representation in `target` as well, on the terms that they have in `source`; all are in memory at
    once. What comes back may be shorter: where the target does not take one, those behind are not tried. `on_bytes` is told
    before an extent of so many bytes is read, and may take its time. What is corrupt is told, not removed. Raises StoreError,
    OSError where the target fails."""
    outcomes: list[Brought | None] = []
    images: list[memoryview] = []
    terms: list[Terms] = []
    parts: list[int] = []  # of each extent that is written
    for info in infos:
        its = Terms(info.retention, info.tenant, keep_s=max(0, info.guaranteed_until_ms - now_ms) / 1000)
        there = target.locate(info.representation, info.keys)
        if there.holds(state=info.state):
            target.keep(there.ids(), its)
            outcomes.append(Brought(True, "present"))
            continue
        found = _read(source, target, info, representation, on_bytes)
        if isinstance(found, str):
            outcomes.append(Brought(False, found))
            continue
        cut = list(parts_of(*found, representation, most_bytes=target.max_extent_bytes(representation)))
        images += cut
        terms += [its] * len(cut)
        parts.append(len(cut))
        outcomes.append(None)
    written = iter(_written(target, representation, images, terms, parts))
    brought: list[Brought] = []
    for one in outcomes:
        if one is None and (one := next(written, None)) is None:
            break
        brought.append(one)
    return brought


def _written(
    target: Tier,
    representation: Representation,
    images: Sequence[memoryview],
    terms: Sequence[Terms],
    parts: Sequence[int],
) -> Iterator[Brought]:
    """Write images, of which so many each make up an extent; yield what became of extents up to one that is not stored."""
    outcomes: list[WriteOutcome] = []
    if len(images) > 1 and isinstance(target, BatchedTier):
        outcomes = target.write_all(images, representation, terms=terms)
    else:
        for image, its in zip(images, terms, strict=True):
            outcomes.append(target.write(image, representation, terms=its))
            if not outcomes[-1].stored:
                break
    at = 0
    for count in parts:
        mine = outcomes[at : at + count]
        nbytes = sum(i.nbytes for i, o in zip(images[at : at + count], mine, strict=False) if o.reason == "written")
        at += count
        if len(mine) == count and mine[-1].stored:
            yield Brought(True, "written", nbytes)
        elif mine:
            yield Brought(False, mine[-1].reason, nbytes)
            return
        else:
            return


def let_go(infos: Sequence[ExtentInfo], source: Tier, target: Tier, *, with_pins: bool = False) -> list[ExtentId]:
    """Remove extents that were brought to `target`; returns those that went. What is not there now stays, and so does what
    somebody reads. `with_pins`: a pin goes along; else what is pinned stays. Raises StoreError, OSError."""
    going = []
    for info in infos:
        there = target.locate(info.representation, info.keys)
        if not there.holds(state=info.state):
            continue
        if info.pinned_until_ms is not None:
            if not with_pins or not all(target.pin(there.ids(), until_ms=info.pinned_until_ms)):
                continue
            source.unpin([info.id])
        going.append(info.id)
    if going and isinstance(target, SettledTier):
        target.settle()  # what is promised here goes with the record
    source.delete(going, reason=MOVED)
    return [extent for extent in going if source.info(extent) is None]


def parts_of(
    image: memoryview, header: ExtentHeader, representation: Representation, *, most_bytes: int
) -> Iterator[memoryview]:
    """Yield an examined image, in several where it is larger than a tier takes; where it cannot be cut, as it is."""
    pieces = len(header.keys) // representation.blocks_per_piece
    if image.nbytes <= most_bytes or representation.state == "required" or pieces == 1:
        yield image
        return
    step = max(1, pieces * most_bytes // image.nbytes * 9 // 10)  # padding weighs more in a shorter one
    for first in range(0, pieces, step):
        yield part_of(image, header, representation, first_piece=first, pieces=min(step, pieces - first))


def _read(
    source: Tier, target: Tier, info: ExtentInfo, representation: Representation, on_bytes: Callable[[int], None]
) -> tuple[memoryview, ExtentHeader] | str:
    """Return an extent's image, all of it verified, with checks that the target takes; or why not."""
    if info.check_key not in source.sealing.key_ids:
        return "key"
    on_bytes(info.extent_bytes)  # before the lease, which may end with time
    try:
        if source.lease([info.id]) != [True]:
            return "gone"
        try:
            image = aligned(info.extent_bytes)
            for at in range(0, info.extent_bytes, _PART_BYTES):
                source.read([ReadRange(info.id, at, [image[at : at + _PART_BYTES]])])
        finally:
            source.release([info.id])
        header = examine(image, representation, source.sealing)
        if header.algorithm not in target.sealing.at_the_door().algorithms:
            header = unkeyed(image, header, representation)
    except ExtentCorrupt:
        return "corrupt"
    except (StoreError, OSError):
        return "unreadable"
    known = len(info.keys[0]) if info.keys else 0
    if [key[:known] for key in header.keys] != list(info.keys):
        return "corrupt"
    return image, header
