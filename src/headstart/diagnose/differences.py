"""A hunk with its two texts, and where they come from. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.diagnose.compare import Hunk
from headstart.diagnose.placing import Place, Side, end_of, place_of, shared_path

_STEPS = 8  # tokens
_ALIKE = 12  # characters


@dataclass(frozen=True, slots=True)
class Difference:
    """A hunk with its texts: A's and B's from `a_char`, `b_char` on, the first characters that differ, to where both go on
    alike. `a_place` and `b_place` are where these characters come from."""

    hunk: Hunk
    a: Side
    b: Side
    a_char: int
    b_char: int
    a_end: int
    b_end: int
    a_place: Place
    b_place: Place
    same_text: bool

    @property
    def on_a(self) -> bool:
        """Whether A's place tells more: one in a value that differs, before one that only holds both neighbours."""
        texts = [{piece.path: piece.text for piece in side.conversation.pieces} for side in (self.a, self.b)]

        def worth(place: Place) -> int:
            differs = texts[0].get(place.path) != texts[1].get(place.path)
            return 3 if place.piece is not None and differs else 2 if differs else 1 if place.path else 0

        return worth(self.a_place) >= worth(self.b_place)

    @property
    def a_text(self) -> str:
        return (self.a.text or "")[self.a_char : self.a_end]

    @property
    def b_text(self) -> str:
        return (self.b.text or "")[self.b_char : self.b_end]


def difference_of(hunk: Hunk, a: Side, b: Side) -> Difference:
    """Return a hunk with its texts and places."""
    if a.text is None or b.text is None:
        nowhere = Place("", None, None)
        return Difference(hunk, a, b, 0, 0, 0, 0, nowhere, nowhere, same_text=False)
    x, y, x_end, y_end = a.char(hunk.a), b.char(hunk.b), a.char(hunk.a_end), b.char(hunk.b_end)
    same = alike(a.text[x:x_end], b.text[y:y_end])
    same_text = same == x_end - x == y_end - y
    if not same_text:
        x, y = _begins(hunk, a, b)
        x_end, y_end = _ends(hunk, a, b)
        beyond = max(0, x - x_end, y - y_end)  # behind the hunk both go on alike
        x_end, y_end = x_end + beyond, y_end + beyond
    ours, theirs = place_of(a, x), place_of(b, y)
    if ours.piece is None and theirs.piece is not None and (end := end_of(a, x)) is not None:
        ours = end if end.path == theirs.path else ours
    elif theirs.piece is None and ours.piece is not None and (end := end_of(b, y)) is not None:
        theirs = end if end.path == ours.path else theirs
    ours, theirs = _closer(ours, theirs, a, b), _closer(theirs, ours, b, a)
    return Difference(hunk, a, b, x, y, x_end, y_end, ours, theirs, same_text=same_text)


def _begins(hunk: Hunk, a: Side, b: Side) -> tuple[int, int]:
    """Return the first characters that differ. Tokens may part before the text does, where they would have gone on over its
    difference, and those of one character, or of several that a tokenizer does not know, all begin with it: so the tokens
    before are asked where the texts are still side by side."""
    assert a.text is not None
    assert b.text is not None
    found = (a.char(hunk.a), b.char(hunk.b))
    for t in range(min(_STEPS, hunk.a, hunk.b) + 1):
        x, y = a.char(hunk.a - t), b.char(hunk.b - t)
        same = alike(a.text[x:], b.text[y:])
        if x + same >= found[0] and y + same >= found[1]:
            found = (x + same, y + same)
    return found


def _ends(hunk: Hunk, a: Side, b: Side) -> tuple[int, int]:
    """Return the characters from which both texts go on alike."""
    assert a.text is not None
    assert b.text is not None
    for t in range(_STEPS + 1):
        x, y = a.char(hunk.a_end + t), b.char(hunk.b_end + t)
        if a.text[x : x + _ALIKE] == b.text[y : y + _ALIKE]:
            return x, y
    return a.char(hunk.a_end), b.char(hunk.b_end)


def _closer(place: Place, opposite: Place, side: Side, other: Side) -> Place:
    """Return a place between two pieces more closely: at the value there that no mark can follow, if one is the first to
    differ; at the piece behind, if the other side has none of that path; else in what holds the pieces behind on both sides,
    where these are different ones."""
    if place.piece is not None:
        return place
    pieces = side.conversation.pieces
    others = {piece.path: piece.text for piece in other.conversation.pieces}
    at = {id(piece): n for n, piece in enumerate(pieces)}
    begin = at[id(place.before)] + 1 if place.before is not None else 0
    end = at[id(place.after)] if place.after is not None else len(pieces)
    path = place.path
    between = (piece for piece in pieces[begin:end] if piece.kind == "fixed" and piece.path.startswith(path))
    changed = next((piece.path for piece in between if others.get(piece.path) != piece.text), None)
    after, beyond = place.after, opposite.after
    if changed is not None:
        path = changed
    elif after is not None and after.path not in others:
        path = after.path
    elif after is not None and beyond is not None and after.path != beyond.path:
        shared = shared_path(after, beyond)
        path = shared if shared.startswith(path) else path
    return Place(path, None, None, place.before, place.after)


def alike(a: str, b: str) -> int:
    """Return how many characters `a` and `b` begin with alike."""
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    low, high = 0, n
    while high - low > 1:  # a comparison of slices is far faster than one of characters
        middle = (low + high) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle)
    return low


def index_of(place: Place) -> int | None:
    """Return which message of its conversation a place is in, or which comes next."""
    for piece in (place.piece, place.after, place.before):
        if piece is not None and piece.where[0] == "messages":
            return int(piece.where[1])
    return None


def role_of(side: Side, place: Place) -> str | None:
    """Return whose message a place is in: "system" for what a client calls developer too."""
    n = index_of(place)
    role = None if n is None else side.conversation.messages[n]["role"]
    return "system" if role == "developer" else role


def at_tools(place: Place) -> bool:
    """Whether a place is in the tools or beside them."""
    near = (place.piece, place.before, place.after)
    return place.path.startswith("tools") or any(one is not None and one.where[0] == "tools" for one in near)
