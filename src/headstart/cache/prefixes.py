"""Extents seen as what people think of: prefixes. Which run on which, what one prefix takes, what goes with it. Pure.

    root ── E1 [a b c d] ─┬─ E2 [e f]         two prefixes, named by their last blocks: f (6 blocks) and y (4 blocks)
                 └────────│─ E3 [x y]         E1 is shared; what only f uses is E2, what only y uses is E3
                          └ behind d          …behind b

A prefix is named by the key of its last block. The extent before another one is found by its parent's key, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.tier.base import ExtentInfo
from headstart.tier.columns import ExtentColumns
from headstart.tier.index import PREFIX_BYTES

NONE = -1


@dataclass(frozen=True, slots=True)
class Spot:
    """One block: which extent (by its place in the list) and the block's position in it."""

    extent: int
    position: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """`nbytes`: of all extents that it lies in; `own_bytes`: of those that no other prefix needs."""

    spot: Spot
    key: bytes  # its first 16 bytes
    blocks: int
    nbytes: int
    own_bytes: int
    info: ExtentInfo  # of the extent with its last block


class Prefixes:
    """The forest that a list of extents is. They may lie in several directories; several representations stay apart.

    A million blocks take a second. Of `extents` only those are looked at that end a prefix which somebody asks for."""

    def __init__(self, columns: ExtentColumns, extents: Sequence[ExtentInfo]) -> None:
        self.extents = extents
        self._columns = columns
        n = len(columns)
        self._before = np.full(n, NONE, np.int64)  # the extent that holds the block before the first
        self._before_position = np.zeros(n, np.int64)
        self._hidden = np.zeros(n, np.bool_)  # its last block is found elsewhere, so nothing runs on from it
        self._stem = np.full(n, NONE, np.int64)  # of a hidden or inner extent: which other one has its last block
        self._inner = np.zeros(n, np.bool_)  # its last block lies inside another extent
        for number in range(len(columns.representations)):
            self._join(np.flatnonzero(columns.representation == number))
        self._order = self._parents_first()
        # Lists and not arrays: they are gone through one by one.
        parents, positions = self._before.tolist(), self._before_position.tolist()
        blocks, nbytes = columns.blocks.tolist(), columns.nbytes.tolist()
        self._blocks_before, self._bytes_before, self._own = [0] * n, [0] * n, [0] * n
        continued = [False] * n  # behind its last block
        for i in self._order:
            before = parents[i]
            if before != NONE:
                self._blocks_before[i] = self._blocks_before[before] + positions[i] + 1
                self._bytes_before[i] = self._bytes_before[before] + nbytes[before]
                continued[before] = continued[before] or positions[i] == blocks[before] - 1
        self._leaf = ~np.array(continued, np.bool_) & ~self._hidden & ~self._inner
        self._leaves_below = self._summed_up(self._leaf)
        leaves_below = self._leaves_below.tolist()
        for i in self._order:  # an extent that one prefix alone needs is that prefix's own; its own ones end the chain
            if leaves_below[i] == 1:
                self._own[i] = nbytes[i] + (self._own[parents[i]] if parents[i] != NONE else 0)

    @classmethod
    def of(cls, extents: Sequence[ExtentInfo]) -> Prefixes:
        return cls(ExtentColumns.of(extents), extents)

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """The extents that end a prefix which no other one continues."""
        return np.flatnonzero(self._leaf)

    def all(self) -> list[Prefix]:
        """Return every prefix that no other one continues."""
        return [self.at(Spot(i, self.extents[i].blocks - 1)) for i in self.ends.tolist()]

    def at(self, spot: Spot) -> Prefix:
        """Return the prefix that ends with a block, whether or not others continue it."""
        i, info = spot.extent, self.extents[spot.extent]
        ends = self._leaf[i] and spot.position == info.blocks - 1
        return Prefix(
            spot=spot,
            key=info.keys[spot.position][:PREFIX_BYTES],
            blocks=self._blocks_before[i] + spot.position + 1,
            nbytes=self._bytes_before[i] + info.extent_bytes,
            own_bytes=self._own[i] if ends else 0,
            info=info,
        )

    @property
    def parents(self) -> npt.NDArray[np.int64]:
        """Which extent each one runs on from, -1 where none is there."""
        return self._before

    def find(self, digits: str) -> dict[bytes, list[Spot]]:
        """Return the blocks whose key begins with these hex digits, by key; of equal keys in several representations all."""
        digits = digits.lower()[: 2 * PREFIX_BYTES]
        whole = np.frombuffer(bytes.fromhex(digits[: len(digits) // 2 * 2]), np.uint8)
        keys, columns = self._columns.keys, self._columns
        fits = (keys[:, : len(whole)] == whole).all(axis=1)
        if len(digits) % 2:
            fits &= keys[:, len(whole)] >> 4 == int(digits[-1], 16)
        rows = np.flatnonzero(fits)
        ends = columns.ends
        owners = np.searchsorted(ends, rows, side="right")
        found: dict[bytes, dict[int, Spot]] = {}
        for row, i in zip(rows.tolist(), owners.tolist(), strict=True):
            spots, representation = found.setdefault(keys[row].tobytes(), {}), int(columns.representation[i])
            if representation not in spots or not self._hidden[i]:
                spots[representation] = Spot(i, row - int(ends[i]) + int(columns.blocks[i]))
        return {key: list(spots.values()) for key, spots in found.items()}

    def chain(self, spot: Spot) -> list[int]:
        """Return the extents that hold a prefix, the first blocks first."""
        chain = [spot.extent]
        while (before := int(self._before[chain[-1]])) != NONE:
            chain.append(before)
        return chain[::-1]

    def used_blocks(self, chain: Sequence[int], spot: Spot) -> list[int]:
        """Return how many blocks of each extent of a chain belong to the prefix that ends at `spot`."""
        return [int(self._before_position[follower]) + 1 for follower in chain[1:]] + [spot.position + 1]

    def continuing(self, spot: Spot) -> set[int]:
        """Return the extents that end the prefixes which go through a block."""
        within = np.zeros(len(self._columns), np.bool_)
        for i in self._order:
            before = int(self._before[i])
            if before != NONE and (within[before] or (before == spot.extent and self._before_position[i] >= spot.position)):
                within[i] = True
        found = set(np.flatnonzero(within & self._leaf).tolist())
        return found | ({spot.extent} if self._leaf[spot.extent] or not found else set())

    def only_for(self, ends: Collection[int]) -> list[int]:
        """Return the extents that are needed for no prefix but those that end with `ends`, the last blocks first. Extents whose
        blocks are all found elsewhere as well go with those."""
        chosen = np.zeros(len(self._columns), np.bool_)
        chosen[list(ends)] = True
        left = self._summed_up(self._leaf & ~chosen)
        going = (left == 0) & ((self._leaves_below > 0) | chosen)
        aside = np.flatnonzero(self._stem != NONE)
        while (more := aside[~going[aside] & going[self._stem[aside]] & (left[aside] == 0)]).size:  # a stem may be aside itself
            going[more] = True
        return [i for i in reversed(self._order) if going[i]]

    def needed_blocks(self, extent: int, without: Collection[int]) -> int:
        """Return how many blocks of an extent are needed once the extents `without` are gone: up to where the last of the
        others runs on from it, 0 where none does."""
        followers = np.flatnonzero(self._before == extent).tolist()
        return max((int(self._before_position[i]) + 1 for i in followers if i not in without), default=0)

    def states_of(self, extents: Collection[int]) -> set[int]:
        """Return the extents that carry a boundary state behind a block of `extents`, and lie aside since all their blocks are
        found in those."""
        aside = np.flatnonzero(self._stem != NONE).tolist()
        return {i for i in aside if self.extents[i].state and int(self._stem[i]) in extents}

    def order(self, extents: Iterable[int]) -> list[int]:
        """Return extents so that each comes behind the one that it runs on from."""
        wanted = set(extents)
        return [i for i in self._order if i in wanted]

    def found_elsewhere(self, extent: int) -> bool:
        """Whether an extent's last block is found in another extent, so that no prefix is read from it to its end."""
        return bool(self._hidden[extent] or self._inner[extent])

    def _summed_up(self, ones: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return for each extent how many of it and of all that run on from it are marked."""
        sums, parents = ones.astype(np.int64).tolist(), self._before.tolist()
        for i in reversed(self._order):
            if parents[i] != NONE:
                sums[parents[i]] += sums[i]
        return np.array(sums, np.int64)

    def _join(self, at: npt.NDArray[np.int64]) -> None:
        """Find, for the extents of one representation, what each runs on from."""
        columns = self._columns
        alone = len(columns.representations) == 1
        keys = columns.keys if alone else columns.keys[np.isin(np.repeat(np.arange(len(columns)), columns.blocks), at)]
        blocks = columns.blocks[at]
        ends = np.cumsum(blocks) - 1
        here = np.arange(len(at), dtype=np.int64)
        owners = np.repeat(here, blocks)
        index = _Blocks(keys)
        firsts = index.firsts()
        new = firsts == np.arange(len(keys))
        elsewhere = ~new[ends]
        last_found = owners[firsts[ends]]
        self._hidden[at] = elsewhere
        self._stem[at] = np.where(elsewhere, at[last_found], NONE)
        # A block that came second, in the middle of its extent: prefixes that end with it go on there.
        middle = np.ones(len(keys), np.bool_)
        middle[ends] = False
        second = {keys[row].tobytes(): int(owners[row]) for row in np.flatnonzero(~new & middle).tolist()}
        for i, end in enumerate(ends.tolist() if second else ()):
            longer = second.get(keys[end].tobytes(), i)
            if longer != i and not elsewhere[i]:
                self._inner[at[i]] = True
                self._stem[at[i]] = at[longer]
        found = index.find(columns.parents[at])
        parents = owners[found]
        known = (found != NONE) & (parents != here)  # its own block cannot come before it, whatever a journal says
        self._before[at] = np.where(known, at[parents], NONE)
        self._before_position[at] = np.where(known, found - ends[parents] + blocks[parents] - 1, 0)

    def _parents_first(self) -> list[int]:
        """Return all extents, each behind the one that it runs on from. What runs in a circle (keys are hashes, so only
        a wrong writer makes one) is cut open."""
        followers: dict[int, list[int]] = {}
        for i, before in enumerate(self._before.tolist()):
            followers.setdefault(before, []).append(i)
        order: list[int] = []
        ready = followers.get(NONE, [])
        seen = set[int]()
        rest = iter(range(len(self._columns)))
        while len(order) < len(self._columns):
            while ready:
                i = ready.pop()
                if i not in seen:
                    seen.add(i)
                    order.append(i)
                    ready += followers.get(i, ())
            stuck = next((i for i in rest if i not in seen), None)
            if stuck is None:
                break
            self._before[stuck] = NONE
            ready = [stuck]
        return order


class _Blocks:
    """Where a key stands first in a list of keys, found by sorting: a million take a third of a second."""

    def __init__(self, keys: npt.NDArray[np.uint8]) -> None:
        words = _words(keys)
        self._keys = keys
        self._order = np.argsort(words[:, 0], kind="stable")
        self._heads, self._tails = words[self._order, 0], words[self._order, 1]

    def firsts(self) -> npt.NDArray[np.int64]:
        """Return for each key of the list where it stands first: itself, unless it stood before."""
        alike = self._heads[1:] == self._heads[:-1]
        if (alike & (self._tails[1:] != self._tails[:-1])).any():  # equal ones need not be neighbours
            return self.find(self._keys)
        begins = np.arange(len(self._order))
        begins[1:][alike] = 0
        firsts = np.empty(len(self._order), np.int64)
        firsts[self._order] = self._order[np.maximum.accumulate(begins)]
        return firsts

    def find(self, keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        words = _words(keys)
        found = np.full(len(words), NONE, np.int64)
        at = np.searchsorted(self._heads, words[:, 0])
        asking = np.arange(len(words))
        while len(asking):  # more than once only where two keys begin with the same eight bytes
            asking = asking[at[asking] < len(self._heads)]
            asking = asking[self._heads[at[asking]] == words[asking, 0]]
            hit = self._tails[at[asking]] == words[asking, 1]
            found[asking[hit]] = self._order[at[asking[hit]]]
            asking = asking[~hit]
            at[asking] += 1
        return found


def _words(keys: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(keys).view(np.uint64)
