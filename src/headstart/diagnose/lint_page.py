"""What was found in a log as one page: a bar of where all tokens went, a bar for every request, the changes, tables. Pure.

The page needs nothing but itself: no script, no font, no address. It prints, and follows the reader's light or dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from headstart.diagnose.lint import Lint
from headstart.diagnose.lint_show import cost_of, lines_of, shown_name
from headstart.diagnose.mending import Change
from headstart.diagnose.show import Prices
from headstart.diagnose.tallies import Tally

_WIDE = 960
_ROWS = 12
_STYLE = """
:root { --ink: #1b1f24; --soft: #5d6670; --page: #ffffff; --line: #d8dde3;
  --kept: #2e8b57; --lost: #d1495b; --unique: #c3cad3; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4af; --page: #14181d; --line: #343b44;
    --kept: #3fae70; --lost: #e0667a; --unique: #4a535e; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
p { margin: .3rem 0; } .soft, figcaption, th { color: var(--soft); font-weight: normal; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg .on { fill: #ffffff; } svg .soft { fill: var(--soft); }
.kept { fill: var(--kept); } .lost { fill: var(--lost); } .unique { fill: var(--unique); }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em; }
figure { margin: .5rem 0; } table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
td, th { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; } code { font-size: .92em; }
pre { overflow-x: auto; border: 1px solid var(--line); padding: .7rem; font-size: 12px; }
"""


def page_of(lint: Lint, changes: Sequence[Change], prices: Prices, *, text: bool) -> str:
    """Return the page as HTML."""
    body = "\n".join(_body(lint, changes, prices, text))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><title>headstart lint</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _body(lint: Lint, changes: Sequence[Change], prices: Prices, text: bool) -> Iterator[str]:
    all = lint.all
    about = "" if lint.exact else "about "
    yield f"<h1>{all.share(all.kept):.0%} of all prompt tokens could come from a cache</h1>"
    if all.lost:
        cost = "" if (said := cost_of(all.lost, prices)) is None else f" That is {said}."
        yield f"<p>Another {all.share(all.lost):.0%} could too, but something before them changes from request to request."
        yield f"{cost}</p>"
    yield f'<p class="soft">{all.requests:,} requests, {about}{all.tokens:,} tokens in their prompts</p>'
    yield "<h2>Where the tokens went</h2>"
    yield _key()
    yield f"<figure>{_whole(lint)}</figure>"
    if changes:
        yield "<h2>What to change first</h2>"
        yield f"<figure>{_steps(lint, changes)}<figcaption>Found again as it is, and with one change after another. Filled: "
        yield "the log was read again with the change made. Outlined: by estimate.</figcaption></figure><ol>"
        yield from (f"<li><b>{escape(change.cause)}</b>: {escape(change.fix)}</li>" for change in changes)
        yield "</ol>"
    yield "<h2>Request after request</h2>"
    yield f"<figure>{_requests(lint)}<figcaption>Each column is a request, as high as its prompt is long: "
    yield f"{len(lint.samples):,} of {all.requests:,}, in order. Green comes from a cache; red could; grey is new."
    yield "</figcaption></figure>"
    if lint.findings:
        yield "<h2>What keeps them from being found</h2>"
        yield from _table(
            ("cause", "where", "tokens", "requests", "fix"),
            (
                (f"<code>{escape(one.cause)}</code>", f"<code>{escape(one.place)}</code>", f"{all.share(one.tokens):.1%}",
                 f"{one.requests:,}", escape(one.fix))
                for one in lint.findings[:_ROWS]
            ),
        )  # fmt: skip
    for n, (kind, groups) in enumerate(lint.groups.items()):
        yield f"<h2>By {kind}</h2>"
        if n == 0 and not text:
            yield '<p class="soft">Digests stand for names; <code>--show-text</code> writes them out.</p>'
        rows = ((escape(shown_name(name, text=text)), *_cells(tally)) for name, tally in groups[:_ROWS])
        yield from _table((kind, "requests", "tokens", "found again", "lost", "unique"), rows)
        if len(groups) > _ROWS:
            yield f'<p class="soft">and {len(groups) - _ROWS:,} more</p>'
    yield "<h2>In words</h2><pre>"
    yield escape("\n".join(lines_of(lint, changes, prices, text=text)))
    yield "</pre>"


def _cells(tally: Tally) -> tuple[str, ...]:
    shares = (f"{tally.share(tokens):.1%}" for tokens in (tally.kept, tally.lost, tally.unique))
    return f"{tally.requests:,}", f"{tally.tokens:,}", *shares


def _key() -> str:
    words = (("kept", "found again"), ("lost", "lost behind a difference"), ("unique", "new: no cache could have it"))
    return (
        "<p>" + "".join(f'<span class="key" style="background: var(--{name})"></span>{word}' for name, word in words) + "</p>"
    )


def _whole(lint: Lint) -> str:
    all, x, parts = lint.all, 0.0, []
    for name, tokens in (("kept", all.kept), ("lost", all.lost), ("unique", all.unique)):
        wide = all.share(tokens) * _WIDE
        parts.append(f'<rect class="{name}" x="{x:.1f}" y="0" width="{max(0.0, wide - 1):.1f}" height="44"/>')
        if wide > 60:
            on = "" if name == "unique" else ' class="on"'
            parts.append(f'<text{on} x="{x + 10:.1f}" y="27">{all.share(tokens):.1%}</text>')
        x += wide
    said = f"{all.share(all.kept):.1%} found again, {all.share(all.lost):.1%} lost, {all.share(all.unique):.1%} new"
    return _svg(44, said, parts)


def _steps(lint: Lint, changes: Sequence[Change]) -> str:
    all, left = lint.all, 190
    room = _WIDE - left - 60
    rows: list[tuple[str, float, bool]] = [("as it is", all.share(all.kept), True)]
    rate = all.share(all.kept)
    for change in changes:
        replayed = change.replayed_tokens is not None
        rate = all.share(change.replayed_tokens or 0) if replayed else min(1.0, rate + all.share(change.estimated_tokens))
        rows.append((f"+ {change.cause}", rate, replayed))
    parts = []
    for n, (word, share, filled) in enumerate(rows):
        y = n * 34
        look = 'class="kept"' if filled else 'fill="none" stroke="var(--kept)" stroke-dasharray="4 3"'
        parts.append(f'<text x="0" y="{y + 19}">{escape(word)}</text>')
        parts.append(f'<rect {look} x="{left}" y="{y + 2}" width="{max(1.0, share * room):.1f}" height="24"/>')
        parts.append(f'<text x="{left + share * room + 8:.1f}" y="{y + 19}">{share:.1%}</text>')
    return _svg(len(rows) * 34, "share of tokens found again, as it is and after each change", parts)


def _requests(lint: Lint) -> str:
    high, samples = 200, lint.samples
    most = max((sample.tokens for sample in samples), default=1)
    step = _WIDE / max(1, len(samples))
    parts = []
    for n, sample in enumerate(samples):
        y = float(high)
        unique = max(0, sample.tokens - sample.kept - sample.lost)
        for name, tokens in (("kept", sample.kept), ("lost", sample.lost), ("unique", unique)):
            tall = tokens / most * high
            if tall:
                y -= tall
                title = f"{sample.tokens:,} tokens, {tokens:,} {name}" + (f", {sample.cause}" if sample.cause else "")
                box = f'x="{n * step:.2f}" y="{y:.2f}" width="{max(0.5, step * 0.86):.2f}" height="{tall:.2f}"'
                parts.append(f'<rect class="{name}" {box}><title>{escape(title)}</title></rect>')
    parts.append(f'<text class="soft" x="0" y="{high + 18}">first request</text>')
    parts.append(
        f'<text class="soft" x="{_WIDE}" y="{high + 18}" text-anchor="end">last; the longest has {most:,} tokens</text>'
    )
    return _svg(high + 24, "tokens of every request: found again, lost, new", parts)


def _svg(high: int, said: str, parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {_WIDE} {high}" role="img" aria-label="{escape(said)}">{"".join(parts)}</svg>'


def _table(heads: Sequence[str], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    """Numbers stand to the right; a cell is HTML."""
    for n, row in enumerate(rows):
        numbers = [' class="n"' if cell[:1].isdigit() else "" for cell in row]
        if n == 0:
            named = zip(heads, numbers, strict=True)
            yield '<div class="wide"><table><tr>' + "".join(f"<th{how}>{head}</th>" for head, how in named) + "</tr>"
        yield "<tr>" + "".join(f"<td{how}>{cell}</td>" for cell, how in zip(row, numbers, strict=True)) + "</tr>"
    yield "</table></div>"
