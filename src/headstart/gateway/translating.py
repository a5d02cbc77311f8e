"""Other engines' names of blocks into ours: by the tokens that their events tell. Pure.

An engine names blocks of 16 tokens, say, by hashes of its own; a router names blocks of 64 by the chain of `block.keys`. Of
each hash it is kept where in a chain it stands: behind which of our keys, and with which tokens behind that. So what follows it
can be named, too. What is kept is bounded, and what is forgotten begins nothing any more until it is told again.

An engine may hold a block in several places (on the GPU, in the host's memory) and lets go of one after the other: it is gone
from a plane of ours with the last of its places there, and forgotten with the last of all.

Blocks that something beside their tokens keeps apart (a salt, an image) are passed over: who asks for them is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from headstart.block.keys import BLOCK_TOKENS, chain, token_bytes
from headstart.events import MEMORY
from headstart.policy.routing.holders import DISK
from headstart.policy.routing.holders import MEMORY as IN_MEMORY

Hash = bytes | int
_FAST = (None, "GPU", MEMORY, "CPU_PINNED")  # SGLang's word for the host's memory; None: the engine has but one place
_MOST_MEDIA = 8  # of a block; an engine has two or three, and a worker that invents more has them forgotten
_BLOCK_BYTES = 4 * BLOCK_TOKENS  # as keys are made of them


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """As in `headstart.events`, with what other engines' events have besides: vLLM's `extra_keys` of each block, SGLang's
    `cache_salt`, and its pairs of a token and the next one where it drafts by pairs."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int | tuple[int, int]]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    cache_salt: str | None = None

    @property
    def tokens(self) -> list[int]:
        return [one if isinstance(one, int) else one[0] for one in self.token_ids]


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    pass


@dataclass(slots=True)
class _Place:
    """Where a block stands: behind which key, with which tokens behind that. `ends`: the keys that are whole with it."""

    key: bytes
    rest: bytes
    ends: tuple[bytes, ...]
    media: tuple[str | None, ...]


class Translator:
    """Of one worker. `root`: what keys of the model's prompts begin with, or of an adapter's, by its name; `most`: hashes that
    are kept.

    >>> translator = Translator(lambda adapter: bytes(32), most=100)
    >>> first = BlockStored([7], None, list(range(32)), 32)
    >>> second = BlockStored([8], 7, list(range(32, 64)), 32)
    >>> len(translator.stored(first)), len(translator.stored(second))
    (0, 1)
    >>> translator.removed(BlockRemoved([8])) == translator.stored(second)
    True
    """

    def __init__(self, root: Callable[[str | None], bytes], *, most: int) -> None:
        self._root = root
        self._most = most
        self._places: OrderedDict[Hash, _Place] = OrderedDict()

    def stored(self, event: BlockStored) -> list[bytes]:
        """Return our keys of what is whole with these blocks; none where it is not known what they follow."""
        size = event.block_size
        if size < 1 or len(event.token_ids) < size * len(event.block_hashes) or event.cache_salt or any(event.extra_keys or ()):
            return []
        key: bytes
        rest: bytes
        if event.parent_block_hash is None:
            key, rest = self._root(event.lora_name), b""
        elif (parent := self._places.get(event.parent_block_hash)) is not None:
            key, rest = parent.key, parent.rest
        else:
            return []
        tokens = event.tokens
        found: list[bytes] = []
        for number, name in enumerate(event.block_hashes):
            data = rest + token_bytes(tokens[number * size : (number + 1) * size])
            whole = len(data) // _BLOCK_BYTES * _BLOCK_BYTES
            new: list[bytes] = list(chain(key, data[:whole]))
            key, rest = (new[-1] if new else key), data[whole:]
            found += new
            before = self._places.get(name)
            media = () if before is None else before.media
            if event.medium not in media and len(media) < _MOST_MEDIA:
                media += (event.medium,)
            self._places[name] = _Place(key, rest, tuple(new), media)
            self._places.move_to_end(name)
        while len(self._places) > self._most:
            self._places.popitem(last=False)
        return found

    def removed(self, event: BlockRemoved) -> list[bytes]:
        """Return our keys that are no longer whole in the medium's plane: those which these blocks ended, and which no other
        medium of the plane has."""
        plane = plane_of(event.medium)
        gone: list[bytes] = []
        for name in event.block_hashes:
            if (place := self._places.get(name)) is None:
                continue
            place.media = tuple(medium for medium in place.media if medium != event.medium)
            if not place.media:
                del self._places[name]
            if all(plane_of(medium) != plane for medium in place.media):
                gone += place.ends
        return gone

    def cleared(self) -> None:
        """Everything is gone."""
        self._places.clear()


def own_keys(names: Iterable[Hash]) -> list[bytes]:
    """Return what a server of ours names blocks by: the beginnings of our keys."""
    return [name for name in names if isinstance(name, bytes) and len(name) >= 8]


def plane_of(medium: str | None) -> int:
    """Return where that is, in the planes of what workers hold; engines have several words for it."""
    return IN_MEMORY if medium in _FAST else DISK
