"""A vLLM server as a child: started, awaited, its last words kept, ended. Its output goes to the log, line by line."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from threading import Thread

import httpx

from headstart.errors import ModelError

READY_S = 1800.0  # a large model is read and compiled for minutes
_LOOK_S = 0.2
_END_S = 30.0
_LAST_WORDS = 15
_log = logging.getLogger("headstart.vllm")


class VLLMProcess:
    """`command` makes the arguments for a port. Nothing outlives this process, see `guard`."""

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        self._command = command
        self._words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._process: subprocess.Popen[str] | None = None
        self._reader: Thread | None = None
        self.url = ""

    def start(self, *, on_progress: Callable[[str], None], ready_s: float = READY_S) -> None:
        """Start it and return once it answers. Raises ModelError with its last words when it does not; what `on_progress`
        raises ends it too."""
        self._words.clear()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        guarded = [sys.executable, "-m", "headstart.engine.vllm.guard", *self._command(port)]
        self._process = subprocess.Popen(
            guarded,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C is for us, who then end it
        )
        self._reader = Thread(target=self._read, args=[self._process], name="vllm-output", daemon=True)
        self._reader.start()
        deadline = time.monotonic() + ready_s
        try:
            while not self._answers():
                if not self.alive:
                    raise ModelError(f"vLLM did not start: {self.last_words()}", exit=self.exit_code)
                if time.monotonic() > deadline:
                    raise ModelError(f"vLLM was not ready within {ready_s:.0f} s: {self.last_words()}")
                on_progress(self._words[-1] if self._words else "")
                time.sleep(_LOOK_S)
        except BaseException:
            self.end(timeout_s=5.0)
            raise

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._process is None else self._process.poll()

    def last_words(self) -> str:
        """Return what it said last: the line that names an error if there is one, and its exit code."""
        if self._reader is not None and not self.alive:
            self._reader.join(2.0)
        words = list(self._words)
        told = next((line for line in reversed(words) if "Error" in line), words[-1] if words else "it said nothing")
        code = self.exit_code
        return told if code is None else f"{told} (exit code {code})"

    def end(self, timeout_s: float = _END_S) -> None:
        """SIGTERM, and SIGKILL to all of its group when that does not suffice. Twice is fine."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # its workers, if any stayed
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        if self._reader is not None:
            self._reader.join(2.0)

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                if told := line.rstrip():
                    self._words.append(told)
                    _log.info("%s", told)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
