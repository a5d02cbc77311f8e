"""Machines as real processes on one directory: killed and stopped at any time, the collector too."""

from __future__ import annotations

from pathlib import Path

from pool_process import Process, eventually

QUICK = {
    "grace_s": 3.0,
    "lease_s": 1.0,
    "visible_s": 0.5,
    "term_s": 2.0,
    "dead_s": 6.0,
    "beat_s": 0.5,
    "collect_s": 0.3,
    "silent_s": 5.0,
}
CAPACITY = 16 << 20


def test_a_machine_that_is_killed_takes_nothing_with_it(root: Path) -> None:
    with Process(root, capacity_bytes=CAPACITY, **QUICK) as b:
        with Process(root, capacity_bytes=CAPACITY, ahead_s=200, **QUICK) as a:
            assert a.ask("save 1 2 3").split()[1:] == ["written"] * 3
            assert float(b.ask("wait 3 60"))
            a.kill()
        assert b.found([1, 2, 3]) == {1, 2, 3}
        assert b.ask("save 4").split()[1:] == ["written"]
        assert eventually(lambda: bool(b.count().get("journals_taken_in")))
        assert b.found([1, 2, 3, 4]) == {1, 2, 3, 4}
        assert b.ask("check") == "0"


def test_a_collector_that_is_stopped_is_replaced_and_harmless_when_it_goes_on(root: Path) -> None:
    with Process(root, capacity_bytes=CAPACITY, **QUICK) as a, Process(root, capacity_bytes=CAPACITY, **QUICK) as b:
        assert a.count()["collects"]
        a.ask(f"save {' '.join(map(str, range(30)))}")
        assert float(b.ask("wait 29 60"))
        a.stop()
        assert eventually(lambda: bool(b.count()["collects"]))
        b.ask("live 2 1 60")
        a.go_on()
        assert eventually(lambda: not a.count()["collects"])
        a.ask("live 1 2 60")
        assert eventually(lambda: a.ask("save 1000").split()[1] in ("written", "present"))  # once there is room again
        assert float(b.ask("wait 1000 60"))
        assert (a.ask("check"), b.ask("check")) == ("0", "0")
