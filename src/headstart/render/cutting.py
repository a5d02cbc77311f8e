"""Where a long text may be cut so that the tokens of its parts, one behind the other, are the tokens of the whole.

A tokenizer takes a text apart into words before it looks for tokens, and a cut between two words changes nothing. Parts are
tokenised by all cores, and even on one core sooner than the whole, whose bookkeeping grows faster than its length.

    … the answer│ is in the│ handbook …        before a single space between two letters
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_PART = 2048  # characters at least; shorter parts win nothing
LONG_CHARACTERS = 2 * _PART  # what is no longer is one part

# Of the words that these find, none that has a letter at its end goes on with a space, and a space before a letter begins one,
# whatever stands before it.
_WORDS = frozenset(
    {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in (r"\p{N}{1,3}", r"\p{N}")  # Llama 3 and its kin, Qwen 2 and its kin
    }
)
_CUT = re.compile(r"[a-z](?= [A-Za-z])")


def may_cut(backend: Any) -> bool:
    """Whether `parts_of` is right for this tokenizer. Known kinds alone: what is not known here may see across a cut."""
    spec = msgspec.json.decode(backend.to_str())
    model, normalizer = spec["model"], spec["normalizer"]
    return (
        model["type"] == "BPE"
        and not model.get("dropout")
        and (normalizer is None or normalizer["type"] == "NFC")
        and _known_words(spec["pre_tokenizer"])
        and not any(
            token["lstrip"] or token["rstrip"] or token["single_word"] or re.search(r"[a-z] ", token["content"])
            for token in spec["added_tokens"]
        )
    )


def parts_of(text: str) -> list[str]:
    """Return parts of `text` of at least some 2,000 characters, as far as it has places to cut; joined they are `text`."""
    parts, begin = [], 0
    while len(text) - begin > LONG_CHARACTERS:
        cut = _CUT.search(text, begin + _PART)
        if cut is None:
            break
        parts.append(text[begin : cut.end()])
        begin = cut.end()
    return [*parts, text[begin:]]


def _known_words(pre_tokenizer: dict[str, Any] | None) -> bool:
    steps = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    words = False
    for step in steps:
        if step["type"] == "ByteLevel" and not step["add_prefix_space"]:
            words |= step.get("use_regex", True)  # GPT-2's own
        elif step["type"] == "Split" and step["pattern"].get("Regex") in _WORDS and step["behavior"] == "Isolated":
            if step["invert"]:
                return False
            words = True
        elif step["type"] != "Digits":
            return False
    return words
