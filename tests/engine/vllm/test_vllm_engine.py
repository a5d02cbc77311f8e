"""vLLM behind our server, of which a fake stands here: what it is asked, how it is started and ended, and its bad days."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from queue import Queue
from typing import Any

import httpx
import openai
import pytest

from api.serving import running_model
from engine.vllm import fake_vllm
from headstart.api.accounts import Accounts
from headstart.cli.opening import open_model
from headstart.config import Config, load_config
from headstart.diagnose.why_show import why_lines
from headstart.engine.base import GenerationRequest, Sampling, TokenEvent
from headstart.engine.vllm import open_engine
from headstart.engine.vllm.engine import VLLMEngine
from headstart.engine.vllm.opening import transfer_config
from headstart.errors import ConfigError, MissingExtra, ModelError, RequestError
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, add_up, entries

TIMEOUT_S = 60.0
PLAIN = 50


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    package = tmp_path / "path" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    (package / "api_server.py").write_text(Path(fake_vllm.__file__).read_text())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "path"), *filter(None, sys.path)]))
    monkeypatch.setenv("FAKE_VLLM", str(tmp_path / "asked"))
    overrides = {"engine.engine": "vllm", "cache.directory": str(tmp_path / "kv"), "cache.retention": "chat=7d.."}
    return load_config(overrides=overrides)


@pytest.fixture
def folder(tiny_model_folder: Callable[..., Path]) -> Path:
    return tiny_model_folder("llama")


@pytest.fixture
def engine(config: Config, folder: Path) -> Iterator[VLLMEngine]:
    engine = open_engine(folder, config, on_progress=lambda stage, fraction: None)
    yield engine
    engine.close()


def noted(tmp_path: Path) -> list[Any]:
    return [json.loads(line) for line in (tmp_path / "asked").read_text().splitlines()]


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Asked:
    """A request under way."""

    def __init__(self, engine: VLLMEngine, how: int, *, id: str = "r", **more: Any) -> None:
        self.events: Queue[TokenEvent] = Queue()
        prompt = (how, *range(10, 100))
        self.request = GenerationRequest(id=id, prompt=prompt, max_tokens=4, stop_ids=frozenset({9}), **more)
        engine.submit(self.request, self.events.put)

    def all(self) -> tuple[list[int], TokenEvent]:
        """Return the tokens and the last event."""
        tokens = []
        while (event := self.events.get(timeout=TIMEOUT_S)).finish is None:
            assert event.token is not None
            tokens.append(event.token)
        return tokens, event


def test_tokens_come_as_a_stream_and_the_receipt_says_what_was_cached(engine: VLLMEngine) -> None:
    tokens, last = Asked(engine, PLAIN).all()
    assert tokens == [100, 101, 102, 103]
    assert last.finish == "length"
    assert last.receipt is not None
    assert (last.receipt.prompt_tokens, last.receipt.completion_tokens, last.receipt.cached_tokens) == (91, 4, 64)
    assert last.receipt.first_token_s is not None
    assert engine.load().counters["generated_tokens"] == 4
    assert (engine.load().running, engine.load().waiting) == (0, 0)
    assert engine.info.context_tokens == 512


def test_a_stop_token_ends_the_answer_and_is_not_told(engine: VLLMEngine) -> None:
    tokens, last = Asked(engine, fake_vllm.STOP).all()
    assert (tokens, last.finish) == ([100, 101, 102], "stop")


def test_all_that_a_request_says_reaches_vllm(engine: VLLMEngine, tmp_path: Path) -> None:
    sampling = Sampling(0.5, 0.9, 40, 0.1, 0.2, 0.3, 1.1, ((5, -1.0),), 11)
    more = {"salt": "mine", "min_tokens": 2, "logprobs": 1, "priority": 3, "tenant": "t", "session": "s", "retention": "chat"}
    events: Queue[TokenEvent] = Queue()
    request = GenerationRequest(id="x", prompt=(PLAIN,), max_tokens=4, sampling=sampling, stop_ids=frozenset({9, 2}), **more)
    engine.submit(request, events.put)
    first = events.get(timeout=TIMEOUT_S)
    assert first.logprobs is not None
    assert (first.logprobs.token, first.logprobs.top) == (-1.5, ((7, -0.25),))
    body = noted(tmp_path)[-1]
    wanted = {
        "prompt": [PLAIN],
        "max_tokens": 4,
        "min_tokens": 2,
        "stop_token_ids": [2, 9],
        "ignore_eos": True,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -1.0},
        "seed": 11,
        "logprobs": 1,
        "cache_salt": "mine",
        "priority": -3,
        "kv_transfer_params": {"headstart": {"retention": "chat", "tenant": "t", "session": "s", "keep": True}},
    }
    assert {key: body[key] for key in wanted} == wanted


def test_what_vllm_cannot_do_is_refused_and_what_it_does_not_take_is_put_in_its_words(
    engine: VLLMEngine, tmp_path: Path
) -> None:
    class Anything:
        def allowed(self) -> bytes | None:
            return None

        def accept(self, token: int) -> None:
            pass

    with pytest.raises(RequestError, match="held to a form"):
        Asked(engine, PLAIN, constraint=Anything())
    salts = []
    for salt in (b"mine", "x" * 2000, "short", None):
        Asked(engine, PLAIN, salt=salt).all()
        salts.append(noted(tmp_path)[-1].get("cache_salt"))
    assert salts[2:] == ["short", None]
    assert salts[:2] == [hashlib.sha256(salt).hexdigest() for salt in (b"mine", b"x" * 2000)]
    Asked(engine, PLAIN, salt="short", use_cache=False).all()
    assert noted(tmp_path)[-1]["cache_salt"] not in ("short", None)


def test_vllm_is_started_with_the_connector_and_our_settings(config: Config, folder: Path, tmp_path: Path) -> None:
    adapters = replace(config.engine, adapters="sql=/srv/sql", context=300, vllm_arguments="--max-num-seqs 3 --name 'a b'")
    shared = replace(config.cache, pool=tmp_path / "pool", node_memory="8MiB")
    engine = open_engine(folder, replace(config, engine=adapters, cache=shared), on_progress=lambda stage, fraction: None)
    engine.close()
    arguments = noted(tmp_path)[0]
    transfer = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector_module_path"] == "headstart.connect.vllm"
    assert transfer["kv_load_failure_policy"] == "recompute"
    said = transfer["kv_connector_extra_config"]
    assert (said["cache.directory"], said["cache.retention"]) == ([str(tmp_path / "kv")], "chat=7d..")
    assert load_config(overrides=said).cache == replace(shared, directory=tmp_path / "kv", memory="2GiB")
    for pair in (["--max-model-len", "300"], ["--lora-modules", "sql=/srv/sql"], ["--max-num-seqs", "3"], ["--name", "a b"]):
        assert arguments[arguments.index(pair[0]) + 1] == pair[1]
    assert engine.info.adapters == ("sql",)


def test_rules_of_tiers_that_vllm_reads_itself_are_left_to_it_since_it_follows_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text('[cache.tiering]\nrules = ["write to disk"]\n')
    monkeypatch.setenv("HEADSTART_CONFIG", str(file))
    said = transfer_config(load_config())["kv_connector_extra_config"]
    assert "cache.tiering.rules" not in said
    assert load_config(overrides=said).cache.tiering.rules == ("write to disk",)
    by_flag = {"cache.tiering.rules": "drop from disk"}
    said = transfer_config(load_config(overrides=by_flag))["kv_connector_extra_config"]
    assert load_config(overrides=said).cache.tiering.rules == ("drop from disk",)


def test_an_aborted_request_is_cut_off_at_vllm_too(engine: VLLMEngine, tmp_path: Path) -> None:
    asked = Asked(engine, fake_vllm.HANG)
    assert asked.events.get(timeout=TIMEOUT_S).token == 100
    with pytest.raises(RequestError, match="still running"):
        Asked(engine, PLAIN)
    engine.abort("r")
    engine.abort("nobody")
    assert asked.all()[1].finish == "abort"
    until(lambda: noted(tmp_path)[-1] == "gone")
    for round_ in range(20):  # aborted before it could begin, or soon after
        asked = Asked(engine, fake_vllm.HANG, id=f"at once {round_}")
        engine.abort(asked.request.id)
        assert asked.all()[1].finish == "abort"
    assert Asked(engine, fake_vllm.HANG, deadline_s=0.05).all()[1].finish == "abort"
    assert Asked(engine, PLAIN).all()[1].finish == "length"


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (fake_vllm.REFUSE, "it does not like this"),
        (fake_vllm.SAY_ERROR, "out of something"),
        (fake_vllm.BREAK_OFF, "broke off"),
    ],
)
def test_what_goes_wrong_with_one_request_ends_that_one_with_a_sentence(engine: VLLMEngine, how: int, sentence: str) -> None:
    _, last = Asked(engine, how).all()
    assert last.finish == "error"
    assert last.error is not None
    assert sentence in last.error
    assert Asked(engine, PLAIN).all()[1].finish == "length"


def test_a_vllm_that_dies_ends_its_requests_and_is_started_again_but_not_for_ever(engine: VLLMEngine) -> None:
    for round_ in range(1, 4):
        other = Asked(engine, fake_vllm.HANG, id="other")
        _, last = Asked(engine, fake_vllm.DIE, id="deadly").all()
        assert last.finish == "error"
        assert other.all()[1].finish == "error"
        until(lambda wanted=round_: engine.load().counters.get("restarts") == wanted and engine.failed is None)
        assert Asked(engine, PLAIN).all()[1].finish == "length"
    Asked(engine, fake_vllm.DIE, id="deadly").all()
    until(lambda: engine.failed is not None and "restart the server" in engine.failed)
    assert engine.failed is not None
    assert "RuntimeError: it broke (exit code 7)" in engine.failed
    with pytest.raises(RequestError, match="restart the server"):
        Asked(engine, PLAIN)


def test_closing_ends_requests_and_the_process(config: Config, folder: Path) -> None:
    engine = open_engine(folder, config, on_progress=lambda stage, fraction: None)
    asked = Asked(engine, fake_vllm.HANG)
    asked.events.get(timeout=TIMEOUT_S)
    engine.close()
    engine.close()
    assert asked.all()[1].finish == "abort"
    assert not engine._process.alive
    with pytest.raises(RequestError, match="shutting down"):
        Asked(engine, PLAIN)


def test_vllm_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from headstart.engine.vllm.process import VLLMProcess\n"
        "loop = 'import os, time; print(os.getpid(), flush=True); time.sleep(600)'\n"
        "process = VLLMProcess(lambda port: [sys.executable, '-c', loop])\n"
        "def tell(line):\n"
        "    if line: print(line, flush=True)\n"
        "process.start(on_progress=tell)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path()})
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait(TIMEOUT_S)
    parent.stdout.close()
    until(lambda: not Path(f"/proc/{child}").exists() or "\nState:\tZ" in Path(f"/proc/{child}/status").read_text())


def path() -> str:
    return os.pathsep.join(filter(None, sys.path))


def test_what_is_missing_or_wrong_is_said_before_anything_is_loaded(config: Config, folder: Path, tmp_path: Path) -> None:
    def opened(**engine: Any) -> None:
        open_engine(folder, replace(config, engine=replace(config.engine, **engine)), on_progress=lambda *_: None)

    with pytest.raises(ModelError, match="ValueError: no such architecture"):
        opened(vllm_arguments="--fail")
    with pytest.raises(ConfigError, match=r"engine\.python"):
        opened(python="/nowhere/python")
    with pytest.raises(ConfigError, match="deterministic"):
        opened(deterministic=True)
    bare = tmp_path / "python"
    for code, sentence in ((3, "pip install vllm"), (4, "--no-deps headstart")):
        bare.write_text(f"#!/bin/sh\nexit {code}\n")
        bare.chmod(0o755)
        with pytest.raises(MissingExtra, match=sentence):
            opened(python=str(bare))
    with pytest.raises(ConfigError, match="vllm_arguments"):
        load_config(overrides={"engine.vllm_arguments": "'open"})


def test_a_start_that_is_given_up_leaves_nothing_running(config: Config, folder: Path, tmp_path: Path) -> None:
    class _GivenUp(Exception):
        pass

    def give_up(stage: str, fraction: float | None) -> None:
        if stage.startswith("starting vLLM"):
            raise _GivenUp

    with pytest.raises(_GivenUp):
        open_engine(folder, config, on_progress=give_up)


def test_our_server_stands_in_front_and_its_usage_log_is_what_the_engine_counted(
    config: Config, folder: Path, tmp_path: Path
) -> None:
    served = open_model(replace(config, model=str(folder)), on_progress=lambda stage, fraction: None)
    accounts = Accounts(log=UsageLog(tmp_path / "usage", keep_bytes=1 << 20))
    with (
        running_model(served, accounts=accounts) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        answer = client.completions.create(model="it", prompt=[PLAIN, 11, 12], max_tokens=4)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 4
        assert answer.usage.prompt_tokens_details.cached_tokens <= 3  # never more than there are
        assert httpx.get(f"{server.url}/health").json()["device"] == "vllm"
        client.completions.create(model="it", prompt=[PLAIN, 11, 12], max_tokens=2, n=2)
        client.completions.create(model="it", prompt=[PLAIN, 11, 12], max_tokens=500, stream=True).close()
        prewarmed: Any = {"prompt_cache_options": {"prewarm": True}}
        answer = client.completions.create(model="it", prompt=[PLAIN, 11, 12], extra_body=prewarmed)
        assert answer.usage is not None
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (0, "length")
        until(lambda: not server.service._flights)
        counters = served.engine.load().counters
    lines = list(entries(tmp_path / "usage", Reading()))
    (sums,) = add_up(lines, []).values()
    assert len(lines) == 4
    assert sums.counts["engine_prompt"] == counters["prompt_tokens"] == 15
    assert sums.counts["engine_generated"] == counters["generated_tokens"]
    assert sums.counts["engine_cached_memory"] == counters.get("cached_memory_tokens", 0)


def test_why_says_what_only_vllm_knows_and_nothing_wrong(config: Config, folder: Path) -> None:
    served = open_model(replace(config, model=str(folder)), on_progress=lambda stage, fraction: None)
    with running_model(served) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        prompt = [PLAIN, *range(11, 310)]
        for _ in range(2):
            id = client.completions.create(model="it", prompt=prompt, max_tokens=4).id
        why = httpx.get(f"{server.url}/v1/headstart/requests/{id}/why").json()
        assert why["reused"] == {"untold": 64}
        (lost,) = why["lost"]
        assert (lost["cause"], lost["first_token"], lost["tokens"]) == ("not_remembered", 64, 192)
        assert "this server cannot tell what became of it; its cache: prefixes are kept by vLLM" in lost["evidence"]
        assert any("does not say which of the cached tokens" in note for note in why["notes"])
        assert "reused    64 tokens, from memory or disk" in list(why_lines(why))
