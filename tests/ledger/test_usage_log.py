"""The usage log: a line for each request whatever happens to the process, the disk or the reader."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headstart.errors import NotThere, UsageLogFailed
from headstart.ledger.entry import EngineCounts, Entry, decode, encode
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import SUMS, Reading, add_up, entries

WRITER = """
import sys, time
from pathlib import Path
from headstart.ledger.entry import Entry
from headstart.ledger.log import UsageLog
log = UsageLog(Path(sys.argv[1]), keep_bytes=1 << 30, file_bytes=1 << 16)
n = 0
while True:
    log.add(Entry(id=f"{sys.argv[2]}-{n}", time=time.time(), prompt=n, output=1))
    sys.stdout.write(f"{n} {time.monotonic()}\\n")
    sys.stdout.flush()
    n += 1
    time.sleep(0.0005)
"""


def entry(number: int, **fields: object) -> Entry:
    return Entry(**{"id": f"r{number}", "time": 1_800_000_000.0 + number, **fields})  # type: ignore[arg-type]


def read(folder: Path) -> tuple[list[Entry], Reading]:
    reading = Reading()
    return list(entries(folder, reading)), reading


def test_a_kill_loses_at_most_what_was_added_in_the_last_second(tmp_path: Path) -> None:
    """Ten processes, one after another, each killed at some moment; what they said they had added is compared."""
    dice = random.Random(7)
    for child in range(10):
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(child)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
        )
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(dice.randint(1, 300))]
        process.send_signal(signal.SIGKILL)
        killed_s = time.monotonic()
        said += process.stdout.readlines()
        process.stdout.close()
        process.wait(30)
        added = {int(number): float(at) for number, at in (line.split() for line in said if line.endswith(b"\n"))}
        found, reading = read(tmp_path)
        there = {one.prompt for one in found if one.id.startswith(f"{child}-")}
        assert all(killed_s - added[number] <= 1.0 for number in added.keys() - there), "older than a second, and lost"
        assert sorted(there) == list(range(len(there))), "no gap"
        assert reading.wrong == 0


def test_a_torn_last_line_is_dropped_and_the_next_process_goes_on(tmp_path: Path) -> None:
    with UsageLog(tmp_path, keep_bytes=1 << 20) as log:
        log.add(entry(1))
    (file,) = tmp_path.iterdir()
    with file.open("ab") as stream:
        stream.write(encode(entry(2))[:-9])
    with UsageLog(tmp_path, keep_bytes=1 << 20) as log:
        log.add(entry(3))
    found, reading = read(tmp_path)
    assert [one.id for one in found] == ["r1", "r3"]
    assert (reading.lines, reading.torn, reading.wrong) == (2, 1, 0)


def test_what_is_no_line_of_ours_is_counted_and_left_out(tmp_path: Path) -> None:
    with UsageLog(tmp_path, keep_bytes=1 << 20) as log:
        log.add(entry(1))
    (file,) = tmp_path.iterdir()
    file.write_bytes(b'{"id": 5}\n\xff\xfe\n' + file.read_bytes() + b'{"id": "later", "time": 1, "from_a_later_version": 1}\n')
    found, reading = read(tmp_path)
    assert [one.id for one in found] == ["r1", "later"]
    assert reading.wrong == 2


def test_files_are_private_rotated_and_bounded_and_the_oldest_go(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "usage"
    with UsageLog(folder, keep_bytes=1 << 18, file_bytes=1 << 16, sync_s=0.001) as log:
        for number in range(4000):
            log.add(entry(number))
            if number % 100 == 0:
                assert log.flush()
    files = sorted(folder.iterdir())
    assert sum(file.stat().st_size for file in files) <= (1 << 18) + 2 * (1 << 16)
    assert {file.stat().st_mode & 0o777 for file in files} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    found, _ = read(folder)
    assert [one.id for one in found] == [f"r{number}" for number in range(4000 - len(found), 4000)]
    assert "is gone" in caplog.text


def test_what_another_process_writes_is_not_taken_away(tmp_path: Path) -> None:
    with UsageLog(tmp_path, keep_bytes=1 << 16, file_bytes=1 << 14, sync_s=0.001) as first:
        first.add(entry(0))
        assert first.flush()
        with UsageLog(tmp_path, keep_bytes=1 << 16, file_bytes=1 << 14, sync_s=0.001) as second:
            for number in range(1, 2000):
                second.add(entry(number))
                if number % 50 == 0:
                    assert second.flush()
        first.add(entry(2000))
    found, _ = read(tmp_path)
    assert {"r0", "r2000"} <= {one.id for one in found}


def test_a_full_disk_loses_no_line_that_waits_and_no_half_line_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write, left = os.write, [100]

    def full(descriptor: int, data: bytes) -> int:
        if left[0] == 0:
            left[0] = 1 << 30  # somebody makes room
            raise OSError(errno.ENOSPC, "No space left on device")
        some = data[: left[0]]
        left[0] -= len(some)
        return write(descriptor, some)

    monkeypatch.setattr(os, "write", full)
    with UsageLog(tmp_path, keep_bytes=1 << 20, sync_s=0.01) as log:
        for number in range(3):
            log.add(entry(number))
        assert log.flush()
        assert log.counters.get("usage_write_failed") == 1
    found, reading = read(tmp_path)
    assert [one.id for one in found] == ["r0", "r1", "r2"]
    assert reading.wrong == 0
    assert "it is tried again" in caplog.text


def test_a_folder_that_cannot_be_had_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageLogFailed, match=r"choose another folder with server\.usage_log"):
        UsageLog(tmp_path / "file", keep_bytes=1 << 20)
    with pytest.raises(NotThere, match="there is no usage log"):
        read(tmp_path / "nowhere")


counts = st.integers(0, 1 << 40)
anything = st.builds(
    Entry,
    id=st.text(min_size=1, max_size=40),
    time=st.floats(0, 4e9),
    tenant=st.text(max_size=8),
    model=st.text(max_size=8),
    retention=st.sampled_from(["default", "agent"]),
    prompt=counts,
    cached_memory=counts,
    cached_disk=counts,
    written=counts,
    output=counts,
    engine=st.builds(EngineCounts, prompt=counts, generated=counts),
)


@given(st.lists(anything, max_size=20), st.permutations(["tenant", "class", "day", "model"]))
def test_a_line_says_what_was_written_and_groups_add_up_to_everything(some: list[Entry], by: list[str]) -> None:
    again = [decode(encode(one)) for one in some]
    assert again == some
    groups = add_up(some, by)
    whole = add_up(some, [])
    for name in (*SUMS, "engine_prompt", "engine_generated"):
        total = sum(sums.counts[name] for sums in whole.values())
        assert sum(sums.counts[name] for sums in groups.values()) == total
    assert sum(sums.counts["prompt"] for sums in groups.values()) == sum(one.prompt for one in some)


def test_closing_twice_is_fine_and_what_comes_later_is_counted(tmp_path: Path) -> None:
    log = UsageLog(tmp_path, keep_bytes=1 << 20)
    log.close()
    log.close()
    log.add(entry(1))
    assert log.counters.get("usage_lines_lost") == 1
    assert list(tmp_path.iterdir()) == [], "an empty file is not left behind"
