"""A MooseFS for all tests of a session, started by them; a skip, loudly, where this machine forbids it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks import moosefs

sys.path.insert(0, str(Path(__file__).parent.parent / "tier" / "pool"))


@pytest.fixture(scope="session")
def cluster() -> Iterator[moosefs.MooseFS]:
    try:
        with moosefs.cluster() as running:
            yield running
    except moosefs.Forbidden as why:
        pytest.skip(f"NOT TESTED: a real MooseFS: {why}")


@pytest.fixture(scope="session")
def clients(cluster: moosefs.MooseFS) -> list[moosefs.Client]:
    """Three machines that mount it."""
    return [cluster.mount() for _ in range(3)]


@pytest.fixture
def roots(clients: list[moosefs.Client], request: pytest.FixtureRequest) -> list[Path]:
    """An empty directory for a pool, as each machine sees it."""
    name = f"pool-{abs(hash(request.node.nodeid))}"
    (clients[0].path / name).mkdir()
    return [client.path / name for client in clients]
