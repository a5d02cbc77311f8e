"""Models that Ollama, LM Studio and the Hugging Face cache have downloaded are found by the names that they have there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headstart import config
from headstart.cli import cli
from headstart.config import model_places
from headstart.engine.local_models import local_models
from headstart.engine.models import resolve_model
from headstart.errors import ModelError

GGUF = b"GGUF" + bytes(60)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with a model of each program, and things beside them that are none."""
    for name in ("OLLAMA_MODELS", "HF_HOME", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(config, "_OLLAMA_SERVICE", tmp_path / "service")
    ollama = tmp_path / ".ollama/models"
    for name, digest in (
        ("library/llama3.2/3b", "sha256:aa"),
        ("me/own/latest", "sha256:bb"),
        ("library/gone/1b", "sha256:cc"),
    ):
        manifest = ollama / "manifests/registry.ollama.ai" / name
        manifest.parent.mkdir(parents=True, exist_ok=True)
        layers = [{"mediaType": "application/vnd.ollama.image.template", "digest": "sha256:00"}]
        layers.append({"mediaType": "application/vnd.ollama.image.model", "digest": digest})
        manifest.write_text(json.dumps({"layers": layers}))
    (ollama / "manifests/registry.ollama.ai/library/llama3.2/bad").write_text("{")
    (ollama / "blobs").mkdir()
    for digest in ("aa", "bb"):
        (ollama / f"blobs/sha256-{digest}").write_bytes(GGUF)
    studio = tmp_path / ".lmstudio/models/org/repo"
    studio.mkdir(parents=True)
    for name in (
        "small.gguf",
        "mmproj-small.gguf",
        "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf",
        "lost-00001-of-00002.gguf",
    ):
        (studio / name).write_bytes(GGUF)
    (studio / "not.gguf").write_text("text")
    snapshot = tmp_path / ".cache/huggingface/hub/models--org--quants/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "q4.gguf").write_bytes(GGUF)
    return tmp_path


def test_each_is_listed_under_its_own_name(home: Path) -> None:
    found = {model.name: (model.source, model.nbytes) for model in local_models(model_places())}
    assert found == {
        "llama3.2:3b": ("ollama", 64),
        "me/own:latest": ("ollama", 64),
        "org/repo/small.gguf": ("lm-studio", 64),
        "org/repo/big-00001-of-00002.gguf": ("lm-studio", 128),
        "org/repo/lost-00001-of-00002.gguf": ("lm-studio", 64),
        "org/quants/q4.gguf": ("hugging-face", 64),
    }


def test_each_is_found_by_that_name(home: Path) -> None:
    def path(name: str) -> str:
        found = resolve_model(name, home / "made", on_progress=lambda *_: None)
        assert found.is_gguf
        return found.path.relative_to(home).as_posix()

    assert path("llama3.2:3b") == ".ollama/models/blobs/sha256-aa"
    assert path("me/own") == path("me/own:latest") == ".ollama/models/blobs/sha256-bb"
    assert path("org/quants/q4.gguf").endswith("snapshots/abc/q4.gguf")
    assert path(str(home / ".ollama/models/blobs/sha256-aa")) == ".ollama/models/blobs/sha256-aa"  # a file without ending
    with pytest.raises(ModelError, match=r"lacks lost-00002-of-00002\.gguf, one of its 2 parts"):
        path("org/repo/lost-00001-of-00002.gguf")
    with pytest.raises(ModelError, match="unknown model 'gone:1b'"):
        path("gone:1b")


def test_what_ollamas_service_has_downloaded_is_found_too(home: Path) -> None:
    (home / ".ollama").rename(home / "elsewhere")
    (home / "elsewhere/models").rename(home / "service")
    found = {model.name: model.path for model in local_models(model_places()) if model.source == "ollama"}
    assert found == {"llama3.2:3b": home / "service/blobs/sha256-aa", "me/own:latest": home / "service/blobs/sha256-bb"}


def test_the_programs_own_variables_are_followed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "elsewhere"))
    monkeypatch.setenv("HF_HOME", str(home / "elsewhere"))
    assert {model.source for model in local_models(model_places())} == {"lm-studio"}


def test_the_command_lists_them(home: Path) -> None:
    text = CliRunner().invoke(cli, ["models"]).output
    assert "smollm2-135m-gguf" in text
    assert "llama3.2:3b" in text
    listed = json.loads(CliRunner().invoke(cli, ["models", "--json"]).output)
    assert listed["aliases"] == ["smollm2-135m", "smollm2-135m-gguf"]
    assert len(listed["models"]) == 6
