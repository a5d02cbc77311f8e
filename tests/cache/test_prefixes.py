"""The forest of extents against a plain model: which prefixes there are, what each takes, and what goes with which."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.cache.prefixes import Prefixes, Spot, _Blocks
from headstart.tier.base import ExtentId, ExtentInfo

ROOT = b"r" * 16


def keys_of(path: str) -> list[bytes]:
    """The keys of a prompt whose blocks are letters: each names all letters up to it."""
    return [sha256(path[: n + 1].encode()).digest()[:16] for n in range(len(path))]


def extent(path: str, first: int, end: int, *, number: int = 0, representation: bytes = b"R") -> ExtentInfo:
    """The extent with blocks `first` … `end` - 1 of a prompt."""
    keys = keys_of(path)
    return ExtentInfo(
        id=ExtentId(number),
        representation=representation,
        keys=tuple(keys[first:end]),
        blocks=end - first,
        header_bytes=4096,
        extent_bytes=1000 * (end - first),
        created_ms=0,
        last_used=0,
        retention="default",
        parent=keys[first - 1] if first else ROOT,
    )


def ends(prefixes: Prefixes) -> dict[bytes, tuple[int, int, int]]:
    return {prefix.key: (prefix.blocks, prefix.nbytes, prefix.own_bytes) for prefix in prefixes.all()}


def test_the_figure_of_the_module_is_what_it_says() -> None:
    prefixes = Prefixes.of([extent("abcd", 0, 4), extent("abcdef", 4, 6), extent("abxy", 2, 4)])
    assert ends(prefixes) == {keys_of("abcdef")[-1]: (6, 6000, 2000), keys_of("abxy")[-1]: (4, 6000, 2000)}
    assert prefixes.only_for({1}) == [1]
    assert prefixes.only_for({1, 2})[-1] == 0
    assert prefixes.continuing(Spot(0, 1)) == {1, 2}
    assert prefixes.continuing(Spot(0, 2)) == {1}
    assert prefixes.needed_blocks(0, {1}) == 2
    assert prefixes.used_blocks(prefixes.chain(Spot(2, 1)), Spot(2, 1)) == [2, 2]


def test_what_is_stored_twice_is_one_prefix_and_goes_with_it() -> None:
    prefixes = Prefixes.of([extent("abc", 0, 3), extent("abcd", 0, 4), extent("abc", 1, 3)])
    assert ends(prefixes) == {keys_of("abcd")[-1]: (4, 4000, 4000)}
    assert set(prefixes.only_for({1})) == {0, 1, 2}


def test_representations_stay_apart() -> None:
    prefixes = Prefixes.of([extent("ab", 0, 2), extent("abcd", 2, 4, representation=b"S")])
    assert {prefix.blocks for prefix in prefixes.all()} == {2}
    assert len(prefixes.all()) == 2
    both = Prefixes.of([extent("ab", 0, 2), extent("ab", 0, 2, representation=b"S")])
    (spots,) = both.find(keys_of("ab")[1].hex()[:9]).values()
    assert len(spots) == 2


def test_parents_that_lie_in_a_circle_end_too() -> None:
    one, two = extent("ab", 0, 2), extent("xy", 0, 2)
    circle = [
        ExtentInfo(**{name: getattr(one, name) for name in ExtentInfo.__slots__} | {"parent": two.keys[-1]}),
        ExtentInfo(**{name: getattr(two, name) for name in ExtentInfo.__slots__} | {"parent": one.keys[-1]}),
    ]
    prefixes = Prefixes.of(circle)
    assert sorted(prefixes.order([0, 1])) == [0, 1]
    assert all(len(prefixes.chain(Spot(i, 0))) <= 2 for i in (0, 1))


def test_nothing_is_no_prefix() -> None:
    prefixes = Prefixes.of([])
    assert (prefixes.all(), prefixes.find("0" * 8), prefixes.only_for(set())) == ([], {}, [])


@st.composite
def forests(draw: st.DrawFn) -> list[tuple[str, int]]:
    """Prompts of letters, saved one after the other: each stores what no earlier one did, from `first` on."""
    stored: set[str] = set()
    found: list[tuple[str, int]] = []
    for _ in range(draw(st.integers(1, 12))):
        base = draw(st.sampled_from(["", *sorted(stored)]))
        path = base + draw(st.text("ab", min_size=1, max_size=5))
        first = next((n for n in range(len(path)) if path[: n + 1] not in stored), None)
        if first is not None:
            found.append((path, first))
            stored |= {path[: n + 1] for n in range(first, len(path))}
    return found


@given(forests(), st.data())
def test_prefixes_agree_with_a_plain_model(forest: list[tuple[str, int]], data: st.DataObject) -> None:
    extents = [extent(path, first, len(path), number=n) for n, (path, first) in enumerate(forest)]
    prefixes = Prefixes.of(extents)
    stored = {path[: n + 1] for path, first in forest for n in range(first, len(path))}
    leaves = {path for path in stored if not any(other != path and other.startswith(path) for other in stored)}
    needed = {
        leaf: {
            n for n, (path, first) in enumerate(forest) if any(leaf.startswith(path[: k + 1]) for k in range(first, len(path)))
        }
        for leaf in leaves
    }
    size = [1000 * (len(path) - first) for path, first in forest]
    want = {}
    for leaf in leaves:
        others = set().union(*(needed[other] for other in leaves if other != leaf))
        want[keys_of(leaf)[-1]] = (
            len(leaf),
            sum(size[n] for n in needed[leaf]),
            sum(size[n] for n in needed[leaf] - others),
        )
    assert ends(prefixes) == want
    chosen = data.draw(st.sets(st.sampled_from(sorted(leaves))))
    going = prefixes.only_for(
        {prefix.spot.extent for prefix in prefixes.all() if prefix.key in {keys_of(c)[-1] for c in chosen}}
    )
    kept = set().union(*(needed[leaf] for leaf in leaves - chosen))
    assert set(going) == set().union(*(needed[leaf] for leaf in chosen)) - kept
    assert all(going.index(int(prefixes.parents[i])) > going.index(i) for i in going if int(prefixes.parents[i]) in going)
    some = data.draw(st.sampled_from(sorted(stored)))
    (spots,) = prefixes.find(keys_of(some)[-1].hex()).values()
    assert {prefixes.at(Spot(i, extents[i].blocks - 1)).key for i in prefixes.continuing(spots[0])} == {
        keys_of(leaf)[-1] for leaf in leaves if leaf.startswith(some)
    }


@pytest.mark.parametrize("tails", [b"\0\1\0", b"\0\0\1"])
def test_keys_that_begin_alike_are_told_apart(tails: bytes) -> None:
    keys = [bytes(15) + bytes([tail]) for tail in tails]
    rows = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16)
    assert _Blocks(rows).firsts().tolist() == [keys.index(key) for key in keys]
