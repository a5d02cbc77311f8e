"""docs/causes.md has every cause, in order, and the README shows what the command really says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headstart.cli import run_cli
from headstart.diagnose.causes import FIXES, Cause, names_of

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "causes.md").read_text(encoding="utf-8")


def rows() -> Iterator[str]:
    yield "| code | OpenAI | Anthropic |"
    yield "|---|---|---|"
    for cause in Cause:
        if cause is Cause.SHORT:
            yield f"| [`{cause}`](#{cause}) | – | – |"
            continue
        names = {
            names_of(cause, in_tools=tools, in_system=system)
            for tools, system in ((False, False), (True, False), (False, True))
        }
        anthropic = {name.anthropic for name in names}
        fixed = cause in (Cause.TOOLS_REORDERED, Cause.TOOLS_RESERIALISED, Cause.TOOLS_CHANGED)
        said = "`tools_changed`" if fixed else f"`{anthropic.pop()}`" if len(anthropic) == 1 else "by place"
        openai = names_of(cause, in_tools=False, in_system=False).openai
        yield f"| [`{cause}`](#{cause}) | `{openai}` | {said} |"


def test_every_cause_has_a_heading_in_order_and_a_fix() -> None:
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == [str(cause) for cause in Cause]
    assert set(FIXES) == set(Cause)


def test_the_table_says_what_the_code_says() -> None:
    found = re.search(r"<!-- causes -->\n(.*?)<!-- end of causes -->", PAGE, re.DOTALL)
    want = "\n".join(rows())
    assert found
    assert found[1].strip() == want, f"between the marks belongs:\n{want}"


@pytest.mark.real_model
def test_the_readme_shows_what_the_command_says(
    smollm2_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^    \$ headstart (diff .*)\n((?:(?:    .*)?\n)*)", readme, re.MULTILINE)
    assert shown
    monkeypatch.chdir(ROOT)
    words = [str(smollm2_folder) if word == "smollm2-135m" else word for word in shown[1].split()]
    assert run_cli(words) == 8
    want = [line.removeprefix("    ") for line in shown[2].rstrip().splitlines()]
    assert capsys.readouterr().out.rstrip().splitlines() == want
