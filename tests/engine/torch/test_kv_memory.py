"""KV memory: what attention writes is what pieces show, counted to the byte and freed once."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory, KVShape, LayerKV
from headstart.transfer.buffers import scatter

SHAPE = KVShape.alike(3, heads=2, width=8, dtype=torch.float32)
PIECE = 2 * 2 * 64 * 8 * 4


def _filled(memory: KVMemory, tokens: int) -> HostKV:
    kv = memory.allocate_host(tokens)
    assert kv is not None
    for layer in SHAPE.numbers:
        for both in (kv.keys(layer), kv.values(layer)):
            both.copy_(torch.randn(both.shape))
    return kv


def _piece(kv: HostKV, layer: int, piece: int) -> bytes:
    return b"".join(map(bytes, kv.buffers(layer, piece, [PIECE])))


def test_a_piece_is_the_same_bytes_whatever_the_length_of_its_request() -> None:
    memory = KVMemory(SHAPE, 1 << 20, context_tokens=512)
    long, short = _filled(memory, 300), memory.allocate_host(130)
    assert short is not None
    for layer in range(3):
        short.keys(layer)[:, :130] = long.keys(layer)[:, :130]
        short.values(layer)[:, :130] = long.values(layer)[:, :130]
        for piece in range(2):
            assert _piece(short, layer, piece) == _piece(long, layer, piece)


@given(layer=st.integers(0, 2), first=st.integers(0, 4), count=st.integers(0, 5))
def test_buffers_hold_the_pieces_one_behind_the_other(layer: int, first: int, count: int) -> None:
    memory = KVMemory(SHAPE, 1 << 20, context_tokens=512)
    kv = _filled(memory, 320)
    count = min(count, 5 - first)
    got = b"".join(map(bytes, kv.buffers(layer, first, [PIECE] * count)))
    want = b""
    for piece in range(first, first + count):
        tokens = slice(64 * piece, 64 * (piece + 1))
        for part in (kv.keys(layer), kv.values(layer)):
            want += part[:, tokens].contiguous().numpy().tobytes()
    assert got == want


@pytest.mark.parametrize("tokens", [320, 512, 128])
def test_pieces_of_several_blocks_are_seen_where_they_lie(tokens: int) -> None:
    shape = replace(SHAPE, piece_tokens=256)
    kv = KVMemory(shape, 1 << 20, context_tokens=512).allocate_host(tokens)
    assert kv is not None
    kv.keys(2).copy_(torch.randn(kv.keys(2).shape))
    kv.values(2).copy_(torch.randn(kv.values(2).shape))
    whole = tokens // 256
    got = kv.buffers(2, 0, [4 * PIECE] * whole)
    want = b""
    for piece in range(whole):
        for part in (kv.keys(2), kv.values(2)):
            want += part[:, 256 * piece : 256 * (piece + 1)].contiguous().numpy().tobytes()
    assert b"".join(map(bytes, got)) == want
    with pytest.raises(ValueError, match="past the"):
        kv.buffers(2, 0, [4 * PIECE] * (whole + 1))
    if whole:
        scatter(memoryview(bytes(4 * PIECE)), kv.buffers(2, 0, [4 * PIECE]))
        assert not kv.keys(2)[:, :256].any()
        assert kv.keys(2)[:, 256:].all()


def test_buffers_can_be_written_and_attention_sees_it() -> None:
    kv = _filled(KVMemory(SHAPE, 1 << 20, context_tokens=512), 64)
    scatter(memoryview(bytes(PIECE)), kv.buffers(1, 0, [PIECE]))
    assert not kv.keys(1).any()
    assert not kv.values(1).any()
    assert kv.keys(0).all()


def test_pieces_that_are_not_there_or_of_another_size_are_refused() -> None:
    kv = _filled(KVMemory(SHAPE, 1 << 20, context_tokens=512), 128)
    with pytest.raises(ValueError, match="past the 128 tokens"):
        kv.buffers(0, 1, [PIECE, PIECE])
    with pytest.raises(ValueError, match="asked for"):
        kv.buffers(0, 0, [PIECE - 1])


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
def test_memory_is_counted_bounded_and_freed_with_the_last_release(device: torch.device | None) -> None:
    memory = KVMemory(SHAPE, 2 * SHAPE.region_bytes(128), context_tokens=128, device=device)
    first, second = memory.allocate(128), memory.allocate(65)
    assert isinstance(first, HostKV if device is None else DeviceKV)
    assert memory.allocate(1) is None
    assert memory.used_bytes == memory.capacity_bytes
    first.retain()
    first.release()
    assert memory.allocate(1) is None
    first.release()
    with pytest.raises(RuntimeError):
        first.release()
    with pytest.raises(RuntimeError):
        first.retain()
    assert second is not None
    second.release()
    assert memory.used_bytes == 0
    with pytest.raises(ValueError, match="never"):
        memory.allocate(257)


def test_a_layer_travels_to_a_device_and_back() -> None:
    memory = KVMemory(SHAPE, 1 << 20, context_tokens=512, device=torch.device("cpu"))
    there, back, kv = _filled(memory, 128), _filled(memory, 128), memory.allocate(200)
    assert isinstance(kv, DeviceKV)
    for layer in range(3):
        kv.copy_layer(layer, of=there, tokens=128)
    kv.copy_to(back, 128)
    assert all(_piece(back, layer, piece) == _piece(there, layer, piece) for layer in range(3) for piece in range(2))


def test_host_memory_beside_a_device_is_bounded_by_a_few_contexts() -> None:
    memory = KVMemory(SHAPE, 100 * SHAPE.region_bytes(128), context_tokens=128, device=torch.device("cpu"))
    passages = [memory.allocate_host(128) for _ in range(5)]
    assert passages[3] is not None
    assert passages[4] is None
    assert memory.capacity_bytes == 100 * SHAPE.region_bytes(128)
    assert [memory.allocate(128) is not None for _ in range(101)] == [True] * 100 + [False]


def test_spare_memory_is_had_once_at_a_time_beyond_the_capacity() -> None:
    memory = KVMemory(SHAPE, SHAPE.region_bytes(128), context_tokens=128)
    assert memory.allocate(128) is not None
    for tokens in (128, 64):
        spare = memory.allocate_spare(tokens)
        assert spare is not None
        assert memory.allocate_spare(64) is None
        assert memory.used_bytes == memory.capacity_bytes + SHAPE.region_bytes(tokens)
        spare.release()
    assert memory.used_bytes == memory.capacity_bytes
    memory.close()


def _backed_tokens(memory: KVMemory) -> int:
    touched = 1
    while memory.touch(64):
        touched += 1
    return 64 * touched


def test_memory_is_touched_for_two_contexts_then_only_for_what_was_used() -> None:
    memory = KVMemory(SHAPE, 100 * SHAPE.region_bytes(128), context_tokens=128)
    assert _backed_tokens(memory) == 256
    assert not memory.touch(64)
    for held in [memory.allocate(128) for _ in range(4)]:
        assert held is not None
        held.release()
    assert _backed_tokens(memory) == 256  # what four requests held at once, less what was touched
    assert not memory.touch(64)


def test_the_representation_tells_what_the_bytes_are() -> None:
    representation = SHAPE.representation(query_heads=4)
    assert representation.kind == "gqa"
    assert SHAPE.representation(query_heads=2).kind == "mha"
    assert representation.layer_bytes == (PIECE,) * 3
    assert representation.bytes_per_token == SHAPE.token_bytes
    assert representation != KVShape(SHAPE.layers, torch.bfloat16).representation(query_heads=4)


@pytest.mark.parametrize(
    ("shape", "query_heads", "digest"),
    [
        (SHAPE, 4, "0315c0fa3a3c3567fd45ca91b09b4ff50a5884ebab40599fd3f732410dff1e92"),
        (
            KVShape.alike(30, heads=3, width=64, dtype=torch.float32),
            9,
            "1e16ad87fa7a43050c261c3b4239df8caccc22e0e45b2ec4ca58db0f97a6c1a7",
        ),
        (
            KVShape.alike(2, heads=2, width=8, dtype=torch.bfloat16),
            2,
            "44e814a4da207b870de5f99baee42358f72cb8c477c505fe2f545a2b8ee36db2",
        ),
    ],
)
def test_prefixes_of_plain_models_that_older_versions_stored_are_still_read(
    shape: KVShape, query_heads: int, digest: str
) -> None:
    assert shape.representation(query_heads=query_heads).digest.hex() == digest


# Some of the model's numbers are left out; a plain layer, a wider one, one with values narrower than keys, a latent.
MIXED = KVShape(
    (LayerKV(0, 4, 8), LayerKV(2, 2, 24), LayerKV(3, 2, 20, key_width=12), LayerKV(7, 1, 18, latent=True)), torch.float32
)


def test_layers_that_differ_each_keep_what_they_are() -> None:
    representation = MIXED.representation(query_heads=4)
    assert representation.layer_numbers == (0, 2, 3, 7)
    assert representation.layer_bytes == tuple(64 * 4 * numbers for numbers in (32, 48, 40, 18))
    assert representation.bytes_per_token == MIXED.token_bytes == 4 * (32 + 48 + 40 + 18)
    memory = KVMemory(MIXED, 4 * MIXED.region_bytes(300), context_tokens=300)
    long, short = memory.allocate_host(300), memory.allocate_host(128)
    assert long is not None
    assert short is not None
    forms = {0: ((2, 320, 8), (2, 320, 8)), 2: ((1, 320, 24), (1, 320, 24)), 3: ((2, 320, 12), (2, 320, 8))}
    for number, (keys, values) in forms.items():
        assert (long.keys(number).shape, long.values(number).shape) == (keys, values)
        for there, here in ((long.keys, short.keys), (long.values, short.values)):
            there(number).copy_(torch.randn(there(number).shape))
            here(number).copy_(there(number)[:, :128])
    assert long.keys(7).shape == (1, 320, 18)
    assert long.values(7).data_ptr() == long.keys(7).data_ptr()
    long.keys(7).copy_(torch.randn(1, 320, 18))
    short.keys(7).copy_(long.keys(7)[:, :128])
    for place, nbytes in enumerate(representation.layer_bytes):
        pieces = [long.buffers(place, 1, [nbytes or 0]), short.buffers(place, 1, [nbytes or 0])]
        assert bytes(pieces[0].tobytes()) == bytes(pieces[1].tobytes())
    assert bytes(long.buffers(3, 0, [64 * 72]).tobytes()) == long.keys(7)[0, :64].numpy().tobytes()
    with pytest.raises(KeyError):
        long.keys(1)


def test_layers_that_differ_travel_to_a_device_and_back() -> None:
    memory = KVMemory(MIXED, 1 << 20, context_tokens=512, device=torch.device("cpu"))
    there, back, kv = memory.allocate_host(64), memory.allocate_host(64), memory.allocate(64)
    assert there is not None
    assert back is not None
    assert isinstance(kv, DeviceKV)
    there.keys(7).copy_(torch.randn(1, 64, 18))
    there.values(3).copy_(torch.randn(2, 64, 8))
    for place in range(4):
        kv.copy_layer(place, of=there, tokens=64)
    kv.copy_to(back, 64)
    assert torch.equal(back.keys(7), there.keys(7))
    assert torch.equal(back.values(3), there.values(3))
