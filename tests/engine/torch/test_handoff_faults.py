"""Whatever becomes of the other worker or of the wire: the answer is that of one worker, and nothing is held for long."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from handoff_kit import alone, pair, wire, worker
from reference import ask, loaded, some_tokens

from asking import eventually
from headstart.cache.arriving import Arrival
from headstart.engine.base import GenerationRequest
from headstart.engine.handoff import HandoffEngine
from headstart.engine.handoff.asking import Asked, encoded
from headstart.engine.handoff.outgoing import Outgoing
from headstart.engine.handoff.receiving import Receiving
from headstart.engine.torch.engine import TorchEngine
from headstart.engine.torch.model import TorchModel
from headstart.errors import WireError
from headstart.tier.pool import PoolTier, Timing
from headstart.transfer.wire import address
from headstart.transfer.wire.address import connect, listen
from headstart.transfer.wire.messages import Accept, Ask, Beat
from headstart.transfer.wire.session import Session

Folders = Callable[..., Path]
PROMPT = some_tokens(300)
SENT = 4 * 64 * 768  # bytes of KV, about: four blocks of the tiny model


@pytest.fixture(scope="module")
def model(tiny_model_folder: Folders) -> Callable[[], TorchModel]:
    found = loaded(tiny_model_folder("llama"))
    return lambda: found


@pytest.fixture
def two(model: Callable[[], TorchModel], tmp_path: Path) -> Iterator[tuple[HandoffEngine, HandoffEngine]]:
    with pair(model, tmp_path) as both:
        yield both


@pytest.fixture(scope="module")
def wanted(model: Callable[[], TorchModel]) -> list[int]:
    with alone(model()) as engine:
        answer = ask(engine, PROMPT, 6)
        answer.result()
        return answer.tokens


def _right(two: tuple[HandoffEngine, HandoffEngine], at: str, wanted: list[int]) -> str:
    """Ask, see that the answer is right and all is given back; return what was lost, "" for nothing."""
    _, decode = two
    for engine in two:
        eventually(lambda engine=engine: engine.load().kv_used_bytes == 0)  # type: ignore[misc]
        tier = engine._cache._sources[0].tier
        tier.delete([one.id for one in tier.scan()], reason="user")
    before = decode.load().counters
    answer = ask(decode, PROMPT, 6, prefill_at=at)
    last = answer.result()
    assert (answer.tokens, last.finish) == (wanted, "length")
    assert last.receipt is not None
    assert last.receipt.cached_tokens == 0  # what came over the wire is no hit, however much of it did
    tier = decode._cache._sources[0].tier
    eventually(lambda: not any(one.leased for one in tier.scan()))
    eventually(lambda: tier.check() == [])
    after = decode.load().counters
    lost = [name for name in after if name.startswith("handoff_lost") and after[name] > before.get(name, 0)]
    return lost[0].removeprefix("handoff_lost_") if lost else ""


def test_a_wire_that_is_cut_anywhere(two: tuple[HandoffEngine, HandoffEngine], wanted: list[int]) -> None:
    prefill, _ = two
    draw = random.Random(5)
    for cut in [0, 30, 75, *(draw.randrange(SENT) for _ in range(5))]:
        with wire(prefill.addresses[1], lambda at, data, cut=cut: data[: max(0, cut - at)]) as address:
            assert _right(two, address, wanted) == "lost"
    eventually(lambda: prefill.load().running == 0)


def test_a_bit_that_flips_anywhere(two: tuple[HandoffEngine, HandoffEngine], wanted: list[int]) -> None:
    prefill, _ = two
    draw = random.Random(6)
    for flip in [0, 7, 40, 80, *(draw.randrange(SENT) for _ in range(4))]:

        def spoil(at: int, data: bytes, flip: int = flip) -> bytes:
            spoilt = bytearray(data)
            if at <= flip < at + len(data):
                spoilt[flip - at] ^= 1 << flip % 8
            return bytes(spoilt)

        with wire(prefill.addresses[1], spoil) as address:
            lost = _right(two, address, wanted)
        assert lost in ("garbage", "version", "secret", "corrupt")


def test_a_bit_that_flips_in_shared_memory(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Receiving._copy

    def spoilt(self: Receiving, at: int, place: memoryview) -> None:
        copy(self, at, place)
        place[len(place) // 2] ^= 4

    monkeypatch.setattr(Receiving, "_copy", spoilt)
    assert _right(two, two[0].addresses[0], wanted) == "corrupt"


@pytest.mark.parametrize("stall", [0, 75, SENT // 2])
def test_a_peer_that_stalls(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], model: Callable[[], TorchModel], stall: int
) -> None:
    done = Event()

    def spoil(at: int, data: bytes) -> bytes:
        if at + len(data) > stall:
            done.wait(30)
            return b""
        return data

    with worker(model(), timeout_s=0.3) as decode, wire(two[0].addresses[1], spoil) as address:
        assert _right((two[0], decode), address, wanted) == "stalled"
        done.set()


def test_a_peer_that_gets_no_further(two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], model: Any) -> None:
    with listen("tcp://127.0.0.1:0")[0] as listener:

        def beat() -> None:
            session = Session(listener.accept()[0], secret=b"", timeout_s=30, listening=True)
            with suppress(WireError):
                assert isinstance(session.receive(), Ask)
                session.send(Accept())
                while True:
                    session.send(Beat())
            session.close()

        beating = Thread(target=beat)
        beating.start()
        at = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with worker(model(), timeout_s=0.05) as decode:
            assert _right((two[0], decode), at, wanted) == "stalled"
        beating.join(30)
        assert not beating.is_alive()


def test_what_was_said_in_another_session_is_not_taken(two: tuple[HandoffEngine, HandoffEngine], wanted: list[int]) -> None:
    said = bytearray()

    def note(at: int, data: bytes) -> bytes:
        said.extend(data)
        return data

    with wire(two[0].addresses[1], note) as address:
        assert _right(two, address, wanted) == ""
    whole = bytes(said)
    # The same bytes once more, and once more with the handshake that this session asks for.
    with wire(two[0].addresses[1], lambda at, data: whole[at : at + len(data)].ljust(len(data), b"\0")) as address:
        assert _right(two, address, wanted) == "secret"
    with wire(two[0].addresses[1], lambda at, data: data[: max(0, 72 - at)] + whole[max(72, at) : at + len(data)]) as address:
        assert _right(two, address, wanted) == "corrupt"


def test_a_deadline_passes_while_another_worker_computes(two: tuple[HandoffEngine, HandoffEngine], model: Any) -> None:
    with listen("tcp://127.0.0.1:0")[0] as listener:

        def beat() -> None:
            session = Session(listener.accept()[0], secret=b"", timeout_s=30, listening=True)
            with suppress(WireError):
                assert isinstance(session.receive(), Ask)
                session.send(Accept())
                while True:
                    session.send(Beat())
            session.close()

        beating = Thread(target=beat)
        beating.start()
        at = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        answer = ask(two[1], PROMPT, 6, prefill_at=at, deadline_s=0.5)
        assert answer.result().finish == "abort"
        beating.join(30)
        assert not beating.is_alive()
    assert two[1].load().counters["handoff_lost_late"] == 1


def test_a_path_at_which_another_user_listens_is_not_believed(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    monkeypatch.setattr(address, "_CREDENTIALS", _Credentials(user + 2))
    assert _right(two, two[0].addresses[0], wanted) == "unreachable"


class _Credentials:
    """What the system says of who listens, with another user in it."""

    size = 12

    def __init__(self, user: int) -> None:
        self._user = user

    def unpack(self, data: bytes) -> tuple[int, int, int]:
        assert len(data) == self.size
        return 1, self._user, 1


@pytest.mark.parametrize("have", [-1, -(1 << 40)])
def test_pieces_before_the_first_are_not_asked_for(two: tuple[HandoffEngine, HandoffEngine], have: int) -> None:
    prefill, decode = two
    request = GenerationRequest(id="x", prompt=tuple(PROMPT), max_tokens=1)
    ask = Ask(
        decode._cache.identity.root(), decode._cache.representation.digest, have, 0, encoded(Asked.of(request, deadline_s=None))
    )
    session = Session(connect(prefill.addresses[1], timeout_s=5), secret=b"", timeout_s=30, listening=False)
    session.send(ask)
    with pytest.raises(WireError) as caught:
        session.receive()
    assert caught.value.reason == "lost"
    session.close()
    eventually(lambda: prefill.load().counters.get("handoff_given_up_garbage", 0) == 1)


def test_an_address_where_nobody_answers(two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], tmp_path: Path) -> None:
    assert _right(two, f"ipc://{tmp_path}/nobody.sock", wanted) == "unreachable"
    assert _right(two, f"ipc://{tmp_path}/nobody.sock, {two[0].addresses[1]}", wanted) == ""


def test_what_arrived_before_the_end_is_used(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    landed = Arrival.landed

    def lost(self: Arrival, layer: int, first: int) -> None:
        landed(self, layer, first)
        if self.arrived_tokens:
            raise OSError("the line is dead")

    prefill, decode = two
    monkeypatch.setattr(Arrival, "landed", lost)
    answer = ask(decode, PROMPT, 6, prefill_at=prefill.addresses[1])
    assert answer.result().finish == "length"
    assert answer.tokens == wanted
    counters = decode.load().counters
    assert counters["cached_memory_tokens"] == counters["handoff_tokens"] == 128  # a pass
    decode._counters.add("handoff_faults", -counters["handoff_faults"])  # the kit looks for those that nobody made


def test_no_room_for_what_arrives(model: Callable[[], TorchModel], wanted: list[int], tmp_path: Path) -> None:
    with pair(model, tmp_path, memory_bytes=4096) as (prefill, decode):
        assert _right((prefill, decode), prefill.addresses[0], wanted) == ""
        assert decode.load().counters["handoff_dropped_runs"] > 0
        assert decode.load().counters["handoff_tokens"] == 0


def test_who_goes_away_frees_what_is_computed_for_it(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = two
    begun, go_on = Event(), Event()
    computed = Outgoing.computed

    def held(self: Outgoing, *arguments: object, **more: object) -> None:
        begun.set()
        go_on.wait(30)
        computed(self, *arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Outgoing, "computed", held)
    answer = ask(decode, PROMPT, 6, prefill_at=prefill.addresses[0], id="goes")
    assert begun.wait(30)
    decode.abort("goes")
    assert answer.result().finish == "abort"
    assert answer.tokens == []
    go_on.set()
    monkeypatch.undo()
    eventually(lambda: prefill.load().running == 0 and prefill.load().kv_used_bytes == 0)
    assert prefill.load().counters.get("handoff_given", 0) == 0
    assert _right(two, prefill.addresses[0], wanted) == ""


def test_a_prompt_that_the_other_cannot_compute_is_computed_here(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though some of it had come by then."""
    computed = Outgoing.computed

    def failing(self: Outgoing, *arguments: object, tokens: int, **more: object) -> None:
        computed(self, *arguments, tokens=tokens, **more)  # type: ignore[arg-type]
        if tokens > 128:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Outgoing, "computed", failing)
    assert _right(two, two[0].addresses[0], wanted) == "failed"
    assert two[0].load().counters["callback_faults"] == 1


def test_many_that_leave_free_all_that_was_computed_for_them(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int]
) -> None:
    prefill, decode = two
    for number in range(24):
        answer = ask(decode, some_tokens(200, seed=number), 4, prefill_at=prefill.addresses[number % 2], id=f"leaves-{number}")
        if number % 9:
            decode.abort(f"leaves-{number}")
        else:
            assert answer.result().finish == "length"
    eventually(lambda: prefill.load().running == prefill.load().waiting == 0)
    eventually(lambda: decode.load().running == decode.load().waiting == 0)
    assert _right(two, prefill.addresses[0], wanted) == ""


def test_the_computing_worker_ends(
    two: tuple[HandoffEngine, HandoffEngine], model: Callable[[], TorchModel], wanted: list[int]
) -> None:
    _, decode = two
    ending = worker(model(), listen=["tcp://127.0.0.1:0"])
    answer = ask(decode, PROMPT, 6, prefill_at=ending.addresses[0])
    ending.close()
    assert answer.result().finish == "length"
    assert answer.tokens == wanted
    assert _right(two, ending.addresses[0], wanted) == "unreachable"


def test_what_a_worker_that_is_gone_left_in_the_pool_is_read(
    model: Callable[[], TorchModel], wanted: list[int], tmp_path: Path
) -> None:
    def pool() -> PoolTier:
        return PoolTier.open(tmp_path, capacity_bytes=64 << 20, timing=Timing.where_seen_after(0.0))

    with worker(model(), listen=["tcp://127.0.0.1:0"], pool=pool()) as prefill:
        at = prefill.addresses[0]
        ask(prefill, PROMPT[:200], 1).result()  # the beginning of a prompt that it will not be there for
        eventually(lambda: prefill._cache.statistics().counters.get("saves_done", 0) == 1)
    with worker(model(), pool=pool()) as decode:
        answer = ask(decode, PROMPT, 6, prefill_at=at)
        receipt = answer.result().receipt
        assert answer.tokens == wanted
        assert receipt is not None
        assert (receipt.cached_memory_tokens, receipt.cached_disk_tokens) == (0, 192)
        assert decode.load().counters["handoff_lost_unreachable"] == 1


def test_the_decoding_worker_ends_in_the_middle(
    two: tuple[HandoffEngine, HandoffEngine], model: Callable[[], TorchModel]
) -> None:
    ending = worker(model())
    answer = ask(ending, PROMPT, 6, prefill_at=two[0].addresses[0])
    ending.close()
    assert answer.result().finish in ("abort", "error", "length")
    eventually(lambda: two[0].load().kv_used_bytes == 0)


@pytest.mark.parametrize(
    "sent",
    [b"\x80\x04cposix\nsystem\nq\x00X\x04\x00\x00\x00echoq\x01\x85q\x02Rq\x03.", b"GET / HTTP/1.1\r\n\r\n", bytes(100)],
    ids=["a pickle", "HTTP", "zeros"],
)
def test_whatever_else_connects_is_shown_out(two: tuple[HandoffEngine, HandoffEngine], sent: bytes) -> None:
    with connect(two[0].addresses[1], timeout_s=5) as stranger, suppress(OSError):  # it may close before it has read all
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(30)
        assert stranger.recv(100) == b""
    eventually(lambda: any(name.startswith("handoff_given_up") for name in two[0].load().counters))


def test_a_question_that_is_none(two: tuple[HandoffEngine, HandoffEngine], wanted: list[int]) -> None:
    prefill, _ = two
    for have, request in ((0, b""), (0, b"\xc1"), (-1, b"\x80")):
        session = Session(connect(prefill.addresses[1], timeout_s=5), secret=b"", timeout_s=30, listening=False)
        session.send(Ask(bytes(32), bytes(32), have, 1 << 40, request))
        session.close()
    eventually(lambda: prefill.load().counters.get("handoff_given_up_garbage", 0) == 3)
    assert _right(two, prefill.addresses[1], wanted) == ""


def test_the_first_token_goes_before_all_kv_and_the_answer_goes_on_behind_it(
    two: tuple[HandoffEngine, HandoffEngine], wanted: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    sends = Outgoing.next

    def token_first(self: Outgoing, timeout_s: float) -> object:
        with self._condition:  # the KV waits here, as it might for a slow wire
            self._condition.wait_for(lambda: self._events or self._closed, 30)
        monkeypatch.setattr(Outgoing, "next", sends)
        return sends(self, timeout_s)

    def never(self: Receiving, message: object) -> None:
        raise WireError("the wire is cut", reason="lost")

    monkeypatch.setattr(Outgoing, "next", token_first)
    monkeypatch.setattr(Receiving, "_pieces", never)
    assert _right(two, two[0].addresses[0], wanted) == "lost"
    assert two[1].inner.load().counters["generated_tokens"] == 5


def test_an_engine_alone_is_not_changed(model: Callable[[], TorchModel], wanted: list[int]) -> None:
    engine: TorchEngine
    with alone(model()) as engine:
        answer = ask(engine, PROMPT, 6, continued=tuple(wanted[:2]))
        assert answer.result().finish == "length"
        assert answer.tokens == wanted[2:]
