"""Runs a program, and ends it when whoever started this is gone: `python -m headstart.engine.vllm.guard PROGRAM …`.

    parent ──(standard input, held open)──▶ guard ──▶ program, in the guard's process group
              closes: SIGTERM to the program, after GRACE_S SIGKILL to the group

A parent that is killed cannot say goodbye, and a vLLM left behind would keep the accelerator. The exit code is the program's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GRACE_S = 20.0


def main(program: list[str]) -> int:
    process = subprocess.Popen(program, stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=[process], daemon=True).start()
    code = process.wait()
    return code if code >= 0 else 128 - code


def _end_with_parent(process: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
