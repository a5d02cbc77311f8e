"""`headstart diff`: files, logs and standard input in, a report and an exit code out; without torch, and soon."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gguf_fixtures import make_gguf
from headstart.cli import run_cli
from headstart.cli.diff import DIFFERS
from headstart.render import Renderer
from model_fixtures import save_tiny_tokenizer

SYSTEM = "You are careful. It is 10:00:0{} now. " + "Keep to the handbook, and say which part of it you have read. " * 8
Run = Callable[..., str]


def chat(second: int, *more: str) -> dict[str, Any]:
    messages = [{"role": "system", "content": SYSTEM.format(second)}, {"role": "user", "content": "Which gate opens first?"}]
    roles = ("assistant", "user")
    return {"messages": [*messages, *({"role": roles[n % 2], "content": text} for n, text in enumerate(more))]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with its template, and no weights."""
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, object], str]:
    def write(name: str, content: object) -> str:
        path = tmp_path / name
        path.write_bytes((content if isinstance(content, str) else json.dumps(content)).encode())
        return str(path)

    return write


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def diff(*arguments: object, code: int = 0) -> str:
        got = run_cli(["diff", *map(str, arguments)])
        said = capsys.readouterr()
        assert got == code, said
        assert "Traceback" not in said.err
        return said.out + said.err

    return diff


def test_a_time_in_the_system_prompt_is_named_with_place_and_cost(file: Any, run: Run, folder: Path) -> None:
    a, b = file("a.json", chat(1)), file("b.json", chat(2))
    said = run(a, b, "--model", folder, "--price", "3/0.3", "--prefill-rate", 400, code=DIFFERS)
    assert "messages[0].content, character 30" in said
    assert "time: a time: '10:00:01' in A, '10:00:02' in B" in said
    assert "[1] now. Keep" in said
    told = json.loads(run(a, b, "--model", folder, "--json", "--price", "3/0.3", "--prefill-rate", 400, code=DIFFERS))
    renderer = Renderer.load(folder, light=True)
    ids = [renderer.chat(chat(n)["messages"]) for n in (1, 2)]
    at = next(n for n, (x, y) in enumerate(zip(*ids, strict=True)) if x != y)
    (finding,) = told["findings"]
    assert (finding["a"]["token"], finding["b"]["token"], finding["a"]["position"]) == (ids[0][at], ids[1][at], at)
    assert told["lost_tokens"] == len(ids[1]) - at // 64 * 64
    assert told["lost_ms"] == told["lost_tokens"] / 400 * 1000


def test_a_conversation_that_went_on_is_the_same(file: Any, run: Run, folder: Path) -> None:
    a, b = file("a.json", chat(1)), file("b.json", chat(1, "Three.", "And then?"))
    assert "the same to the end of A" in run(a, b, "--model", folder)
    assert json.loads(run(a, b, "--json"))["same"]


def test_a_log_s_lines_are_named_by_id_or_number(file: Any, run: Run, folder: Path) -> None:
    entries = [
        {"request_id": "r1", "body": chat(1)},
        {"id": "r2", **chat(2)},
        {"custom_id": "r3", "prompt_token_ids": [5, 6, 7]},
    ]
    log = file("log.jsonl", "\n".join(map(json.dumps, entries)))
    one = json.loads(run(f"{log}#r1", f"{log}#r2", "--model", folder, "--json", code=DIFFERS))
    assert one["findings"][0]["cause"] == "time"
    assert json.loads(run(f"{log}#1", f"{log}#2", "--model", folder, "--json", code=DIFFERS))["findings"] == one["findings"]
    assert "same to the end" in run(f"{log}#r3", file("ids.json", [5, 6, 7, 8]))
    assert "there are r1, r2, r3 and so on" in run(f"{log}#r9", log, code=3)
    assert "has 3 lines; say which with" in run(log, log, code=2)


def test_ids_and_text_are_compared_by_the_tokenizer_named(file: Any, run: Run, folder: Path) -> None:
    text = "The cache keeps what was computed once."
    ids = Renderer.load(folder, light=True).completion(text)
    assert "the same to the end" in run(file("a.txt", text), file("b.json", ids), "--model", folder)
    assert "name the tokenizer with --model" in run(file("a.txt", text), file("b.json", ids), code=2)


def test_standard_input_is_one_side(file: Any, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO(json.dumps(chat(2)).encode())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert "10:00:02" in run(file("a.json", chat(1)), "-", code=DIFFERS)
    assert "only one of A and B" in run("-", "-", code=2)


def test_line_ends_of_a_text_file_are_kept(file: Any, run: Run) -> None:
    said = run(file("a.txt", "one\ntwo\n"), file("b.txt", "one\r\ntwo\r\n"), code=DIFFERS)
    assert "whitespace: line ends" in said
    assert "␍" in said


@pytest.mark.parametrize(
    ("name", "content", "code", "said"),
    [
        ("a.json", "{", 2, "a.json is not valid JSON"),
        ("a.json", {"x": 1}, 2, "holds no request"),
        ("a.json", "", 2, "a.json is empty"),
        ("a.json", {"messages": [{"role": "user", "content": 5}]}, 2, "a.json: messages[0].content must be a string"),
        ("a.json", {"messages": [{"role": "nobody", "content": "x"}]}, 2, "a.json: messages[0].role is 'nobody'"),
        ("a.jsonl", "{}\nno\n", 2, "line 2, is not valid JSON"),
        ("a.json", [1, -2], 2, "a token id is a whole number"),
    ],
)
def test_what_cannot_be_read_is_a_sentence(
    name: str, content: Any, code: int, said: str, file: Any, run: Run, folder: Path
) -> None:
    told = run(file(name, content), file("b.json", chat(1)), "--model", folder, code=code)
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_file_or_model_that_is_not_there_is_a_sentence(file: Any, run: Run, tmp_path: Path) -> None:
    a = file("a.json", chat(1))
    assert "there is no file" in run(tmp_path / "none.json", a, code=3)
    assert "is a folder; give a file" in run(tmp_path, a, code=2)
    assert "has no tokenizer.json" in run(a, a, "--model", tmp_path, code=3)
    assert "there is no folder" in run(a, a, "--model", tmp_path / "none", code=3)
    assert "give the folder that holds tokenizer.json" in run(a, a, "--model", a, code=3)
    for price in ("3", "x/y", "1/3", "nan/nan"):
        assert "--price is" in run(a, a, "--price", price, code=2)


HEADER = "x-anthropic-billing-header: cc_version=2.1; cch={};\n"


def test_what_a_headstart_server_takes_out_is_a_note_and_a_difference_elsewhere(
    file: Any, run: Run, folder: Path, tmp_path: Path
) -> None:
    bodies = [chat(1), chat(2)]
    for n, body in enumerate(bodies):
        body["messages"][0]["content"] = HEADER.format(f"{n}a{n}b") + body["messages"][0]["content"]
    a, b = file("a.json", bodies[0]), file("b.json", bodies[1])
    told = json.loads(run(a, b, "--model", folder, "--json", code=DIFFERS))
    (time,) = told["findings"]
    assert time["cause"] == "time"
    text = bodies[1]["messages"][0]["content"]
    assert text[time["offset"] :].startswith("2 now.")  # as the client counts
    assert any("billing-header" in note and "--as-sent" in note for note in told["notes"])
    told = json.loads(run(a, b, "--model", folder, "--as-sent", "--json", code=DIFFERS))
    assert [one["cause"] for one in told["findings"]] == ["request_header", "time"]
    assert json.loads(run(a, b, "--json", code=DIFFERS))["findings"][0]["cause"] == "request_header"
    settings = tmp_path / "headstart.toml"
    settings.write_text('[server]\ncanonical = ""\n')
    told = json.loads(run(a, b, "--model", folder, "--config", settings, "--json", code=DIFFERS))
    assert told["findings"][0]["cause"] == "request_header"


def test_the_tokenizer_of_a_gguf_does(file: Any, run: Run, tmp_path: Path) -> None:
    model = make_gguf(tmp_path / "tiny.gguf")
    a, b = file("a.json", chat(1)), file("b.json", chat(2))
    told = json.loads(run(a, b, "--model", model, "--json", code=DIFFERS))
    (finding,) = told["findings"]
    assert (told["exact"], finding["cause"], finding["path"], finding["offset"]) == (True, "time", "messages[0].content", 30)
    assert finding["a"]["token"] != finding["b"]["token"]
    assert "the same to the end" in run(a, file("c.json", chat(1, "Three.", "And then?")), "--model", model)


def test_a_folder_with_nothing_but_tokenizer_json_compares_texts(file: Any, run: Run, folder: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "tokenizer.json", alone)
    assert "other_text" in run(file("a.txt", "The cache."), file("b.txt", "The index."), "--model", alone, code=DIFFERS)
    assert "has no chat template" in run(file("a.json", chat(1)), file("b.json", chat(2)), "--model", alone, code=2)


def test_it_runs_without_torch_and_transformers(file: Any, folder: Path) -> None:
    program = (
        "import sys; from headstart.cli import run_cli; code = run_cli(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'uvicorn', 'starlette', 'httpx'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    a, b = file("a.json", chat(1)), file("b.json", chat(2))
    for model in ([], ["--model", str(folder)]):
        command = [sys.executable, "-c", program, "diff", a, b, *model]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (DIFFERS, "")
        assert "time: a time" in done.stdout
