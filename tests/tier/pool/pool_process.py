"""Machines as processes: started, asked, stopped, killed."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType

ANSWER_S = 240.0


class Process:
    """`with Process(path, capacity_bytes=…) as one: one.ask("save 1 2")`. `before`: a command that the process is run under."""

    def __init__(
        self,
        path: Path | str,
        *,
        capacity_bytes: int,
        ahead_s: float = 0.0,
        before: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
        **timing: float,
    ) -> None:
        child = Path(__file__).with_name("pool_child.py")
        command = [*before, sys.executable, str(child), str(path), str(capacity_bytes), json.dumps(timing), str(ahead_s)]
        environment = (
            os.environ | (variables or {}) | {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "OMP_NUM_THREADS": "1"}
        )
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()
        self.answer("open")

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self, wanted: str | None = None) -> str:
        """Return the next line that it says."""
        line = self._lines.get(timeout=ANSWER_S)
        assert line, f"the process ended with {self._process.wait(10)}"
        assert not line.startswith("wrong"), line
        assert wanted is None or line == wanted, line
        return line

    def ask(self, line: str) -> str:
        self.tell(line)
        return self.answer()

    def found(self, seeds: Sequence[int]) -> set[int]:
        return set(map(int, self.ask(f"find {' '.join(map(str, seeds))}").split()))

    def count(self) -> dict[str, int]:
        counters: dict[str, int] = json.loads(self.ask("count"))
        return counters

    def stop(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process.poll() is None and kind is None:
            self.go_on()
            self.ask("close")
        self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            for line in self._process.stdout:
                self._lines.put(line.rstrip("\n") or " ")
        except ValueError:  # closed under us
            pass
        self._lines.put("")


def eventually(holds: Callable[[], bool], *, within_s: float = 120.0) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(0.05)
    return False
