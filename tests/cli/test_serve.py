"""Parts of `headstart serve` that need no model: where it listens, and where it refuses to."""

from __future__ import annotations

import asyncio
import logging
import signal
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from headstart.api.keys import append_key, make_key
from headstart.cli import run_cli, serving
from headstart.cli.serving import accounts_of, bound, url_of
from headstart.config import Config, ServerConfig, load_config
from headstart.errors import ConfigError, UsageLogFailed


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


def test_with_keys_it_listens_for_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    append_key(tmp_path / "keys", make_key({"tenant": "a"}).key)
    bound(ServerConfig(host="0.0.0.0", port=0, keys=tmp_path / "keys")).close()
    assert run_cli(["serve", "--keys", str(tmp_path / "none"), "--port", "0"]) == 2
    assert "make one with headstart keys add" in capsys.readouterr().err


def test_where_there_are_keys_a_usage_log_that_cannot_be_kept_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    append_key(tmp_path / "keys", make_key({"tenant": "a"}).key)
    (tmp_path / "file").touch()
    with pytest.raises(UsageLogFailed):
        accounts_of(ServerConfig(keys=tmp_path / "keys", usage_log=tmp_path / "file"))
    assert accounts_of(ServerConfig(usage_log=tmp_path / "file")).log is None
    assert "this server keeps none" in caplog.text
    assert accounts_of(ServerConfig(usage_keep="0")).log is None


def test_a_signal_before_the_loop_runs_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    run = asyncio.run
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def loading(config: Config, *, on_progress: Callable[[str, float | None], None]) -> None:
        while True:  # until told that the server is going down
            on_progress("loading", None)
            threading.Event().wait(0.01)

    with bound(ServerConfig(port=0)) as listener:
        server = serving._Server(Config(server=ServerConfig(usage_keep="0")), listener)

        def signalled_first(answering: Coroutine[Any, Any, None]) -> None:
            signal.raise_signal(signal.SIGTERM)
            told.append(server.should_exit)
            server.should_exit = True
            run(answering)

        monkeypatch.setattr(serving, "open_model", loading)
        monkeypatch.setattr(serving.asyncio, "run", signalled_first)
        try:
            assert server.run_until_stopped() == 0
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    assert told == [True]


def test_a_request_that_was_cut_while_going_down_is_no_bug_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("uvicorn.error")
    with bound(ServerConfig(port=0)) as listener:
        server = serving._Server(Config(server=ServerConfig(usage_keep="0")), listener)
    log.addFilter(server._is_worth_a_line)
    try:
        log.error("a bug before", exc_info=asyncio.CancelledError())
        server.should_exit = True
        log.error("a cut", exc_info=asyncio.CancelledError())
        log.error("a bug", exc_info=ValueError())
    finally:
        log.removeFilter(server._is_worth_a_line)
    assert [record.getMessage() for record in caplog.records] == ["a bug before", "a bug"]


def test_leave_may_be_given_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_SERVER_ALLOW_REMOTE", "true")
    assert load_config().server.allow_remote
