"""Who runs a cluster meets what it did not expect: router and workers are not ended for it."""

from __future__ import annotations

import logging
from pathlib import Path
from threading import Event

import pytest

from headstart.gateway.cluster import Cluster
from headstart.gateway.cluster_file import ClusterFile


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """One that has started nothing, and whose router and workers are ready."""
    cluster = Cluster(ClusterFile(directory=str(tmp_path)), grace_s=0.0)
    cluster._router.url = "http://127.0.0.1:1"
    monkeypatch.setattr(cluster, "_all_ready", lambda: True)
    return cluster


def test_a_look_that_fails_is_not_the_end(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "headstart")
    stop, looks = Event(), []

    def step() -> None:
        looks.append(len(looks))
        if len(looks) == 2:
            raise OSError(28, "No space left on device")
        if len(looks) == 3:
            stop.set()

    monkeypatch.setattr(cluster, "step", step)
    cluster.run(stop)
    cluster.close()
    assert len(looks) == 3
    assert [record.getMessage()[:7] for record in caplog.records] == ["seeing "]


def test_before_it_is_ready_it_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cluster, "step", step)
    with pytest.raises(OSError, match="No space"):
        cluster.run(Event())
    cluster.close()
