"""Parts of `headstart serve` that need no model: where it listens, and where it refuses to."""

from __future__ import annotations

import pytest

from headstart.cli import run_cli
from headstart.cli.serve import bound, url_of
from headstart.config import ServerConfig, load_config
from headstart.errors import ConfigError


def test_port_0_takes_a_free_one_and_the_address_names_it() -> None:
    with bound(ServerConfig(port=0)) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert url_of(listener) == f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "localhost"])
def test_loopback_needs_no_leave(host: str) -> None:
    bound(ServerConfig(host=host, port=0)).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "myhost"])
def test_an_address_that_others_reach_needs_leave(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="say --allow-remote"):
        bound(ServerConfig(host=host, port=0))
    assert run_cli(["serve", "no-such-model", "--host", host, "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"headstart: {host} can be reached by others")
    assert said.count("\n") == 1


def test_with_leave_it_listens_for_others() -> None:
    bound(ServerConfig(host="0.0.0.0", port=0, allow_remote=True)).close()


def test_leave_may_be_given_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_SERVER_ALLOW_REMOTE", "true")
    assert load_config().server.allow_remote
