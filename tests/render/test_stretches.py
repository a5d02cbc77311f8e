"""A conversation so far is known at once, and its tokens are those of the whole text, with what was generated, all the same."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asking import in_threads
from headstart.api.ask import Ask
from headstart.api.caching import Caching
from headstart.api.prompting import Prompting
from headstart.api.served import Served
from headstart.render import Renderer, stretches
from headstart.render.generated import Beginnings, Generated, digest_of, splice
from headstart.render.special import Special
from headstart.render.stretches import Stretches
from headstart.render.tokenising import Tokeniser

sys.path.append(str(Path(__file__).parent.parent / "diagnose"))
from families import FAMILIES

BEGIN = "<|im_start|>assistant\n"
_WORDS = st.sampled_from(("<", "<a", "<a>", "a>", ">", "a", "><", "<a><", "aa", " ", "b"))


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(FAMILIES[request.param](tmp_path_factory.mktemp(request.param)), light=True)


@pytest.fixture
def short_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "_STRETCH", 24)


def _whole(renderer: Renderer, text: str) -> list[int]:
    return list(renderer._backend.encode(text, add_special_tokens=False).ids)


def _spliced(renderer: Renderer, text: str, answers: Sequence[Generated]) -> list[int]:
    """The tokens of a text with nothing remembered: each answer where it stands, and each text between by itself."""
    ends = re.compile("|".join(map(re.escape, sorted(renderer.ends))) if renderer.ends else r"(?!)")
    ids: list[int] = []
    for part in splice(Beginnings(text), len(text), answers, ends=ends).parts:
        ids += _whole(renderer, part) if isinstance(part, str) else part
    return ids


def _served(renderer: Renderer) -> Served:
    return cast(Served, SimpleNamespace(renderer=renderer, engine=SimpleNamespace(info=SimpleNamespace(context_tokens=10**6))))


@given(st.sets(_WORDS, min_size=1), st.lists(_WORDS, max_size=12).map("".join), st.lists(_WORDS, max_size=6).map("".join))
@example({"a>", "<a"}, "<a>b", "")
@example({"<a>", "<"}, "x<a>", "")
@example({"aa"}, "aaa", "")
def test_a_certain_place_is_one_whatever_stands_around_it(words: set[str], text: str, before: str) -> None:
    special = Special(words)
    at = special.certain(text, 0)
    if at is not None:
        assert len(before) + at in special.places(before + text)
        assert special.certain(text, at) == at
        assert at in special.places(text[: at + 3] + "<a>" + before)


def test_a_token_that_minds_its_neighbours_leaves_no_certain_place() -> None:
    assert Special({"<s>"}, {"tool"}).certain("x<s>", 0) == 1
    assert Special({"<s>"}, {"tool"}, mind_words=True).certain("x<s>", 0) is None
    assert Special({"<s>"}, {" tool"}).certain("x<s>", 0) is None
    assert Special({"<s>", "<s"}).certain("x<s><|end|>", 0) is None
    assert Special(()).certain("<s>", 0) is None


_SAID = st.lists(
    st.sampled_from(("the answer", " ", "\n", "é", "<|im_end|>", "<|im_start|>user\n", "<s>", "</s>", "</think>", "yes", "  ")),
    max_size=6,
).map("".join)
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "</s>")]
_TEMPLATES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False})
_DID = st.one_of(
    st.tuples(st.just("ask"), _SAID, st.sampled_from(("as it was", "with spaces", "otherwise"))),
    st.tuples(st.just("edit"), st.integers(0, 20), _SAID),
    st.tuples(st.just("back"), st.integers(0, 20), st.none()),
    st.tuples(st.just("tools"), st.integers(0, 2), st.none()),
    st.tuples(st.just("template"), st.integers(0, 1), st.none()),
    st.tuples(st.just("again"), st.integers(0, 3), st.none()),
)


def test_conversations_have_the_tokens_of_their_text_and_of_what_was_generated(family: Renderer, short_stretches: None) -> None:
    """Two servers hear the same conversation: one that remembers, and one whose stretches and parts are forgotten each time."""

    @settings(max_examples=min(40, settings.default.max_examples))
    @given(st.lists(_DID, max_size=14), _SAID)
    @example(
        [("ask", "What?", "as it was"), ("ask", "And?", "with spaces"), ("edit", 1, "x"), ("ask", "So?", "otherwise")], "y"
    )
    @example([("ask", "<s>", "as it was"), ("again", 0, None), ("ask", "", "as it was"), ("template", 1, None)] * 3, "</s>")
    def check(did: list[tuple[str, Any, Any]], answered: str) -> None:
        served, prompting = _served(family), Prompting()
        history: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        tools, template, heard = 0, 0, 0
        answers: list[Generated] = []
        for kind, first, second in did:
            if kind == "edit":
                history[first % len(history)] = {**history[first % len(history)], "content": second}
            elif kind == "back":  # and from there on something else: a branch
                del history[1 + first % len(history) // 2 * 2 :]
            elif kind == "tools":
                tools = first
            elif kind == "template":
                template = first
            asked = [*history, {"role": "user", "content": first if kind == "ask" else "Go on."}]
            ask = Ask(id_prefix="", messages=tuple(asked), tools=tuple(_TOOLS[:tools]) or None, template=_TEMPLATES[template])
            text = family.write(asked, tools=_TOOLS[:tools], arguments=_TEMPLATES[template])
            prompt = prompting.prompt(served, ask)
            assert prompt.digest == digest_of(text)
            right = [one for some in prompting._answers.like(asked, owner="None").values() for one in some]
            assert set(map(id, right)) <= set(map(id, answers))
            assert list(prompt.ids) == _spliced(family, text, right)
            if not right:
                assert list(prompt.ids) == _whole(family, text)
            if kind in ("ask", "again"):
                said = f"{answered}{heard if kind == 'ask' else ''}"
                tokens = [
                    token for word in re.findall(r"\s*\S|\s+", said) for token in _whole(family, word)
                ]  # in its own pieces
                keep = prompting._answers.keep

                def kept(answer: Generated, *, owner: str, keep: Any = keep) -> None:
                    assert owner == "None"
                    answers.append(answer)
                    keep(answer, owner=owner)

                prompting._answers.keep = kept  # type: ignore[method-assign]
                prompting.heard(served, ask, prompt, tokens, content=said)
                prompting._answers.keep = keep  # type: ignore[method-assign]
                heard += 1
                written = {"as it was": said, "with spaces": f" {said}\n", "otherwise": f"{said}!"}.get(second, said)
                history = [*asked, {"role": "assistant", "content": written}]

    check()


class _Noted:
    """What `Stretches` asks to be tokenised, by a tokeniser of characters that is cut before each <s>."""

    def __init__(self, **more: Any) -> None:
        self.parts: list[str | array[int]] = []
        self.stretches = Stretches(Tokeniser(lambda texts: [], Special({"<s>"}), vocabulary=0), {"</s>"}, **more)

    def ids(self, text: str, *answers: Generated, owner: str = "") -> list[int]:
        return self.stretches.told(text, answers, self._encode, owner=owner).ids

    def _encode(self, parts: list[str | array[int]]) -> list[Sequence[int]]:
        self.parts += parts
        return [list(map(ord, part)) if isinstance(part, str) else part for part in parts]

    def asked(self) -> int:
        """How many characters were asked for since."""
        count, self.parts = sum(len(part) for part in self.parts if isinstance(part, str)), []
        return count


def _turns(count: int, *, of: str = "") -> str:
    return "".join(f"<s>user {of}{number} {'word ' * 100}</s>" for number in range(count))


def test_of_the_next_turn_only_what_is_new_is_looked_at() -> None:
    noted = _Noted()
    text = _turns(200)
    assert noted.ids(text) == list(map(ord, text))
    assert noted.asked() == len(text)
    assert noted.ids(text + _turns(1)) == list(map(ord, text + _turns(1)))
    assert noted.asked() < 2 * stretches._STRETCH
    branch = text[: len(text) // 2] + _turns(30, of="branch")
    assert noted.ids(branch) == list(map(ord, branch))
    assert noted.asked() < len(branch) // 2 + 2 * stretches._STRETCH
    noted.ids(text, owner="beta")
    assert noted.asked() == len(text)


def test_no_answer_is_cut_and_a_newer_one_to_the_same_prompt_takes_its_place() -> None:
    noted = _Noted()
    prompt = _turns(40)
    said = "<s>".join("word " * 50 for _ in range(100))  # with places inside where it could be cut
    text = prompt + said + "</s>" + _turns(40)

    def answer(tokens: int) -> Generated:
        return Generated(len(prompt), digest_of(prompt), array("I", [7] * tokens), said, content=said)

    without = noted.ids(text)
    first, second = answer(5), answer(6)
    for one in (first, second, first):
        ids = noted.ids(text, one)
        assert ids == [*map(ord, prompt), *one.tokens, *map(ord, "</s>" + _turns(40))]
        noted.asked()
        assert noted.ids(text, one) == ids
        assert noted.asked() < 2 * stretches._STRETCH
    assert noted.ids(text) == without == list(map(ord, text))


def test_a_stretch_is_another_where_it_begins_elsewhere_for_the_sake_of_an_answer_that_is_not_remembered_any_more(
    short_stretches: None,
) -> None:
    noted = _Noted()
    text = f"{'a' * 30}<s>{'b' * 10}</s><s>{'c' * 100}<s>{'d' * 10}"
    elsewhere = Generated(28, digest_of("of another conversation"), array("I", [7]), "b", content="b")
    for end, answers in ((60, []), (len(text), [elsewhere]), (len(text), []), (len(text), [elsewhere])):
        assert noted.ids(text[:end], *answers) == list(map(ord, text[:end]))


def test_an_answer_of_spaces_that_is_written_as_nothing_stands_there_once_whatever_messages_it_may_be() -> None:
    noted = _Noted()
    prompt = "<s>user hello</s><s>assistant "
    answer = Generated(len(prompt), digest_of(prompt), array("I", [7]), "\n")
    assert noted.ids(prompt + "</s><s>", answer, answer) == [*map(ord, prompt), 7, *map(ord, "</s><s>")]


def test_the_memory_of_stretches_is_bounded_and_of_the_longest_the_beginning_stays() -> None:
    noted = _Noted(remembered_bytes=1_000_000)
    for number in range(40):
        noted.ids(_turns(30, of=f"{number} "), owner=str(number % 3))
        assert noted.stretches._kept.nbytes <= 1_000_000
    noted.asked()
    noted.ids(_turns(30, of="39 "), owner="0")
    assert noted.asked() < 2 * stretches._STRETCH
    long = _turns(1000)  # of eight times what may be kept
    noted.ids(long, owner="1")
    noted.asked()
    noted.ids(long, owner="1")
    assert len(long) // 2 < noted.asked() < len(long) - 5 * stretches._STRETCH


def test_many_threads_tell_their_own_conversations(renderer: Renderer, short_stretches: None) -> None:
    wrong: list[str] = []

    def run(number: int) -> None:
        for count in range(1, 12):
            text = "".join(f"<|im_start|>user\n{number % 2} {turn}<|im_end|>\n" for turn in range(count)) + BEGIN + str(number)
            if renderer.told(text, [], owner="threads").ids != _whole(renderer, text):
                wrong.append(text)

    in_threads(run)
    assert not wrong


def test_what_is_kept_up_to_a_breakpoint_goes_over_answers_in_their_own_tokens(renderer: Renderer) -> None:
    served, prompting = _served(renderer), Prompting()
    first = Ask(id_prefix="", messages=({"role": "user", "content": "Look."},))
    tokens = [token for letter in "the answer" for token in renderer.completion(letter)]
    prompting.heard(served, first, prompting.prompt(served, first), tokens, content="the answer")
    part = {"type": "text", "text": "And here?", "prompt_cache_breakpoint": {}}
    more = ({"role": "assistant", "content": "the answer"}, {"role": "user", "content": [part]})
    assert first.messages is not None
    second = Ask(id_prefix="", messages=(*first.messages, *more), caching=Caching(explicit=True))
    prompt = prompting.prompt(served, second)
    assert prompt.keep_tokens is not None
    assert renderer.decode(prompt.ids[: prompt.keep_tokens]).endswith("And here?")
    assert list(prompt.ids) != renderer.written(
        renderer.write([*first.messages, more[0], {"role": "user", "content": "And here?"}])
    )
