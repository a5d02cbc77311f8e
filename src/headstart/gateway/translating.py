"""Other engines' names of blocks into ours: by the tokens that their events tell. Pure.

An engine names blocks of 16 tokens, say, by hashes of its own; a router names blocks of 64 by the chain of `block.keys`. Of
each hash it is kept where in a chain it stands: behind which of our keys, and with which tokens behind that. So what follows it
can be named, too. What is kept is bounded, and what is forgotten begins nothing any more until it is told again.

Blocks that something beside their tokens keeps apart (a salt, an image) are passed over: who asks for them is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from headstart.block.keys import BLOCK_TOKENS, chain, token_bytes

Hash = bytes | int
_BLOCK_BYTES = 4 * BLOCK_TOKENS  # as keys are made of them


class BlockStored(msgspec.Struct, tag=True, frozen=True):
    """As in `headstart.events`, with what other engines' events have besides."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True):
    block_hashes: list[Hash]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True):
    pass


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
        self._places: OrderedDict[Hash, tuple[bytes, bytes, tuple[bytes, ...]]] = OrderedDict()

    def stored(self, event: BlockStored) -> list[bytes]:
        """Return our keys of what is whole with these blocks; none where it is not known what they follow."""
        size = event.block_size
        if size < 1 or len(event.token_ids) < size * len(event.block_hashes) or any(event.extra_keys or ()):
            return []
        key: bytes
        rest: bytes
        if event.parent_block_hash is None:
            key, rest = self._root(event.lora_name), b""
        elif event.parent_block_hash in self._places:
            key, rest, _ = self._places[event.parent_block_hash]
        else:
            return []
        found: list[bytes] = []
        for number, name in enumerate(event.block_hashes):
            data = rest + token_bytes(event.token_ids[number * size : (number + 1) * size])
            whole = len(data) // _BLOCK_BYTES * _BLOCK_BYTES
            new: list[bytes] = list(chain(key, data[:whole]))
            key, rest = (new[-1] if new else key), data[whole:]
            found += new
            self._places[name] = key, rest, tuple(new)
            self._places.move_to_end(name)
        while len(self._places) > self._most:
            self._places.popitem(last=False)
        return found

    def removed(self, event: BlockRemoved) -> list[bytes]:
        """Return our keys that are no longer whole: those which these blocks ended."""
        return [key for name in event.block_hashes if (place := self._places.pop(name, None)) for key in place[2]]

    def cleared(self) -> None:
        """Everything is gone."""
        self._places.clear()


def own_keys(names: Iterable[Hash]) -> list[bytes]:
    """Return what a server of ours names blocks by: the beginnings of our keys."""
    return [name for name in names if isinstance(name, bytes) and len(name) >= 8]
