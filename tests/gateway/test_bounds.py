"""What the router remembers is bounded, whatever comes; names of blocks; events; what a worker says of itself."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from asking import eventually
from headstart.api.behalf import headers_for, read_secret, routed
from headstart.api.errors import WrongKey
from headstart.api.keyring import Caller
from headstart.api.keys import make_key
from headstart.block.keys import chain_keys
from headstart.errors import ConfigError, KeysUnreadable
from headstart.events import BlockRemoved, BlockStored, Publisher
from headstart.gateway.decisions import Asked, Attempt, Decisions
from headstart.gateway.following import Change, Follower, Following
from headstart.gateway.translating import BlockRemoved as TheirRemoved
from headstart.gateway.translating import BlockStored as TheirStored
from headstart.gateway.translating import Translator
from headstart.gateway.worker import Address, endpoint_seen_from
from headstart.policy.routing.estimate import Speeds
from headstart.policy.routing.holders import keys_of
from headstart.policy.routing.router import Routing
from headstart.policy.speed import Speed

SPEEDS = Speeds(prefill=Speed((1e-4, 0.0)), step=Speed((1e-2, 0.0, 0.0)))


def test_a_million_different_prefixes_take_no_more_memory_than_some() -> None:
    routing = Routing(block_tokens=64, random=Random(0), workers=8, blocks=20_000)
    for worker in range(8):
        routing.up(f"w{worker}", SPEEDS, now_s=0.0, events=False)
    decisions = Decisions(most=100)
    draw = np.random.default_rng(0)
    sizes = []
    for number in range(500):  # of 2,000 blocks each: a million
        keys = draw.integers(1, 1 << 63, 2_000).astype(np.uint64)
        decision = routing.choose(keys, tokens=128_000, now_s=number * 0.01)
        assert decision is not None
        routing.sent(str(number), decision, tokens=128_000, now_s=number * 0.01)
        routing.presume(decision.worker, keys)
        asked = Asked(str(number), "", 0.0, "m", 128_000, "tokenizer")
        decisions.keep(asked)
        asked.attempts.append(Attempt(decision, {}))
        decisions.answered(asked, f"answer {number}")
        if number >= 8:
            routing.finished(str(number - 8), answer=10, now_s=number * 0.01)
        sizes.append(len(routing.holders))
    assert max(sizes) <= 20_000
    assert len(decisions) == 100
    assert len(decisions._numbers) == 200
    assert decisions.find("1") is None
    assert decisions.find("answer 499") is decisions.find("499")


def test_other_engines_blocks_of_any_size_get_our_names() -> None:
    tokens = list(range(1000, 1400))
    right = chain_keys(tokens, root=bytes(32))
    for size in (16, 24, 64, 128):
        translator = Translator(lambda adapter: bytes(32), most=1000)
        found: list[bytes] = []
        for number in range(len(tokens) // size):
            parent = number if number else None
            event = TheirStored([number + 1], parent, tokens[number * size : (number + 1) * size], size)
            found += translator.stored(event)
        assert found == right[: len(found)]
        assert len(found) == len(tokens) // size * size // 64
        assert translator.removed(TheirRemoved([number + 1 for number in range(4)])) == found[: 4 * size // 64]


def test_blocks_whose_parent_is_not_known_or_that_something_keeps_apart_have_no_name() -> None:
    translator = Translator(lambda adapter: bytes(32), most=2)
    block = list(range(64))
    assert translator.stored(TheirStored([2], 1, block, 64)) == []
    assert translator.stored(TheirStored([2], None, block, 64, extra_keys=[("salt",)])) == []
    assert len(translator.stored(TheirStored([1], None, block, 64))) == 1
    for name in range(10, 20):
        translator.stored(TheirStored([name], None, block, 64))
    assert translator.stored(TheirStored([2], 1, block, 64)) == []  # forgotten
    assert translator.stored(TheirStored([3], 19, block[:10], 64)) == []  # fewer tokens than it says


def test_a_block_in_several_media_is_gone_from_each_plane_with_the_last_of_them() -> None:
    translator = Translator(lambda adapter: bytes(32), most=100)
    block = list(range(64))
    key = chain_keys(block, root=bytes(32))

    def stored(medium: str | None) -> list[bytes]:
        return translator.stored(TheirStored([1], None, block, 64, medium=medium))

    def removed(medium: str | None) -> list[bytes]:
        return translator.removed(TheirRemoved([1], medium))

    assert [stored(medium) for medium in ("GPU", "CPU_PINNED", "DISK")] == [key] * 3
    assert removed("GPU") == []  # SGLang and vLLM write to the host's memory first, and then let go on the GPU
    assert translator.stored(TheirStored([2], 1, block, 64, medium="CPU_PINNED")) != []  # what follows it has a name still
    assert removed("CPU_PINNED") == key
    assert removed("DISK") == key
    assert removed("DISK") == []
    assert translator.stored(TheirStored([2], 1, block, 64)) == []


def test_a_worker_that_invents_media_without_end_takes_no_memory_by_it() -> None:
    translator = Translator(lambda adapter: bytes(32), most=10)
    block = list(range(64))
    for number in range(1000):
        translator.stored(TheirStored([1], None, block, 64, medium=f"tape {number}"))
    assert len(translator._places[1].media) < 20
    translator.stored(TheirStored([2], None, block, 64, medium="GPU"))
    assert translator.removed(TheirRemoved([2], "GPU")) == chain_keys(block, root=bytes(32))  # others are followed as ever


def test_blocks_under_a_salt_of_sglang_s_are_passed_over_and_its_pairs_are_their_first_tokens() -> None:
    def stored(**more: Any) -> list[bytes]:
        event = {"type": "BlockStored", "block_hashes": [-7], "parent_block_hash": None, "token_ids": list(range(64))}
        event |= {"block_size": 64, "lora_id": None, "medium": "GPU"}
        read = msgspec.msgpack.decode(msgspec.msgpack.encode(event | more), type=TheirStored)
        return Translator(lambda adapter: bytes(32), most=100).stored(read)

    right = chain_keys(range(64), root=bytes(32))
    assert stored() == stored(session_id="7") == right
    assert stored(cache_salt="acme") == []
    assert stored(token_ids=[(token, token + 1) for token in range(64)]) == right


class Loop:
    """An event loop in a thread, and what was handed to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.forgotten = 0
        self.held: set[int] = set()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def took(self, change: Change) -> None:
        if change.forget:
            self.forgotten += 1
            self.held.clear()
        for came, _, keys in change.changes:
            (self.held.update if came else self.held.difference_update)(keys.tolist())

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(30)
        self.loop.close()


@pytest.fixture
def loop() -> Iterator[Loop]:
    loop = Loop()
    yield loop
    loop.close()


def stored(*numbers: int) -> BlockStored:
    return BlockStored(
        [number.to_bytes(16, "little") for number in numbers], None, [0] * 64 * len(numbers), 64, None, "CPU", None
    )


def test_events_are_followed_gaps_are_asked_for_and_a_new_process_begins_from_nothing(loop: Loop) -> None:
    publisher = Publisher("tcp://127.0.0.1:0")
    ended = threading.Event()
    todo: deque[Callable[[], object]] = deque()

    def answer() -> None:  # a publisher is one thread's
        while not ended.is_set():
            publisher.wait(0.02)
            while todo:
                todo.popleft()()
            while (asked := publisher.asked()) is not None:
                publisher.again(*asked)
        publisher.close()

    def lose() -> None:
        publisher._kept.append((publisher.next_number, publisher.encode([stored(3)])))
        publisher.next_number += 1

    publisher.publish([stored(1, 2)])
    thread = threading.Thread(target=answer)
    thread.start()
    follower = Follower(loop.loop)
    one = Following("w", publisher.endpoint, publisher.replay_endpoint, None, loop.took)
    try:
        follower.follow(one)
        eventually(lambda: loop.held == {1, 2})
        todo.append(lose)  # one that is lost on its way
        todo.append(lambda: publisher.publish([BlockRemoved([(1).to_bytes(16, "little")], "CPU")]))
        eventually(lambda: loop.held == {2, 3})
        assert follower.gaps <= 1
        follower.leave(one)
        todo.append(lambda: publisher.publish([stored(9)]))
        eventually(lambda: publisher.next_number == 4)
        again = Following("w", publisher.endpoint, "", None, loop.took)  # nobody to ask: only what comes from now on
        follower.follow(again)

        def heard() -> bool:
            if not todo:
                todo.append(lambda: publisher.publish([stored(7)]))
            return 7 in loop.held

        eventually(heard)
        assert 9 not in loop.held
    finally:
        follower.close()
        ended.set()
        thread.join(30)


def test_addresses_say_what_is_wrong_with_them() -> None:
    address = Address.parse("http://host:8000/v1,role=prefill,events=tcp://host:5557")
    assert (address.url, address.id, address.role) == ("http://host:8000", "host:8000", "prefill")
    for wrong in (
        "host:8000",
        "ftp://host",
        "http://",
        "http://a,role=cook",
        "http://a,events=5557",
        "http://a,what=1",
        "http://a:x",
    ):
        with pytest.raises(ConfigError):
            Address.parse(wrong)
    assert endpoint_seen_from("tcp://*:5557", "http://10.0.0.5:8000") == "tcp://10.0.0.5:5557"
    assert endpoint_seen_from("tcp://127.0.0.1:5557", "http://10.0.0.5:8000") == "tcp://127.0.0.1:5557"


def test_whose_a_request_is_is_believed_of_who_has_the_secret_alone(tmp_path: Any, caplog: Any) -> None:
    key = make_key({"tenant": "Käse&Co", "class": "agent", "priority": 3, "tokens_per_minute": 5}).key
    told = headers_for(Caller(key.tenant, key))
    assert all(value.isascii() for value in told.values())
    assert key.hash not in str(told)
    secret = "a-secret-of-sixteen"
    assert routed({**told, "authorization": "Bearer something-else"}, secret) is None
    caller = routed({**told, "authorization": f"Bearer {secret}"}, secret)
    assert caller is not None
    assert (caller.tenant, caller.key_id, caller.retention, caller.routed) == ("Käse&Co", key.id, "agent", True)
    assert caller.salt("x") == Caller(key.tenant, key).salt("x")
    assert not caller.operator
    with pytest.raises(WrongKey, match="cannot be read"):
        routed({"x-headstart-caller": "{", "authorization": f"Bearer {secret}"}, secret)
    (tmp_path / "short").write_text("short")
    for file in ("short", "none"):
        with pytest.raises(KeysUnreadable, match="openssl rand"):
            read_secret(tmp_path / file)
    for mode, warned in ((0o600, False), (0o644, True)):
        caplog.clear()
        (tmp_path / "key").write_text(secret)
        (tmp_path / "key").chmod(mode)
        assert read_secret(tmp_path / "key") == secret
        assert ("can be read by other users" in caplog.text) == warned


def test_events_of_other_engines_are_read_whatever_names_they_give() -> None:
    from headstart.gateway.following import _Batch, changed

    event = {"type": "BlockStored", "block_hashes": [1 << 62], "parent_block_hash": None, "token_ids": list(range(64))}
    event |= {"block_size": 64, "lora_id": None, "medium": "GPU", "lora_name": None, "group_idx": 0, "more": "unknown"}
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode([1.0, [event, {"type": "AllBlocksCleared"}, event], 0]), type=_Batch)
    change = changed(batch.events, Translator(lambda adapter: bytes(32), most=10))
    assert change.forget
    ((came, _, keys),) = change.changes
    assert came
    assert keys.tolist() == keys_of(chain_keys(range(64), root=bytes(32))).tolist()
