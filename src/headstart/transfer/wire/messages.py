"""What two workers say to each other about one prompt. `docs/wire.md` is the specification.

    who decodes                     who computes the prompt
        Ask ────────────────────────▶                       what is to be computed, how much of it is there already
           ◀──────────────────────── Accept │ Refuse
           ◀──────────────────────── Pieces …               of one layer, as soon as it is computed; their bytes follow
           ◀──────────────────────── Told …                 how far it is, and the first token
        Taken ──────────────────────▶                       so many places in that memory are free again
           ◀──────────────────────── Beat                   nothing yet, and still there
           ◀──────────────────────── End                    that was all

What the prompt is asked for and what comes of it besides KV is the engines' affair, and opaque here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from headstart.block.checks import CHECK_BYTES, XXH3, Buffer, flat, piece_check
from headstart.transfer.wire.remote import Remote

VERSION = 1
MOST_RUN_BYTES = 32 << 20  # of all layers of what is sent as one run, unless a single piece has more


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """`root` and `representation`: whose KV it must be. `have`: pieces from the prompt's start that need not be sent.
    `window`: bytes of shared memory whose descriptor comes with this, 0 for none. `remote`: memory that can be written into
    from another machine. `request`: for the engine."""

    root: bytes
    representation: bytes
    have: int
    window: int
    request: bytes
    remote: Remote | None = None


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    pass


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """`reason`: a short stable word; `why`: one sentence."""

    reason: str
    why: str


class Pieces(msgspec.Struct, frozen=True, tag="pieces"):
    """`count` pieces of `layer` from piece `first` of the prompt on, all that the run has. `at`: where they lie in the memory
    that came with `Ask`; None: they follow. `check`: over their bytes, see `Sealing`."""

    layer: int
    first: int
    count: int
    check: bytes
    at: int | None


class Told(msgspec.Struct, frozen=True, tag="told"):
    result: bytes


class Taken(msgspec.Struct, frozen=True, tag="taken"):
    places: int


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    pass


class End(msgspec.Struct, frozen=True, tag="end"):
    pass


Message = Ask | Accept | Refuse | Pieces | Told | Taken | Beat | End

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode(body: bytes) -> Message:
    """Return the message. Raises msgspec.DecodeError (a ValueError) for what is none."""
    message: Message = _decoder.decode(body)
    return message


class Sealing:
    """The checks of pieces on their way, bound to one session, the representation, the last block's key and the layer.

    Without a secret it is the check of extents, which finds every accident. With one it is a keyed BLAKE2b, which nobody on the
    way can make; at about 1 GB/s of a core instead of ten."""

    def __init__(self, session: bytes, representation: bytes, *, keyed: bool) -> None:
        self._session = session
        self._representation = representation
        self._keyed = keyed

    def check(self, buffers: Sequence[Buffer], *, key: bytes, layer: int) -> bytes:
        """Return the check of pieces of `layer` that end with the block of `key`."""
        if not self._keyed:
            bound = self._session + self._representation
            return piece_check(algorithm=XXH3, representation=bound, key=key, layer=layer, buffers=buffers)
        hashed = hashlib.blake2b(digest_size=CHECK_BYTES, key=self._session)
        hashed.update(self._representation + key + layer.to_bytes(4, "little"))
        for buffer in buffers:
            hashed.update(flat(buffer))
        return hashed.digest()
