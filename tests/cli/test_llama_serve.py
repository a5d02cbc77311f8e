"""A GGUF over HTTP: the same dialect, usage and metrics; hits after SIGKILL; mistakes in one sentence."""

from __future__ import annotations

import ctypes.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from openai import OpenAI

from asking import ask, eventually
from gguf_fixtures import make_gguf
from headstart.cli.opening import open_model
from headstart.cli.server_process import ServerProcess
from headstart.config import CacheConfig, Config, EngineConfig
from headstart.engine.llama.binding import PACKAGE, RELEASE, VERSIONS


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


def test_dialects_receipts_tenants_and_cache_commands_are_as_of_any_model(command: list[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys.jsonl"
    ours, others = (_told("keys", "add", "--tenant", name, "--keys", str(keys)).split()[-1] for name in ("ours", "others"))
    server = ServerProcess([*command, "--keys", str(keys)], log=tmp_path / "log")
    server.start()
    system, question = MESSAGES[0]["content"], MESSAGES[1]["content"]

    def usage(key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {key}"}
        answer = httpx.post(f"{server.url}/v1/{path}", json={"model": "any", **body}, headers=headers, timeout=60)
        assert answer.status_code == 200, answer.text
        told: dict[str, Any] = answer.json()
        receipt = httpx.get(f"{server.url}/v1/headstart/requests/{told['id']}", headers=headers, timeout=60).json()
        return {**told["usage"], "receipt": receipt}

    try:
        chat = {"messages": MESSAGES, "max_tokens": 2}
        cold = usage(ours, "chat/completions", chat)
        prompt = cold["prompt_tokens"]
        whole = (prompt - 1) // 64 * 64
        assert cold["prompt_tokens_details"]["cached_tokens"] == 0
        here = ("--directory", str(tmp_path / "kv"), "--json")
        eventually(lambda: sum(one["tokens"] for one in json.loads(_told("cache", "ls", *here))["prefixes"]) >= whole)

        hit = usage(ours, "chat/completions", chat)
        assert (hit["prompt_tokens"], hit["prompt_tokens_details"]["cached_tokens"]) == (prompt, whole)
        assert hit["receipt"]["load_decision"]["matched_tokens"] == whole
        hit = usage(ours, "messages", {"system": system, "messages": MESSAGES[1:], "max_tokens": 2})
        assert (hit["input_tokens"], hit["cache_read_input_tokens"]) == (prompt - whole, whole)
        hit = usage(ours, "responses", {"instructions": system, "input": question, "max_output_tokens": 2})
        assert (hit["input_tokens"], hit["input_tokens_details"]["cached_tokens"]) == (prompt, whole)
        assert usage(others, "chat/completions", chat)["prompt_tokens_details"]["cached_tokens"] == 0

        assert json.loads(_told("cache", "verify", *here))["faults"] == []
        _told("cache", "rm", "--all", "--yes", *here)
        assert json.loads(_told("cache", "ls", *here))["prefixes"] == []
    finally:
        server.stop()
        server._client.close()


def _told(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "headstart.cli", *arguments], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_memory_plan_is_told_at_start(server: ServerProcess, tmp_path: Path) -> None:
    (told,) = [line for line in (tmp_path / "log").read_text().splitlines() if "memory plan: weights" in line]
    assert "(change with --context, --max-running, --kv-memory, --kv-type, --cache-memory)" in told


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
    huge = tmp_path / "huge.gguf"  # all of it but the beginning a hole, which nobody may read to its end
    shutil.copyfile(file, huge)
    os.truncate(huge, 4 << 40)
    code, said = _said(str(huge), *command[1:])
    assert code == 3
    assert re.fullmatch(rf"headstart: {huge} is 4,194,304 MiB and [\d,]+ MiB of memory are free; take a smaller one", said)
    strange = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(strange, "perceptron")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    code, said = _said(str(strange), *command[1:])
    assert (code, said) == (
        3,
        f"headstart: {strange} has the architecture 'perceptron', which this libllama does not know; use a newer one",
    )


def test_a_wrong_libllama_is_refused_with_one_sentence(command: list[str]) -> None:
    code, said = _said(*command, "--libllama", sys.executable)
    assert code == 3
    assert said.startswith("headstart: libllama cannot be loaded: ")
    other = ctypes.util.find_library("m")
    code, said = _said(*command, "--libllama", str(other))
    assert code == 3
    assert said == (
        f"headstart: {other} is not the libllama that this headstart speaks to: it has no llama_version; "
        f"use a build of llama.cpp {' or '.join(VERSIONS)} as in {PACKAGE} {RELEASE}"
    )


@pytest.mark.parametrize("name", ["tiny:1b", "org/small/tiny.gguf", "org/quants/tiny.gguf"])
def test_what_other_programs_have_downloaded_is_served_by_its_name(
    name: str, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/tiny/1b"
    for place in (
        tmp_path / "ollama/blobs/sha256-aa",
        tmp_path / ".lmstudio/models/org/small/tiny.gguf",
        tmp_path / "hub/models--org--quants/snapshots/abc/tiny.gguf",
    ):
        place.parent.mkdir(parents=True)
        place.symlink_to(file)
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:aa"}]}))
    config = Config(
        model=name, models_directory=tmp_path, cache=CacheConfig(enabled=False), engine=EngineConfig(kv_memory="16MiB")
    )
    served = open_model(config, on_progress=lambda *_: None)
    try:
        answer = ask(served.engine, served.renderer.completion("The order of the gates."), 3)
        assert answer.result().finish == "length"
    finally:
        served.engine.close()
