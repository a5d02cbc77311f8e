"""A text becomes token ids in stretches, and those of a conversation so far are remembered as they are.

A conversation is told again with every turn. Its stretches are known by a digest of all that comes before their end, so nothing
in them is compared with answers, cut at special tokens or looked up message by message.

    text   ├──── stretch ────┼──── stretch ────┼── rest ──┤      cut before a special token, never in an answer
    known by                  ▲                 ▲                a digest of the text up to here, where it begins, what
                                                                 answers may stand in it

What a stretch becomes depends on nothing behind it: it is cut where what follows becomes tokens by itself, whatever it is.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile
from typing import TypeAlias

from headstart.render.generated import Beginnings, Generated, splice
from headstart.render.remembering import Remembered
from headstart.render.tokenising import Tokeniser

REMEMBERED_BYTES = 64 << 20
_STRETCH = 8192  # characters at least
_ENTRY_BYTES = 400  # of books, beside tokens and marks
_Key: TypeAlias = "tuple[bytes, int, tuple[object, ...]]"
Encode: TypeAlias = Callable[[list["str | array[int]"]], list[Sequence[int]]]


@dataclass(frozen=True, slots=True)
class Told:
    """The tokens of a text and its digest. `acted`: the rules of canonical form by which generated tokens stand in it."""

    ids: list[int]
    acted: frozenset[str]
    digest: bytes


@dataclass(frozen=True, slots=True)
class _Stretch:
    """A text from `begin`, where `before` is, up to `end`; `digest`: of the text up to there. `answers` may stand in it."""

    before: Beginnings
    begin: int
    end: int
    digest: bytes
    answers: Sequence[Generated]

    @property
    def key(self) -> _Key:
        return self.digest, self.begin, tuple(one.mark for one in self.answers)


@dataclass(frozen=True, slots=True)
class _Known:
    ids: tuple[int, ...]
    acted: frozenset[str]


class Stretches:
    """Any number of threads may use one. `ends`: texts that end a turn. `remembered_bytes`: at most, of all owners together."""

    def __init__(self, tokeniser: Tokeniser, ends: Collection[str], *, remembered_bytes: int = REMEMBERED_BYTES) -> None:
        self._tokeniser = tokeniser
        self._ends = re.compile("|".join(map(re.escape, sorted(ends))) if ends else r"(?!)")
        self._kept: Remembered[_Key, _Known] = Remembered(remembered_bytes, nbytes=_nbytes)

    def told(self, text: str, answers: Iterable[Generated], encode: Encode, *, owner: str) -> Told:
        """Return the tokens of `text` with those of the answers that stand in it, as they were generated. `encode` makes tokens
        of what is not known, in order; what is given as tokens stays as it is."""
        stretches = self._stretches(text, sorted(answers, key=lambda one: one.prompt_characters))
        *whole, rest = stretches
        # From the end on: what is kept of too long a conversation is then its beginning, without which nothing else is of use.
        found = self._kept.get(owner, [one.key for one in reversed(whole)])
        known = [one for one in takewhile(bool, reversed(found)) if one is not None]
        spliced = [splice(one.before, one.end, one.answers, ends=self._ends) for one in stretches[len(known) :]]
        encoded = iter(encode(list(chain.from_iterable(one.parts for one in spliced))))
        ids: list[int] = []
        for one in known:
            ids += one.ids
        fresh: dict[_Key, _Known] = {}
        for stretch, made in zip(stretches[len(known) :], spliced, strict=True):
            begin = len(ids)
            for _, some in zip(made.parts, encoded, strict=False):
                ids += some
            if stretch is not rest:
                fresh[stretch.key] = _Known(tuple(ids[begin:]), made.acted)
        if fresh:
            self._kept.put(owner, dict(reversed(fresh.items())))
        acted = frozenset().union(*(one.acted for one in known), *(one.acted for one in spliced))
        return Told(ids, acted, rest.digest)

    def _stretches(self, text: str, answers: Sequence[Generated]) -> list[_Stretch]:
        """Return the stretches of a text, the rest of it last; `answers` in the order of where they begin."""
        found: list[_Stretch] = []
        beginnings = Beginnings(text)
        taken = 0
        while True:
            before, first = beginnings.copy(), taken
            cut = self._tokeniser.cut(text, before.at + _STRETCH)
            while cut is not None:
                while taken < len(answers) and answers[taken].prompt_characters < cut:
                    taken += 1
                if taken == first:
                    break
                # An answer ends with the turn; where one begins in another they end together.
                closing = self._ends.search(text, answers[taken - 1].prompt_characters)
                if closing is not None and closing.start() <= cut:
                    break
                cut = None if closing is None else self._tokeniser.cut(text, closing.start())
            if cut is None:
                found.append(_Stretch(before, before.at, len(text), beginnings.digest(len(text)), answers[first:]))
                return found
            found.append(_Stretch(before, before.at, cut, beginnings.digest(cut), answers[first:taken]))


def _nbytes(key: _Key, known: _Known) -> int:
    return sys.getsizeof(known.ids) + 8 * len(key[2]) + _ENTRY_BYTES
