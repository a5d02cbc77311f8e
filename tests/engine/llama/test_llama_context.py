"""Ranges of sequences go out and come back to the byte, whatever else the memory holds and whoever computes meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from asking import some_tokens
from gguf_fixtures import Kind
from headstart.engine.llama.binding import Library
from headstart.engine.llama.context import Context, Row, WrongState
from headstart.engine.llama.weights import Weights

Made = Callable[[Kind], Path]
PROMPT, OTHER = some_tokens(400, 1, 250), some_tokens(300, 2, 250)


@pytest.fixture(params=["f16", "q8_0"])
def context(request: pytest.FixtureRequest, library: Library, gguf: Made) -> Iterator[Context]:
    yield from _context(library, gguf("llama"), request.param)


@pytest.fixture(params=["granitehybrid", "mamba"])
def recurrent(request: pytest.FixtureRequest, library: Library, gguf: Made) -> Iterator[Context]:
    yield from _context(library, gguf(request.param), "f16")


def _context(library: Library, file: Path, kv_type: str) -> Iterator[Context]:
    weights = Weights(library, file, gpu_layers=0)
    context = Context(weights, cells=4096, sequences=8, kv_type=kv_type, batch=512, ubatch=512, threads=2, flash=True)
    yield context
    context.close()
    weights.close()


def _logits(context: Context, *rows: Row) -> list[np.ndarray]:
    return [context.logits(output).copy() for output in context.compute(rows)]


def test_what_is_put_back_beside_others_that_compute_is_the_same_to_the_byte(context: Context) -> None:
    _logits(context, Row(1, PROMPT[:320], 0, True))
    pieces = [context.copy_out(1, at, at + 64) for at in range(0, 320, 64)]
    assert len({len(piece) for piece in pieces}) == 1
    wanted = _logits(context, Row(1, PROMPT[320:384], 320, True))[0]
    _logits(context, Row(2, OTHER[:100], 0, True))
    context.remove(1)
    at = 100
    for number, piece in enumerate(pieces):  # another sequence writes into the cells between
        context.put_in(3, memoryview(piece), number * 64, number * 64 + 64)
        _logits(context, Row(2, OTHER[at : at + 7], at, True))
        at += 7
    assert [bytes(context.copy_out(3, first, first + 64)) for first in range(0, 320, 64)] == list(map(bytes, pieces))
    # In one pass with another's row: the sums are in another order, and no more than that.
    got, _ = _logits(context, Row(3, PROMPT[320:384], 320, True), Row(2, OTHER[at : at + 1], at, True))
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_alone_the_logits_behind_what_was_put_back_are_the_same_bits(context: Context) -> None:
    _logits(context, Row(1, PROMPT[:320], 0, True))
    pieces = [context.copy_out(1, at, at + 64) for at in range(0, 320, 64)]
    wanted = _logits(context, Row(1, PROMPT[320:384], 320, True))[0]
    context.remove(1)
    for number, piece in enumerate(pieces):
        context.put_in(1, memoryview(piece), number * 64, number * 64 + 64)
    got = _logits(context, Row(1, PROMPT[320:384], 320, True))[0]
    assert np.array_equal(got, wanted)


def test_a_few_rows_behind_a_long_prefix_are_filled_up_to_a_tile_and_leave_nothing(
    library: Library, gguf: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Weights(library, gguf("llama"), gpu_layers=0)
    context = Context(weights, cells=256, sequences=3, kv_type="f16", batch=256, ubatch=256, threads=1, flash=True)
    missing = lambda rows, first: context._missing([Row(1, OTHER[:rows], first, wanted=True)])  # noqa: E731
    assert [missing(rows, 100_000) for rows in (1, 16, 32, 63, 64)] == [0, 0, 32, 1, 0]
    assert [missing(32, first) for first in (0, 50)] == [0, 0]
    _logits(context, Row(1, PROMPT[:216], 0, True))
    context.share(1, 2, 216)
    rows = PROMPT[216:256]  # then every cell that may be asked for is held
    assert context._tiles is not None
    monkeypatch.setattr(context, "_tiles", replace(context._tiles, key_work=0))
    wanted = _logits(context, Row(1, rows, 216, True))[0]
    context.remove(1)
    monkeypatch.setattr(context, "_tiles", replace(context._tiles, key_work=1 << 20))
    got = _logits(context, Row(2, rows, 216, True))[0]
    assert not np.array_equal(got, wanted), "another kernel"
    assert np.abs(got - wanted).max() < 5e-3 * np.abs(wanted).max()
    assert [context.end_of(number) for number in range(3)] == [0, 0, 256]
    context.close()
    weights.close()


def test_a_beginning_that_is_shared_outlives_who_computed_it(context: Context) -> None:
    wanted = _logits(context, Row(1, PROMPT[:200], 0, True))[0]
    context.share(1, 2, 128)
    context.remove(1)
    got = _logits(context, Row(2, PROMPT[128:200], 128, True))[0]
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_bytes_of_other_tokens_and_damaged_ones_are_refused(context: Context) -> None:
    _logits(context, Row(1, PROMPT[:200], 0, True))
    piece = context.copy_out(1, 64, 128)
    with pytest.raises(WrongState, match="tokens 0 to 64 brought those from 64 to 128"):
        context.put_in(2, memoryview(piece), 0, 64)
    with pytest.raises(WrongState):
        context.put_in(2, memoryview(piece)[:-100], 64, 128)
    assert context.end_of(2) == 0
    assert context.end_of(0) == 0, "the scratch sequence is left empty"


def test_a_recurrent_sequence_goes_on_from_its_ranges_and_the_state_behind_them(recurrent: Context) -> None:
    _logits(recurrent, Row(1, PROMPT[:128], 0, True))
    pieces = [recurrent.copy_out(1, at, at + 64) for at in (0, 64)]
    state = recurrent.state_out(1)
    wanted = _logits(recurrent, Row(1, PROMPT[128:192], 128, True))[0]
    _logits(recurrent, Row(2, OTHER[:100], 0, True))
    for number, piece in enumerate(pieces):
        recurrent.put_in(3, memoryview(piece), number * 64, number * 64 + 64)
    recurrent.state_in(3, memoryview(state), 128)
    assert bytes(recurrent.state_out(3))[8:] == bytes(state)[8:]
    got = _logits(recurrent, Row(3, PROMPT[128:192], 128, True))[0]
    assert np.abs(got - wanted).max() < 1e-3 * np.abs(wanted).max()
    with pytest.raises(WrongState, match="should stand behind 64 tokens stands behind"):
        recurrent.state_in(4, memoryview(state), 64)
