"""Sorted arrays of offsets answer as a set and a dict do."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from headstart.tier.disk.offsets import Offsets, Rows

places = st.integers(0, 12).map(lambda n: n * 4096)


@given(st.lists(places), st.lists(places, max_size=20))
def test_offsets_are_a_set_in_order(added: list[int], asked: list[int]) -> None:
    offsets = Offsets()
    for offset in added:
        offsets.add(offset)
    assert list(offsets) == sorted(set(added))
    assert len(offsets) == len(set(added))
    assert [offset in offsets for offset in asked] == [offset in set(added) for offset in asked]
    assert offsets.among(np.array(asked, np.int64)).tolist() == [offset in set(added) for offset in asked]
    offsets.clear()
    assert not offsets


@given(st.lists(st.tuples(places, st.booleans()), max_size=40), st.lists(places, max_size=20))
def test_rows_are_a_dict_in_the_order_of_offsets(changes: list[tuple[int, bool]], asked: list[int]) -> None:
    column, model = np.zeros(64, np.int64), dict[int, int]()
    rows = Rows(lambda: column)
    for row, (offset, comes) in enumerate(changes):
        if comes and offset not in model:
            column[row], model[offset] = offset, row
            rows.add(row)
        elif model.pop(offset, None) is not None:
            rows.remove(offset)
        else:
            with pytest.raises(KeyError):
                rows.remove(offset)
        assert rows.behind(offset) == (not model or offset > max(model))
    assert list(rows.items()) == sorted(model.items())
    assert list(rows.values()) == [row for _, row in sorted(model.items())]
    assert [rows.get(offset) for offset in asked] == [model.get(offset) for offset in asked]
    assert rows.get_all(np.array(asked, np.int64)).tolist() == [model.get(offset, -1) for offset in asked]
    column[50:55] = np.arange(20, 25) * 4096
    rows.extend(np.arange(50, 55))
    assert list(rows.items())[len(model) :] == list(zip(column[50:55].tolist(), range(50, 55), strict=True))
    assert list(rows) == sorted(model) + column[50:55].tolist()
    assert len(rows) == len(model) + 5
