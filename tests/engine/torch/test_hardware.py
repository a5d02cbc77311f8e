"""What the machine offers: devices by name and number."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest
import torch

from headstart.engine.torch.hardware import choose_device
from headstart.errors import ConfigError


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("asked", "got"), [("auto", "cuda"), ("cuda", "cuda"), ("cuda:0", "cuda:0"), ("cuda:1", "cuda:1"), ("cpu", "cpu")]
)
def test_a_device_is_chosen_by_its_name_and_number(asked: str, got: str) -> None:
    assert choose_device(asked) == torch.device(got)


@pytest.mark.usefixtures("two_gpus")
def test_a_number_beyond_the_last_device_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(ConfigError, match="'cuda:2', and this machine has: auto, cuda, cpu, cuda:0, cuda:1"):
        choose_device("cuda:2")


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for asked in ("cuda", "cuda:0", "gpu"):
        with pytest.raises(ConfigError, match="auto, cpu"):
            choose_device(asked)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_memory_that_was_freed_is_taken_again_without_faults() -> None:
    program = (
        "import resource, torch; from headstart.engine.torch.hardware import keep_freed_memory\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "assert keep_freed_memory()\n"
        "for _ in range(20):\n    before = faults(); torch.empty(16 << 20).fill_(1); print(faults() - before)\n"
    )
    counts = [int(line) for line in subprocess.check_output([sys.executable, "-c", program], text=True).split()]
    assert counts[0] > 1000
    assert sum(counts[-10:]) < 1000  # after some rounds, in which the heap settles
