"""Text to token ids, of which what came before is remembered: a conversation's next turn tokenises only what is new.

A tokenizer takes a text apart at its special tokens before it does anything else, and what lies between two of them becomes
tokens by itself. So a text is cut at special tokens, and long parts once more between words (`cutting`); each part becomes the
same tokens wherever it stands, and those of a part that was seen before are looked up.

    <|im_start|>system … │<|im_end|>\\n│<|im_start|>user … │<|im_end|>\\n│<|im_start|>assistant …
                         cut at the beginning of each special token
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any, TypeAlias

from headstart.render.cutting import LONG_CHARACTERS, may_cut, parts_of
from headstart.render.remembering import Remembered
from headstart.render.special import Special, special_of

Ids: TypeAlias = "tuple[int, ...] | array[int]"
REMEMBERED_BYTES = 64 << 20
_SHORT_CHARACTERS = 16
_ENTRY_BYTES = 200  # of books, beside text and ids


class Tokeniser:
    """Any number of threads may use one. `encode` makes tokens of texts, each by itself, without what is put around a text.
    `between_words`: whether `cutting` is right for it. `remembered_bytes`: what is remembered at most, of all owners."""

    def __init__(
        self,
        encode: Callable[[list[str]], Iterable[Sequence[int]]],
        special: Special,
        *,
        vocabulary: int,
        between_words: bool = False,
        remembered_bytes: int = REMEMBERED_BYTES,
    ) -> None:
        self._encode = encode
        self._special = special
        self._between_words = between_words
        self._parts: Remembered[str, Ids] = Remembered(remembered_bytes, nbytes=_nbytes)
        # A token id is one object wherever it stands: what is remembered is then put together without making any.
        self._ids = tuple(range(vocabulary))

    def ids(self, text: str, *, owner: str = "") -> list[int]:
        """Return the tokens of `text`. What one owner's texts became is remembered for that owner alone: how soon an answer
        comes tells what was tokenised before."""
        return self.each([text], owner=owner)[0]

    def each(self, texts: Sequence[str], *, owner: str = "") -> list[list[int]]:
        """Return the tokens of each of several texts, for what one of them all takes."""
        parts = [self.parts(text) for text in texts]
        known = iter(self._known(list(chain.from_iterable(parts)), owner, self.shared))
        made: list[list[int]] = []
        for some in parts:
            tokens: list[int] = []
            for _, ids in zip(some, known, strict=False):
                tokens += ids
            made.append(tokens)
        return made

    def packed(self, text: str, *, owner: str = "") -> array[int]:
        """Return the tokens of `text` as u32, for whoever only makes keys of them: in less time than `ids`."""
        tokens = array("I")
        for ids in self._known(self.parts(text), owner, partial(array, "I")):
            tokens.extend(ids)
        return tokens

    def shared(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return these tokens as those objects that stand for them in everything that is remembered."""
        known = self._ids
        return tuple([known[token] if token < len(known) else token for token in ids])

    def cut(self, text: str, at: int) -> int | None:
        """Return the first place from `at` on where what stands before it and what begins there become tokens by themselves,
        whatever either of them is; None where there is none."""
        return self._special.certain(text, at)

    def _known(self, parts: list[str], owner: str, form: Callable[[Sequence[int]], Ids]) -> list[Ids]:
        """Return the tokens of each part; what was not known before is remembered in this form."""
        found = self._parts.get(owner, parts)
        known = [ids for ids in found if ids is not None]
        if len(known) == len(found):
            return known
        new = list(dict.fromkeys(part for part, ids in zip(parts, found, strict=True) if ids is None))
        fresh = {part: form(ids) for part, ids in zip(new, self._encode(new), strict=True)}
        self._parts.put(owner, fresh)
        return [fresh[part] if ids is None else ids for part, ids in zip(parts, found, strict=True)]

    def parts(self, text: str) -> list[str]:
        """Return the parts of `text` that become tokens by themselves; joined they are `text`."""
        sections = self._sections(text)
        if not self._between_words or max(map(len, sections)) <= LONG_CHARACTERS:
            return sections
        parts: list[str] = []
        for section in sections:
            parts += parts_of(section)
        return parts

    def _sections(self, text: str) -> list[str]:
        found = self._special.places(text)
        # What is as short as the end of a turn goes with what it ends; not so the last, as the text may go on there.
        cuts = [at for at, then in pairwise(found) if then - at >= _SHORT_CHARACTERS] + found[-1:]
        if not cuts or cuts[0] > 0:
            cuts.insert(0, 0)
        return [text[begin:end] for begin, end in pairwise([*cuts, len(text)])]


def tokeniser_of(backend: Any, *, remembered_bytes: int = REMEMBERED_BYTES) -> Tokeniser:
    """Return what makes tokens as a tokenizer of the library `tokenizers` does."""

    def encode(texts: list[str]) -> Iterable[Sequence[int]]:
        # The fast batch leaves out offsets, which cost as much as the rest.
        return (one.ids for one in backend.encode_batch_fast(texts, add_special_tokens=False))

    return Tokeniser(
        encode,
        special_of(backend),
        vocabulary=backend.get_vocab_size(),
        between_words=may_cut(backend),
        remembered_bytes=remembered_bytes,
    )


def _nbytes(part: str, ids: Ids) -> int:
    return sys.getsizeof(part) + sys.getsizeof(ids) + _ENTRY_BYTES
