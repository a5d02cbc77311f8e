"""What was found in a log, for people and for programs. Pure. Nothing that a prompt says is shown unless asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from headstart.diagnose.lint import Lint
from headstart.diagnose.mending import Change
from headstart.diagnose.show import Prices, visible
from headstart.diagnose.tallies import OTHERS, Finding, Logged, Tally

_WIDTH = 118
_FINDINGS = 12
_GROUPS = 8
_EVIDENCE = 160


def shown_name(name: str, *, text: bool) -> str:
    """Return the name of a tenant, session or tag, or its digest where what a log says is not to be shown."""
    if text or name == OTHERS:
        return visible(name)
    return f"#{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def lines_of(lint: Lint, changes: Sequence[Change], prices: Prices, *, text: bool) -> Iterator[str]:
    """Yield the report for people, line by line."""
    all = lint.all
    about = "" if lint.exact else "about "
    yield f"{all.requests:,} requests, {about}{all.tokens:,} tokens in their prompts"
    if lint.unread:
        yield from _wrapped("", f"{lint.unread:,} entries without a request that can be read, such as {lint.unread_such_as[0]}")
    yield ""
    yield _share_line(all, "found again", all.kept, "what an ideal cache finds: large enough, never too late")
    if all.held is not None:
        missing = all.kept - all.held
        yield _share_line(
            all, "  held", all.held, f"with room for {lint.capacity_tokens:,} tokens; {missing:,} lost for want of room"
        )
    yield _share_line(all, "lost", all.lost, "an earlier prompt has them, but behind a difference")
    yield _share_line(all, "unique", all.unique, "no earlier prompt has them")
    if (said := cost_of(all.lost, prices)) is not None:
        yield f"            what is lost: {said}"
    if lint.findings:
        yield ""
        yield "lost by                  of tokens     requests  where"
    for finding in lint.findings[:_FINDINGS]:
        share = f"{finding.cause:<24} {all.share(finding.tokens):>9.1%} {finding.requests:>12,}"
        yield f"{share}  {finding.place}"
        yield from _wrapped("    fix   ", finding.fix)
        yield from _examples(finding, text)
    if len(lint.findings) > _FINDINGS:
        yield f"and {len(lint.findings) - _FINDINGS} more causes at other places"
    if changes:
        yield ""
        yield from _change_lines(lint, changes)
    for kind, groups in lint.groups.items():
        if len(groups) > 1 or kind == "tenant":
            yield ""
            yield from _group_lines(kind, groups, text)
    if lint.logged is not None:
        yield ""
        yield from _logged_lines(lint.logged)
    yield from _notes(lint)


def _share_line(all: Tally, word: str, tokens: int, about: str) -> str:
    return f"{word:<12}{all.share(tokens):>7.1%} {tokens:>15,} tokens   {about}"


def _examples(finding: Finding, text: bool) -> Iterator[str]:
    if finding.examples:
        example = finding.examples[0]
        yield f"    see   headstart diff {_quoted(example.a)} {_quoted(example.b)}"
        if text and example.evidence:
            said = visible(example.evidence)
            yield from _wrapped("    said  ", said if len(said) <= _EVIDENCE else f"{said[:_EVIDENCE]}…")


def _quoted(name: str) -> str:
    return f"'{name}'" if set(name) & set(" #&;()'\"$*?") else name


def _change_lines(lint: Lint, changes: Sequence[Change]) -> Iterator[str]:
    yield "what would gain most, one after another"
    rate = lint.all.share(lint.all.kept)
    for n, change in enumerate(changes, start=1):
        estimated = f"{change.cause}: about {lint.all.share(change.estimated_tokens):.1%} of the tokens"
        if change.replayed_tokens is None:
            told = f"{estimated}; it cannot be replayed, what the prompts should have said instead is not known"
        else:
            then = lint.all.share(change.replayed_tokens)
            told = f"{estimated}; replayed with it, {then:.1%} are found again instead of {rate:.1%}"
            rate = then
        yield from _wrapped(f"{n:>3} ", told)
        yield from _wrapped("    ", change.fix)


def _group_lines(kind: str, groups: Sequence[tuple[str, Tally]], text: bool) -> Iterator[str]:
    yield f"{'by ' + kind:<24} {'requests':>10} {'tokens':>15} {'found again':>12} {'lost':>8} {'unique':>8}"
    for name, tally in groups[:_GROUPS]:
        shares = f"{tally.share(tally.kept):>12.1%} {tally.share(tally.lost):>8.1%} {tally.share(tally.unique):>8.1%}"
        yield f"{shown_name(name, text=text)[:24]:<24} {tally.requests:>10,} {tally.tokens:>15,} {shares}"
    if len(groups) > _GROUPS:
        yield f"and {len(groups) - _GROUPS:,} more"


def _logged_lines(logged: Logged) -> Iterator[str]:
    found, ideal = logged.cached / max(1, logged.tokens), logged.predicted / max(1, logged.tokens)
    yield (
        f"the log says of {logged.requests:,} requests what their server had cached: {found:.1%} of {logged.tokens:,} tokens; "
        f"an ideal cache: {ideal:.1%}"
    )
    yield (
        f"  equal in {logged.equal:,}; the server found less in {logged.short:,} ({logged.short_tokens:,} tokens) "
        f"and more in {logged.more:,}"
    )
    for cause, requests in sorted(logged.rules.items(), key=lambda one: -one[1]):
        yield f"  less, by a rule of the provider: {cause} in {requests:,}"
    unexplained = logged.short - sum(logged.rules.values())
    if unexplained:
        yield f"  less, and the log does not show why (evicted, another machine, not yet written): {unexplained:,}"


def _notes(lint: Lint) -> Iterator[str]:
    notes = []
    if not lint.exact:
        notes.append("no tokenizer given: tokens are estimates, a token for 4 bytes of text; name one with --model")
    if lint.judged < lint.breaks:
        notes.append(
            f"{lint.judged:,} of {lint.breaks:,} differences were compared, evenly chosen; what is lost is scaled from these"
        )
    if lint.canonical:
        notes.append(
            f"of {lint.canonical:,} requests a header line was taken out first, as a headstart server does (server.canonical); "
            "other servers compute it, and everything behind it, again: --as-sent counts that"
        )
    if lint.findings:
        notes.append("what is lost is an upper bound: it assumes a cache that keeps everything and has written it in time")
    for note in notes:
        yield ""
        yield from _wrapped("note  ", note)


def cost_of(tokens: int, prices: Prices) -> str | None:
    """Return what computing so many tokens takes and costs, as far as that is known."""
    said = []
    if (ms := prices.ms(tokens)) is not None:
        said.append(f"{ms / 1000:,.0f} s of computing")
    if (cost := prices.cost(tokens)) is not None:
        said.append(f"{cost:,.2f} more to pay")
    return ", ".join(said) or None


def _wrapped(label: str, text: str) -> Iterator[str]:
    lines = wrap(text, _WIDTH - len(label), break_long_words=False, break_on_hyphens=False) or [""]
    for n, line in enumerate(lines):
        yield (label if n == 0 else " " * len(label)) + line


def json_of(lint: Lint, changes: Sequence[Change], prices: Prices, *, text: bool) -> dict[str, Any]:
    """Return the report for programs."""
    return {
        "exact": lint.exact,
        "unread": lint.unread,
        "unread_such_as": list(lint.unread_such_as),
        "canonical_requests": lint.canonical,
        **_tally(lint.all),
        "capacity_tokens": lint.capacity_tokens,
        "lost_ms": prices.ms(lint.all.lost),
        "lost_money": prices.cost(lint.all.lost),
        "differences": lint.breaks,
        "differences_judged": lint.judged,
        "findings": [_finding(lint, finding, text) for finding in lint.findings],
        "changes": [
            {
                "cause": str(change.cause),
                "places": list(change.places),
                "fix": change.fix,
                "estimated_tokens": change.estimated_tokens,
                "replayed_tokens": change.replayed_tokens,
                "replayed_rate": None if change.replayed_tokens is None else lint.all.share(change.replayed_tokens),
            }
            for change in changes
        ],
        "groups": {
            kind: [{"name": shown_name(name, text=text), **_tally(tally)} for name, tally in groups]
            for kind, groups in lint.groups.items()
        },
        "logged": None
        if (logged := lint.logged) is None
        else {
            "requests": logged.requests,
            "tokens": logged.tokens,
            "cached_tokens": logged.cached,
            "predicted_tokens": logged.predicted,
            "equal": logged.equal,
            "server_found_less": logged.short,
            "server_found_more": logged.more,
            "less_tokens": logged.short_tokens,
            "rules": {str(cause): requests for cause, requests in logged.rules.items()},
        },
    }


def _tally(tally: Tally) -> dict[str, Any]:
    return {
        "requests": tally.requests,
        "tokens": tally.tokens,
        "found_again_tokens": tally.kept,
        "held_tokens": tally.held,
        "lost_tokens": tally.lost,
        "unique_tokens": tally.unique,
        "ideal_rate": tally.share(tally.kept),
    }


def _finding(lint: Lint, finding: Finding, text: bool) -> dict[str, Any]:
    return {
        "cause": str(finding.cause),
        "place": finding.place,
        "fix": finding.fix,
        "requests": finding.requests,
        "request_share": finding.requests / max(1, lint.all.requests),
        "tokens": finding.tokens,
        "token_share": lint.all.share(finding.tokens),
        "by": {kind: {shown_name(name, text=text): tokens for name, tokens in by.items()} for kind, by in finding.by.items()},
        "examples": [
            {"a": one.a, "b": one.b, **({"path": one.path, "evidence": one.evidence} if text else {})}
            for one in finding.examples
        ],
    }
