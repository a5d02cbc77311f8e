"""The Python that README and docs show runs as it stands, against a real server of ours with a tiny random model in it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sybil import Document
from sybil.parsers.markdown import PythonCodeBlockParser
from transformers import AutoModelForCausalLM, AutoTokenizer

from api.serving import Listening, running_model
from headstart.cli.opening import open_model
from headstart.config import load_config

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN_URL = "http://127.0.0.1:8000"


@pytest.fixture
def server(tiny_model_folder: Callable[..., Path], tmp_path: Path) -> Iterator[Listening]:
    config = load_config(
        overrides={
            "model": str(tiny_model_folder("llama")),
            "models_directory": tmp_path,
            "cache.directory": tmp_path / "kv",
            "cache.capacity": "64MiB",
            "cache.memory": "8MiB",
            "engine.kv_memory": "64MiB",
        }
    )
    with running_model(open_model(config, on_progress=lambda stage, fraction: None)) as server:
        yield server


def reader_s_client(server: Listening) -> type[openai.OpenAI]:
    """What `OpenAI` is to a reader: it finds the server where the page says. Nobody types faster than what was new is saved."""

    def wait_until_saved(response: httpx.Response) -> None:
        response.read()
        deadline = time.monotonic() + 30
        while "headstart_saves_pending" in (text := httpx.get(f"{server.url}/metrics").text):
            (pending,) = [line for line in text.splitlines() if line.startswith("headstart_saves_pending{")]
            if pending.endswith(" 0.0"):
                return
            assert time.monotonic() < deadline
            time.sleep(0.01)

    class Client(openai.OpenAI):
        def __init__(self, *, base_url: str, **more: Any) -> None:
            assert base_url.startswith(SHOWN_URL)
            http = httpx.Client(event_hooks={"response": [wait_until_saved]})
            super().__init__(base_url=base_url.replace(SHOWN_URL, server.url), http_client=http, **more)

    return Client


def give_the_reader_s_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have transformers load the tiny model, whatever hub name a page loads."""
    for loader in (AutoModelForCausalLM, AutoTokenizer):
        load = loader.from_pretrained
        monkeypatch.setattr(loader, "from_pretrained", lambda name, load=load: load(folder))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_does_what_the_page_says(
    page: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    document = Document.parse(str(page), PythonCodeBlockParser())
    examples = list(document.examples())
    if "openai" in page.read_text() and examples:
        client = reader_s_client(request.getfixturevalue("server"))
        monkeypatch.setattr(openai, "OpenAI", client)
    if "open_store" in page.read_text() and examples:
        give_the_reader_s_model(request.getfixturevalue("tiny_model_folder")("llama"), monkeypatch)
        monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", str(request.getfixturevalue("tmp_path") / "kv"))
        monkeypatch.setenv("HEADSTART_CACHE_MEMORY", "8MiB")
    for example in examples:
        example.evaluate()
    if "client" in document.namespace:
        document.namespace["client"].close()


def test_readme_shows_code() -> None:
    assert len(list(Document.parse(str(ROOT / "README.md"), PythonCodeBlockParser()).examples())) >= 5
