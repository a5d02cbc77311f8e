"""Templates that keep a conversation whole as it grows, and toy ones of every kind that does not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diagnose.families import FOLDING, byte_fallback, byte_level
from headstart.diagnose.template_check import Check, check_template
from headstart.render import Renderer

HEAD = "{% for message in messages %}<|im_start|>{{ message.role }}\n"
TAIL = "{{ message.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
CALLS = "{% for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"

GOOD = (
    TOOLS
    + HEAD
    + "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    + CALLS
    + TAIL
    + "{% endif %}"
)
EMPTY_THINK = TOOLS + HEAD + CALLS + TAIL + "<think>\n\n</think>\n\n{% endif %}"
DROPS = (
    TOOLS
    + HEAD
    + "{% if message.reasoning_content and (loop.last or messages[-1].role == 'tool') %}"
    + "<think>{{ message.reasoning_content }}</think>{% endif %}"
    + CALLS
    + TAIL
    + "{% endif %}"
)
MOVES = (
    "{% for message in messages %}{% if tools and loop.index0 == (messages | length) - 1 %}<|im_start|>tools\n"
    "{{ tools | tojson }}<|im_end|>\n{% endif %}<|im_start|>{{ message.role }}\n" + CALLS + TAIL + "{% endif %}"
)
DATED = "<|im_start|>system\nToday is {{ strftime_now('%Y-%m-%d') }}.<|im_end|>\n" + GOOD
BEGINS = "{{ bos_token }}" + GOOD


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("template"))


@pytest.fixture
def checked(plain: Path, tmp_path: Path) -> Callable[[str], dict[str, Check]]:
    def check(template: str) -> dict[str, Check]:
        folder = tmp_path / "model"
        shutil.copytree(plain, folder)
        config = folder / "tokenizer_config.json"
        (folder / "chat_template.jinja").write_text(template)
        assert "chat_template" not in config.read_text()
        return {one.name: one for one in check_template(Renderer.load(folder, light=True))}

    return check


def test_a_template_that_only_appends_is_well(checked: Callable[[str], dict[str, Check]]) -> None:
    found = checked(GOOD)
    assert {one.status for one in found.values()} == {"good"}
    assert len(found) == 8


def test_an_empty_think_block_that_history_lacks_is_found(checked: Callable[[str], dict[str, Check]]) -> None:
    """The generation prompt opens with it, and history is written without: request N is no beginning of N + 1."""
    found = checked(EMPTY_THINK)["a question and its answer"]
    assert found.status == "bad"
    assert "<think>" in found.said
    assert "preserve_thinking" in found.fix or "history" in found.fix


def test_reasoning_that_is_dropped_at_the_next_question_is_found(checked: Callable[[str], dict[str, Check]]) -> None:
    found = checked(DROPS)
    assert found["with reasoning, at a new question"].status == "bad"
    assert "<think>" in found["with reasoning, at a new question"].said
    assert found["with reasoning before a tool call"].status == "good"
    assert found["a question and its answer"].status == "good"


def test_tools_that_move_to_the_last_message_are_found(checked: Callable[[str], dict[str, Check]]) -> None:
    found = checked(MOVES)
    assert found["with a tool call and its result"].status == "bad"
    assert found["with a system prompt"].status == "good"


def test_a_date_that_the_template_writes_is_noted(checked: Callable[[str], dict[str, Check]]) -> None:
    found = checked(DATED)
    assert found["dates"].status == "note"
    assert found["with a system prompt"].status == "good"


def test_a_template_without_tools_and_reasoning_says_so(checked: Callable[[str], dict[str, Check]]) -> None:
    found = checked(HEAD + TAIL + "{% endif %}")
    assert found["with tools"].status == "note"
    assert found["with reasoning, at a new question"].status == "note"
    assert "with a tool call and its result" not in found


def test_a_beginning_that_would_be_doubled_is_noted(tmp_path: Path) -> None:
    folder = byte_fallback(tmp_path / "model")  # its tokenizer puts one before texts, its template another
    assert "bos_token" in FOLDING
    found = {one.name: one for one in check_template(Renderer.load(folder, light=True))}
    assert found["beginning of text"].status == "note"
    assert "another before it" in found["beginning of text"].said


def test_a_template_that_refuses_says_what_it_refuses(checked: Callable[[str], dict[str, Check]]) -> None:
    found = checked(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}" + HEAD + TAIL + "{% endif %}"
    )
    assert found["with a system prompt"].status == "note"
    assert "no system here" in found["with a system prompt"].said
