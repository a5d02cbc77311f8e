"""One request of a log against an earlier one: what is lost behind each difference, by its cause. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from headstart.diagnose.causes import Cause
from headstart.diagnose.entries import Entry
from headstart.diagnose.placing import Side, side_of
from headstart.diagnose.prints import TENANT, PiecePrint, Print
from headstart.diagnose.reading import Reading
from headstart.diagnose.report import report_of
from headstart.diagnose.requests import NAMESPACE, Conversation, Piece
from headstart.errors import RequestError
from headstart.render.messages import ROLES

_STEPS = 4  # of a path that are told apart
_AT_TOOLS = (Cause.TOOLS_REORDERED, Cause.TOOLS_CHANGED)


@dataclass(frozen=True, slots=True)
class Lost:
    """Tokens that mending one cause at one place would find again. `evidence` may quote the prompt."""

    cause: Cause
    place: str
    path: str
    tokens: int
    evidence: str


@dataclass(frozen=True, slots=True)
class Break:
    """Request `b` began like `a` and parted from it."""

    a: str
    b: str
    causes: tuple[Lost, ...]


def compare_sources(a: Entry, b: Entry, reading: Reading) -> Break | None:
    """Return what parts two requests; None where nothing does, or they cannot be compared."""
    assert a.source is not None
    assert b.source is not None
    try:
        sides = [side_of(entry.id, reading.conversation(entry), reading.renderer) for entry in (a, b)]
        report = report_of(*sides, begin_id=reading.begin_id)
    except (RequestError, ValueError):  # text beside token ids
        return None
    lost = [
        Lost(
            finding.cause,
            "tools" if finding.cause in _AT_TOOLS else place_class(finding.path, _role(sides, finding.path)),
            finding.path,
            tokens,
            finding.evidence,
        )
        for finding, tokens in zip(report.findings, report.gains, strict=True)
        if tokens
    ]
    return Break(a.source.name, b.source.name, tuple(lost)) if lost else None


def place_class(path: str, role: str | None = None) -> str:
    """Return a path without numbers and without what is far inside, so that like places have one name; a message by its role.

    >>> place_class("messages[5].content[0].text", "tool"), place_class("tools[2].function.parameters.properties.tag.type")
    ('messages[tool].content[*]', 'tools[*].function.parameters')
    """
    steps = re.findall(r"[^.\[\]]+|\[\d+\]", path)
    kept: list[str] = []
    for n, step in enumerate(steps[:_STEPS]):
        named = f"[{role}]" if n == 1 and role is not None else "[*]"
        kept.append(named if step.startswith("[") else f".{step}" if kept else step)
    return "".join(kept).removesuffix(".text") or "between messages"


def role_at(conversation: Conversation, piece: Piece) -> str | None:
    """Return whose message a piece stands in; "system" for what a client calls developer too."""
    if piece.where[0] != "messages" or not piece.path.startswith(("messages", "input")):
        return None
    role = str(conversation.messages[int(piece.where[1])]["role"])
    return "system" if role == "developer" else role if role in ROLES else "other"  # which may be any text


def _role(sides: Sequence[Side], path: str) -> str | None:
    for side in sides:
        for piece in side.conversation.pieces:
            if piece.path.startswith(path):
                return role_at(side.conversation, piece)
    return None


def compare_prints(a: Entry, b: Entry, reading: Reading) -> Break | None:
    """Like `compare_sources`, of what `record` kept: to the piece, and by the names that each cause alone would leave equal."""
    ours, theirs = reading.kept(a), reading.kept(b)
    for name in sorted(ours.apart.keys() | theirs.apart.keys()):
        if ours.apart.get(name, "") != theirs.apart.get(name, ""):
            cause = Cause.MODEL if name == "model" else Cause.SALT if name in (*NAMESPACE, TENANT) else Cause.ADAPTER
            return _broken(a, b, cause, name, 0)
    n = next((n for n, (x, y) in enumerate(zip(ours.pieces, theirs.pieces, strict=False)) if x.name != y.name), None)
    if n is None:
        return None
    cause, path = _cause(ours, theirs, n), theirs.pieces[n].path
    return _broken(a, b, cause, path, n)


def _broken(a: Entry, b: Entry, cause: Cause, path: str, n: int) -> Break | None:
    assert a.kept is not None
    assert b.kept is not None
    known = {piece.name for piece in a.kept.pieces[n:]}
    alike = sum(piece.chars for piece in b.kept.pieces[n:] if piece.name in known)
    if a.kept.pieces[n:] and b.kept.pieces[n:] and _spelled(a.kept.pieces[n], b.kept.pieces[n]) is cause:
        alike += b.kept.pieces[n].chars  # all but a value in it
    chars = sum(piece.chars for piece in b.kept.pieces)
    tokens = alike * b.kept.tokens // max(1, chars)
    return Break(a.id, b.id, (Lost(cause, place_class(path), path, tokens, ""),)) if tokens else None


def _cause(a: Print, b: Print, n: int) -> Cause:
    x, y = a.pieces[n], b.pieces[n]
    names_a, names_b = ([piece.name for piece in side.pieces if piece.path.startswith("tools")] for side in (a, b))
    if x.path.startswith("tools") or y.path.startswith("tools"):
        if sorted(names_a) == sorted(names_b):
            return Cause.TOOLS_REORDERED
        return _spelled(x, y) or Cause.TOOLS_CHANGED
    if "image" in (x.kind, y.kind):
        return Cause.IMAGE
    if "reasoning" in (x.kind, y.kind):
        return Cause.REASONING
    if (cause := _spelled(x, y)) is not None:
        return cause
    if _is_system(x, n) and _is_system(y, n):
        return Cause.SYSTEM
    rest = [piece.name for piece in a.pieces[n:]]
    after = [piece.name for piece in b.pieces[n : n + 2]]
    if any(rest[k : k + len(after)] == after for k in range(1, len(rest))):
        return Cause.TRUNCATED
    last = all(n >= len(side.pieces) - 2 for side in (a, b))
    return Cause.OTHER if last else Cause.EDITED


def _spelled(x: PiecePrint, y: PiecePrint) -> Cause | None:
    return next((cause for cause, name in x.forms.items() if y.forms.get(cause) == name), None)


def _is_system(piece: PiecePrint, n: int) -> bool:
    return piece.path.startswith(("system", "instructions")) or (n <= 1 and piece.path.startswith("messages[0]"))
