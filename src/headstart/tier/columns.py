"""Many extents at once, as columns: what prefixes are made of, without an object for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.tier.base import ExtentInfo

PREFIX_BYTES = 16  # of a key: what tiers remember


@dataclass(frozen=True, slots=True)
class ExtentColumns:
    """Entry i of `blocks`, `nbytes`, `parents` and `representation` (a number in `representations`) is extent i's. `keys` are
    those of all blocks, extent by extent."""

    representations: tuple[bytes, ...]
    representation: npt.NDArray[np.int64]
    blocks: npt.NDArray[np.int64]
    nbytes: npt.NDArray[np.int64]
    parents: npt.NDArray[np.uint8]  # [extents, 16]
    keys: npt.NDArray[np.uint8]  # [blocks, 16]

    @classmethod
    def of(cls, infos: Sequence[ExtentInfo]) -> ExtentColumns:
        names = tuple(dict.fromkeys(info.representation for info in infos))
        return cls(
            names,
            np.array([names.index(info.representation) for info in infos], np.int64),
            np.array([info.blocks for info in infos], np.int64),
            np.array([info.extent_bytes for info in infos], np.int64),
            _rows([info.parent[:PREFIX_BYTES].ljust(PREFIX_BYTES, b"\0") for info in infos]),
            _rows([key[:PREFIX_BYTES] for info in infos for key in info.keys]),
        )

    @classmethod
    def joined(cls, parts: Sequence[ExtentColumns]) -> ExtentColumns:
        """Return the extents of all parts, one part behind the other."""
        names = tuple(dict.fromkeys(name for part in parts for name in part.representations))
        if len(parts) == 1:
            return parts[0]
        numbers = [np.array([names.index(name) for name in part.representations], np.int64) for part in parts]
        return cls(
            names,
            np.concatenate([number[part.representation] for number, part in zip(numbers, parts, strict=True)]),
            np.concatenate([part.blocks for part in parts]),
            np.concatenate([part.nbytes for part in parts]),
            np.concatenate([part.parents for part in parts]),
            np.concatenate([part.keys for part in parts]),
        )

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Behind which block each extent's last one stands in `keys`."""
        return np.cumsum(self.blocks)


def _rows(keys: Sequence[bytes]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(b"".join(keys), np.uint8).reshape(-1, PREFIX_BYTES)
