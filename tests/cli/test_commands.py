"""The command line without a model: help is quick, wrong use is a sentence and an exit code, never a traceback."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headstart.cli import run_cli
from headstart.cli.cache import COMMANDS
from headstart.errors import HeadstartError


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    code = run_cli(list(arguments))
    said = capsys.readouterr().err
    assert "Traceback" not in said
    return code, said


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys; from headstart.cli import run_cli; code = run_cli(['--help']);"
        "heavy = {'torch', 'transformers', 'numpy', 'uvicorn', 'starlette', 'rich', 'msgspec', 'httpx'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    for command in ("serve", "run", "pull", "demo", "version"):
        assert f"  {command} " in done.stdout


def test_the_help_of_what_takes_long_to_start_imports_nothing_heavy() -> None:
    asked = [*(["cache", verb] for verb in COMMANDS), ["serve"], ["run"], ["demo"], ["route"], ["why"], ["diff"]]
    program = (
        f"import sys; from headstart.cli import run_cli; codes = {{run_cli([*words, '--help']) for words in {asked}}};"
        "heavy = {'torch', 'transformers', 'numpy', 'uvicorn', 'starlette', 'rich', 'httpx', 'jinja2'} & set(sys.modules);"
        "sys.exit(f'{codes}, imported {heavy}' if heavy or codes != {0} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_setting_of_a_server_is_a_flag_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    from headstart.config import settings

    assert run_cli(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    assert run_cli(["route", "--help"]) == 0
    of_router = capsys.readouterr().out
    for key, setting in settings().items():
        assert key == "model" or f"  {setting.flag} " in (of_router if key.startswith("route.") else text)
    assert not any(f"  --{name} " in of_router for name in ("max-waiting", "strict-models", "answers", "keep-prompts", "role"))
    assert "[default: ]" not in text


def test_version_can_be_read_by_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["version", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["headstart"]


def test_an_unknown_command_or_flag_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = fails(capsys, "servee")
    assert (code, "servee" in said) == (2, True)
    assert "did you mean 'serve'?" in said
    assert "there are serve, run, pull" in fails(capsys, "xyz")[1]
    code, said = fails(capsys, "serve", "--cache-memroy", "1GiB")
    assert code == 2
    assert "--cache-memory" in said


def test_serve_takes_its_model_as_a_flag_too(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = fails(capsys, "serve", "--model", "smollm", "--port", "0", "--models-directory", str(tmp_path))
    assert (code, "unknown model 'smollm'" in said) == (3, True)
    code, said = fails(capsys, "serve", "a", "--model", "b", "--port", "0")
    assert (code, "two models are named, a and --model b; give one" in said) == (2, True)


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt_is_refused_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompt: str
) -> None:
    monkeypatch.setattr("headstart.cli.opening.open_model", None)
    code, said = fails(capsys, "run", prompt)
    assert (code, "the prompt is empty" in said) == (2, True)


def test_pull_says_when_there_was_nothing_to_do(
    capsys: pytest.CaptureFixture[str], tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    assert run_cli(["pull", str(tiny_model_folder("llama")), "--models-directory", str(tmp_path)]) == 0
    assert " is already here and whole, in " in capsys.readouterr().out


def test_an_unknown_model_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, said = fails(capsys, "run", "hi", "--model", "smollm", "--models-directory", str(tmp_path))
    assert (code, said.count("\n")) == (3, 1)
    assert said.startswith("headstart: unknown model 'smollm'")


def test_a_directory_without_weights_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    code, said = fails(capsys, "run", "hi", "--model", str(tmp_path))
    assert (code, said.count("\n")) == (3, 1)
    assert str(tmp_path) in said


@pytest.mark.parametrize("library", ["torch", "transformers"])
def test_a_missing_extra_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, library: str
) -> None:
    from headstart.engine.torch import open_engine

    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setattr(
        "headstart.cli.opening.open_model", lambda config, on_progress: open_engine(tmp_path, config, on_progress=on_progress)
    )
    code, said = fails(capsys, "run", "hi")
    assert code == 3
    assert "pip install 'headstart[torch]'" in said


def test_a_port_in_use_is_a_sentence_before_any_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = fails(capsys, "serve", "no-such-model", "--port", str(port))
    assert (code, said.count("\n")) == (4, 1)
    assert f"port {port} of 127.0.0.1 is in use" in said


def test_an_address_that_is_not_ours_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = fails(capsys, "serve", "no-such-model", "--host", "192.0.2.1", "--port", "0", "--allow-remote")
    assert code == 2
    assert "cannot listen on port 0 of 192.0.2.1" in said


def test_an_unknown_configuration_key_is_a_sentence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "headstart.toml"
    file.write_text("[server]\nprot = 8000\n")
    code, said = fails(capsys, "serve", "--config", str(file))
    assert (code, said.count("\n")) == (2, 1)
    assert "unknown configuration key 'server.prot'" in said
    assert "did you mean 'server.port'?" in said


def test_an_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headstart.cli.pull.chosen_config", interrupted)
    assert run_cli(["pull"]) == 130


TERMINATED_WHILE_CONVERTING = """
import sys
from headstart import cli
from headstart.engine import smollm2

child = "import os, sys, time; print(os.getpid(), file=open(sys.argv[1], 'w'), flush=True); time.sleep(60)"

def convert(arguments):
    smollm2._run([sys.executable, "-c", child, *arguments], "converting", 60, still=lambda: None)

cli.run_cli = convert
cli.main()
"""


def test_a_command_that_is_terminated_stops_the_child_that_converts(tmp_path: Path) -> None:
    place = tmp_path / "pid"
    with subprocess.Popen([sys.executable, "-c", TERMINATED_WHILE_CONVERTING, str(place)]) as command:
        while not (place.exists() and place.read_text().strip()):
            assert command.poll() is None
            time.sleep(0.01)
        command.terminate()
        assert command.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(place.read_text()), 0)


def test_an_error_raised_on_purpose_is_its_sentence_and_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise HeadstartError("something is wrong; do something else")

    monkeypatch.setattr("headstart.cli.pull.chosen_config", broken)
    assert fails(capsys, "pull") == (1, "headstart: something is wrong; do something else\n")
