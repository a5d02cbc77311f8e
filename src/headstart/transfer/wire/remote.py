"""Memory of one worker that another writes straight into, through NIXL: by RDMA where the network has it.

    who decodes                                  who computes the prompt
        lends memory, and says so in Ask ───────────▶ reaches it
                              ◀═══ NIXL ════════════ writes pieces there, and waits until they have arrived
           ◀──────────────────────────────────────── Pieces(at=…), as with shared memory

What arrives is checked by who lent the memory, in a copy, as with a `Window`; so a late write is found like any wrong byte.
Memory stays registered and is lent again until this process ends: somebody who was given up may still write into it.

NIXL has no secrets of its own: who reaches its ports is trusted with this process's memory (`docs/prefill-decode.md`).
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import mmap
import os
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Thread
from typing import Any

import msgspec
import numpy as np

from headstart.errors import ConfigError, MissingExtra, WireError

_log = logging.getLogger(__name__)

_PACKAGES = ("nixl", "nixl_cu13", "nixl_cu12")  # whichever CUDA it was built for: host memory is all that is used
_POLL_S = 0.0005
_LEAST_RATE = 1 << 20  # bytes a second: slower is stalled, as in `session`
_MOST_REMOTES = 64  # agents of others that are kept while nobody uses them: reaching one anew takes some milliseconds
_MOST_STUCK = 4  # writes that never ended, each of which holds its memory; then nothing more is written this way
_MOST_AGENT_BYTES = 16 << 10
_TELL_S = 0.25  # so often it is told that a write is still waited for


class Remote(msgspec.Struct, frozen=True):
    """`nbytes` bytes at `address` of a process whose NIXL agent describes itself in `agent`."""

    agent: bytes
    address: int
    nbytes: int


class _Region:
    """Registered memory of this process."""

    def __init__(self, agent: Any, nbytes: int) -> None:
        self._mapping = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._mapping)
        self.array = np.frombuffer(self._mapping, np.uint8)
        self.address = int(self.array.ctypes.data)
        self.registration = agent.register_memory([(self.address, nbytes, 0, "")], "DRAM")


class RemoteMemory:
    """This process's end. From any thread; close it when nothing is lent or reached any more.

    `region_bytes`: how much is lent, and held to write from, for each prompt on its way."""

    def __init__(self, *, region_bytes: int) -> None:
        """Start NIXL. Raises MissingExtra, and ConfigError where it does not start."""
        library = _library()
        self._region_bytes = region_bytes
        try:
            # No thread of NIXL's own: it would take a core, also when nothing is under way.
            sync = library._api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            settings = library.nixl_agent_config(enable_prog_thread=False, backends=["UCX"], sync_mode=sync)
            self._agent = library.nixl_agent(f"headstart-{uuid.uuid4().hex}", settings)
            if "UCX" not in self._agent.backends:
                raise RuntimeError("it has no UCX")
            # Where memory cannot be registered (a small RLIMIT_MEMLOCK, say) it is seen now, not by the first prompt.
            self._free = [_Region(self._agent, region_bytes)]
        except Exception as error:  # NIXL's errors have no base of their own
            raise ConfigError(
                f"NIXL does not start ({error}); leave --handoff-nixl out, or mend its installation", key="handoff.nixl"
            ) from error
        self._condition = Condition()
        self._lent = 0
        self._failed = False
        self._stuck: list[tuple[Any, _Region]] = []  # writes that never ended, and what they read
        self._closed = False
        self._remotes: OrderedDict[str, int] = OrderedDict()  # name of an agent -> how many use it now
        self._thread = Thread(target=self._progress, name="handoff-nixl", daemon=True)
        self._thread.start()

    def lend(self) -> Lent | None:
        """Return memory that another worker may write into; None where there is none, and bytes must be sent."""
        if self._failed:
            return None
        try:
            region = self._take()
            agent = self._agent.get_partial_agent_metadata(region.registration, inc_conn_info=True, backends=["UCX"])
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return None
        with self._condition:
            self._lent += 1
            self._condition.notify()
        return Lent(self, region, Remote(agent, region.address, self._region_bytes))

    def reach(self, remote: Remote) -> Reached | None:
        """Return a way to write into what another worker lent; None where there is none, and bytes must be sent."""
        if len(remote.agent) > _MOST_AGENT_BYTES or not 0 < remote.nbytes <= 1 << 40 or len(self._stuck) >= _MOST_STUCK:
            return None
        if self._failed:
            return None
        try:
            source = self._take()
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(error)
            return None
        try:
            with self._condition:
                name = self._agent.add_remote_agent(remote.agent)
                name = name.decode() if isinstance(name, bytes) else str(name)
                self._remotes[name] = self._remotes.get(name, 0) + 1
                self._remotes.move_to_end(name)
                self._forget_idle()
        except Exception as error:  # noqa: BLE001 - as above: whatever is wrong with another's agent, bytes can be sent
            _log.warning("another worker's memory cannot be reached through NIXL (%s); its KV is sent instead", error)
            self._give_back(source, lent=False)
            return None
        return Reached(self, name, remote, source)

    def close(self) -> None:
        """Stop. Memory that is in use stays until the process ends. Twice is fine."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        self._thread.join()

    def _progress(self) -> None:
        """Let NIXL take in what others write, where the network does not write by itself."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._lent or self._closed)
                if self._closed:
                    return
            try:
                self._agent.get_new_notifs()
            except Exception as error:  # noqa: BLE001 - the thread's outer edge
                self._give_up(error)
                return
            time.sleep(_POLL_S)

    def _give_up(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            _log.error("NIXL fails (%s: %s); KV goes over the connection from now on", type(error).__name__, error)

    def _take(self) -> _Region:
        with self._condition:
            if self._free:
                return self._free.pop()
        return _Region(self._agent, self._region_bytes)

    def _give_back(self, region: _Region, *, lent: bool) -> None:
        with self._condition:
            self._lent -= lent
            self._free.insert(0, region)  # the one that was used longest ago is next: a late write meets nobody so soon

    def _forget_idle(self) -> None:
        for name in [name for name, users in self._remotes.items() if not users][: max(0, len(self._remotes) - _MOST_REMOTES)]:
            del self._remotes[name]
            self._agent.remove_remote_agent(name)

    def _write(
        self, name: str, source: _Region, address: int, nbytes: int, *, deadline: float, waiting: Callable[[], None]
    ) -> str:
        """Write the first bytes of `source`, and return "DONE", or why not; "stuck" where `source` may still be read, and is
        kept for that."""
        agent = self._agent
        told_s = time.monotonic()
        state = ""
        try:
            local = agent.get_xfer_descs([(source.address, nbytes, 0)], "DRAM")
            there = agent.get_xfer_descs([(address, nbytes, 0)], "DRAM")
            handle = agent.initialize_xfer("WRITE", local, there, name)
            state = agent.transfer(handle)
            try:
                while state == "PROC":
                    now_s = time.monotonic()
                    if now_s > deadline:
                        break
                    if now_s - told_s > _TELL_S:
                        told_s = now_s
                        waiting()
                    time.sleep(_POLL_S)
                    state = agent.check_xfer_state(handle)
            finally:
                if state == "PROC":
                    with self._condition:
                        self._stuck.append((handle, source))
                else:
                    agent.release_xfer_handle(handle)
        except WireError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            _log.debug("a write through NIXL failed", exc_info=True)
            return "stuck" if state == "PROC" else f"{type(error).__name__} {error}"
        return "stuck" if state == "PROC" else state


class Lent:
    """Memory of this process that another one writes into. `view`: what it wrote; `remote`: how it gets there."""

    def __init__(self, memory: RemoteMemory, region: _Region, remote: Remote) -> None:
        self._memory: RemoteMemory | None = memory
        self._region = region
        self.view = region.view
        self.remote = remote

    def close(self) -> None:
        """Take it back. Twice is fine."""
        if self._memory is not None:
            self._memory._give_back(self._region, lent=True)
            self._memory = None


class Reached:
    """Memory of another process that is written into; what a `Window` is between processes of one machine. For one thread."""

    def __init__(self, memory: RemoteMemory, name: str, remote: Remote, source: _Region) -> None:
        self._memory = memory
        self._name = name
        self._remote = remote
        self._source: _Region | None = source
        self._closed = False
        self.nbytes = min(remote.nbytes, source.view.nbytes)

    def put(self, data: Any, at: int, *, timeout_s: float, waiting: Callable[[], None]) -> bool:
        """Write an array of uint8 at byte `at`, and return when it has arrived; False where it has not, or nobody knows: then
        nothing more can be written here. `waiting` is called now and then until it has, and may raise WireError."""
        source = self._source
        if source is None or not 0 <= at <= at + data.nbytes <= self.nbytes:
            return False
        np.copyto(source.array[: data.nbytes], data)
        deadline = time.monotonic() + timeout_s + data.nbytes / _LEAST_RATE
        address = self._remote.address + at
        self._source = None  # whatever comes of it, NIXL may still read it
        state = self._memory._write(self._name, source, address, data.nbytes, deadline=deadline, waiting=waiting)
        if state != "stuck":
            self._source = source
        if state == "DONE":
            return True
        _log.warning("writing into another worker's memory through NIXL failed (%s); its KV is sent instead", state)
        return False

    def close(self) -> None:
        """Let go of it. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        memory, source, self._source = self._memory, self._source, None
        with memory._condition:
            memory._remotes[self._name] -= 1
        if source is not None:
            memory._give_back(source, lent=False)


def _library() -> Any:
    # NIXL's wheel brings a libnl of its own, and its UCX loads the machine's libibverbs, which brings another: the second to
    # come finds the functions of the first, and the process crashes when it ends. Bound at once, each finds its own.
    with suppress(OSError):
        ctypes.CDLL("libibverbs.so.1", mode=os.RTLD_NOW | os.RTLD_LOCAL)
    for name in _PACKAGES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise MissingExtra("--handoff-nixl needs NIXL; install it with: pip install 'headstart[nixl]'", extra="nixl")
