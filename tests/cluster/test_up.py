"""`headstart up` with real servers of a tiny model behind the real router: on this machine, and on a Ray cluster of two nodes.

A worker that is killed comes again, who runs the cluster may be killed, a scale-down costs no request, `down` leaves nothing.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.gateway.child import started_of

pytestmark = pytest.mark.cluster

PATIENCE_S = 120.0
SMALL = ["--kv-memory", "32MiB", "--cache-memory", "8MiB", "--cache-capacity", "64MiB", "--usage-keep", "0"]


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    pytest.importorskip("ray", reason="NOT TESTED: workers on Ray: pip install 'headstart[ray]'")
    script = (
        "import sys, warnings; warnings.simplefilter('ignore'); from ray.cluster_utils import Cluster\n"
        "cluster = Cluster(initialize_head=True, head_node_args={'num_cpus': 1, 'include_dashboard': False})\n"
        "cluster.add_node(num_cpus=2)\n"
        "print('at', cluster.address, flush=True); sys.stdin.read(); cluster.shutdown()"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        address = next(line.split()[1] for line in process.stdout if line.startswith("at "))
        yield address
    finally:
        process.stdin.close()
        process.wait(60)
        process.stdout.close()


class Up:
    """A cluster of a file in `folder`, by the command line alone."""

    def __init__(self, folder: Path, text: str) -> None:
        self.file = folder / "cluster.toml"
        self.directory = folder / "run"
        self.file.write_text(f'directory = "{self.directory}"\n{text}')

    def command(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "headstart.cli", *words], capture_output=True, text=True, timeout=2 * PATIENCE_S
        )
        assert done.returncode == 0, f"{done.stderr}\n{self.logs()}"
        return done.stdout

    def logs(self) -> str:
        return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in sorted((self.directory / "logs").glob("*.log")))

    def start(self) -> None:
        self.command("up", str(self.file), "--detach")

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.directory / "state.json").read_text())
        return found

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.command("ps", str(self.file), "--json"))["workers"]
        return found

    def ready(self) -> set[str]:
        answer = httpx.get(f"{self.state()['router']}/router/workers", timeout=30.0).json()
        return {one["url"] for one in answer["workers"] if one["state"] == "ready"}

    def eventually(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def ask(self, number: int) -> int:
        body = {"model": "any", "messages": [{"role": "user", "content": f"Count to {number}."}], "max_tokens": 4}
        answer = httpx.post(f"{self.state()['router']}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["completion_tokens"])

    def down(self) -> None:
        self.command("down", str(self.file))


def processes(up: Up) -> list[int]:
    return [json.loads(path.read_text())["pid"] for path in sorted(up.directory.glob("*/*/process.json"))]


def serving(model: Path, cache: Path, launcher: str, address: str, planner: str) -> str:
    flags = json.dumps([*SMALL, "--cache-directory", str(cache), *(["--allow-remote"] if launcher == "ray" else [])])
    return (
        f'model = "{model}"\nlauncher = "{launcher}"\nray_address = "{address}"\n'
        f"[router]\nport = 0\n[[workers]]\ncount = 2\narguments = {flags}\n{planner}"
    )


def test_who_is_killed_comes_again_and_down_leaves_nothing(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    up = Up(tmp_path, serving(tiny_model_folder("llama"), tmp_path / "kv", "local", "", ""))
    up.start()
    try:
        assert len(up.ready()) == 2
        assert up.ask(3) > 0
        table = up.command("ps", str(up.file)).splitlines()
        assert table[0].split()[:3] == ["worker", "role", "state"]
        assert [line.split()[2] for line in table[1:]] == ["ready", "ready"]
        assert "2 of 2 workers ready" in up.command("top", str(up.file), "--count", "1")
        assert "both: 2 ready" in up.command("plan", str(up.file), "--dry-run", "--looks", "1")

        before = processes(up)
        os.kill(up.state()["pid"], signal.SIGKILL)
        assert up.ask(4) > 0  # router and workers went on
        up.start()
        assert processes(up) == before  # and were taken over

        url = min(up.ready())
        worker = pid_at(url)
        os.kill(worker, signal.SIGKILL)
        up.eventually(lambda: len(up.ready() - {url}) == 2)
        assert up.ask(5) > 0
        running = processes(up)
        assert worker not in running
        os.kill(up.state()["pid"], signal.SIGKILL)
    finally:
        up.down()
    assert len(running) == 3
    assert [started_of(pid) for pid in running] == [None] * 3
    assert "no cluster runs" in up.command("down", str(up.file))


def test_workers_that_cannot_start_end_it_with_what_they_said(tmp_path: Path) -> None:
    command = json.dumps([sys.executable, "-c", "raise SystemExit('there is no such model')"])
    up = Up(tmp_path, f"[router]\nport = 0\n[[workers]]\ncommand = {command}")
    done = subprocess.run(
        [sys.executable, "-m", "headstart.cli", "up", str(up.file), "--detach"],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 1
    assert "there is no such model" in done.stderr
    assert processes(up) == []
    assert not (up.directory / "state.json").exists()


def test_a_router_port_that_is_taken_is_told_at_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        up = Up(tmp_path, f"[router]\nport = {taken.getsockname()[1]}")
        done = subprocess.run([sys.executable, "-m", "headstart.cli", "up", str(up.file)], capture_output=True, text=True)
    assert done.returncode == 4
    assert "choose another router.port" in done.stderr
    assert processes(up) == []


PLANNER = "[planner]\nminimum = 1\nevery_s = 0.5\nstart_s = 1\nwarm_s = 1\nsettle_s = 3\nfirst_token_s = 60\ntoken_s = 60\n"


@pytest.mark.parametrize("launcher", ["local", "ray"])
def test_a_scale_down_costs_no_request(
    launcher: str, tiny_model_folder: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue("ray_address") if launcher == "ray" else ""
    up = Up(tmp_path, serving(tiny_model_folder("llama"), tmp_path / "kv", launcher, address, PLANNER))
    failures: list[BaseException] = []
    answered: list[int] = []
    stop = threading.Event()

    def client(number: int) -> None:
        while not stop.is_set():
            try:
                answered.append(up.ask(number))
            except BaseException as error:  # noqa: BLE001  told by the test below
                failures.append(error)
                return

    up.start()
    clients = [threading.Thread(target=client, args=(number,)) for number in range(3)]
    try:
        for one in clients:
            one.start()
        up.eventually(lambda: bool(failures) or len(up.workers()) == 1)
        more = len(answered) + 3
        up.eventually(lambda: bool(failures) or len(answered) >= more)
    finally:
        stop.set()
        for one in clients:
            one.join()
        log = up.logs()
        up.down()
    assert failures == []
    assert all(answered)
    assert "planner: drain" in log


def test_on_ray_a_worker_that_is_killed_comes_again(
    ray_address: str, tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    up = Up(tmp_path, serving(tiny_model_folder("llama"), tmp_path / "kv", "ray", ray_address, ""))
    up.start()
    try:
        first, second = up.ready()
        os.kill(pid_at(first), signal.SIGKILL)
        up.eventually(lambda: len(up.ready() - {first}) == 2)
        assert second in up.ready()
        assert up.ask(3) > 0
        serves = [pid_at(url) for url in up.ready()]
    finally:
        up.down()
    assert [started_of(pid) for pid in serves] == [None, None]


def pid_at(url: str) -> int:
    """Return which process listens there."""
    port = int(url.rpartition(":")[2])
    inode = next(
        line.split()[9]
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]
        if line.split()[3] == "0A" and int(line.split()[1].rpartition(":")[2], 16) == port
    )
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(one) == f"socket:[{inode}]" for one in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    raise AssertionError(f"nobody listens at {url}")
