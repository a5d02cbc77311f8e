"""What the tests of `headstart cache` share: a directory with prompts in it, and the command run in this process."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headstart.block.extent import decode_header, encode_header
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.cli import run_cli
from headstart.testing.fake_kv import IDENTITY, TINY, FakeKV
from headstart.testing.round_trip import load
from headstart.tier.base import Terms
from headstart.tier.disk import DiskTier

CAPACITY = 64 << 20


def kv(pieces: int, *, seed: int = 0, like: FakeKV | None = None, shared: int = 0, layout: Representation = TINY) -> FakeKV:
    """A prompt of so many pieces; its first `shared` pieces are those of `like`."""
    tokens = (np.arange(pieces * layout.piece_tokens, dtype=np.uint64) * 7 + seed * 100_003 + 1) % (1 << 31)
    if like is not None:
        n = shared * layout.piece_tokens
        tokens = np.concatenate([like.tokens[:n].astype(np.uint64), tokens[n:]])
    return FakeKV(layout, tokens.tolist())


def key_of(prompt: FakeKV, piece: int = -1) -> str:
    """The key of a piece's last block, as far as the command line wants it."""
    per_piece = prompt.representation.blocks_per_piece
    return prompt.keys[(range(prompt.pieces)[piece] + 1) * per_piece - 1].hex()[:16]


@contextmanager
def tier_at(root: Path, *, capacity_bytes: int = CAPACITY) -> Iterator[DiskTier]:
    tier = DiskTier.open(root, capacity_bytes=capacity_bytes)
    try:
        yield tier
    finally:
        tier.close()


def image_of(prompt: FakeKV, first: int = 0, pieces: int | None = None, *, retention: str = "default") -> memoryview:
    """An extent's image that was made ten seconds ago."""
    image = prompt.image(first, pieces, retention=retention)
    header = replace(decode_header(image, prompt.representation), created_ms=int(time.time() * 1000) - 10_000)
    encoded = encode_header(header, prompt.representation)
    image[: len(encoded)] = encoded
    return image


def write(tier: DiskTier, prompt: FakeKV, first: int = 0, pieces: int | None = None, **terms: str) -> None:
    image = image_of(prompt, first, pieces, retention=terms.get("retention", "default"))
    outcome = tier.write(image, prompt.representation, terms=Terms(**terms))
    assert outcome.reason == "written"


def family(root: Path) -> tuple[FakeKV, FakeKV]:
    """Write two prompts: the first in two extents of four pieces, the second with the first two pieces in common."""
    one = kv(8, seed=1)
    two = kv(6, seed=2, like=one, shared=2)
    with tier_at(root) as tier:
        write(tier, one, 0, 4)
        write(tier, one, 4, 4)
        write(tier, two, 2, 4, tenant="acme", retention="chat")
    return one, two


def found_pieces(root: Path, prompt: FakeKV) -> int:
    """Return how many pieces of a prompt can be matched and loaded, each compared to the byte."""
    asked = FakeKV(prompt.representation, [*prompt.tokens.tolist(), 1])  # one token is always left to compute
    with tier_at(root) as tier:
        cache = PrefixCache([tier], identity=IDENTITY, representation=prompt.representation, match_timeout_s=20.0)
        loaded = load(cache, asked)
        assert loaded.wrong == []
        cache.close()
    return loaded.usable_tokens // prompt.representation.piece_tokens


def bytes_of(root: Path) -> dict[str, bytes]:
    """Every file of a directory."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


class Run:
    """`headstart cache …` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str | Path, code: int = 0) -> str:
        """Run, expect an exit code, and return what was said, errors included."""
        got = run_cli(["cache", *map(str, arguments)])
        said = self._capsys.readouterr()
        assert got == code, said
        assert "Traceback" not in said.err
        return said.out + said.err

    def json(self, *arguments: str | Path, code: int = 0) -> Any:
        got = run_cli(["cache", *map(str, arguments), "--json"])
        said = self._capsys.readouterr()
        assert got == code, said
        return json.loads(said.out)
