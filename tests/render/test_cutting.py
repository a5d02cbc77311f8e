"""A text that is tokenised in parts gives the tokens of the whole; a tokenizer that may see across a cut is never cut for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headstart.render import Renderer, cutting
from headstart.render.cutting import may_cut, parts_of

_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
_WORDS: dict[str, Any] = {
    "GPT-2": {**_BYTES, "use_regex": True},
    "digits, GPT-2": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, {**_BYTES, "use_regex": True}],
    },
    **{
        f"split {number}": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                _BYTES,
            ],
        }
        for number, pattern in enumerate(sorted(cutting._WORDS))
    },
}
_PLAIN = "a|the|answer| |  | is|\n|\n\n|\t|'s|'|'re |.|, |(|7|2024| 1|Z|_|\r\n|I'm |s s|x y z "
_OTHER = ("é", "e\u0301", "\u0301", "😀", "ß", "\u00a0", "語", "<|im_end|>", "<|im_start|>")
_PIECES = st.sampled_from((*_PLAIN.split("|"), *_OTHER))


def _backend(renderer: Renderer, **changes: Any) -> Any:
    from tokenizers import Tokenizer

    spec = json.loads(renderer._backend.to_str())
    return Tokenizer.from_str(json.dumps({**spec, **changes}))


def _ids(backend: Any, parts: list[str]) -> list[int]:
    return [token for one in backend.encode_batch_fast(parts, add_special_tokens=False) for token in one.ids]


@pytest.mark.parametrize("normalizer", [None, {"type": "NFC"}])
@pytest.mark.parametrize("words", list(_WORDS))
def test_parts_give_the_tokens_of_the_whole(renderer: Renderer, words: str, normalizer: dict[str, str] | None) -> None:
    backend = _backend(renderer, pre_tokenizer=_WORDS[words], normalizer=normalizer)
    assert may_cut(backend)

    @given(st.lists(_PIECES, max_size=60).map("".join))
    @example("it is so, the answer is in the handbook, a b c")
    def check(text: str) -> None:
        parts = parts_of(text)
        assert "".join(parts) == text
        assert _ids(backend, parts) == _ids(backend, [text])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cutting, "_PART", 2)
        patched.setattr(cutting, "LONG_CHARACTERS", 4)
        check()


def test_a_long_prompt_is_cut_and_a_short_one_is_not() -> None:
    text = "the answer is in the handbook " * 500
    parts = parts_of(text)
    assert len(parts) > 3
    assert "".join(parts) == text
    assert min(map(len, parts)) >= 2048
    assert parts_of(text[:4000]) == [text[:4000]]
    assert parts_of("0 1 " * 5000) == ["0 1 " * 5000]  # no place to cut


def test_the_renderer_gives_what_the_tokenizer_gives_in_one_go(renderer: Renderer) -> None:
    text = "The answer is in the handbook, isn't it? 24 pages\n\nof it." * 400
    ids = renderer.chat([{"role": "user", "content": text}])
    assert ids == renderer.completion(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec["model"].update(dropout=0.1),
        lambda spec: spec.update(normalizer={"type": "NFKC"}),
        lambda spec: spec.update(pre_tokenizer=None),
        lambda spec: spec.update(pre_tokenizer={**_BYTES, "use_regex": True, "add_prefix_space": True}),
        lambda spec: spec.update(pre_tokenizer=_BYTES),
        lambda spec: spec.update(pre_tokenizer={"type": "Whitespace"}),
        lambda spec: spec["added_tokens"][0].update(rstrip=True),
        lambda spec: spec["added_tokens"][0].update(content="of the"),
    ],
)
def test_a_tokenizer_that_may_see_across_a_cut_is_left_alone(
    renderer: Renderer, change: Callable[[dict[str, Any]], None]
) -> None:
    from tokenizers import Tokenizer

    spec = json.loads(renderer._backend.to_str())
    change(spec)
    assert may_cut(renderer._backend)
    assert not may_cut(Tokenizer.from_str(json.dumps(spec)))
