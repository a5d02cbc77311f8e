"""How the tests run: hypothesis profiles and `--soak`. `--hypothesis-profile=ci` (hypothesis' own option) chooses another."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, Phase, settings

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak, with thousands of examples")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--soak"):
        settings.load_profile("soak")


@pytest.fixture(scope="session", autouse=True)
def usage_logs(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers that a test starts keep their usage log here, not where the user's own lies."""
    os.environ.setdefault("HEADSTART_SERVER_USAGE_LOG", str(tmp_path_factory.mktemp("usage")))
