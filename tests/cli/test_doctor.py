"""`headstart doctor`: each thing with its sign and a fix, an exit code, nothing left on the disk."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gguf_fixtures import make_gguf
from headstart.cli import run_cli
from headstart.cli.doctor import UNWELL
from model_fixtures import save_tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_tokenizer(tmp_path / "model")


def test_template_and_disk_are_told_and_nothing_is_left(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", str(tmp_path / "kv" / "deep"))
    monkeypatch.setenv("HEADSTART_CACHE_MIN_FREE", "1MiB")
    before = sorted(tmp_path.rglob("*"))
    assert run_cli(["doctor", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "✔ a question and its answer" in said
    assert "MB/s" in said
    assert "GB free" in said
    assert sorted(tmp_path.rglob("*")) == before


def test_how_fast_prompts_are_computed_is_measured_if_asked_and_else_said_to_be_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", str(tmp_path / "kv"))
    monkeypatch.setenv("HEADSTART_CACHE_MIN_FREE", "1MiB")
    model = make_gguf(tmp_path / "tiny.gguf")
    said = []
    for more in ([], ["--compute"]):
        assert run_cli(["doctor", str(model), "--json", *more]) == 0
        told = json.loads(capsys.readouterr().out)
        assert {one["status"] for one in told["template"]} <= {"good", "note"}
        said.append(told["computing"][0])
    assert said[0]["status"] == "note"
    assert "was not measured" in said[0]["said"]
    assert "--compute" in said[0]["fix"]
    assert "tokens/s (a prompt of 1,024)" in said[1]["said"]


def test_a_template_that_loses_its_history_is_an_exit_code_of_its_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = folder / "chat_template.jinja"
    template.write_text(
        "{% for message in messages %}<|im_start|>{{ message.role }}{{ messages | length }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ messages | length }}\n{% endif %}"
    )
    assert run_cli(["doctor", str(folder), "--template", "--json"]) == UNWELL
    told = json.loads(capsys.readouterr().out)
    assert list(told) == ["template"]
    assert {one["status"] for one in told["template"]} >= {"bad"}
    assert all(one["fix"] for one in told["template"] if one["status"] == "bad")


def test_a_disk_without_room_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_MIN_FREE", "900000GiB")
    assert run_cli(["doctor", str(folder)]) == UNWELL
    said = capsys.readouterr().out
    assert "✘" in said
    assert "lower cache.min_free" in said


def test_it_needs_no_torch_and_no_transformers(folder: Path) -> None:
    arguments = ["doctor", str(folder), "--template"]
    code = f"import sys; from headstart.cli import run_cli; run_cli({arguments!r}); print(sorted(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "'headstart.diagnose.template_check'" in said
    assert "'torch'" not in said
    assert "'transformers'" not in said
