"""How the tests run: hypothesis profiles and `--soak`. `--hypothesis-profile=ci` (hypothesis' own option) chooses another."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from headstart.cache import saver

pytest_plugins = ["model_fixtures"]

# dev and ci repeat exactly; soak looks for what nobody has seen yet and prints how to see it again.
_QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=50, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile("ci", max_examples=200, derandomize=True, deadline=None, suppress_health_check=_QUIET)
settings.register_profile(
    "soak",
    max_examples=5000,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
settings.load_profile("dev")

# Files of few tests that take long: they begin first, so that no process is left with one of them at the end.
LONG = {
    "api/test_canonical_requests.py",
    "api/test_many_clients.py",
    "api/test_other_clients.py",
    "api/test_real_accounts.py",
    "api/test_real_server.py",
    "cache/test_leases.py",
    "cli/test_cache_beside_serve.py",
    "cli/test_llama_serve.py",
    "diagnose/test_predicted.py",
    "engine/llama/test_llama_agents.py",
    "engine/llama/test_llama_real_model.py",
    "engine/torch/test_accounting.py",
    "engine/torch/test_all_together.py",
    "engine/torch/test_deterministic.py",
    "engine/torch/test_many_requests.py",
    "gateway/test_apart.py",
    "spec/test_s03_lease.py",
    "spec/test_s04_budget.py",
    "spec/test_s05_recovery.py",
    "testing/test_machines.py",
    "tier/disk/test_disk_bit_flips.py",
    "tier/disk/test_disk_bulk.py",
    "tier/disk/test_disk_crash.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak, with thousands of examples")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--soak"):
        settings.load_profile("soak")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which processes that share them end at about the same time: long ones, then by how many tests."""
    here, tests = Path(__file__).parent, Counter(item.path for item in items)
    long = {here / name for name in LONG}
    items.sort(key=lambda item: (item.path not in long, -tests[item.path], item.path))


@pytest.fixture(scope="session", autouse=True)
def niceness_of_saves() -> Iterator[int]:
    """How far saving yields to computing, but not here: whoever waits for a save would wait for other processes' tests."""
    shipped, saver._NICENESS = saver._NICENESS, 0
    yield shipped
    saver._NICENESS = shipped


@pytest.fixture(scope="session", autouse=True)
def usage_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that a test starts keep their usage log here, not where the user's own lies."""
    os.environ.setdefault("HEADSTART_SERVER_USAGE_LOG", str(tmp_path_factory.mktemp("usage")))
