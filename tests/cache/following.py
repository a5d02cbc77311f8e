"""A router as it follows KV events: subscribes, asks again for what it missed, and keeps the blocks that it was told of.

The forms are declared here once more, as a subscriber of vLLM's stream has them, so that a change of ours is noticed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec
import zmq

TIMEOUT_S = 30.0


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Follower:
    """`blocks[medium][hash]` is (parent, tokens of the block, adapter). `seen`: every event, in order."""

    def __init__(self, endpoint: str, replay_endpoint: str) -> None:
        self.blocks: dict[str, dict[bytes, tuple[bytes | None, tuple[int, ...], str | None]]] = {}
        self.seen: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self.last = -1
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        self._live.connect(endpoint)
        self._replay = self._context.socket(zmq.DEALER)
        self._replay.connect(replay_endpoint)
        self._decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def until(self, true: Callable[[], bool]) -> None:
        """Follow until something is true."""
        deadline = time.monotonic() + TIMEOUT_S
        while not true():
            assert time.monotonic() < deadline, (self.last, self.seen[-3:])
            if self._live.poll(50):
                _, number, payload = self._live.recv_multipart()
                self._take(int.from_bytes(number, "big"), payload)
            else:
                self.catch_up()

    def catch_up(self, number: int | None = None) -> None:
        """Ask for everything from a number on, or from where it stands."""
        self._replay.send_multipart((b"", (self.last + 1 if number is None else number).to_bytes(8, "big")))
        while self._replay.poll(TIMEOUT_S * 1000):
            _, _, number_bytes, payload = self._replay.recv_multipart()
            found = int.from_bytes(number_bytes, "big", signed=True)
            if found == -1:
                return
            self._apply(payload)
            self.last = max(self.last, found)
        raise AssertionError("no answer")

    def _take(self, number: int, payload: bytes) -> None:
        if number <= self.last:
            return
        if number > self.last + 1:
            self.catch_up()
            return
        self._apply(payload)
        self.last = number

    def _apply(self, payload: bytes) -> None:
        for event in self._decoder.decode(payload).events:
            self.seen.append(event)
            if isinstance(event, AllBlocksCleared):
                self.blocks = {}
                continue
            assert event.medium is not None
            there = self.blocks.setdefault(event.medium, {})
            if isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    assert isinstance(name, bytes)
                    there.pop(name, None)
                continue
            assert event.block_size == 64
            assert len(event.token_ids) == 64 * len(event.block_hashes)
            parent = event.parent_block_hash
            for place, name in enumerate(event.block_hashes):
                assert isinstance(name, bytes)
                assert not isinstance(parent, int)
                there[name] = (parent, tuple(event.token_ids[64 * place : 64 * place + 64]), event.lora_name)
                parent = name

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._context.destroy(linger=0)
