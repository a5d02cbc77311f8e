"""Bytes spread over buffers are cut and copied without a byte lost, and staging memory is aligned and reused."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import StoreError
from headstart.testing.fake_kv import aligned_bytes
from headstart.tier.arena import is_aligned
from headstart.transfer.buffers import Coming, Staging, flat, gather, scatter, split


@given(st.lists(st.integers(0, 40), max_size=12), st.lists(st.integers(0, 60), max_size=12))
def test_split_hands_out_every_byte_once_in_order(lengths: list[int], sizes: list[int]) -> None:
    data = bytes(i % 251 for i in range(sum(lengths)))
    edges = np.cumsum([0, *lengths]).tolist()
    buffers = [memoryview(data)[a:b] for a, b in pairwise(edges)]
    while sum(sizes) > len(data):
        sizes.pop()
    runs = split(buffers, sizes)
    assert [sum(part.nbytes for part in run) for run in runs] == sizes
    assert b"".join(bytes(part) for run in runs for part in run) == data[: sum(sizes)]


@given(
    st.lists(st.tuples(st.integers(0, 30), st.lists(st.integers(0, 40), max_size=3)), max_size=6),
    st.lists(st.integers(0, 60), min_size=1, max_size=30),
    st.integers(0, 9),
)
def test_what_comes_goes_where_it_belongs_or_is_missed(
    places: list[tuple[int, list[int]]], chunks: list[int], begin: int
) -> None:
    """`places`: bytes that nobody wants, and the lengths of buffers behind them."""
    data = bytes(i % 251 for i in range(sum(chunks)))
    edges = np.cumsum([0, *chunks]).tolist()
    targets, at = [], begin
    for gap, lengths in places:
        targets.append((at + gap, [memoryview(bytearray(n)) for n in lengths]))
        at += gap + sum(lengths)
    last = max(
        (offset + sum(b.nbytes for b in buffers) for offset, buffers in targets if any(map(len, buffers))), default=begin
    )
    chunks = iter([data[a:b] for a, b in pairwise(edges)])
    coming = Coming(chunks, at=begin)
    if last - begin > len(data):
        with pytest.raises(StoreError, match="ended at byte"):
            fill(coming, targets)
        return
    fill(coming, targets)
    coming.end()
    assert next(chunks, None) is None
    for offset, buffers in targets:
        wanted = data[offset - begin :]
        assert b"".join(map(bytes, buffers)) == wanted[: sum(b.nbytes for b in buffers)]


def fill(coming: Coming, targets: list[tuple[int, list[memoryview]]]) -> None:
    for offset, buffers in targets:
        coming.fill(offset, buffers)


def test_what_is_scattered_is_gathered_again() -> None:
    data = memoryview(bytes(range(200)))
    parts = [memoryview(bytearray(n)) for n in (0, 3, 150, 47)]
    scatter(data, parts)
    back = memoryview(bytearray(200))
    gather(parts, back)
    assert back == data


def test_an_array_of_any_strides_is_filled_and_read_in_its_own_order() -> None:
    memory = np.zeros((3, 4, 5), np.uint8)  # three parts a piece, each part's pieces side by side
    pieces = memory[:, 1:3].transpose(1, 0, 2)
    data = memoryview(bytes(range(30)))
    scatter(data, pieces)
    assert bytes(memory[2, 2]) == bytes(range(25, 30))
    assert not memory[:, 0].any()
    assert not memory[:, 3].any()
    back = memoryview(bytearray(30))
    gather(pieces, back)
    assert back == data


def test_buffers_of_any_format_are_seen_as_bytes() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (view,) = flat([array.data])
    assert bytes(view) == array.tobytes()
    with pytest.raises(TypeError):
        flat([array[:, ::2].data])


def test_alignment_means_address_and_length() -> None:
    memory = aligned_bytes(3 * 4096).data
    for view in (memory, memory.toreadonly()):
        assert all(map(is_aligned, (view[:4096], view[8192:], view[5:5])))
        assert not is_aligned(view[8 : 4096 + 8])
        assert not is_aligned(view[:4000])
        assert not is_aligned(view[::2])


def test_staging_is_aligned_reused_and_grows() -> None:
    staging = Staging("test")
    first = staging.take(5000)
    assert is_aligned(first[:4096])
    first[:5] = b"abcde"
    assert bytes(staging.take(6000)[:5]) == b"abcde"
    large = staging.take(5 << 20)
    assert (large.nbytes, bytes(large[:5])) == (5 << 20, bytes(5))
    assert bytes(first[:5]) == b"abcde"  # memory lives as long as somebody looks at it
