"""Parts of `headstart serve` that need no model: where it listens and what it says about that."""

from __future__ import annotations

import pytest

from headstart.cli.serve import _warn_if_reachable, bound, url_of
from headstart.config import ServerConfig


def test_port_0_takes_a_free_one_and_the_address_names_it() -> None:
    with bound(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert url_of(listener) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_nobody_is_warned_of_loopback(host: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_if_reachable(host)
    assert not caplog.records


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myhost"])
def test_an_address_that_others_reach_is_warned_of(host: str, caplog: pytest.LogCaptureFixture) -> None:
    _warn_if_reachable(host)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"listening on {host}" in record.getMessage()
