"""`headstart lint`: logs in, a report, JSON or a page out, and an exit code; nothing that a prompt says unless asked."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from diagnose.logs import clock, turns, written
from diagnose.pairs import SYSTEM
from headstart.cli import run_cli
from headstart.cli.lint import BROKEN
from model_fixtures import save_tiny_tokenizer

Run = Callable[..., str]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    lines = [{"id": f"r{n}", "tenant": "Lovelace & Co", "body": body} for n, body in enumerate(turns(5, system=clock))]
    return written(tmp_path / "log.jsonl", lines)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def lint(*arguments: object, code: int = 0) -> str:
        got = run_cli(["lint", *map(str, arguments)])
        said = capsys.readouterr()
        assert got == code, said
        assert "Traceback" not in said.err
        return said.out if code == 0 else said.out + said.err

    return lint


def test_a_report_says_what_is_lost_by_what_and_what_to_change(log: Path, run: Run) -> None:
    said = run(log, "--price", "3/0.3", "--prefill-rate", 400, "--capacity", "1M")
    assert "5 requests" in said
    assert "time" in said.partition("lost by")[2]
    assert f"headstart diff '{log}#1' '{log}#2'" in said or f"headstart diff {log}#1 {log}#2" in said
    assert "replayed with it" in said
    assert "s of computing" in said


def test_token_counts_are_exact_with_a_tokenizer(log: Path, run: Run, tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(tmp_path / "tokenizer")
    told = json.loads(run(log, "--model", folder, "--json"))
    assert told["exact"]
    assert told["found_again_tokens"] + told["lost_tokens"] + told["unique_tokens"] == told["tokens"]
    assert told["changes"][0]["replayed_tokens"] > told["found_again_tokens"]


def test_what_a_headstart_server_takes_out_costs_nothing_unless_it_is_counted_as_sent(tmp_path: Path, run: Run) -> None:
    folder = save_tiny_tokenizer(tmp_path / "tokenizer")
    lines = turns(4, system=lambda n: f"x-anthropic-billing-header: cc_version=2.1; cch={n}a{n}b{n};\n{SYSTEM}")
    log = written(tmp_path / "log.jsonl", lines)
    told = json.loads(run(log, "--model", folder, "--json"))
    assert (told["canonical_requests"], told["lost_tokens"], told["findings"]) == (4, 0, [])
    assert "of 4 requests a header line was taken out first" in " ".join(run(log, "--model", folder).split())
    for more in (("--model", folder, "--as-sent"), ()):
        told = json.loads(run(log, *more, "--json"))
        assert (told["canonical_requests"], told["findings"][0]["cause"]) == (0, "request_header")


def test_tenants_share_nothing_where_they_are_said_to_be_apart(tmp_path: Path, run: Run) -> None:
    log = written(tmp_path / "log.jsonl", [{"tenant": name, "body": turns(1)[0]} for name in ("a", "b", "a")])
    together, apart = (json.loads(run(log, *more, "--json"))["found_again_tokens"] for more in ((), ("--tenants-apart",)))
    assert together == 2 * apart > 0


def test_nothing_that_a_prompt_says_is_shown_unless_asked_for(log: Path, run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    hidden = run(log, "--html", page) + page.read_text() + run(log, "--json")
    assert "10:1" not in hidden
    assert "Lovelace" not in hidden
    shown = run(log, "--show-text", "--html", page)
    assert "10:10:00" in shown
    assert "Lovelace" in shown
    assert "Lovelace &amp; Co" in page.read_text()


def test_a_page_stands_alone(log: Path, run: Run, tmp_path: Path) -> None:
    run(log, "--html", tmp_path / "page.html")
    seen: list[tuple[str, dict[str, str | None]]] = []
    open_tags: list[str] = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            seen.append((tag, dict(attrs)))
            if tag not in ("meta", "rect"):
                open_tags.append(tag)

        def handle_endtag(self, tag: str) -> None:
            if tag != "rect":
                assert open_tags.pop() == tag

    Parser().feed((tmp_path / "page.html").read_text())
    assert open_tags == []
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in seen}
    assert not [attrs for _, attrs in seen if {"src", "href"} & attrs.keys()]
    assert sum(tag == "svg" for tag, _ in seen) == 3
    assert {"kept", "lost", "unique"} <= {attrs.get("class") for tag, attrs in seen if tag == "rect"}


def test_a_broken_limit_is_an_exit_code_of_its_own(log: Path, run: Run) -> None:
    run(log, "--fail-on", "any=100%,tools_changed", "--changes", 0)
    said = run(log, "--fail-on", "time=5%", "--fail-on", "rate=99%", "--changes", 0, code=BROKEN)
    assert said.count("limit broken") == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fail-on", "clocks=5%"], "--fail-on names 'clocks'"),
        (["--fail-on", "time=much"], "give a share"),
        (["--fail-on", "time=200%"], "between 0 and 100%"),
        (["--capacity", "large"], "such as 5M"),
        (["--html", "/nowhere/page.html"], "cannot be written"),
    ],
)
def test_a_wrong_option_is_refused(log: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    assert run_cli(["lint", str(log), *arguments]) in (2, 3)
    assert said in capsys.readouterr().err


def test_a_file_without_requests_is_refused(tmp_path: Path, run: Run) -> None:
    said = run(written(tmp_path / "log.jsonl", [{"level": "info"}]), code=2)
    assert "no request was found" in said
    assert "holds no request" in said


def test_it_starts_without_torch_and_transformers(log: Path) -> None:
    code = f"import sys; from headstart.cli import run_cli; run_cli(['lint', {str(log)!r}]); print(sorted(sys.modules))"
    said: Any = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    assert "'headstart.diagnose.lint'" in said
    heavy = (
        "torch",
        "transformers",
        "tokenizers",
        "jinja2",
        "httpx",
        "aiohttp",
        "starlette",
        "uvicorn",
        "rich",
        "headstart.cache",
    )
    assert not [name for name in heavy if f"'{name}'" in said]


def test_the_example_of_coding_agents_loses_by_what_its_page_says(run: Run) -> None:
    example = Path(__file__).parents[2] / "examples" / "lint" / "agents.jsonl"
    told = json.loads(run(example, "--json"))
    assert [one["cause"] for one in told["findings"]] == ["tools_reordered", "request_header", "time"]
    rates = [told["ideal_rate"], *(one["replayed_rate"] for one in told["changes"])]
    assert rates == sorted(rates)
    assert rates[-1] > 2 * rates[0]
