"""Writes the golden files from the present code. Run it only when the format version goes up; a diff here is a new format.

python tests/block/golden_vectors.py
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from headstart.block.extent import layout_of, seal
from headstart.block.identity import Identity
from headstart.block.keys import Content, block_extras, chain_keys
from headstart.block.representation import Representation

GOLDEN = Path(__file__).parent / "golden"
IDENTITY = Identity(weights=bytes(range(32)), architecture=b'{"model_type":"llama"}')
FIXED = Representation(kind="gqa", layout="torch/token-kv-head-dim/1", dtype="float32", layer_bytes=(48, 32))
OPAQUE = Representation(kind="opaque", layout="llama/seq-state/1", dtype="q8_0", layer_bytes=(None,), piece_tokens=128)


def names() -> dict[str, object]:
    """Identities, representations and chains, each with what it is made of."""
    adapted = Identity(IDENTITY.weights, IDENTITY.architecture, adapters=(b"\xaa" * 32, b"\xbb" * 32), version="7")
    picture = Content(start=70, tokens=100, digest=bytes(range(100, 132)))

    def chain(**how: object) -> list[str]:
        return [key.hex() for key in chain_keys(list(range(200)), root=IDENTITY.root(), **how)]  # type: ignore[arg-type]

    return {
        "roots": {"plain": IDENTITY.root().hex(), "two adapters, version 7": adapted.root().hex()},
        "representations": {
            name: {"encoded": value.encode().hex(), "digest": value.digest.hex()}
            for name, value in (("fixed", FIXED), ("opaque", OPAQUE))
        },
        "keys of tokens 0 … 199": {
            "plain": chain(),
            "salt": chain(salt="tenant"),
            "salt after 100 shared tokens": chain(salt="tenant", shared_tokens=100),
            "content at 70, 100 tokens": chain(contents=[picture]),
        },
    }


def fixed_extent() -> bytearray:
    tokens = np.arange(128, dtype=np.uint32)
    keys = chain_keys(tokens, root=IDENTITY.root(), salt="tenant")
    extras = [block_extras(block, salt="tenant", shared_tokens=0, contents=()) for block in range(2)]
    layout = layout_of(FIXED, 2, extras_bytes=sum(map(len, extras)), retention="chat")
    image = bytearray(layout.extent_bytes)
    for layer in range(2):
        offset, nbytes = layout.piece_range(layer, 0, 2)
        image[offset : offset + nbytes] = bytes(range(100 * layer + 1, 100 * layer + 1 + nbytes))
    seal(
        memoryview(image),
        FIXED,
        parent=IDENTITY.root(),
        keys=keys,
        tokens=tokens,
        extras=extras,
        created_ms=1_700_000_000_000,
        retention="chat",
    )
    return image


def opaque_extent() -> bytearray:
    tokens = np.arange(384, dtype=np.uint32)
    keys = chain_keys(tokens, root=IDENTITY.root())
    sizes = np.array([[40, 24]], np.uint32)
    layout = layout_of(OPAQUE, 4, piece_bytes=sizes, state_bytes=20)
    image = bytearray(layout.extent_bytes)
    offset, nbytes = layout.piece_range(0, 0, 2)
    image[offset : offset + nbytes] = bytes(range(1, nbytes + 1))
    image[layout.state_offset : layout.state_offset + 20] = bytes(range(200, 220))
    seal(
        memoryview(image),
        OPAQUE,
        parent=keys[1],
        keys=keys[2:],
        tokens=tokens[128:],
        piece_bytes=sizes,
        state_bytes=20,
        created_ms=1_700_000_000_001,
    )
    return image


def dump(image: bytes | bytearray) -> str:
    """Return rows of 32 bytes as "offset: hex"; rows of zeros are left out, the first line is the length."""
    rows = [f"{at:08x}: {image[at : at + 32].hex()}" for at in range(0, len(image), 32) if any(image[at : at + 32])]
    return "\n".join([f"bytes: {len(image)}", *rows]) + "\n"


if __name__ == "__main__":
    (GOLDEN / "names.json").write_text(json.dumps(names(), indent=2, ensure_ascii=False) + "\n")
    (GOLDEN / "extent_fixed.hex").write_text(dump(fixed_extent()))
    (GOLDEN / "extent_opaque.hex").write_text(dump(opaque_extent()))
