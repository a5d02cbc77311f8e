"""The object tier on a real S3 server: its contract, many processes on one bucket, and a server that refuses, hangs or goes."""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import obstore
import obstore.store
import pytest
from benchmarks import s3_server
from faulty_proxy import FaultyProxy, Mode
from pool_process import Process, eventually

from headstart.cli.server_process import ServerProcess
from headstart.errors import TierUnavailable
from headstart.metrics import Counters
from headstart.testing.tier_contract import TierContract
from headstart.tier.base import Tier
from headstart.tier.object import Bucket, ObjectTier
from headstart.tier.pool import Timing

pytestmark = pytest.mark.cluster

QUICK = {
    "grace_s": 8.0,
    "lease_s": 3.0,
    "visible_s": 1.0,
    "look_s": 0.5,
    "term_s": 4.0,
    "dead_s": 15.0,
    "beat_s": 1.0,
    "silent_s": 4.0,
    "answer_s": 5.0,
    "list_s": 2.0,
}
CAPACITY = 16 << 20
numbers = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[s3_server.S3Server]:
    try:
        with s3_server.server() as running:
            yield running
    except s3_server.Forbidden as why:
        pytest.skip(f"NOT TESTED: a real S3 server: {why}")


@pytest.fixture
def url(server: s3_server.S3Server) -> str:
    """An empty prefix, beside others'."""
    return f"s3://first/kv-{next(numbers)}"


def test_a_bucket_that_is_not_there_is_said_so(server: s3_server.S3Server) -> None:
    bucket = Bucket(plain(server, "s3://nowhere/kv"), where="nowhere/kv", counters=Counters())
    with pytest.raises(TierUnavailable, match="nowhere/kv is not there; make the bucket"):
        ObjectTier.open_bucket(bucket, capacity_bytes=CAPACITY)


def plain(server: s3_server.S3Server, url: str) -> Any:
    """The bucket as the library sees it."""
    return obstore.store.from_url(url, config=s3_server.config_of(server), client_options={"allow_http": True})


def objects(server: s3_server.S3Server, url: str, folder: str) -> dict[str, int]:
    return {one["path"]: one["size"] for page in obstore.list(plain(server, url), folder) for one in page}


def start(server: s3_server.S3Server, url: str, *, port: int = 0, **options: float) -> Process:
    variables = s3_server.environment(f"http://127.0.0.1:{port or server.port}")
    return Process(url, variables=variables, **{"capacity_bytes": CAPACITY, **QUICK, **options})


class TestObjectTierOnAServer(TierContract):
    persistent = True
    capacity_bytes = 1 << 20

    @pytest.fixture
    def make_tier(self, server: s3_server.S3Server, url: str) -> Callable[[int], Tier]:
        timing = Timing(grace_s=0.0, collect_s=0.2)
        return lambda capacity_bytes: ObjectTier.open_bucket(
            Bucket(plain(server, url), where=url.removeprefix("s3://"), counters=Counters()),
            capacity_bytes=capacity_bytes,
            timing=timing,
        )


def test_what_one_process_saved_another_finds_within_a_second_and_the_dead_take_nothing(
    server: s3_server.S3Server, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with start(server, url, ahead_s=-180) as b, start(server, url) as c:
        with start(server, url, ahead_s=240) as a:
            delays = []
            for seed in range(20):
                b.tell(f"wait {seed} 60")
                acknowledged, outcome = a.ask(f"save {seed}").split()
                assert outcome == "written"
                found = float(b.answer())
                assert found
                delays.append(found - float(acknowledged))
            a.kill()
        assert b.found(range(20)) == c.found(range(20)) == set(range(20))
        assert c.ask("save 100").split()[1] == "written"
        assert float(b.ask("wait 100 60"))
        assert eventually(lambda: any(one.count().get("journals_taken_in") for one in (b, c)))
        assert b.found([*range(20), 100]) == {*range(20), 100}
        assert (b.ask("check"), c.ask("check")) == ("0", "0")
    with capsys.disabled():
        median, most = 1000 * statistics.median(delays), 1000 * max(delays)
        print(f"\nseen by another process: median {median:.0f} ms, most {most:.0f} ms after the save was acknowledged")


def test_eight_writers_and_readers_over_a_full_bucket_never_see_wrong_bytes(server: s3_server.S3Server, url: str) -> None:
    """Their clocks are minutes apart, they save the same prefixes, and the collector is killed on the way."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(start(server, url, ahead_s=60.0 * (n - 4))) for n in range(8)]
        for number, one in enumerate(crowd):
            one.tell(f"live 8 {number} 400")
        for one in crowd:
            done = json.loads(one.answer())
            assert done["saved"] > 0
            assert done["read"] > 0
        collector = next(one for one in crowd if one.count()["collects"])
        collector.kill()
        rest = [one for one in crowd if one is not collector]
        for number, one in enumerate(rest):
            one.tell(f"live 5 {100 + number} 400")
        for one in rest:
            one.answer()
        assert eventually(lambda: any(one.count()["collects"] for one in rest))
        assert eventually(lambda: sum(one.count().get("evicted_capacity", 0) for one in rest) > 0)
        largest = max(objects(server, url, "segments").values())
        assert eventually(lambda: sum(objects(server, url, "segments").values()) <= CAPACITY + 8 * largest)
        assert [one.ask("check") for one in rest] == ["0"] * 7
        assert all(one.count().get("object_requests_put", 0) > 0 for one in rest)


def test_a_writer_killed_amid_a_put_in_parts_leaves_nothing_that_is_found(server: s3_server.S3Server, url: str) -> None:
    """Its upload goes through a proxy that hangs when half of it is there."""
    pieces = 1400  # some 20 MB
    with FaultyProxy(server.port) as proxy, start(server, url, capacity_bytes=256 << 20) as b:
        with start(server, url, port=proxy.port, capacity_bytes=256 << 20, answer_s=60.0) as a:
            assert a.ask("save 1").split()[1] == "written"
            proxy.hang_after = 10 << 20
            a.tell(f"large 2 {pieces}")
            assert eventually(lambda: proxy.mode == "hang")
            a.kill()
        assert float(b.ask("wait 1 60"))
        assert b.ask(f"large 2 {pieces}") == "written"
        assert len([size for size in objects(server, url, "segments").values() if size > 8 << 20]) == 1
        assert b.ask("check") == "0"


def test_a_server_that_refuses_hangs_or_goes_costs_misses_and_is_used_again(server: s3_server.S3Server, url: str) -> None:
    modes: list[Mode] = ["busy", "hang", "gone"]
    with FaultyProxy(server.port) as proxy, start(server, url, port=proxy.port) as a:
        a.ask("save 1 2")
        assert a.found([1, 2]) == {1, 2}
        for mode in modes:
            looks = a.count().get("look_failed", 0)
            proxy.mode = mode
            assert eventually(lambda: a.ask("wait 1 0") == "0.0")
            assert a.ask("save 3").split()[1] in ("stopped", "error")
            assert eventually(lambda looks=looks: a.count().get("look_failed", 0) > looks)
            proxy.mode = "pass"
            assert float(a.ask("wait 1 120"))
        assert eventually(lambda: a.ask("save 4").split()[1] == "written")
        assert a.found([1, 2, 4]) == {1, 2, 4}


def test_bytes_flipped_in_the_bucket_are_a_miss_and_are_quarantined_for_all(server: s3_server.S3Server, url: str) -> None:
    with start(server, url) as a, start(server, url) as b:
        a.ask("save 1 2")
        assert float(b.ask("wait 2 60"))
        for key in objects(server, url, "segments"):
            data = bytearray(obstore.get(plain(server, url), key).bytes())
            data[-5000] ^= 0x40
            obstore.put(plain(server, url), key, bytes(data))
        assert eventually(lambda: b.ask("corrupt 1 2") == "2")
        assert eventually(lambda: a.count()["extents"] == 0)
        assert b.count()["quarantined_corrupt"] == 2
        assert a.ask("save 1").split()[1] == "written"
        assert float(b.ask("wait 1 60"))


@pytest.mark.real_model
def test_what_a_server_computed_another_one_with_an_empty_disk_hits_after_it_was_killed(
    server: s3_server.S3Server, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    asked = [
        {"role": "system", "content": "Gates open in the order G3, G4, G2, G5, G1, G6. " * 25},
        {"role": "user", "content": "Which gate opens first?"},
    ]

    def serve(name: str) -> ServerProcess:
        arguments = ["smollm2-135m", "--cache-directory", str(tmp_path / name), "--cache-capacity", "1GiB"]
        arguments += ["--object-store", url, "--object-capacity", "1GiB"]
        return ServerProcess(arguments, log=tmp_path / f"{name}.log")

    with serve("a") as a:
        cold = a.ask(asked, max_tokens=4)
        assert eventually(lambda: a.metric("headstart_tier_extents", tier="object") > 0)
        assert eventually(lambda: not a.metric("headstart_saves_pending"))
        a.kill()
    with serve("b") as b:
        hit = b.ask(asked, max_tokens=4)
        assert hit.text == cold.text
        assert int(hit.usage["prompt_cache_hit_tokens"]) >= int(cold.usage["prompt_tokens"]) - 128
        assert b.metric("headstart_cache_loaded_tokens_total", tier="object") > 0
        assert b.metric("headstart_tier_object_requests_total", tier="object") > 0
        health = httpx.get(f"{b.url}/health").text
        assert "in the object store" in health
    for said in (health, *((tmp_path / f"{name}.log").read_text() for name in "ab")):
        assert s3_server.SECRET not in said
