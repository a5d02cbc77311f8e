"""A GGUF over HTTP: the same dialect, usage and metrics; hits after SIGKILL; mistakes in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from gguf_fixtures import make_gguf
from headstart.cli.opening import open_model
from headstart.cli.server_process import ServerProcess
from headstart.config import CacheConfig, Config, EngineConfig


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def command(file: Path, tmp_path: Path) -> list[str]:
    cache = ["--cache-directory", str(tmp_path / "kv"), "--cache-capacity", "64MiB", "--models-directory", str(tmp_path)]
    return [str(file), *cache, "--kv-memory", "16MiB", "--cache-min-free", "0"]


@pytest.fixture
def server(command: list[str], tmp_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(command, log=tmp_path / "log")
    process.start(on_progress=lambda _: None)
    yield process
    process.stop()
    process._client.close()


MESSAGES = [{"role": "system", "content": "The order of the gates. " * 30}, {"role": "user", "content": "Which one?"}]


def test_a_hit_after_sigkill_gives_the_same_tokens(server: ServerProcess) -> None:
    cold = server.ask(MESSAGES, max_tokens=12)
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] == 0
    while server.metric("headstart_saves_pending"):
        pass
    server.kill()
    server.start(on_progress=lambda _: None)
    hit = server.ask(MESSAGES, max_tokens=12)
    prompt = cold.usage["prompt_tokens"]
    assert hit.usage["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 64 * 64 > 128
    assert hit.text == cold.text


def test_clients_get_several_answers_log_probabilities_and_json(server: ServerProcess) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused") as client:
        answer = client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            n=2,
            max_tokens=6,
            temperature=1.2,
            seed=3,
            logprobs=True,
            top_logprobs=2,  # type: ignore[arg-type]
        )
        assert len(answer.choices) == 2
        assert answer.choices[0].logprobs is not None
        assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2  # type: ignore[index]
        assert "tiny" in httpx.get(f"{server.url}/v1/models").text
        assert "libllama" not in httpx.get(f"{server.url}/metrics").text
        plain = client.completions.create(model="tiny", prompt="The order", max_tokens=4, stop=["zzzz"])
        assert plain.usage is not None
        assert plain.usage.completion_tokens == 4


def test_libllamas_threads_do_not_spin_while_they_wait_for_one_another(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "")  # so that it is put back
    monkeypatch.delenv("OMP_WAIT_POLICY")
    config = Config(
        model=str(file), models_directory=tmp_path, cache=CacheConfig(enabled=False), engine=EngineConfig(kv_memory="16MiB")
    )
    open_model(config, on_progress=lambda *_: None).engine.close()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"


def _said(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "headstart.cli", "serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_what_cannot_be_served_ends_with_one_sentence(file: Path, command: list[str], tmp_path: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(file.read_bytes()[:300_000])
    code, said = _said(str(cut), *command[1:])
    assert (code, said) == (3, f"headstart: {cut} is not a whole GGUF file: it is truncated or damaged; fetch the file again")
    code, said = _said(*command, "--deterministic")
    assert (code, said) == (2, "headstart: engine.deterministic is not for GGUF models; leave it out, or serve a folder")
    code, said = _said(*command, "--libllama", sys.executable)
    assert code == 3
    assert said.startswith("headstart: libllama cannot be loaded: ")
