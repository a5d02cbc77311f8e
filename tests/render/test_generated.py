"""An answer that comes back as history keeps its tokens where nothing but order and spaces was changed, and nowhere else."""

from __future__ import annotations

import re
from array import array
from typing import Any

import pytest

from headstart.render.answers import Call
from headstart.render.generated import Answers, Beginnings, Generated, Spliced, digest_of, splice, standing

RULES = ("tool-arguments", "generated-tokens")
PROMPT = "<|im_start|>user\nLook.<|im_end|>\n<|im_start|>assistant\n"
WROTE = '<tool_call>{"name":"look","arguments":{"at":1, "how":"é"}}</tool_call>'
WRITTEN = '<tool_call>{"name": "look", "arguments": {"how": "é", "at": 1}}</tool_call>'
REST = "<|im_end|>\n<|im_start|>tool\nseen<|im_end|>\n"
CALL = Call("call_1", "look", '{"at":1, "how":"é"}')


def _answer(text: str = WROTE, prompt: str = PROMPT, **said: Any) -> Generated:
    return Generated(len(prompt), digest_of(prompt), array("I", [7, 8, 9]), text, **said)


def _message(arguments: Any = '{"how": "é", "at": 1}', **more: Any) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


def _like(answers: Answers, message: dict[str, Any], *, owner: str = "acme") -> int:
    return len(answers.like([message], owner=owner).get(0, ()))


def _spliced(text: str, *answers: Generated, rules: tuple[str, ...] = RULES) -> list[Any]:
    return [part if isinstance(part, str) else list(part) for part in _made(text, *answers, rules=rules).parts]


def _made(text: str, *answers: Generated, rules: tuple[str, ...] = RULES) -> Spliced:
    ruled = [one for one in answers if one.rule in rules]
    return splice(Beginnings(text), len(text), ruled, ends=re.compile(re.escape("<|im_end|>")))


def test_a_call_keeps_its_tokens_though_the_template_writes_its_json_in_another_way() -> None:
    answer = _answer(calls=(CALL,))
    assert _spliced(PROMPT + WRITTEN + REST, answer) == [PROMPT, [7, 8, 9], REST]
    assert _made(PROMPT + WRITTEN + REST, answer).acted == {"tool-arguments"}
    assert _spliced(PROMPT + WRITTEN + REST, answer, rules=("generated-tokens",)) == [PROMPT + WRITTEN + REST]


def test_a_text_keeps_its_tokens_though_it_would_be_tokenised_in_another_way() -> None:
    answer = _answer("Yes.\n\n", content="Yes.\n\n")
    assert _spliced(f"{PROMPT}Yes.\n\n{REST}", answer) == [PROMPT, [7, 8, 9], REST]
    assert _spliced(f"{PROMPT}Yes.{REST}", answer) == [PROMPT, [7, 8, 9], REST]  # templates trim


@pytest.mark.parametrize(
    "text",
    [
        PROMPT + WRITTEN.replace("1", "2") + REST,  # another value
        PROMPT + WRITTEN.replace("é", "\\u00e9") + REST,
        PROMPT + "<think>Hm.</think>" + WRITTEN + REST,
        PROMPT + WRITTEN,  # the turn does not end
        PROMPT.replace("Look", "look") + WRITTEN + REST,  # another prompt
        PROMPT,
        "",
    ],
)
def test_where_more_than_order_and_spaces_differs_the_text_is_tokenised_as_it_is(text: str) -> None:
    assert _spliced(text, _answer(calls=(CALL,))) == [text]


def test_several_answers_stand_in_one_text_and_the_text_is_all_there() -> None:
    second = PROMPT + WRITTEN + REST + "<|im_start|>assistant\n"
    text = second + "It is seen." + REST
    answers = [_answer("It is  seen.", second, content="It is  seen."), _answer(calls=(CALL,))]
    assert _spliced(text, *answers) == [PROMPT, [7, 8, 9], REST + "<|im_start|>assistant\n", [7, 8, 9], REST]
    assert standing(text, answers) == {answers[0].prompt_digest, answers[1].prompt_digest}
    assert standing(second, answers) == {answers[1].prompt_digest}


def test_an_answer_is_found_by_the_id_of_its_call_where_the_json_is_equal() -> None:
    answers = Answers()
    answers.keep(_answer(calls=(CALL,)), owner="acme")
    for arguments in ('{"how": "\\u00e9", "at": 1.0}', {"how": "é", "at": 1}, CALL.arguments):
        assert _like(answers, _message(arguments)) == 1
    for wrong in ('{"at": true, "how": "é"}', '{"at": 1}', "{", None, 7):
        assert _like(answers, _message(wrong)) == 0
    assert _like(answers, _message(content="And?")) == 0
    assert _like(answers, _message(tool_calls=[])) == 0
    assert _like(answers, _message(), owner="beta") == 0
    assert list(answers.like([{"role": "user"}, _message(), 7, _message()], owner="acme")) == [1, 3]


def test_answers_with_the_same_text_to_different_prompts_are_kept_apart_and_few() -> None:
    answers = Answers()
    for number in range(30):
        answers.keep(_answer("Yes.", PROMPT + str(number), content="Yes.", reasoning=f"{number}"), owner="")
    found = answers.like([{"role": "assistant", "content": " Yes. "}], owner="")[0]
    assert [one.reasoning for one in found] == [str(number) for number in range(29, 21, -1)]


def test_what_is_remembered_is_bounded() -> None:
    answers = Answers(remembered_bytes=20_000)
    for number in range(100):
        answers.keep(_answer("x" * 100, content=f"{number}"), owner=str(number % 3))
    assert answers._kept.nbytes <= 20_000
    assert _like(answers, {"role": "assistant", "content": "99"}, owner="0")
    answers.keep(_answer("x" * 100_000, content="large"), owner="0")
    assert answers._kept.nbytes <= 20_000


@pytest.mark.parametrize(
    "message",
    [{}, {"role": "assistant"}, {"role": "assistant", "content": 7}, {"role": "assistant", "tool_calls": 7}]
    + [{"role": "assistant", "tool_calls": [call]} for call in (7, {}, {"function": 7}, {"id": "call_1", "function": {}})],
)
def test_what_is_no_message_is_like_nothing(message: dict[str, Any]) -> None:
    answers = Answers()
    answers.keep(_answer(calls=(CALL,)), owner="")
    assert _like(answers, message, owner="") == 0
