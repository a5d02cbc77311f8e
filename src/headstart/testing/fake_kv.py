"""KV bytes that know their own prefix: a cache that serves anything but the right block is seen to the bit.

The bytes of a piece are expanded from a digest of (identity, salt, every token up to its end, layer, rank), so a stale,
foreign, shifted, torn or mixed piece differs from the right one in nearly every byte. `FakeKV` is the KV memory that an
engine saves from; `FakeDestination` is the one that it loads into, poisoned beforehand and compared afterwards.

The digests are made here with BLAKE2, apart from the product's own chain: an oracle must not share the mistake it looks for.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from headstart.block.checks import XXH3
from headstart.block.extent import ALIGNMENT, STATE_LAYER, ExtentHeader, encode_header, layout_of, piece_check
from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS, BlockKey, Content, block_extras, chain_keys
from headstart.block.representation import Representation

POISON = 0xAA
STATE_BYTES = 5000  # of a boundary state, unless said otherwise: no multiple of an OS page
_OPAQUE_BYTES = (200, 9000)  # an opaque piece is this large, so some cross a 4 KiB edge and some do not


class FakeKV:
    """The KV of one prompt, as a source for `PrefixCache.save`. Content is a pure function of the arguments.

    `tokens` may go beyond the last full piece; the rest has no bytes. `salt` enters at the first block that is not wholly in
    `shared_tokens`, as it does in the chain of keys, so that two tenants have equal bytes exactly where they may share.
    A content counts in every block that it touches.
    `cuts` says into how many buffers a piece is cut, as engines that keep K and V apart do."""

    def __init__(
        self,
        representation: Representation,
        tokens: Sequence[int],
        *,
        identity: Identity | None = None,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        contents: Sequence[Content] = (),
        rank: int = 0,
        cuts: int = 1,
    ) -> None:
        self.representation = representation
        self.tokens = np.asarray(tokens, dtype=np.uint32)
        self.identity = IDENTITY if identity is None else identity
        self.salt = salt or None
        self.shared_tokens = shared_tokens
        self.contents = tuple(contents)
        self.rank = rank
        self._cuts = cuts
        self._digests = self._prefix_digests()

    @property
    def pieces(self) -> int:
        """Full pieces that the prompt has."""
        return len(self._digests)

    @cached_property
    def keys(self) -> list[BlockKey]:
        """The keys of the blocks of all full pieces."""
        tokens = self.tokens[: self.pieces * self.representation.piece_tokens]
        return chain_keys(
            tokens.tolist(),
            root=self.identity.root(),
            salt=self.salt,
            shared_tokens=self.shared_tokens,
            contents=self.contents,
        )

    def piece_bytes(self, layer: int, piece: int) -> int:
        """Bytes of one piece; where the representation leaves it open, the piece's own content decides."""
        fixed = self.representation.layer_bytes[layer]
        if fixed is not None:
            return fixed
        low, high = _OPAQUE_BYTES
        return low + int.from_bytes(self._seed(layer, piece)[8:12], "little") % (high - low)

    def piece(self, layer: int, piece: int) -> npt.NDArray[np.uint8]:
        """Return the bytes that piece number `piece` of `layer` must have."""
        nbytes = self.piece_bytes(layer, piece)
        words = -(-nbytes // 8)
        seed = self._seed(layer, piece)
        flip, scale = (np.uint64(int.from_bytes(seed[i : i + 8], "little")) for i in (0, 8))
        mixed: npt.NDArray[np.uint64] = (_table(words) ^ flip) * (scale | np.uint64(1))
        mixed ^= mixed >> np.uint64(32)  # the low bits of a product are its weak ones
        return mixed.view(np.uint8)[:nbytes]

    def state(self, pieces: int, *, nbytes: int = STATE_BYTES) -> memoryview:
        """Return the boundary state that must stand behind the first `pieces` pieces."""
        seed = hashlib.blake2b(b"state" + self._digests[pieces - 1] + bytes([self.rank]), digest_size=32).digest()
        return memoryview((seed * (nbytes // 32 + 1))[:nbytes])

    def states(self, *pieces: int, nbytes: int = STATE_BYTES) -> dict[int, memoryview]:
        """Return the states behind so many pieces as `PrefixCache.save` takes them; of all of them where none is named."""
        step = self.representation.piece_tokens
        return {count * step: self.state(count, nbytes=nbytes) for count in pieces or [self.pieces]}

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        """See KVView. Sizes of 0 mean that the view decides."""
        found = []
        for piece, size in enumerate(sizes, start=first):
            content = self.piece(layer, piece)
            if size not in (0, len(content)):
                raise ValueError(f"layer {layer}, piece {piece} has {len(content)} bytes, {size} were asked for")
            found += cut(content.data, self._cuts)
        return found

    def image(
        self,
        first: int = 0,
        pieces: int | None = None,
        *,
        retention: str = "default",
        keys: Sequence[BlockKey] | None = None,
        created_ms: int = 0,
        state_bytes: int = 0,
    ) -> memoryview:
        """Return the 4 KiB-aligned image of an extent that holds `pieces` pieces from `first` on, as a tier is given it.
        `keys` replaces the prompt's own: what a hash collision would leave behind. `created_ms` 0: unknown. With `state_bytes`
        it ends with a boundary state of so many."""
        count = self.pieces - first if pieces is None else pieces
        representation = self.representation.digest
        per_piece = self.representation.blocks_per_piece
        blocks = range(first * per_piece, (first + count) * per_piece)
        keys = self.keys if keys is None else keys
        extras = tuple(
            block_extras(b, salt=self.salt, shared_tokens=self.shared_tokens, contents=self.contents) for b in blocks
        )
        layers = range(self.representation.layers)
        sizes = np.array([[self.piece_bytes(la, p) for p in range(first, first + count)] for la in layers], dtype=np.uint32)
        varies = None in self.representation.layer_bytes
        layout = layout_of(
            self.representation,
            len(blocks),
            piece_bytes=sizes if varies else None,
            extras_bytes=sum(map(len, extras)),
            state_bytes=state_bytes,
            retention=retention,
        )
        image = aligned_bytes(layout.extent_bytes)
        checks = np.zeros((len(layers), count, 16), dtype=np.uint8)
        for layer in layers:
            position = layout.layer_offsets[layer]
            for i in range(count):
                content = self.piece(layer, first + i)
                image[position : position + len(content)] = content
                position += len(content)
                checks[layer, i] = np.frombuffer(
                    piece_check(
                        algorithm=XXH3,
                        representation=representation,
                        key=keys[(first + i + 1) * per_piece - 1],
                        layer=layer,
                        buffers=[content.data],
                    ),
                    dtype=np.uint8,
                )
        state, state_check = memoryview(b""), bytes(16)
        if state_bytes:
            state = self.state(first + count, nbytes=state_bytes)
            image[layout.state_offset : layout.state_offset + state_bytes] = np.frombuffer(state, np.uint8)
            state_check = piece_check(
                algorithm=XXH3,
                representation=representation,
                key=keys[blocks[-1]],
                layer=STATE_LAYER,
                buffers=[state],
            )
        header = ExtentHeader(
            representation=representation,
            parent=keys[blocks[0] - 1] if blocks[0] else self.identity.root(),
            keys=tuple(keys[b] for b in blocks),
            tokens=self.tokens[blocks[0] * BLOCK_TOKENS : (blocks[-1] + 1) * BLOCK_TOKENS],
            checks=checks,
            extras=extras if any(extras) else (),
            piece_bytes=sizes if varies else None,
            retention=retention,
            created_ms=created_ms,
            state_bytes=state_bytes,
            state_check=state_check,
        )
        encoded = encode_header(header, self.representation)
        image[: len(encoded)] = np.frombuffer(encoded, dtype=np.uint8)
        return image.data

    def _prefix_digests(self) -> list[bytes]:
        digest = hashlib.blake2b(repr(self.identity).encode(), digest_size=32)
        salted_at = self.shared_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        step = self.representation.piece_tokens
        found = []
        for start in range(0, len(self.tokens) - step + 1, step):
            for block in range(start, start + step, BLOCK_TOKENS):
                if self.salt is not None and block == salted_at:
                    salt = self.salt.encode() if isinstance(self.salt, str) else self.salt
                    digest.update(b"salt" + hashlib.blake2b(salt).digest())
                for content in self.contents:
                    if content.start < block + BLOCK_TOKENS and content.start + content.tokens > block:
                        digest.update(repr((content.start, content.tokens, content.digest)).encode())
                digest.update(self.tokens[block : block + BLOCK_TOKENS].tobytes())
            found.append(digest.copy().digest())
        return found

    def _seed(self, layer: int, piece: int) -> bytes:
        return hashlib.blake2b(self._digests[piece] + bytes([layer, self.rank]), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class WrongPiece:
    """A piece that does not hold what it must: `what` is "poison" (never written), "torn" or "foreign"."""

    layer: int
    piece: int
    first_wrong_byte: int
    what: str


class FakeDestination:
    """KV memory for `pieces` pieces, poisoned, that a load writes into and that is then compared with what is right.

    `shift` moves every buffer off its 4 KiB alignment, so that the reader has to go through staging; `cuts` as in FakeKV."""

    def __init__(self, representation: Representation, pieces: int, *, shift: int = 0, cuts: int = 1) -> None:
        self.representation = representation
        self.pieces = pieces
        self._shift = shift
        self._cuts = cuts
        self._layers = [None if fixed is None else self._memory(pieces * fixed) for fixed in representation.layer_bytes]
        self._varying: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        """See KVView. A piece outside this memory, or of another size than its layer has, is the caller's mistake."""
        if first < 0 or first + len(sizes) > self.pieces:
            raise ValueError(f"pieces {first} to {first + len(sizes)} of a destination that has {self.pieces}")
        memory, fixed = self._layers[layer], self.representation.layer_bytes[layer]
        if memory is None or fixed is None:
            for piece, size in enumerate(sizes, start=first):
                self._varying.setdefault((layer, piece), self._memory(size))
            return [view for i in range(len(sizes)) for view in cut(self._varying[layer, first + i].data, self._cuts)]
        if any(size != fixed for size in sizes):
            raise ValueError(f"layer {layer} has pieces of {fixed} bytes, {sorted(set(sizes))} were asked for")
        run = memory.data[first * fixed : (first + len(sizes)) * fixed]
        if self._cuts == 1:
            return [run]
        return [part for i in range(len(sizes)) for part in cut(run[i * fixed : (i + 1) * fixed], self._cuts)]

    def wrong(self, source: FakeKV, *, pieces: int, layers: Sequence[int] | None = None, first: int = 0) -> list[WrongPiece]:
        """Return which of `pieces` pieces from `first` on differ from what `source` says; empty when all are right."""
        found = []
        for layer in range(self.representation.layers) if layers is None else layers:
            for piece in range(first, first + pieces):
                have, want = self._piece(layer, piece), source.piece(layer, piece)
                differs = np.flatnonzero(have != want) if have.shape == want.shape else np.zeros(1, dtype=np.int64)
                if len(differs):
                    poison = bool(np.all(have == POISON))
                    what = "poison" if poison else "torn" if len(differs) < 0.9 * len(want) else "foreign"
                    found.append(WrongPiece(layer, piece, int(differs[0]), what))
        return found

    def touched(self, *, first: int = 0) -> list[tuple[int, int]]:
        """Return (layer, piece) of every piece from `first` on that no longer holds the poison alone."""
        every = [(layer, piece) for layer in range(self.representation.layers) for piece in range(first, self.pieces)]
        return [(layer, piece) for layer, piece in every if not np.all(self._piece(layer, piece) == POISON)]

    def _piece(self, layer: int, piece: int) -> npt.NDArray[np.uint8]:
        memory, fixed = self._layers[layer], self.representation.layer_bytes[layer]
        if memory is None or fixed is None:
            return self._varying.get((layer, piece), np.full(1, POISON, dtype=np.uint8))
        return memory[piece * fixed : (piece + 1) * fixed]

    def _memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = aligned_bytes(nbytes + self._shift)[self._shift :]
        memory[:] = POISON
        return memory


def aligned_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    """Return zeroed memory whose address is a multiple of 4 KiB."""
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def cut(view: memoryview, parts: int) -> list[memoryview]:
    """Cut a view into `parts` pieces of nearly equal length that together are the whole."""
    edges = [len(view) * i // parts for i in range(parts + 1)]
    return [view[a:b] for a, b in itertools.pairwise(edges)]


IDENTITY = Identity(weights=b"\x11" * 32, architecture=b'{"model_type":"fake"}')
"""The identity of prompts that name none."""

TINY = Representation(kind="gqa", layout="fake/1", dtype="float32", layer_bytes=(4096, 4096, 4096))
"""Three layers of one OS page a piece: the smallest that exercises every offset."""

UNEVEN = Representation(kind="gqa", layout="fake/1", dtype="float16", layer_bytes=(1536, 4104, 520))
"""Layers of different sizes, none a multiple of 4 KiB."""

PAGED = Representation(kind="mla", layout="fake/2", dtype="bfloat16", layer_bytes=(2304, 2304), piece_tokens=128)
"""Two blocks a piece, as an engine with pages of 128 tokens has."""

OPAQUE = Representation(kind="opaque", layout="fake/3", dtype="q8_0", layer_bytes=(None,), piece_tokens=128)
"""One run state of all layers, whose size varies."""


STATEFUL = replace(TINY, layout="fake/5", state="required")
"""As TINY, of use only up to a boundary state."""

STATEFUL_PAGED = replace(PAGED, layout="fake/5", state="required")
STATEFUL_OPAQUE = replace(OPAQUE, layout="fake/5", state="required")


@lru_cache(maxsize=16)
def _table(words: int) -> npt.NDArray[np.uint64]:
    # splitmix64 of 0, 1, 2 …: the same for every piece, which then needs one xor and one multiplication
    x = np.arange(words, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    x.flags.writeable = False
    return x
