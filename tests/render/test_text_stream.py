"""What a client gets piece by piece is what it would have got at once, cut at the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headstart.errors import RequestError
from headstart.render import Renderer, TextStream

PROSE = "def größe(x): 日本語 👩‍👩‍👧 €∀😀 the cache keeps what was computed\n  once <|im_end|> aaab�b"


def cut(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """The definition, character by character: cut where the first stop string to be complete begins, the longest if several."""
    for end in range(1, len(text) + 1):
        met = [s for s in stop if text[:end].endswith(s)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


def stream_all(renderer: Renderer, tokens: Sequence[int], stop: Sequence[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(renderer, stop)
    return [*(stream.push(token) for token in tokens), stream.finish()], stream


def check(renderer: Renderer, tokens: Sequence[int], stop: Sequence[str]) -> None:
    want, stopped = cut(renderer.decode(tokens), stop)
    pieces, stream = stream_all(renderer, tokens, stop)
    assert ("".join(pieces), stream.stopped) == (want, stopped)
    assert stream.finish() == ""
    if stopped:
        assert stream.push(tokens[0]) == ""


STOPS = st.lists(
    st.one_of(st.text("ab� \né😀", min_size=1, max_size=4), st.sampled_from(["the c", "日本", "\n  ", "👩‍👧", "aab"])),
    max_size=4,
)


@given(tokens=st.lists(st.integers(0, 511), max_size=40), stop=STOPS)
@example(tokens=[], stop=[])
def test_random_tokens_stream_as_they_decode(renderer: Renderer, tokens: list[int], stop: list[str]) -> None:
    check(renderer, tokens, stop)


@given(data=st.data(), stop=STOPS)
def test_text_streams_as_it_decodes(renderer: Renderer, data: st.DataObject, stop: list[str]) -> None:
    text = data.draw(st.lists(st.one_of(st.sampled_from(PROSE.split(" ")), st.text(max_size=5)), min_size=1, max_size=12))
    tokens = [token for word in text for token in renderer.completion(word + " ")]
    check(renderer, tokens, stop)


@given(data=st.data())
def test_stop_strings_taken_from_the_text_itself_are_found(renderer: Renderer, data: st.DataObject) -> None:
    tokens = renderer.completion(PROSE)
    text = renderer.decode(tokens)
    start = data.draw(st.integers(0, len(text) - 1))
    stop = [text[start : start + data.draw(st.integers(1, 12))]]
    check(renderer, tokens, stop)
    assert stream_all(renderer, tokens, stop)[1].stopped


def test_of_several_stop_strings_in_one_token_the_first_complete_counts(renderer: Renderer) -> None:
    token = max(range(renderer.vocabulary), key=lambda token: len(renderer.decode([token])))
    text = renderer.decode([token])
    assert len(text) >= 5
    parts = [text[a:b] for a in range(5) for b in range(a + 1, 6)]
    for first in parts:
        for second in parts:
            check(renderer, [token], [first, second])


@given(raw=st.binary(min_size=1, max_size=24))
@example(raw="😀".encode()[:3] + b"a")
@example(raw=b"\xff" * 20 + "é".encode())
def test_bytes_one_a_token_stream_as_they_decode(renderer: Renderer, raw: bytes) -> None:
    check(renderer, [byte_token(renderer, byte) for byte in raw], [])


def byte_token(renderer: Renderer, byte: int) -> int:
    from tokenizers import pre_tokenizers

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    letter = chr(byte) if byte in printable else chr(256 + rest.index(byte))
    assert letter in pre_tokenizers.ByteLevel.alphabet()
    return int(renderer._backend.token_to_id(letter))


def test_an_unfinished_character_is_held_back_until_it_is_whole(renderer: Renderer) -> None:
    stream = TextStream(renderer)
    assert [stream.push(byte_token(renderer, byte)) for byte in "a😀".encode()] == ["a", "", "", "", "😀"]


def test_an_unfinished_character_at_the_end_is_flushed(renderer: Renderer) -> None:
    pieces, _ = stream_all(renderer, [byte_token(renderer, byte) for byte in "a😀".encode()[:3]], [])
    assert pieces == ["a", "", "", "�"]


def test_only_what_may_begin_a_stop_string_is_held_back(renderer: Renderer) -> None:
    stream = TextStream(renderer, ["abc"])
    sent = [stream.push(byte_token(renderer, byte)) for byte in b"xabababc!"]
    assert sent == ["x", "", "", "ab", "", "ab", "", "", ""]
    assert stream.stopped
    assert stream.finish() == ""


def test_held_text_comes_when_no_stop_string_follows(renderer: Renderer) -> None:
    pieces, stream = stream_all(renderer, [byte_token(renderer, byte) for byte in b"xab"], ["abc"])
    assert pieces == ["x", "", "", "ab"]
    assert not stream.stopped


def test_special_tokens_are_no_text(renderer: Renderer) -> None:
    pieces, _ = stream_all(renderer, renderer.chat([{"role": "user", "content": "hi"}]), [])
    assert "".join(pieces) == "user\nhi\nassistant\n"


@pytest.mark.parametrize("stop", [[""], ["a", ""], [1], [None]])
def test_an_empty_stop_string_is_refused(renderer: Renderer, stop: list[str]) -> None:
    with pytest.raises(RequestError) as caught:
        TextStream(renderer, stop)
    assert caught.value.param == "stop"


def test_words_of_a_sentencepiece_model_keep_their_spaces(tmp_path: Path) -> None:
    """Such a decoder drops the space before a text's first word, and has a token for every byte."""
    renderer = sentencepiece_like(tmp_path)
    ids = {
        text: renderer._backend.token_to_id(text) for text in ("▁Hello", "▁", "▁world", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>")
    }
    tokens = [ids[t] for t in ("▁Hello", "▁world", "▁", "▁world", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "▁Hello", "<0xF0>")]
    check(renderer, tokens, [])
    assert stream_all(renderer, tokens, [])[0] == ["Hello", " world", " ", " world", "", "", "", "😀", " Hello", "", "�"]


def sentencepiece_like(folder: Path) -> Renderer:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "▁Hello", "▁", "▁world", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(
        models.BPE(vocab={w: i for i, w in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Renderer(PreTrainedTokenizerFast(tokenizer_object=tokenizer), stop_ids=frozenset(), vocabulary=len(words))
