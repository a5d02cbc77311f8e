"""Tokens that a tokenizer looks for in a text before all else, and where a text may be cut for their sake. Pure.

What lies between two of them becomes tokens by itself. To know where they stand a text is gone through from its beginning, as
they may overlap: of <a>b and >bc the first that comes wins. Some overlap with none; where one of those stands it is that token
whatever stands around it, so a text may be cut there without a look at the rest.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from os.path import commonprefix
from typing import Any


class Special:
    """`plain`: the texts of such tokens. `others`: of those that take the spaces beside them along, or mind the words beside
    them, so that they depend on their neighbours: no cut there, and none at all where tokens may themselves be such spaces.
    `mind_words`: whether some of the others do that. `certain_alone`: a tokenizer that takes them in another order than
    leftmost first, so that it is cut before those alone that overlap with none."""

    def __init__(
        self,
        plain: Collection[str],
        others: Collection[str] = (),
        *,
        mind_words: bool = False,
        certain_alone: bool = False,
    ) -> None:
        words = {*plain, *others}
        usable = bool(plain) and "" not in words and not (others and any(word != word.strip() for word in words))
        found_by = re.compile(_any_of(sorted(words))) if usable else None
        certain = [] if found_by is None or mind_words else sorted({*plain} - _overlapping(words, found_by))
        self._certain = re.compile(_any_of(certain)) if certain else None
        self._any = self._certain if certain_alone else found_by
        # What minds words is another token where a letter stands behind it than at the end of a text.
        before = {word for word in plain if not (mind_words and re.match(r"\w", word))}
        self._cut_before = frozenset(before) if others and not certain_alone else None

    def places(self, text: str) -> list[int]:
        """Return where such tokens begin before which the text may be cut: leftmost first, the longest that fits, as tokenizers
        take them."""
        if self._any is None:
            return []
        matches: Iterable[re.Match[str]] = self._any.finditer(text)
        if self._cut_before is not None:
            matches = (match for match in matches if match.group() in self._cut_before)
        return list(map(re.Match.start, matches))

    def certain(self, text: str, at: int) -> int | None:
        """Return the first place from `at` on where a token begins that overlaps with no other; None where there is none."""
        found = None if self._certain is None else self._certain.search(text, at)
        return None if found is None else found.start()


def special_of(backend: Any) -> Special:
    """Return those of a tokenizer of the library `tokenizers`: all that it looks for in a text as it is given."""
    if getattr(backend, "encode_special_tokens", False):
        return Special(())  # special tokens are then text like any other
    tokens = [token for token in backend.get_added_tokens_decoder().values() if not token.normalized and token.content]
    others = {token.content for token in tokens if token.lstrip or token.rstrip or token.single_word}
    mind_words = any(token.single_word for token in tokens)
    return Special({token.content for token in tokens} - others, others, mind_words=mind_words)


def _overlapping(words: Collection[str], any_of: re.Pattern[str]) -> set[str]:
    """Return those of `words` that hold another, lie in another, or begin as one ends, themselves included."""
    begins = {word[:end] for word in words for end in range(1, len(word))}
    ends = {word[begin:] for word in words for begin in range(1, len(word))}
    found: set[str] = set()
    for word in words:
        if any(word[begin:] in begins for begin in range(1, len(word))) or any(
            word[:end] in ends for end in range(1, len(word))
        ):
            found.add(word)
        if any_of.search(word, 1) or any(word[:end] in words for end in range(1, len(word))):
            within = {word[begin:end] for begin in range(len(word)) for end in range(begin + 1, len(word) + 1)}
            found |= within.intersection(words)  # the word itself is one of them
    return found


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
