"""The pool on a real MooseFS of several chunk servers, mounted by machines with networks of their own."""

from __future__ import annotations

import json
import statistics
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmarks import moosefs
from pool_process import Process, eventually

pytestmark = pytest.mark.cluster

QUICK = {
    "grace_s": 8.0,
    "lease_s": 3.0,
    "visible_s": 1.0,
    "term_s": 4.0,
    "dead_s": 15.0,
    "beat_s": 0.5,
    "silent_s": 3.0,
    "answer_s": 5.0,
}
CAPACITY = 32 << 20


def start(client: moosefs.Client, root: Path, **options: float) -> Process:
    return Process(root, before=client.before, capacity_bytes=CAPACITY, **QUICK | options)


def test_what_one_machine_saved_another_finds_and_the_dead_take_nothing_with_them(
    clients: list[moosefs.Client], roots: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    with start(clients[1], roots[1], ahead_s=-180) as b, start(clients[2], roots[2]) as c:
        with start(clients[0], roots[0], ahead_s=240) as a:
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
        print(f"\nseen by another machine: median {median:.0f} ms, most {most:.0f} ms after the save was acknowledged")


def test_a_mount_that_is_stopped_costs_misses_and_is_used_again(cluster: moosefs.MooseFS, roots: list[Path]) -> None:
    client = cluster.mount()
    root = client.path / roots[0].name
    with start(client, root) as a:
        a.ask("save 1 2")
        assert a.found([1, 2]) == {1, 2}
        client.stop()
        try:
            assert eventually(lambda: a.count().get("locate_refused_silent", 0) > 0 or not a.found([]))
            assert eventually(lambda: a.ask("wait 1 0") == "0.0")
            assert a.ask("save 3").split()[1] == "stopped"
        finally:
            client.go_on()
        assert float(a.ask("wait 1 120"))
        assert eventually(lambda: a.ask("save 4").split()[1] == "written")
        assert a.found([1, 2, 4]) == {1, 2, 4}


def test_eight_writers_and_readers_over_a_full_pool_never_see_wrong_bytes(
    clients: list[moosefs.Client], roots: list[Path]
) -> None:
    """Their clocks are minutes apart; the collector is killed on the way."""
    with ExitStack() as stack:
        crowd = [stack.enter_context(start(clients[n % 3], roots[n % 3], ahead_s=60.0 * (n - 4))) for n in range(8)]
        for number, one in enumerate(crowd):
            one.tell(f"live 25 {number} 1500")
        collector = None
        for one in crowd[1:]:
            done = json.loads(one.answer())
            assert done["saved"] > 0
            assert done["read"] > 0
        crowd[0].answer()
        collector = next(one for one in crowd if one.count()["collects"])
        collector.kill()
        rest = [one for one in crowd if one is not collector]
        for number, one in enumerate(rest):
            one.tell(f"live 10 {100 + number} 1500")
        for one in rest:
            one.answer()
        assert eventually(lambda: any(one.count()["collects"] for one in rest))
        assert sum(one.count().get("evicted_capacity", 0) for one in rest) >= 0
        taken = sum(path.stat().st_size for path in roots[0].rglob("*.seg"))
        assert taken <= CAPACITY + 8 * (8 << 20)
        assert [one.ask("check") for one in rest] == ["0"] * 7
