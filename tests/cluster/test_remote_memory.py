"""NIXL itself, between two processes: what one writes into the other's memory, and what becomes of who dies, stalls or lies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from ctypes.util import find_library
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headstart.errors import ConfigError, MissingExtra
from headstart.transfer.wire import remote as remote_module
from headstart.transfer.wire.remote import Remote, RemoteMemory

pytestmark = pytest.mark.cluster

NBYTES = 4 << 20

# Lends memory, says where, and says of what lies there by its sum whenever it is asked.
_LENDER = f"""
import sys, msgspec
from headstart.transfer.wire.remote import RemoteMemory
memory = RemoteMemory(region_bytes={NBYTES})
lent = memory.lend()
print(msgspec.json.encode(lent.remote).decode(), flush=True)
for line in sys.stdin:
    print(sum(lent.view[:1000]), lent.view[{NBYTES} - 1], flush=True)
lent.close()
memory.close()
"""


@pytest.fixture
def lender() -> Iterator[tuple[subprocess.Popen[str], Remote]]:
    child = subprocess.Popen(
        [sys.executable, "-c", _LENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert child.stdout is not None
    assert child.stdin is not None
    told = next(line for line in child.stdout if line.startswith("{"))  # NIXL writes its log there too
    try:
        yield child, msgspec.json.decode(told, type=Remote)
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@pytest.fixture
def memory() -> Iterator[RemoteMemory]:
    mine = RemoteMemory(region_bytes=NBYTES)
    yield mine
    mine.close()


def _nothing() -> None:
    """Nobody to tell."""


def _seen(child: subprocess.Popen[str]) -> str:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write("?\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def test_what_is_put_lies_in_the_other_process(memory: RemoteMemory, lender: tuple[subprocess.Popen[str], Remote]) -> None:
    child, there = lender
    reached = memory.reach(there)
    assert reached is not None
    assert reached.put(np.full(1000, 3, np.uint8), 0, timeout_s=30, waiting=_nothing)
    assert _seen(child) == "3000 0"
    assert reached.put(np.full(NBYTES, 7, np.uint8), 0, timeout_s=30, waiting=_nothing)
    assert _seen(child) == "7000 7"
    assert reached.put(np.full(1, 9, np.uint8), NBYTES - 1, timeout_s=30, waiting=_nothing)
    assert not reached.put(np.full(2, 9, np.uint8), NBYTES - 1, timeout_s=30, waiting=_nothing)  # beyond its end
    assert _seen(child) == "7000 9"
    reached.close()
    again = memory.reach(there)  # its agent is known by now
    assert again is not None
    assert again.put(np.full(1000, 1, np.uint8), 0, timeout_s=30, waiting=_nothing)
    assert _seen(child) == "1000 9"
    again.close()


def test_a_process_that_used_it_ends_well_beside_the_machines_own_rdma() -> None:
    """It crashed at its end: see `_library`."""
    if find_library("ibverbs") is None:
        with suppress(OSError):
            waiting = ["-o", "DPkg::Lock::Timeout=100"]  # another test may be installing something
            subprocess.run(["apt-get", "install", "-y", "-qq", *waiting, "libibverbs1"], capture_output=True, timeout=120)
    if find_library("ibverbs") is None:
        pytest.skip("NOT TESTED: NIXL beside the machine's own libibverbs, which is not here and could not be installed")
    program = f"""
from headstart.transfer.wire.remote import RemoteMemory
memory = RemoteMemory(region_bytes={NBYTES})
memory.lend().close()
memory.close()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


def test_who_is_killed_is_given_up_in_time(memory: RemoteMemory, lender: tuple[subprocess.Popen[str], Remote]) -> None:
    child, there = lender
    reached = memory.reach(there)
    assert reached is not None
    assert reached.put(np.ones(NBYTES, np.uint8), 0, timeout_s=30, waiting=_nothing)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not reached.put(np.ones(NBYTES, np.uint8), 0, timeout_s=1, waiting=_nothing)
    reached.close()
    reached.close()


def test_writes_that_never_end_keep_their_memory_and_are_bounded(tmp_path: Path) -> None:
    """In a process of its own, which NIXL's own state cannot outlive: over TCP, into a process that stands still."""
    script = tmp_path / "stuck.py"
    script.write_text(
        f"""
import os, signal, subprocess, sys
import msgspec, numpy as np
from headstart.transfer.wire.remote import Remote, RemoteMemory
child = subprocess.Popen([sys.executable, "-c", {_LENDER!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
there = msgspec.json.decode(next(line for line in child.stdout if line.startswith("{{")), type=Remote)
memory = RemoteMemory(region_bytes={NBYTES})
_nothing = lambda: None
reached = memory.reach(there)
assert reached.put(np.ones({NBYTES}, np.uint8), 0, timeout_s=30, waiting=_nothing)
reached.close()
child.send_signal(signal.SIGSTOP)
put = 0
told = []
tell = lambda: told.append(1)
while (reached := memory.reach(there)) is not None:
    assert put < 8, "never given up"
    assert not reached.put(np.ones({NBYTES}, np.uint8), 0, timeout_s=-3, waiting=tell)  # less the time for so many bytes
    assert told, "nobody was told that it waits"
    assert not reached.put(np.ones(1, np.uint8), 0, timeout_s=30, waiting=_nothing)
    reached.close()
    put += 1
child.kill()
print("given up after", put, flush=True)
os._exit(0)
"""
    )
    ran = subprocess.run(
        [sys.executable, str(script)], env={**os.environ, "UCX_TLS": "tcp"}, capture_output=True, text=True, timeout=120
    )
    assert ran.stdout.splitlines()[-1:] == ["given up after 4"], ran.stderr


def test_an_agent_that_is_none_is_not_reached(memory: RemoteMemory) -> None:
    assert memory.reach(Remote(b"nothing that NIXL wrote", 4096, NBYTES)) is None
    assert memory.reach(Remote(bytes(1 << 20), 4096, NBYTES)) is None
    lent = memory.lend()
    assert lent is not None
    assert memory.reach(Remote(lent.remote.agent, lent.remote.address, 0)) is None
    lent.close()
    lent.close()


def test_without_nixl_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_PACKAGES", ("headstart_has_no_such_module",))
    with pytest.raises(MissingExtra, match=r"headstart\[nixl\]"):
        RemoteMemory(region_bytes=NBYTES)


def test_a_nixl_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_PACKAGES", ("json",))
    with pytest.raises(ConfigError, match="NIXL does not start"):
        RemoteMemory(region_bytes=NBYTES)


def test_who_fails_while_it_lends_sends_from_then_on(memory: RemoteMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def get_new_notifs(self) -> None:
            raise RuntimeError("the network went away")

    lent = memory.lend()
    assert lent is not None
    monkeypatch.setattr(memory, "_agent", Broken())
    memory._thread.join(30)
    assert not memory._thread.is_alive()
    assert memory.lend() is None
    assert memory.reach(lent.remote) is None
    lent.close()


def test_a_write_that_nobody_can_ask_after_keeps_its_memory(
    memory: RemoteMemory, lender: tuple[subprocess.Popen[str], Remote]
) -> None:
    class Mute:
        """Begins a write, and cannot say what becomes of it."""

        def get_xfer_descs(self, *_: object) -> None: ...
        def initialize_xfer(self, *_: object) -> None: ...
        def transfer(self, _: object) -> str:
            return "PROC"

        def check_xfer_state(self, _: object) -> str:
            raise RuntimeError("it cannot be asked")

    _, there = lender
    first, second = memory.reach(there), memory.reach(there)
    assert first is not None
    assert second is not None
    agent, memory._agent = memory._agent, Mute()
    assert not first.put(np.ones(1, np.uint8), 0, timeout_s=30, waiting=_nothing)
    memory._agent = agent
    stuck = [region for _, region in memory._stuck]
    first.close()
    first.close()  # once more is no second user less
    assert list(memory._remotes.values()) == [1]
    assert stuck
    assert not set(map(id, stuck)) & set(map(id, memory._free))
    second.close()
    assert list(memory._remotes.values()) == [0]
