"""The C kernel gives what attention is by its definition, in float64: every width, grouping, window, sink and sharing."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headstart.engine.torch import attention, kernel
from headstart.engine.torch.attention import Prefix, Segment, Sight, Step

_FOUND = kernel.kernel()
pytestmark = pytest.mark.skipif(_FOUND is None, reason="headstart was installed without its C kernel")
_LANES = sorted({_FOUND.lanes, min(_FOUND.lanes, 8)}) if _FOUND is not None else []


class SomeKV:
    """Keys and values of one layer, where a test wants them."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self._keys, self._values = keys, values

    @classmethod
    def drawn(cls, heads: int, tokens: int, width: int, value_width: int | None = None) -> SomeKV:
        return cls(torch.randn(heads, tokens, width), torch.randn(heads, tokens, value_width or width))

    def keys(self, layer: int) -> Tensor:
        return self._keys

    def values(self, layer: int) -> Tensor:
        return self._values


def _use(monkeypatch: pytest.MonkeyPatch, lanes: int | None) -> None:
    assert _FOUND is not None
    chosen = None if lanes is None else dataclasses.replace(_FOUND, lanes=lanes)
    monkeypatch.setattr(attention, "kernel", lambda: chosen)


def _attended(query: Tensor, key: Tensor, value: Tensor, segments: Sequence[Segment], **more: Any) -> Tensor:
    """[rows, heads, width] through `attend`."""
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    window = more.pop("window", None)
    out, _ = attention.attend(module, query[None], key[None], value[None], Sight(window), headstart=Step(segments), **more)
    return out[0]


def _by_definition(
    query: Tensor,  # [heads, rows, width]
    segments: Sequence[Segment],
    *,
    scaling: float,
    window: int | None = None,
    s_aux: Tensor | None = None,
) -> Tensor:
    """[rows, heads, width] in float64, from the KV that `attend` has written."""
    out = torch.zeros(query.shape[1], query.shape[0], segments[0].kv.values(0).shape[2], dtype=torch.float64)
    for one in segments:
        kvs = [(one.kv, None)] if one.prefix is None else [(one.prefix.kv, one.prefix.tokens), (one.kv, None)]
        keys = torch.cat([kv.keys(0)[:, :tokens] for kv, tokens in kvs], dim=1).double()
        values = torch.cat([kv.values(0)[:, :tokens] for kv, tokens in kvs], dim=1).double()
        group = query.shape[0] // keys.shape[0]
        rows = torch.arange(one.first, one.first + one.count)[:, None]
        seen = torch.arange(keys.shape[1])[None] <= rows
        if window is not None:
            seen &= torch.arange(keys.shape[1])[None] > rows - window
        folded = query[:, one.rows].double().reshape(keys.shape[0], group, one.count, -1)
        scores = torch.einsum("kgrd,knd->kgrn", folded, keys) * scaling
        scores = scores.masked_fill(~seen, float("-inf"))
        if s_aux is not None:
            sinks = s_aux.double().view(keys.shape[0], group, 1, 1).expand(-1, -1, one.count, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        shares = scores.softmax(dim=-1)[..., : keys.shape[1]]
        out[one.rows] = torch.einsum("kgrn,knd->kgrd", shares, values).flatten(0, 1).transpose(0, 1)
    return out


@pytest.mark.parametrize("lanes", _LANES)
@settings(max_examples=settings.default.max_examples // 2)
@given(
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 5]),
    width=st.sampled_from([8, 16, 40, 64, 80, 96, 128, 256]),
    first=st.sampled_from([0, 1, 63, 64, 65, 200, 600]),
    count=st.sampled_from([1, 2, 5, 16, 33, 100]),
    window=st.sampled_from([None, None, 1, 20, 64, 300]),
    threads=st.sampled_from([1, 2]),
    sink=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_shape_is_attended_as_defined(
    lanes: int,
    kv_heads: int,
    group: int,
    width: int,
    first: int,
    count: int,
    window: int | None,
    threads: int,
    sink: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    torch.set_num_threads(threads)
    kv = SomeKV.drawn(kv_heads, first + count + seed % 3, width)
    query, key, value = (torch.randn(heads, count, width) for heads in (kv_heads * group, kv_heads, kv_heads))
    segments = [Segment(kv, 0, count, first)]
    sinks = torch.randn(kv_heads * group) if sink else None
    with pytest.MonkeyPatch.context() as patched:
        _use(patched, lanes)
        got = _attended(query, key, value, segments, scaling=width**-0.5, window=window, s_aux=sinks)
    assert torch.equal(kv.keys(0)[:, first : first + count], key)
    assert torch.equal(kv.values(0)[:, first : first + count], value)
    want = _by_definition(query, segments, scaling=width**-0.5, window=window, s_aux=sinks)
    assert (got - want).abs().max() <= 3e-6


@pytest.mark.parametrize("lanes", _LANES)
@pytest.mark.parametrize("window", [None, 90])
def test_requests_with_and_without_a_shared_prefix_are_attended_in_one_call(
    lanes: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _use(monkeypatch, lanes)
    torch.manual_seed(3)
    one, other = (Prefix(SomeKV.drawn(2, room, 64), tokens) for room, tokens in ((700, 640), (64, 64)))
    segments, rows = [], 0
    for first, count, prefix in ((640, 1, one), (700, 40, one), (0, 70, None), (90, 1, other), (900, 1, one), (500, 3, None)):
        base = prefix.tokens if prefix else 0
        segments.append(Segment(SomeKV.drawn(2, first + count - base, 64), rows, count, first, prefix))
        rows += count
    query, key, value = (torch.randn(rows, heads, 64).transpose(0, 1) for heads in (6, 2, 2))
    got = _attended(query, key, value, segments, scaling=0.125, window=window)
    assert (got - _by_definition(query, segments, scaling=0.125, window=window)).abs().max() <= 2e-6


def test_values_may_be_narrower_than_keys_and_lie_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _LANES[-1])
    torch.manual_seed(4)
    both = torch.randn(2, 300, 96 + 64)
    kv = SomeKV(both[:, :, :96], both[:, :, 96:])
    assert _FOUND is not None
    plan = kernel.Plan(_FOUND, [(None, [Segment(kv, 0, 8, 290)])], [], kernel.Shape(2, 3, 96, 64))
    query, out = torch.randn(6, 8, 96), torch.empty(8, 6, 64)
    plan.attend(0, query, both[:, :8, :96], both[:, :8, 96:], out, scale=0.1, window=None, sinks=None)
    want = _by_definition(query, [Segment(kv, 0, 8, 290)], scaling=0.1)
    assert (out - want).abs().max() <= 2e-6


@pytest.mark.parametrize("lanes", _LANES)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_not_hidden(lanes: int, wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    kv = SomeKV.drawn(1, 100, 64)
    query, key, value = torch.randn(2, 3, 64), torch.randn(1, 3, 64), torch.randn(1, 3, 64)
    query[0, 1, 5] = wrong
    kv.values(0)[0, 40, 7] = wrong
    ways = []
    for way in (lanes, None):
        _use(monkeypatch, way)
        ways.append(_attended(query, key, value, [Segment(kv, 0, 3, 97)], scaling=0.125))
    assert ways[0][1, 0].isnan().all()  # the query's row and head
    assert not ways[0][:, :, 7].isfinite().any()  # the value's number, in every row
    assert ways[0][0, 1, :7].isfinite().all()  # and nothing else
    assert torch.equal(ways[0].isfinite(), ways[1].isfinite())


def test_the_same_call_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _LANES[-1])
    torch.set_num_threads(2)
    torch.manual_seed(6)
    kv = SomeKV.drawn(2, 3000, 64)
    query, key, value = torch.randn(6, 20, 64), torch.randn(2, 20, 64), torch.randn(2, 20, 64)
    segments = [Segment(kv, 0, 20, 2980)]
    first = _attended(query, key, value, segments)
    for _ in range(5):
        assert torch.equal(_attended(query, key, value, segments), first)


def test_kv_that_is_too_short_or_of_another_shape_is_never_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, _LANES[-1])
    query, key = torch.randn(2, 3, 64), torch.randn(1, 3, 64)
    for kv in (SomeKV.drawn(1, 12, 64), SomeKV.drawn(2, 13, 64), SomeKV.drawn(1, 13, 72), SomeKV.drawn(1, 13, 64, 72)):
        before = kv.keys(0).clone()
        with pytest.raises(ValueError, match="does not hold 13 tokens"):
            _attended(query, key, key, [Segment(kv, 0, 3, 10)])
        assert torch.equal(kv.keys(0), before)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (torch.float64, 64), (torch.float32, 20)])
def test_what_it_does_not_serve_goes_through_torch(dtype: torch.dtype, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel.Plan, "attend", None)
    kv = SomeKV(torch.randn(1, 9, width).to(dtype), torch.randn(1, 9, width).to(dtype))
    query, key = torch.randn(2, 3, width).to(dtype), torch.randn(1, 3, width).to(dtype)
    assert _attended(query, key, key, [Segment(kv, 0, 3, 6)]).isfinite().all()
    with pytest.raises(TypeError, match="not callable"):  # this would have gone through it
        _attended(torch.randn(2, 3, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 8), [Segment(SomeKV.drawn(1, 9, 8), 0, 3, 6)])


def test_a_kernel_compiled_from_another_source_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _FOUND is not None
    assert kernel._is_ours(_FOUND.library)
    monkeypatch.setattr(kernel, "_MEANING", 0)
    assert not kernel._is_ours(_FOUND.library)
    assert not kernel._is_ours(ctypes.CDLL(None))


def test_a_segment_without_rows_never_reaches_the_kernel() -> None:
    kv = SomeKV.drawn(2, 64, 16)
    assert _FOUND is not None
    with pytest.raises(ValueError, match="at least a row"):
        kernel.Plan(_FOUND, [(None, [Segment(kv, 0, 0, 5)])], (), kernel.Shape(2, 1, 16, 16))
