"""A report for people and for programs. Pure. What cannot be seen in a text is made visible."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from headstart.diagnose.around import Around

if TYPE_CHECKING:  # so that `why`, which shows what a server found, starts without NumPy
    from headstart.diagnose.report import Finding, Report

_WIDTH = 110
_SHOWN = 120  # characters of a text
_SIGNS = {"\n": "⏎", "\r": "␍", "\t": "⇥"}


@dataclass(frozen=True, slots=True)
class Prices:
    """Money for a million input tokens, computed and cached; tokens a second that are computed."""

    input_price: float | None = None
    cached_price: float | None = None
    prefill_tokens_s: float | None = None

    def cost(self, tokens: int) -> float | None:
        """Return what computing `tokens` costs more than reading them from a cache."""
        if self.input_price is None or self.cached_price is None:
            return None
        return tokens * (self.input_price - self.cached_price) / 1e6

    def ms(self, tokens: int) -> float | None:
        return None if self.prefill_tokens_s is None else tokens / self.prefill_tokens_s * 1000


def visible(text: str) -> str:
    """Return `text` on one line: line breaks, tabs and spaces at a line's end as signs, other invisible characters by name.

    >>> visible("a \\r\\nb\\u00a0c")
    'a␠␍⏎b⟨U+00A0 no-break space⟩c'
    """
    text = re.sub(r" +(?=[\r\n]|$)", lambda match: "␠" * len(match.group()), text)
    return "".join(_sign(character) for character in text)


def _sign(character: str) -> str:
    if character in _SIGNS:
        return _SIGNS[character]
    kind = unicodedata.category(character)
    if character != " " and (kind[0] in "CMZ"):
        name = unicodedata.name(character, "").lower()
        return f"⟨U+{ord(character):04X}{' ' + name if name else ''}⟩"
    return character


def lines_of(report: Report, prices: Prices) -> Iterator[str]:
    """Yield the report for people, line by line."""
    about = "" if report.exact else "about "
    yield f"A  {report.a_name}: {about}{report.a_tokens:,} tokens"
    yield f"B  {report.b_name}: {about}{report.b_tokens:,} tokens"
    yield ""
    if not report.findings:
        shared = min(report.a_tokens, report.b_tokens)
        yield f"the same to the end of {'A' if report.a_tokens <= report.b_tokens else 'B'}: {about}{shared:,} tokens"
        new = report.b_tokens - report.kept_tokens
        yield f"B finds {report.kept_tokens:,} tokens again in blocks of {report.block_tokens} and computes {new:,}"
    for n, finding in enumerate(report.findings):
        if n:
            gained = finding.kept_tokens - report.findings[n - 1].kept_tokens
            yield ""
            yield f"mend this, and {about}{gained:,} tokens more are found again; the next break is at"
            yield ""
        yield from _finding_lines(finding, about)
        if n == 0:
            yield from _cost_lines(report, prices, about)
    if report.unlisted:
        yield ""
        yield f"and {report.unlisted} more differences behind these"
    if report.notes:
        yield ""
    for note in report.notes:
        yield from wrapped("note      ", note)


def _finding_lines(finding: Finding, about: str) -> Iterator[str]:
    a, b = finding.a, finding.b
    where = finding.path or "between messages, in the template's own text"
    if finding.offset is not None:
        where += f", character {finding.offset:,}"
    elif finding.path and (a.text or b.text):
        where += " (in what is around its values)"
    at = f"token {about}{a.position:,}" + ("" if a.position == b.position else f" of A, {b.position:,} of B")
    yield f"{at}: {where}"
    if a.before or a.text or b.text:
        for side, around in (("A", a), ("B", b)):
            yield f"  {side}  {marked(around)}"
    yield from wrapped("  cause   ", f"{finding.cause}: {finding.evidence}" + _times(finding))
    yield from wrapped("  fix     ", finding.fix)


def marked(around: Around) -> str:
    """A text with brackets round what differs, and the token's id before it."""
    before = visible(around.before + ".")[-_SHOWN // 2 - 1 : -1]  # spaces at its end are not at a line's end
    text = visible(around.text)
    text = "␠" * (len(text) - len(text.lstrip(" "))) + text.lstrip(" ")
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    token = "" if around.token is None else f"{around.token:>6}  "
    return f"{token}{before}[{text}]{visible(around.after)[: _SHOWN // 3]}"


def _times(finding: Finding) -> str:
    more = finding.places - 1
    return f" (and in {more} place{'s' if more > 1 else ''} more)" if more else ""


def _cost_lines(report: Report, prices: Prices, about: str) -> Iterator[str]:
    parts = [f"{about}{report.lost_tokens:,} tokens of B ({report.lost_blocks:,} blocks) are computed again"]
    parts.append(f"{report.kept_tokens:,} ({report.kept_blocks:,} blocks) found")
    if (ms := prices.ms(report.lost_tokens)) is not None:
        parts.append(f"{ms:,.0f} ms")
    if (cost := prices.cost(report.lost_tokens)) is not None:
        parts.append(f"{cost:.6f} more to pay")
    yield from wrapped("  lost    ", "; ".join(parts))


def when(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def wrapped(label: str, text: str) -> Iterator[str]:
    lines = wrap(text, _WIDTH - len(label), break_long_words=False, break_on_hyphens=False) or [""]
    for n, line in enumerate(lines):
        yield (label if n == 0 else " " * len(label)) + line


def json_of(report: Report, prices: Prices) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "same": not report.differs,
        "exact": report.exact,
        "block_tokens": report.block_tokens,
        "a": {"name": report.a_name, "tokens": report.a_tokens},
        "b": {"name": report.b_name, "tokens": report.b_tokens},
        "common_tokens": report.common_tokens,
        "kept_tokens": report.kept_tokens,
        "kept_blocks": report.kept_blocks,
        "lost_tokens": report.lost_tokens,
        "lost_blocks": report.lost_blocks if report.differs else 0,
        "lost_ms": prices.ms(report.lost_tokens),
        "lost_money": prices.cost(report.lost_tokens),
        "findings": [
            {
                "cause": str(finding.cause),
                "evidence": finding.evidence,
                "fix": finding.fix,
                "openai_reason": finding.openai,
                "anthropic_reason": finding.anthropic,
                "path": finding.path,
                "offset": finding.offset,
                "places": finding.places,
                "kept_tokens": finding.kept_tokens,
                "a": asdict(finding.a),
                "b": asdict(finding.b),
            }
            for finding in report.findings
        ],
        "unlisted": report.unlisted,
        "notes": list(report.notes),
    }
