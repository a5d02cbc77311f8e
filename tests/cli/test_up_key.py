"""The router's key of `headstart up --detach` is seen by nobody who lists processes."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from headstart.cli.up import _detached
from headstart.errors import HeadstartError
from headstart.gateway.cluster_file import ClusterFile


def test_a_key_is_on_no_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[list[str], dict[str, str]]] = []

    class Ended:
        pid = 1

        def __init__(self, command: list[str], *, env: dict[str, str], **_: Any) -> None:
            started.append((command, env))

        def poll(self) -> int:
            return 1

    monkeypatch.setattr(subprocess, "Popen", Ended)
    with pytest.raises(HeadstartError, match="did not start"):
        _detached(tmp_path / "cluster.toml", ClusterFile(directory=str(tmp_path)), "a secret")
    ((command, environment),) = started
    assert "a secret" not in " ".join(command)
    assert environment["HEADSTART_API_KEY"] == "a secret"
