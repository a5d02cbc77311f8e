"""The usage log on real file systems that fill up, break and vanish: serving goes on, it is said once, nothing is lost."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

sys.path.append(str(Path(__file__).parent.parent / "tier" / "disk"))
from mounts import Mount, mounted

from api.serving import running
from headstart.api.accounts import Accounts
from headstart.ledger.entry import Entry, encode
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, entries
from headstart.testing.fake_engine import FakeEngine


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def entry(number: int) -> Entry:
    return Entry(id=f"r{number}", time=1_800_000_000.0 + number, session="s" * 200)


def ids(folder: Path) -> list[str]:
    reading = Reading()
    found = [one.id for one in entries(folder, reading)]
    assert reading.wrong == 0
    return found


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Callable[[str], int]:
    caplog.set_level(logging.INFO, "headstart")
    return lambda words: sum(words in record.getMessage() for record in caplog.records)


@pytest.fixture(params=["tmpfs", "ext4"])
def small(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Mount]:
    with mounted(request.param, tmp_path, 8) as mount:
        yield mount


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Mount]:
    with mounted("ext4", tmp_path, 8) as mount:
        yield mount


def fill(mount: Mount) -> Path:
    ballast = mount.place / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while file.write(bytes(size)):
                    pass
            except OSError:
                continue
    return ballast


def test_a_full_disk_holds_lines_up_and_loses_none(small: Mount, told: Callable[[str], int]) -> None:
    folder = small.place / "usage"
    with UsageLog(folder, keep_bytes=1 << 20, sync_s=0.01) as log:
        log.add(entry(0))
        assert log.flush()
        ballast = fill(small)
        for number in range(1, 200):  # more than fits into what the file's last block has left
            log.add(entry(number))
        eventually(lambda: log.counters.get("usage_write_failed") >= 3)
        assert told("cannot be written, it is tried again: No space left") == 1
        ballast.unlink()
        assert log.flush(60)
        assert told("is written again") == 1
        assert log.counters.get("usage_lines_lost") == 0
    assert ids(folder) == [f"r{number}" for number in range(200)]
    assert len(list(folder.iterdir())) <= 3, "what was tried in vain is not left lying"


def test_a_server_serves_on_while_its_usage_log_is_full(tmp_path: Path, told: Callable[[str], int]) -> None:
    with mounted("tmpfs", tmp_path, 1) as mount:
        log = UsageLog(mount.place / "usage", keep_bytes=1 << 20, sync_s=0.01)
        with running(FakeEngine(), accounts=Accounts(log=log)) as server, httpx.Client(base_url=server.url, timeout=60) as http:
            ballast = fill(mount)
            answers = [
                http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-headstart-session": "s" * 200})
                for _ in range(20)
            ]
            assert [answer.status_code for answer in answers] == [200] * 20
            eventually(lambda: log.counters.get("usage_write_failed") >= 2)
            metrics = http.get("/metrics").text
            (failed,) = [line for line in metrics.splitlines() if line.startswith("headstart_usage_write_failed_total")]
            assert float(failed.split()[1]) >= 2
            assert told("cannot be written") == 1
            ballast.unlink()
            eventually(lambda: len(ids(log.directory)) == 20)
        assert sorted(ids(log.directory)) == sorted(answer.json()["id"] for answer in answers)


@pytest.mark.parametrize("fault", ["turn_read_only", "shut_down"])
def test_a_disk_that_turns_read_only_or_fails_is_waited_for(ext4: Mount, fault: str, told: Callable[[str], int]) -> None:
    folder = ext4.place / "usage"
    with UsageLog(folder, keep_bytes=1 << 20, sync_s=0.01) as log:
        log.add(entry(0))
        assert log.flush()
        getattr(ext4, fault)()
        log.add(entry(1))
        eventually(lambda: log.counters.get("usage_write_failed") >= 4)
        assert told("cannot be written") in (1, 2)  # neither written nor synced, or not written
        log.add(entry(2))
        ext4.replace()
        assert log.flush(60)
        assert told("is written again") in (1, 2)
        log.add(entry(3))
    found = ids(folder)
    assert found[-2:] == ["r2", "r3"]
    assert "r1" in found
    assert len(set(found)) == len(found)


def test_a_folder_that_is_removed_is_made_again_and_nothing_that_comes_later_is_lost(
    tmp_path: Path, told: Callable[[str], int]
) -> None:
    folder = tmp_path / "there" / "usage"
    with UsageLog(folder, keep_bytes=1 << 20, sync_s=0.01) as log:
        log.add(entry(0))
        assert log.flush()
        shutil.rmtree(folder.parent)
        log.add(entry(1))  # into a file that has no name any more
        assert log.flush()
        log.add(entry(2))
        assert log.flush()
        assert ids(folder) == ["r1", "r2"]
        assert told("was taken away") == 1


def test_a_folder_that_is_moved_away_keeps_its_lines_and_the_log_goes_on_in_its_place(tmp_path: Path) -> None:
    folder = tmp_path / "usage"
    with UsageLog(folder, keep_bytes=1 << 20, sync_s=0.01) as log:
        log.add(entry(0))
        assert log.flush()
        folder.rename(tmp_path / "collected")
        log.add(entry(1))
        assert log.flush()
        log.add(entry(2))
    assert ids(tmp_path / "collected") == ["r0", "r1"]
    assert ids(folder) == ["r2"]


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_many_lines_are_added_up_in_little_memory(tmp_path: Path, count: int) -> None:
    folder, files = tmp_path, 20
    for file in range(files):
        with (folder / f"usage-1-{file:06d}.jsonl").open("wb") as stream:
            for number in range(file * count // files, (file + 1) * count // files):
                one = Entry(id=f"r{number}", time=float(number), tenant=f"t{number % 7}", prompt=3, output=1)
                stream.write(encode(one))
    program = (
        "import json, resource, sys; from pathlib import Path; from headstart.ledger.reading import *\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "reading = Reading(); sums = add_up(entries(Path(sys.argv[1]), reading), ['tenant', 'month'])\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(json.dumps([reading.lines, sum(one.counts['prompt'] for one in sums.values()), len(sums), grown]))"
    )
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=True, timeout=300)
    lines, prompt, groups, grown_kib = json.loads(done.stdout)
    assert (lines, prompt, groups) == (count, 3 * count, 7)
    assert grown_kib < 4096
