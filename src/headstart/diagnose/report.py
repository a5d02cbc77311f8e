"""Two prompts compared: where they part, why, what it costs, and where they would part next. Pure.

A  ▓▓▓▓▓▓▓▓│▓▓▓ x ▓▓▓▓▓▓▓│▓▓▓▓▓▓ y ▓▓▓      │ the last full block that both have
   ╰ reused ╯ ╰──────── computed again ───╯   x mended: reused up to the second │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.around import Around
from headstart.diagnose.causes import FIXES, Cause, names_of
from headstart.diagnose.compare import Hunk, common, hunks
from headstart.diagnose.differences import Difference, at_tools, difference_of, role_of
from headstart.diagnose.judging import apart, verdict_of
from headstart.diagnose.placing import ESTIMATED_BYTES, Place, Side
from headstart.diagnose.requests import equal_form

_RUN = 8  # tokens alike after which two prompts have met again
_AROUND = 12  # tokens shown on either side
_FINDINGS = 8
_ONCE = {Cause.TOOLS_REORDERED, Cause.TOOLS_RESERIALISED, Cause.TOOLS_CHANGED}
_SHORTENED = {Cause.SUMMARISED, Cause.TRUNCATED}


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause, at `path` of the request from character `offset` on; None where that is not within one value.

    `kept_tokens` of B stay reusable with everything before it mended; `places` counts differences of one cause and path."""

    cause: Cause
    evidence: str
    fix: str
    openai: str
    anthropic: str
    path: str
    offset: int | None
    a: Around
    b: Around
    kept_tokens: int
    places: int = 1


@dataclass(frozen=True, slots=True)
class Report:
    """`exact` is false where token positions are estimates. `lost_tokens` of B are computed again, though A had come before;
    a request always computes one token. `alike_tokens` of B stand behind the first difference, and in A behind it too.
    `findings` are in order; `unlisted` counts further differences."""

    a_name: str
    b_name: str
    a_tokens: int
    b_tokens: int
    exact: bool
    common_tokens: int
    kept_tokens: int
    lost_tokens: int
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    unlisted: int = 0
    alike_tokens: int = 0

    @property
    def gains(self) -> tuple[int, ...]:
        """How many tokens more are found again with each finding mended, those before it being mended."""
        kept = [finding.kept_tokens for finding in self.findings]
        left, gains = self.alike_tokens, []
        for this, after in zip(kept, [*kept[1:], self.b_tokens], strict=False):  # none of none
            gains.append(max(0, min(left, after - this)))
            left -= gains[-1]
        return tuple(gains)

    @property
    def differs(self) -> bool:
        return bool(self.findings)

    @property
    def block_tokens(self) -> int:
        return BLOCK_TOKENS

    @property
    def kept_blocks(self) -> int:
        return self.kept_tokens // BLOCK_TOKENS

    @property
    def lost_blocks(self) -> int:
        return self.b_tokens // BLOCK_TOKENS - self.kept_blocks


def report_of(a: Side, b: Side, *, begin_id: int | None = None, findings: int = _FINDINGS) -> Report:
    """Compare two sides. Raises ValueError where one has token ids and the other characters only."""
    if a.exact != b.exact and len(a.units) and len(b.units):
        raise ValueError("token ids can be compared with text only by the tokenizer that made them")
    exact = a.exact and b.exact
    tokens = [side.tokens(len(side.units)) for side in (a, b)]
    shared = common(a.units, b.units)
    found = [
        _apart(one.path, one.verdict.cause, one.verdict.evidence) for one in apart(a.conversation, b.conversation, exact=exact)
    ]
    unlisted = alike = 0
    apart_by_field = bool(found)
    last: Hunk | None = None
    for hunk in hunks(a.units, b.units, run=_RUN if exact else _RUN * ESTIMATED_BYTES):
        if last is not None:
            alike += b.tokens(hunk.b) - b.tokens(last.b_end)
        last = hunk
        difference = difference_of(hunk, a, b)
        verdict = verdict_of(difference, begin_id=begin_id)
        finding = _finding(difference, verdict.cause, verdict.evidence, tokens[1])
        if found and _same(found[-1], finding):
            found[-1] = replace(found[-1], places=found[-1].places + 1)
        elif len(found) < findings:
            found.append(finding)
        else:
            unlisted += 1
    if last is not None:
        alike += b.tokens(last.b_end + common(a.units[last.a_end :], b.units[last.b_end :])) - b.tokens(last.b_end)
    if apart_by_field:  # what comes before the first difference in text is lost too
        alike += b.tokens(shared)
    kept = found[0].kept_tokens if found else _kept(min(b.tokens(shared), tokens[1]), tokens[1])
    return Report(
        a_name=a.name,
        b_name=b.name,
        a_tokens=tokens[0],
        b_tokens=tokens[1],
        exact=exact,
        common_tokens=b.tokens(shared),
        kept_tokens=kept,
        lost_tokens=tokens[1] - kept if found else 0,
        findings=tuple(found),
        notes=tuple(_notes(a, b, tokens, shared, bool(found))),
        unlisted=unlisted,
        alike_tokens=alike,
    )


def _kept(position: int, tokens: int) -> int:
    """Return how many tokens of a prompt are found again whose first `position` are known: whole blocks, one token is left."""
    return max(0, min(position, tokens - 1)) // BLOCK_TOKENS * BLOCK_TOKENS


def _same(before: Finding, finding: Finding) -> bool:
    """Whether mending the one mends the other: a shortened history or a changed list of tools may part in several places."""
    if before.cause in _SHORTENED and finding.cause in _SHORTENED:
        return True
    return before.cause is finding.cause and (finding.cause in _ONCE or before.path == finding.path)


def _apart(path: str, cause: Cause, evidence: str) -> Finding:
    nothing = Around(None, 0, "", None, "", "", "")
    names = names_of(cause, in_tools=False, in_system=False)
    return Finding(cause, evidence, FIXES[cause], names.openai, names.anthropic, path, None, nothing, nothing, 0)


def _finding(d: Difference, cause: Cause, evidence: str, b_tokens: int) -> Finding:
    side, place = (d.a, d.a_place) if d.on_a else (d.b, d.b_place)
    names = names_of(cause, in_tools=at_tools(place), in_system=role_of(side, place) == "system")
    return Finding(
        cause=cause,
        evidence=evidence,
        fix=FIXES[cause],
        openai=names.openai,
        anthropic=names.anthropic,
        path=place.path,
        offset=_offset(place),
        a=_around(d.a, d.hunk.a, d.hunk.a_end, d.a_char, d.a_end, d.a_place),
        b=_around(d.b, d.hunk.b, d.hunk.b_end, d.b_char, d.b_end, d.b_place),
        kept_tokens=_kept(d.b.tokens(d.hunk.b), b_tokens),
    )


def _around(side: Side, unit: int, end: int, char: int, char_end: int, place: Place) -> Around:
    units = side.units
    token = int(units[unit]) if side.exact and unit < len(units) else None
    position = side.tokens(unit)
    offset = _offset(place)
    if side.text is None:
        shown = [
            " ".join(map(str, units[x:y].tolist()))
            for x, y in ((max(0, unit - _AROUND), unit), (unit, min(end, unit + _AROUND)))
        ]
        return Around(token, position, place.path, offset, shown[0], shown[1], "")
    wide = _AROUND if side.exact else _AROUND * ESTIMATED_BYTES
    begin = side.char(max(0, unit - wide))
    stop = min(max(char_end, char), side.char(unit + 2 * wide))
    after = side.char(min(len(units), max(end, unit) + wide)) if stop >= char_end else stop
    return Around(token, position, place.path, offset, side.text[begin:char], side.text[char:stop], side.text[stop:after])


def _offset(place: Place) -> int | None:
    """Return the character of a place in what the client wrote."""
    return None if place.offset is None or place.piece is None else place.offset + place.piece.skipped


def _notes(a: Side, b: Side, tokens: Sequence[int], shared: int, differs: bool) -> list[str]:
    notes = []
    if not a.exact or not b.exact:
        notes.append("no tokenizer given: compared by character, and positions in tokens are estimates; name one with --model")
    if min(tokens) <= BLOCK_TOKENS:
        notes.append(f"{Cause.SHORT}: a prompt of {min(tokens)} tokens has no whole block of {BLOCK_TOKENS} that could be kept")
    if not differs and shared == len(b.units) < len(a.units):
        notes.append("B is a beginning of A")
    ours, theirs = a.conversation, b.conversation
    if a.exact and not differs:
        shapes = [n for n in ours.shapes.keys() & theirs.shapes.keys() if ours.shapes[n] != theirs.shapes[n]]
        if shapes:
            notes.append(
                f"{Cause.SHAPE}: the content of messages[{min(shapes)}] is a string on one side, a list of parts on the other; "
                "headstart renders both alike, other servers may not"
            )
    if acted := sorted(ours.acted | theirs.acted):
        notes.append(
            f"taken out before comparing, as a headstart server does (server.canonical): {', '.join(acted)}; other servers "
            "compute it, and --as-sent compares it"
        )
    if any(piece.kind == "image" for side in (ours, theirs) for piece in side.pieces):
        notes.append("what is no text, such as an image, counts here by its digest; its tokens are not known without the model")
    if a.exact and b.exact and equal_form(ours.template) != equal_form(theirs.template) and not differs:
        notes.append(f"{Cause.TEMPLATE}: the template's arguments differ without an effect on these messages")
    return notes
