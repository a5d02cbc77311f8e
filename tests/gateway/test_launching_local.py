"""Workers as real processes: restarted when they die, found again after a SIGKILL of who started them, none left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from headstart.gateway.child import started_of
from headstart.gateway.launching import Launched, Spec
from headstart.gateway.launching_local import LocalLauncher

SERVES = "import http.server as h; s = h.HTTPServer(('127.0.0.1', 0), h.BaseHTTPRequestHandler);"
SERVES += "print(f'listening on http://127.0.0.1:{s.server_port}, loading', flush=True); s.serve_forever()"
SERVER = Spec("both", (sys.executable, "-c", SERVES))
STUBBORN = Spec("both", (sys.executable, "-c", "import signal; signal.signal(15, signal.SIG_IGN);" + SERVES))
DIES = Spec("both", (sys.executable, "-c", "raise SystemExit(3)"))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "workers"
    LocalLauncher(tmp_path / "workers", grace_s=0.0).close()


def eventually(launcher: LocalLauncher, holds: Callable[[list[Launched]], bool]) -> list[Launched]:
    deadline = time.monotonic() + 60
    while not holds(workers := list(launcher.workers())):
        assert time.monotonic() < deadline, workers
        launcher.tend()
        time.sleep(0.01)
    return workers


def all_up(workers: list[Launched]) -> bool:
    return all(one.state == "up" for one in workers)


def pid_of(worker: Launched) -> int:
    return int(worker.where.split()[1].rstrip(","))


def test_a_worker_s_address_is_what_it_says_and_it_ends_when_told(folder: Path) -> None:
    launcher = LocalLauncher(folder)
    assert [launcher.start(SERVER), launcher.start(SERVER)] == ["both-1", "both-2"]
    one, two = eventually(launcher, all_up)
    assert one.url != two.url
    assert (folder.parent / "logs" / "both-1.log").read_text().startswith(f"listening on {one.url}")
    launcher.stop("both-1")
    assert [worker.name for worker in eventually(launcher, lambda workers: len(workers) == 1)] == ["both-2"]
    assert started_of(pid_of(one)) is None
    launcher.close()
    assert started_of(pid_of(two)) is None
    assert list(folder.iterdir()) == []


def test_a_port_that_the_command_asks_for_is_a_free_one(folder: Path) -> None:
    launcher = LocalLauncher(folder)
    launcher.start(Spec("both", (sys.executable, "-m", "http.server", "--bind", "{host}", "{port}")))
    (worker,) = eventually(launcher, all_up)
    assert worker.url is not None
    assert worker.url.startswith("http://127.0.0.1:")
    assert not worker.url.endswith("{port}")
    launcher.close()


def test_one_that_is_killed_comes_again_at_another_address(folder: Path) -> None:
    launcher = LocalLauncher(folder)
    launcher.start(SERVER)
    (before,) = eventually(launcher, all_up)
    os.kill(pid_of(before), signal.SIGKILL)
    (after,) = eventually(launcher, lambda workers: workers[0].restarts == 1 and all_up(workers))
    assert pid_of(after) != pid_of(before)
    assert after.why.startswith("killed by SIGKILL; the last that it said: listening on http://127.0.0.1:")
    launcher.close()


def test_one_that_always_dies_is_tried_less_and_less_often(folder: Path) -> None:
    now_s = [0.0]
    launcher = LocalLauncher(folder, clock=lambda: now_s[0])
    launcher.start(DIES)
    starts = []
    for _ in range(4):
        eventually(launcher, lambda workers: workers[0].state == "down")
        restarts = launcher.workers()[0].restarts
        while launcher.workers()[0].restarts == restarts:
            now_s[0] += 0.5
            launcher.tend()
        starts.append(now_s[0])
    waits = [after - before for before, after in zip([0.0, *starts], starts, strict=False)]
    assert waits == sorted(waits)
    assert waits[-1] >= 4 * waits[0]
    launcher.close()


def test_one_that_does_not_end_is_killed(folder: Path) -> None:
    launcher = LocalLauncher(folder, grace_s=0.2)
    launcher.start(STUBBORN)
    (worker,) = eventually(launcher, all_up)
    launcher.stop("both-1")
    eventually(launcher, lambda workers: not workers)
    assert started_of(pid_of(worker)) is None


def test_after_a_sigkill_of_the_launcher_the_next_one_has_its_workers(folder: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from headstart.gateway.launching import Spec\n"
        "from headstart.gateway.launching_local import LocalLauncher\n"
        f"launcher = LocalLauncher(Path({str(folder)!r}))\n"
        f"for _ in range(2): launcher.start(Spec('both', {SERVER.command!r}))\n"
        "print('started', flush=True)\n"
        "time.sleep(600)"
    )
    first = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert first.stdout is not None
    assert first.stdout.readline() == b"started\n"  # the workers themselves may not have begun yet
    first.kill()
    first.wait()
    first.stdout.close()
    launcher = LocalLauncher(folder)
    workers = eventually(launcher, all_up)
    assert [worker.name for worker in workers] == ["both-1", "both-2"]
    assert launcher.start(SERVER) == "both-3"
    launcher.close()
    assert [started_of(pid_of(worker)) for worker in workers] == [None, None]


def test_a_number_that_the_system_gave_to_another_process_is_left_alone(folder: Path) -> None:
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (folder / "both-1").mkdir(parents=True)
    (folder / "both-1" / "spec.json").write_text(json.dumps(asdict(SERVER)))
    (folder / "both-1" / "process.json").write_text(json.dumps({"pid": stranger.pid, "started": "earlier"}))
    launcher = LocalLauncher(folder)
    assert launcher.workers()[0].state == "down"
    launcher.close()
    assert stranger.poll() is None
    assert list(folder.iterdir()) == []
    stranger.kill()
    stranger.wait()


def test_where_its_folder_is_gone_nothing_is_started(tmp_path: Path) -> None:
    late = [
        sys.executable,
        "-m",
        "headstart.gateway.child",
        str(tmp_path / "gone" / "process.json"),
        "touch",
        str(tmp_path / "x"),
    ]
    assert subprocess.run(late, capture_output=True).returncode != 0
    assert not (tmp_path / "x").exists()


def test_half_a_folder_is_cleared_away(folder: Path) -> None:
    (folder / "both-1").mkdir(parents=True)
    assert LocalLauncher(folder).workers() == []
    assert not (folder / "both-1").exists()
