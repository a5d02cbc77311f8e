"""Everything in a cache directory read and verified: what is there, is it what was written, can it be read at all."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headstart.block.extent import ExtentHeader
from headstart.block.representation import Representation
from headstart.block.whole import examine
from headstart.errors import ExtentCorrupt, StoreError
from headstart.tier.base import ExtentInfo
from headstart.tier.disk.look import Look


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with one extent. `reason` is a short stable word: those of `block.whole.examine`, "short-read" (the file
    ends too early), "segment-…" (the file is not what its name says), "keys" (other blocks lie here than the journal says),
    or, where `unreadable`, the name of the system's error: whether the bytes are right is not known then."""

    reason: str
    what: str
    unreadable: bool = False


@dataclass(frozen=True, slots=True)
class Examined:
    """`fault` is None where all is well, and where the extent was removed before it could be read (`gone`)."""

    info: ExtentInfo
    fault: Fault | None = None
    gone: bool = False


def scrub(look: Look, extents: list[ExtentInfo], *, on_bytes: Callable[[int], None]) -> Iterator[Examined]:
    """Read and verify extents, one after the other as they lie in their files. `on_bytes`: see `Look.read`."""
    representations: dict[bytes, Representation | None] = {}
    for info in sorted(extents, key=lambda info: _place(look, info)):
        if info.representation not in representations:
            representations[info.representation] = look.representation(info.representation)
        representation = representations[info.representation]
        if representation is None:
            yield Examined(info, Fault("representation", "no journal says how its bytes are laid down"))
            continue
        try:
            image = look.read(info.id, on_bytes=on_bytes)
            if image is not None:
                require_same(examine(image, representation, look.sealing), info)
            yield Examined(info, gone=image is None)
        except ExtentCorrupt as error:
            yield Examined(info, Fault(str(error.facts.get("reason", "corrupt")), error.message))
        except (OSError, StoreError) as error:
            yield Examined(info, Fault(_word(error), str(error), unreadable=True))


def require_same(header: ExtentHeader, info: ExtentInfo) -> None:
    """Make sure that what lies somewhere are the blocks, and the boundary state, that the journal says. Raises
    ExtentCorrupt("keys"): a whole extent in another one's place is right in itself."""
    width = len(info.keys[0])
    same = tuple(key[:width] for key in header.keys) == info.keys and header.parent[: len(info.parent)] == info.parent
    if not same or info.state != (header.state_bytes > 0):
        raise ExtentCorrupt("another extent lies where the journal says that this one is", reason="keys")


def _place(look: Look, info: ExtentInfo) -> tuple[str, int]:
    where = look.where(info.id)
    return ("", 0) if where is None else (where[0].name, where[1])


def _word(error: OSError | StoreError) -> str:
    if isinstance(error, OSError):
        return errno.errorcode.get(error.errno or 0, "other").lower()
    return str(error.facts.get("reason", "other"))
