"""Text to token ids, of which what came before is remembered: a conversation's next turn tokenises only what is new.

A tokenizer takes a text apart at its special tokens before it does anything else, and what lies between two of them becomes
tokens by itself. So a text is cut at special tokens, and long parts once more between words (`cutting`); each part becomes the
same tokens wherever it stands, and those of a part that was seen before are looked up.

    <|im_start|>system … │<|im_end|>\\n│<|im_start|>user … │<|im_end|>\\n│<|im_start|>assistant …
                         cut at the beginning of each special token
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from os.path import commonprefix
from typing import Any, TypeAlias

from headstart.render.cutting import LONG_CHARACTERS, may_cut, parts_of
from headstart.render.remembering import Remembered

Ids: TypeAlias = "tuple[int, ...] | array[int]"
REMEMBERED_BYTES = 64 << 20
_SHORT_CHARACTERS = 16
_ENTRY_BYTES = 200  # of books, beside text and ids


class Tokeniser:
    """Any number of threads may use one. `remembered_bytes`: what is remembered at most, of all owners together."""

    def __init__(self, backend: Any, *, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._backend = backend
        self._cuts = may_cut(backend)
        self._special, self._cut_before = _special(backend)
        self._parts: Remembered[str, Ids] = Remembered(remembered_bytes, nbytes=_nbytes)
        # A token id is one object wherever it stands: what is remembered is then put together without making any.
        self._ids = tuple(range(backend.get_vocab_size()))

    def ids(self, text: str, *, special_tokens: bool = False, owner: str = "") -> list[int]:
        """Return the tokens of `text`; with `special_tokens` also those that the tokenizer puts around every text. What one
        owner's texts became is remembered for that owner alone: how soon an answer comes tells what was tokenised before."""
        if special_tokens:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids)
        tokens: list[int] = []
        for ids in self._known(text, owner, self._same):
            tokens += ids
        return tokens

    def packed(self, text: str, *, owner: str = "") -> array[int]:
        """Return the tokens of `text` as u32, for whoever only makes keys of them: in less time than `ids`."""
        tokens = array("I")
        for ids in self._known(text, owner, partial(array, "I")):
            tokens.extend(ids)
        return tokens

    def _known(self, text: str, owner: str, form: Callable[[Sequence[int]], Ids]) -> list[Ids]:
        """Return the tokens of each part; what was not known before is remembered in this form."""
        parts = self.parts(text)
        found = self._parts.get(owner, parts)
        known = [ids for ids in found if ids is not None]
        if len(known) == len(found):
            return known
        new = list(dict.fromkeys(part for part, ids in zip(parts, found, strict=True) if ids is None))
        # The fast batch leaves out offsets, which cost as much as the rest.
        encoded = self._backend.encode_batch_fast(new, add_special_tokens=False)
        fresh = {part: form(one.ids) for part, one in zip(new, encoded, strict=True)}
        self._parts.put(owner, fresh)
        return [fresh[part] if ids is None else ids for part, ids in zip(parts, found, strict=True)]

    def parts(self, text: str) -> list[str]:
        """Return the parts of `text` that become tokens by themselves; joined they are `text`."""
        sections = self._sections(text)
        if not self._cuts or max(map(len, sections)) <= LONG_CHARACTERS:
            return sections
        parts: list[str] = []
        for section in sections:
            parts += parts_of(section)
        return parts

    def _sections(self, text: str) -> list[str]:
        if self._special is None:
            return [text]
        matches = self._special.finditer(text)
        if self._cut_before is not None:
            matches = (match for match in matches if match.group() in self._cut_before)
        found = list(map(re.Match.start, matches))
        # What is as short as the end of a turn goes with what it ends; not so the last, as the text may go on there.
        cuts = [at for at, then in pairwise(found) if then - at >= _SHORT_CHARACTERS] + found[-1:]
        if not cuts or cuts[0] > 0:
            cuts.insert(0, 0)
        return [text[begin:end] for begin, end in pairwise([*cuts, len(text)])]

    def _same(self, ids: Sequence[int]) -> tuple[int, ...]:
        known = self._ids
        return tuple([known[token] if token < len(known) else token for token in ids])


def _nbytes(part: str, ids: Ids) -> int:
    return sys.getsizeof(part) + sys.getsizeof(ids) + _ENTRY_BYTES


def _special(backend: Any) -> tuple[re.Pattern[str] | None, frozenset[str] | None]:
    """Return what finds all tokens that are looked for in a text as it is given, leftmost and longest first as the tokenizer
    does, None where it may not be cut at any; and those of them before which it may be cut, None for all."""
    if getattr(backend, "encode_special_tokens", False):
        return None, None  # special tokens are then text like any other
    tokens = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized and token.content]
    # One that takes the spaces beside it along, or minds the words beside it, depends on its neighbours: no cut there, and
    # none at all where tokens may themselves be such spaces.
    others = {token.content for token in tokens if token.lstrip or token.rstrip or token.single_word}
    plain = frozenset(token.content for token in tokens) - others
    if not plain or (others and any(content != content.strip() for content in plain | others)):
        return None, None
    return re.compile(_any_of(sorted(plain | others))), plain if others else None


def _any_of(words: list[str]) -> str:
    """Return an expression for any of `words`, the longest that fits. Words that begin alike are tried together: there may be
    a thousand, and texts full of what they begin with."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        by_first.setdefault(word[:1], []).append(word)
    optional = by_first.pop("", None) is not None
    alternatives = []
    for alike in by_first.values():
        begin = commonprefix(alike)  # noqa: RUF071 - of characters, no paths
        alternatives.append(re.escape(begin) + _any_of([word[len(begin) :] for word in alike]))
    if not alternatives:
        return ""
    together = alternatives[0] if len(alternatives) == 1 and not optional else f"(?:{'|'.join(alternatives)})"
    return together + "?" * optional
