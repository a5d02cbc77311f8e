"""The tokenizer and the template of a GGUF: to the token what its makers' own tokenizer gives, on texts that are hard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gguf_fixtures import Kind
from headstart.engine.llama.binding import Library
from headstart.engine.llama.weights import Weights
from headstart.engine.smollm2 import fetch_smollm2_gguf
from headstart.errors import ContextLengthExceeded, RequestError
from headstart.render import GGUFRenderer, Renderer, TextStream

Made = Callable[[Kind], Path]
HARD = [
    "Hello  world\n\n\n  x=1234567;",
    "日本語テキスト 🎉👩‍👩‍👧 é\u0301 naïve Größe",
    "<|im_start|>user\nhi<|im_end|> <|endoftext|>x",
    " " * 50 + "\t\t\n \n",
    "don't I'LL we've 10,000.00 ∀x ∈ ℝ",
    "\u00a0\u2003x\x00y\u200b",
    "def f(x):\r\n    return x**2  # ok\r\n",
    (Path(__file__).parents[3] / "LICENSE").read_text(),
]
MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": HARD[1]}]


@pytest.fixture
def renderer(library: Library, gguf: Made) -> Iterator[GGUFRenderer]:
    weights = Weights(library, gguf("llama"), vocabulary_only=True)
    yield GGUFRenderer(weights.vocabulary, template=weights.chat_template)
    weights.close()


@pytest.mark.real_model
def test_tokens_are_those_of_the_models_own_tokenizer(library: Library, smollm2_folder: Path, tmp_path: Path) -> None:
    file = fetch_smollm2_gguf(smollm2_folder.parent / "smollm2-135m-gguf", lambda *_: None)
    weights = Weights(library, file, vocabulary_only=True)
    own, other = GGUFRenderer(weights.vocabulary, template=weights.chat_template), Renderer.load(smollm2_folder)
    for text in HARD:
        assert own.tokenise(text, special_tokens=False).ids == other.tokenise(text, special_tokens=False).ids
        assert own.completion(text) == other.completion(text)
        assert own.decode(own.completion(text)) == other.decode(other.completion(text))
    assert own.chat(MESSAGES) == other.chat(MESSAGES)
    assert own.stop_ids >= other.stop_ids
    plain = own.tokenise(HARD[7], special_tokens=False)
    assert plain.begins == other.tokenise(HARD[7], special_tokens=False).begins
    weights.close()


@pytest.mark.parametrize("text", HARD)
def test_text_comes_back_whole_and_piece_by_piece(text: str, renderer: GGUFRenderer) -> None:
    ids = renderer.tokenise(text, special_tokens=False).ids
    plain = renderer.decode(ids)
    assert renderer.decode(ids, special=True) == text
    stream = TextStream(renderer)
    assert "".join(map(stream.push, ids)) + stream.finish() == plain
    assert b"".join(map(renderer.token_bytes, ids)).decode() == text


def test_each_token_is_told_where_it_begins(renderer: GGUFRenderer) -> None:
    tokens = renderer.tokenise("aé🎉b", special_tokens=False)
    assert tokens.begins == [0, 1, 1, 2, 2, 2, 2, 3]


def test_the_template_of_the_file_is_followed(renderer: GGUFRenderer) -> None:
    text = renderer.decode(renderer.chat(MESSAGES), special=True)
    assert text.startswith("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\n")
    assert text.endswith("<|im_start|>assistant\n")
    assert {renderer.special_tokens["<|im_end|>"], renderer.special_tokens["<|endoftext|>"]} == renderer.stop_ids


def test_what_cannot_be_said_is_refused(renderer: GGUFRenderer) -> None:
    with pytest.raises(RequestError, match="which is no character"):
        renderer.completion("\ud800")
    with pytest.raises(ContextLengthExceeded):
        renderer.completion("x" * 10_000, context_tokens=64)
    assert renderer.token_bytes(10_000_000) == b""


def _conversation(turns: int) -> str:
    return (
        "".join(f"<|im_start|>user\n{HARD[turn % 6]} {turn}<|im_end|>\n" for turn in range(turns)) + "<|im_start|>assistant\n"
    )


def test_what_came_before_is_not_tokenised_again_and_the_tokens_are_those_of_the_whole(
    renderer: GGUFRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    whole = renderer._words.tokenise

    def tokenise(text: str, *, special_tokens: bool) -> list[int]:
        asked.append(text)
        return whole(text, special_tokens=special_tokens)

    monkeypatch.setattr(renderer._words, "tokenise", tokenise)
    for turns in (50, 51, 52, 400):
        text = _conversation(turns)
        asked.clear()
        ids = renderer.told(text, [], owner="acme").ids
        assert ids == renderer.written(text, owner="acme") == renderer.packed(text, owner="acme").tolist()
        if turns in (51, 52):
            assert sum(map(len, asked)) < 200
        begun = renderer._words.begin_id
        assert ids == whole(text, special_tokens=False) or ids == [begun, *whole(text, special_tokens=False)]
    asked.clear()
    renderer.told(_conversation(400), [], owner="beta")
    assert sum(map(len, asked)) > 10_000


def test_the_tokens_that_are_looked_for_are_told_by_their_attributes(renderer: GGUFRenderer) -> None:
    looked_for = renderer._words.looked_for()
    assert {"<|im_start|>", "<|im_end|>", "<|endoftext|>"} <= looked_for.keys()
    assert set(renderer.special_tokens) <= looked_for.keys()
