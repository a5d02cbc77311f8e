"""How an extent is read: every piece once, early layers alone, requests neither small nor large without need."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headstart.block.extent import layout_of
from headstart.block.representation import Representation
from headstart.transfer.io_pool import REQUEST_BYTES
from headstart.transfer.plan import expected_layout, far_requests, read_with_head, requests

SIZES = st.sampled_from([520, 4096, 73_728, 98_304, 1 << 20, 3 << 20])


def representation(*layer_bytes: int | None) -> Representation:
    return Representation(kind="mla", layout="plan/1", dtype="float32", layer_bytes=layer_bytes)


@given(st.data(), st.lists(SIZES, min_size=1, max_size=40), st.integers(1, 70))
def test_every_piece_of_every_layer_is_read_once(data: st.DataObject, layer_bytes: list[int], blocks: int) -> None:
    layout = layout_of(representation(*layer_bytes), blocks)
    first = data.draw(st.integers(0, blocks - 1))
    pieces = data.draw(st.integers(1, blocks - first))
    done = data.draw(st.integers(0, pieces))
    times = np.zeros((len(layer_bytes), pieces), int)
    times[0, :done] += 1
    before = 0
    for request in requests(layout, first=first, pieces=pieces, done=done):
        assert request.layers.start >= before
        before = request.layers.start
        times[request.layers.start : request.layers.stop, request.first : request.first + request.count] += 1
        nbytes = sum(layout.piece_range(layer, first + request.first, request.count)[1] for layer in request.layers)
        assert nbytes <= REQUEST_BYTES or (request.count == 1 and len(request.layers) == 1)
        if len(request.layers) > 1:
            assert nbytes <= REQUEST_BYTES
            assert (request.count, pieces) == (layout.pieces, layout.pieces)  # else they do not lie side by side
            assert len(request.layers) <= request.layers.start  # what is waited for soonest comes in small steps
    assert (times == 1).all()


@given(st.data(), st.lists(SIZES, min_size=1, max_size=40), st.integers(1, 70), st.sampled_from([0, 1 << 20]))
def test_from_afar_every_piece_is_asked_for_once_and_as_much_as_may_be_at_a_time(
    data: st.DataObject, layer_bytes: list[int], blocks: int, gap_bytes: int
) -> None:
    layout, most_bytes = layout_of(representation(*layer_bytes), blocks), 4 << 20
    first = data.draw(st.integers(0, blocks - 1))
    pieces = data.draw(st.integers(1, blocks - first))
    times = np.zeros((len(layer_bytes), pieces), int)
    planned = far_requests(layout, first=first, pieces=pieces, most_bytes=most_bytes, gap_bytes=gap_bytes)
    before = begin = 0
    end = layout.header_bytes
    for number, request in enumerate(planned):
        times[request.layers.start : request.layers.stop, request.first : request.first + request.count] += 1
        ranges = [layout.piece_range(layer, first + request.first, request.count) for layer in request.layers]
        whole = request.count == pieces == planned[number - 1].count or not planned[number - 1].layers
        if number:  # it could not go with the one before: that has ended far from it, or has no room
            assert not whole or ranges[0][0] - end > gap_bytes or sum(ranges[0]) - begin > most_bytes
            begin, end = ranges[0][0], ranges[0][0]
        for start, nbytes in ranges:
            assert start - end <= gap_bytes
            end = start + nbytes
        assert end - begin <= most_bytes or (request.count == 1 and len(ranges) == 1) or not ranges
        assert request.layers.start >= before
        before = request.layers.start
    assert (times == 1).all()


def test_pieces_that_vary_are_planned_by_their_own_sizes() -> None:
    sizes = np.array([[700_000, 300_000, 900_000], [10, 20, 30]], np.uint32)
    layout = layout_of(representation(None, None), 3, piece_bytes=sizes)
    planned = [(list(r.layers), r.first, r.count) for r in requests(layout, first=0, pieces=3, done=0)]
    assert planned == [([0], 0, 2), ([0], 2, 1), ([1], 0, 3)]


def test_layers_of_a_short_extent_go_together_and_long_runs_are_cut_evenly() -> None:
    short = requests(layout_of(representation(*[98_304] * 12), 1), first=0, pieces=1, done=1)
    assert [list(request.layers) for request in short] == [[1], [2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    long = requests(layout_of(representation(98_304, 98_304), 16), first=0, pieces=16, done=16)
    assert [(request.first, request.count) for request in long] == [(0, 8), (8, 8)]


@given(SIZES, st.integers(1, 70))
def test_a_header_brings_as_much_of_layer_0_as_one_request_of_it(size: int, pieces: int) -> None:
    together = read_with_head(representation(size), first=0, wanted=pieces)
    assert together * size <= REQUEST_BYTES or together == 1
    rest = requests(layout_of(representation(size), pieces), first=0, pieces=pieces, done=together)
    alone = requests(layout_of(representation(size), pieces), first=0, pieces=pieces, done=0)
    assert 1 + len(rest) == len(alone)  # no more requests than without a header


def test_a_header_comes_alone_where_the_hit_begins_inside_or_sizes_vary() -> None:
    assert read_with_head(representation(4096), first=1, wanted=3) == 0
    assert read_with_head(representation(None), first=0, wanted=3) == 0


def test_the_layout_is_known_from_the_headers_length_alone() -> None:
    uneven = representation(520, 4104, 98_304)
    for extras_bytes in (0, 5000):
        layout = layout_of(uneven, 7, extras_bytes=extras_bytes)
        assert expected_layout(uneven, 7, layout.header_bytes) == layout
