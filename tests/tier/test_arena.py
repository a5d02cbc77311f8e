"""Regions never overlap, come back whole, and stay valid as long as somebody looks at them."""

from __future__ import annotations

import gc
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headstart.tier.arena import ALIGNMENT, HUGE_PAGE, Arena


def address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)


def test_the_base_is_aligned_to_a_huge_page_and_every_region_to_4_kib() -> None:
    with Arena(3 * ALIGNMENT) as arena:
        first = arena.allocate(5)
        second = arena.allocate(ALIGNMENT + 1)
        assert first is not None
        assert second is not None
        assert address(first.view) % HUGE_PAGE == 0
        assert address(second.view) == address(first.view) + ALIGNMENT
        assert (first.nbytes, second.nbytes) == (5, ALIGNMENT + 1)
        assert arena.used_bytes == 3 * ALIGNMENT


def test_touching_changes_no_content_and_tells_when_all_is_touched() -> None:
    with Arena(3 * HUGE_PAGE) as arena:
        region = arena.allocate(HUGE_PAGE)
        assert region is not None
        region.view[-1] = 7
        while arena.touch(HUGE_PAGE):
            pass
        assert region.view[-1] == 7
        assert not arena.touch(HUGE_PAGE)
        rest = arena.allocate(2 * HUGE_PAGE)
        assert rest is not None
        assert not np.frombuffer(rest.view, np.uint8).any()
    assert not arena.touch(HUGE_PAGE)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say what is backed")
def test_what_is_handed_out_next_is_touched_ahead_and_no_more() -> None:
    with Arena(16 * HUGE_PAGE) as arena:
        region = arena.allocate(HUGE_PAGE)
        assert region is not None
        begin = address(region.view)
        assert arena.touch_ahead(4 * HUGE_PAGE, at_once=3 * HUGE_PAGE)
        assert backed(begin) == 3 * HUGE_PAGE
        assert not arena.touch_ahead(4 * HUGE_PAGE, at_once=3 * HUGE_PAGE)
        assert backed(begin) == 5 * HUGE_PAGE
        region.release()
        again = arena.allocate(HUGE_PAGE)
        assert not arena.touch_ahead(4 * HUGE_PAGE, at_once=3 * HUGE_PAGE)
        assert backed(begin) == 5 * HUGE_PAGE, "what was touched once stays so"
        rest = arena.allocate(14 * HUGE_PAGE)
        assert rest is not None
        while arena.touch_ahead(4 * HUGE_PAGE, at_once=3 * HUGE_PAGE):
            pass
        assert backed(begin) == 16 * HUGE_PAGE
    assert again is not None
    assert not arena.touch_ahead(4 * HUGE_PAGE, at_once=3 * HUGE_PAGE)


def backed(at: int) -> int:
    """Return how many bytes of the mapping there are in memory."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    inside = False
    for line in lines:
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found is not None:
            inside = int(found[1], 16) <= at < int(found[2], 16)
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("it is not mapped")


def test_full_now_is_none_and_never_is_an_error() -> None:
    with Arena(2 * ALIGNMENT) as arena:
        region = arena.allocate(2 * ALIGNMENT)
        assert region is not None
        assert arena.allocate(1) is None
        with pytest.raises(ValueError, match="can never fit"):
            arena.allocate(2 * ALIGNMENT + 1)
        with pytest.raises(ValueError, match="can never fit"):
            arena.allocate(0)
        region.release()
        assert arena.allocate(1) is not None


def test_a_region_is_freed_with_its_last_release_and_only_once() -> None:
    with Arena(ALIGNMENT) as arena:
        region = arena.allocate(10)
        assert region is not None
        region.retain()
        region.release()
        assert arena.used_bytes == ALIGNMENT
        region.release()
        assert arena.used_bytes == 0
        with pytest.raises(RuntimeError, match="after its last release"):
            region.release()
        with pytest.raises(RuntimeError, match="after its last release"):
            region.retain()
        assert arena.used_bytes == 0


def test_views_outlive_a_closed_arena() -> None:
    arena = Arena(ALIGNMENT)
    region = arena.allocate(8)
    assert region is not None
    array = np.frombuffer(region.view, np.uint8)
    array[:] = 3
    arena.close()
    arena.close()
    gc.collect()
    assert array.tolist() == [3] * 8
    region.release()
    with pytest.raises(RuntimeError, match="closed"):
        arena.allocate(1)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 9 * ALIGNMENT), st.randoms(use_true_random=False)), max_size=80))
def test_regions_never_overlap_and_all_space_comes_back(steps: list[tuple[bool, int, object]]) -> None:
    with Arena(32 * ALIGNMENT) as arena:
        live = []
        for grow, nbytes, random in steps:
            if grow:
                region = arena.allocate(nbytes)
                if region is not None:
                    live.append(region)
            elif live:
                live.pop(random.randrange(len(live))).release()  # type: ignore[attr-defined]
            spans = sorted((address(r.view), address(r.view) + r.nbytes) for r in live)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))
            assert arena.used_bytes == sum(-(-r.nbytes // ALIGNMENT) * ALIGNMENT for r in live)
        for region in live:
            region.release()
        assert arena.used_bytes == 0
        assert arena.allocate(32 * ALIGNMENT) is not None  # one piece again
