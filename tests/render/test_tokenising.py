"""What came before is not tokenised again, and the tokens are those of the whole text all the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from asking import in_threads
from headstart.render import Renderer
from headstart.render.tokenising import Tokeniser, tokeniser_of

sys.path.append(str(Path(__file__).parent.parent / "diagnose"))
from families import FAMILIES

_SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "<0x0A>", "<tool>", "  ", "<|im", "im_start|>", "<")
_WORDS = ("a", "the", " answer", " ", "   ", "\n", "\n\n", "é", "e\u0301", "\u0301", "😀", "語", "user\n", "x=1;", "2024", ".")
_TEXTS = st.lists(st.sampled_from((*_SPECIAL, *_WORDS)), max_size=40).map("".join)
_ADDED: dict[str, list[dict[str, Any]]] = {
    "as they are": [],
    "one takes the spaces before it": [{"content": "<tool>", "lstrip": True}],
    "one takes the spaces behind it": [{"content": "<tool>", "rstrip": True}],
    "one minds its neighbours": [{"content": "<tool>", "single_word": True}],
    "one minds its neighbours, and another begins as a word": [{"content": "<tool>", "single_word": True}, {"content": "user"}],
    "one is looked for in normalised text": [{"content": "<tool>", "normalized": True}],
    "some are spaces": [{"content": "  "}, {"content": "   "}],
    "some are spaces, and one takes them": [{"content": "  "}, {"content": "<tool>", "lstrip": True, "rstrip": True}],
    "some begin alike": [{"content": "<|im"}, {"content": "<|im_start|>user"}, {"content": "<"}],
}


@pytest.fixture(scope="session", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer.load(FAMILIES[request.param](tmp_path_factory.mktemp(request.param)), light=True)


def _with_added(renderer: Renderer, added: list[dict[str, Any]], **changes: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer

    spec = json.loads(renderer._backend.to_str())
    backend = Tokenizer.from_str(json.dumps({**spec, **changes}))
    backend.add_special_tokens([AddedToken(**{"normalized": False, "special": True, **one}) for one in added])
    return backend


def _whole(backend: Any, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("added", list(_ADDED))
def test_tokens_are_those_of_the_whole_text_whatever_was_seen_before(family: Renderer, added: str) -> None:
    backend = _with_added(family, _ADDED[added])
    tokeniser = tokeniser_of(backend, remembered_bytes=20_000)

    @settings(max_examples=min(100, settings.default.max_examples))
    @given(st.lists(_TEXTS, min_size=1, max_size=4))
    @example(["<s>a", "<s>a  <tool>  b", "<|im_start|>user", " <|im_start|>user <|im"])
    @example(["a <tool>user\nwith more behind it"])
    def check(texts: list[str]) -> None:
        for count in range(len(texts)):  # a conversation that grows
            text = "".join(texts[: count + 1])
            assert "".join(tokeniser.parts(text)) == text
            assert tokeniser.ids(text) == _whole(backend, text)

    check()


_FIRST = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}
_ALWAYS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_PREPEND = {
    "type": "Sequence",
    "normalizers": [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ],
}


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": _FIRST},
        {"pre_tokenizer": _ALWAYS},
        {"pre_tokenizer": None, "normalizer": _PREPEND},
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
    ],
    ids=["space before the first word", "space before each", "space put before", "NFKC", "stripped"],
)
def test_what_a_tokenizer_does_at_a_texts_beginning_it_does_there_alone(family: Renderer, changes: dict[str, Any]) -> None:
    backend = _with_added(family, [], **changes)
    tokeniser = tokeniser_of(backend)

    @settings(max_examples=min(100, settings.default.max_examples))
    @given(_TEXTS)
    @example("the<s>the</s> the")
    def check(text: str) -> None:
        assert tokeniser.ids(text) == _whole(backend, text)
        assert tokeniser.ids(text) == _whole(backend, text)

    check()


class _Watched:
    """A tokenizer that notes how many characters it was given."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: list[str], **more: Any) -> Any:
        self.characters += sum(map(len, texts))
        return self._backend.encode_batch_fast(texts, **more)


def _watched(renderer: Renderer, **more: Any) -> tuple[Tokeniser, _Watched]:
    backend = _Watched(renderer._backend)
    return tokeniser_of(backend, **more), backend


def _turns(count: int) -> str:
    return "".join(f"<|im_start|>user\nQuestion {i} {'word ' * 50}<|im_end|>\n" for i in range(count))


def test_the_next_turn_tokenises_only_what_is_new(renderer: Renderer) -> None:
    begin = "<|im_start|>assistant\n"
    tokeniser, backend = _watched(renderer)
    tokeniser.ids(_turns(100) + begin)
    before = backend.characters
    assert tokeniser.ids(_turns(101) + begin) == _whole(renderer._backend, _turns(101) + begin)
    assert backend.characters - before == len(_turns(101)) - len(_turns(100))
    before = backend.characters
    tokeniser.ids(_turns(101))  # what stands last here is a part of its own, so the turn before it is one without its end
    assert backend.characters - before <= len(_turns(1)) + 20


def test_a_long_text_without_special_tokens_that_grows_is_not_tokenised_again(renderer: Renderer) -> None:
    tokeniser, backend = _watched(renderer)
    text = "the handbook says so and " * 2000
    tokeniser.ids(text)
    before = backend.characters
    assert tokeniser.ids(text + "no more") == _whole(renderer._backend, text + "no more")
    assert backend.characters - before < 10_000


def test_packed_tokens_are_the_same_whichever_form_is_remembered(renderer: Renderer) -> None:
    first, second = (renderer.write([{"role": "user", "content": said}]) for said in ("one, two, three " * 900, "four"))
    for one, other in ((first, second), (second, first)):
        assert renderer.packed(one, owner="a").tolist() == renderer.written(one, owner="a")
        assert renderer.written(other, owner="b") == renderer.packed(other, owner="b").tolist()
    assert renderer.packed(first + second).tolist() == renderer.written(first + second, owner="c")


def test_what_one_owner_sent_is_not_remembered_for_another(renderer: Renderer) -> None:
    tokeniser, backend = _watched(renderer)
    tokeniser.ids(_turns(3), owner="acme")
    before = backend.characters
    assert tokeniser.ids(_turns(3), owner="beta") == tokeniser.ids(_turns(3), owner="acme")
    assert backend.characters - before == before


def test_memory_is_bounded_and_who_has_most_loses_first(renderer: Renderer) -> None:
    tokeniser, backend = _watched(renderer, remembered_bytes=60_000)
    tokeniser.ids(_turns(3), owner="small")
    for seed in range(20):
        tokeniser.ids("".join(f"<|im_start|>{seed} {i} {'word ' * 50}" for i in range(20)), owner="large")
    parts = tokeniser._parts
    assert parts.nbytes <= 60_000
    before = backend.characters
    tokeniser.ids(_turns(3), owner="small")
    assert backend.characters == before
    for number in range(2000):  # owners that send one thing each are no way round the bound
        tokeniser.ids(f"<|im_start|>{number} {'word ' * 20}", owner=str(number))
    assert parts.nbytes <= 60_000
    assert parts.owners < 200


def test_many_threads_get_the_tokens_of_their_own_texts(renderer: Renderer) -> None:
    tokeniser = tokeniser_of(renderer._backend, remembered_bytes=30_000)
    wrong: list[str] = []

    def run(number: int) -> None:
        for count in range(1, 12):
            text = _turns(count) + f"<|im_start|>{number}"
            if tokeniser.ids(text) != _whole(renderer._backend, text):
                wrong.append(text)

    in_threads(run)
    assert not wrong


def test_a_thousand_special_tokens_are_found_as_soon_as_one(renderer: Renderer) -> None:
    backend = _with_added(renderer, [{"content": f"<|reserved_{i}|>"} for i in range(1000)])
    tokeniser = tokeniser_of(backend)
    text = "<|reserved_7|><p>" + "<|reserved_99|>a < b <|reserved_ <<" * 20
    assert tokeniser.ids(text) == _whole(backend, text)
    assert len(list(tokeniser.parts(text))) == 21


_SAID = st.lists(st.sampled_from((*_SPECIAL, *_WORDS, "the answer is in the handbook " * 150)), max_size=4).map("".join)
_TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "</s>")]
_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("say"), _SAID, _SAID),
        st.tuples(st.just("edit"), st.integers(0, 20), _SAID),
        st.tuples(st.just("drop"), st.integers(0, 20), st.none()),
        st.tuples(st.just("system"), _SAID, st.none()),
        st.tuples(st.just("tools"), st.integers(0, 2), st.none()),
    ),
    max_size=12,
)


def test_conversations_that_grow_and_change_anywhere_have_the_tokens_of_their_whole_text(family: Renderer) -> None:
    @settings(max_examples=min(30, settings.default.max_examples))
    @given(_CHANGES)
    @example(
        [("say", "Größe </s>?", "Yes <s>."), ("tools", 2, None), ("say", "And?", "No."), ("system", "Be <s> brief.", None)]
    )
    def check(changes: list[tuple[str, Any, Any]]) -> None:
        system, turns, tools = "Be brief.", [("hello", "hi")], 0
        for kind, first, second in changes:
            if kind == "say":
                turns.append((first, second))
            elif kind == "edit":
                turns[first % len(turns)] = (second, "hi")
            elif kind == "drop" and len(turns) > 1:
                del turns[first % len(turns)]
            elif kind == "system":
                system = first
            elif kind == "tools":
                tools = first
            messages = [{"role": "system", "content": system}]
            for asked, answered in turns:
                messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            chat = [*messages, {"role": "user", "content": "And?"}]
            text = family.write(chat, tools=_TOOLS[:tools])
            assert family.chat(chat, tools=_TOOLS[:tools]) == _whole(family._backend, text)

    check()
