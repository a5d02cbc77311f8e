"""What two texts show by themselves: which kind of change explains all of their difference. Pure."""

from __future__ import annotations

import json
import re
import unicodedata

from headstart.diagnose.causes import Cause, Verdict, told
from headstart.diagnose.requests import equal_form

_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_TIMES = re.compile(
    r"\b\d{4}-\d{1,2}-\d{1,2}(?:[T ]\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?(?:Z|UTC|[+-]\d{2}:?\d{2}))?)?"
    r"|\b\d{1,2}[/.]\d{1,2}[/.]\d{2,4}\b|\b\d{4}/\d{1,2}/\d{1,2}\b"
    r"|\b\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d+)?)?(?: ?[AaPp]\.?[Mm]\b\.?)?(?: ?(?:Z|UTC|GMT|CET)\b)?"
    rf"|\b{_MONTH}\.? \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?|\b\d{{1,2}}\.? {_MONTH}\.?(?:,? \d{{4}})?|\b{_MONTH} \d{{4}}"
    rf"|\b{_DAY}\b|\b1[4-9]\d{{8}}(?:\d{{3}}|\d{{6}})?(?:\.\d+)?\b"
)
_IDS = re.compile(
    r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b"
    r"|\b(?:req|call|toolu|msg|chatcmpl|cmpl|resp|run|sess|session|trace|span|thread|conv|user|job|task|id|tmp)[-_](?=[A-Za-z0-9_-]*\d)[A-Za-z0-9_-]{3,}"
    r"|\b[0-9A-HJKMNP-TV-Z]{26}\b"
    r"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{7,}\b"
    r"|\b(?=[A-Za-z0-9]*\d)(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{16,}\b"
)
_COUNTERS = re.compile(
    r"(?i)(?:\b(?:turn|request|session|counter|count|step|iteration|message|attempt|call|seq|sequence|nonce|build|run|number|no\.|"
    r"id|pid|port|revision|seed)|#)[ \t]*(?:#|no\.|:|=|is|number)?[ \t]*\d+"
)
_NUMBERS = re.compile(r"\b\d+\b")
_HEADER = re.compile(r"(?im)^(?:x-[a-z0-9-]+|[a-z-]*billing[a-z-]*)[ \t]*:.*$|\bcch=[0-9a-zA-Z]+")
_INVISIBLE = re.compile("[\u200b-\u200f\u2060-\u2064\ufeff\u00ad\u061c\u180e\u202a-\u202e\u2066-\u2069]")
_QUOTES = {ord(x): y for x, y in zip("“”„‟‘’‚‛«»–—−", '""""\'\'\'\'""---', strict=True)} | {ord("…"): "..."}


def header(a: str, b: str) -> str | None:
    """Return what to say where lines that a client adds to each request are all of the difference between whole lines."""
    found = [_HEADER.search(text) for text in (a, b)]
    if found == [None, None] or _without_headers(a) != _without_headers(b):
        return None
    shown = [told(match.group()) if match else "none" for match in found]
    return f"{shown[0]} in A, {shown[1]} in B"


def spaces(a: str, b: str) -> str | None:
    """Return what to say where both are the same but for spaces and line breaks."""
    if "".join(a.split()) != "".join(b.split()):
        return None
    if a.replace("\r\n", "\n") == b.replace("\r\n", "\n"):
        return "line ends: CRLF on one side, LF on the other"
    if a.replace("\u00a0", " ") == b.replace("\u00a0", " "):
        return "a no-break space on one side, a space on the other"
    if re.sub(r"[ \t]+(?=\n|$)", "", a) == re.sub(r"[ \t]+(?=\n|$)", "", b):
        return "spaces at the end of a line on one side only"
    if re.sub(r"\n+", "\n", a) == re.sub(r"\n+", "\n", b) or a.rstrip("\n") == b.rstrip("\n"):
        return "another number of line breaks"
    return "the same text with other spaces or line breaks"


def form(a: str, b: str) -> str | None:
    """Return what to say where both show the same characters in another Unicode form, or with invisible ones between."""
    if unicodedata.normalize("NFC", a) == unicodedata.normalize("NFC", b):
        return "the same characters composed (NFC) on one side and decomposed (NFD) on the other"
    if _INVISIBLE.sub("", a) == _INVISIBLE.sub("", b):
        found = next(character for character in a + b if _INVISIBLE.match(character))
        return f"an invisible character, U+{ord(found):04X} {unicodedata.name(found, '').lower()}, on one side only"
    if unicodedata.normalize("NFKC", a.translate(_QUOTES)) == unicodedata.normalize("NFKC", b.translate(_QUOTES)):
        return "typographic or compatibility characters on one side, plain ones on the other"
    return None


def same_json(a: str, b: str, at: int) -> str | None:
    """Return what to say where both texts hold JSON over character `at`, before which they are alike, that means the same."""
    for x, y in [(a, b), *_embedded(a, b, at)]:
        try:
            ours, theirs = json.loads(x), json.loads(y)
        except (ValueError, RecursionError):
            continue
        if isinstance(ours, dict | list) and x != y and equal_form(ours) == equal_form(theirs):
            spelling = (
                "with other spacing or escapes" if json.dumps(ours) == json.dumps(theirs) else "in another order or spelling"
            )
            return f"JSON that means the same {spelling}"
    return None


def changing(a: str, b: str, at: int, *, numbers: bool) -> Verdict | None:
    """Return a cause where values that change by themselves are all of the difference, which is at character `at`: times, then
    ids, then counters; any number too where `numbers` says that none belongs there."""
    families = [(Cause.TIME, "a time", _TIMES), (Cause.ID, "an id", _IDS), (Cause.ID, "a counter", _COUNTERS)]
    if numbers:
        families.append((Cause.ID, "a number", _NUMBERS))
    for n, (cause, word, pattern) in enumerate(families):
        left, right = a, b
        for _, _, known in families[: n + 1]:
            left, right = known.sub("\0", left), known.sub("\0", right)
        if left != right:
            continue
        for known_cause, known_word, known in families[: n + 1]:  # the one that the first difference stands in
            x, y = _value_at(a, known, at), _value_at(b, known, at)
            if x is not None and y is not None and x != y:
                return Verdict(known_cause, f"{known_word}: {told(x)} in A, {told(y)} in B")
        return Verdict(
            cause, f"{word} among others: {told(_value_at(a, pattern, at))} in A, {told(_value_at(b, pattern, at))} in B"
        )
    return None


def forms(text: str) -> dict[Cause, str]:
    """Return `text` without what each cause alone would change, for the causes that have something to take out: two texts
    part by that cause if this is equal. In the order in which they are asked."""
    found = {Cause.HEADER: _without_headers(text) if _HEADER.search(text) else text}
    try:
        value = json.loads(text) if text[:1] in "{[" else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict | list):
        found[Cause.JSON] = equal_form(value)
    found[Cause.WHITESPACE] = "".join(text.split())
    found[Cause.UNICODE] = unicodedata.normalize("NFKC", _INVISIBLE.sub("", text).translate(_QUOTES))
    found[Cause.TIME] = masked(text, Cause.TIME)
    found[Cause.ID] = masked(text, Cause.ID)
    return found


def masked(text: str, cause: Cause) -> str:
    """Return `text` with every time taken out, or with `Cause.ID` every time, id and counter."""
    for pattern in (_TIMES,) if cause is Cause.TIME else (_TIMES, _IDS, _COUNTERS):
        text = pattern.sub("\0", text)
    return text


def plain(text: str, cause: Cause) -> str:
    """Return `text` as it would be sent with the fix for whitespace, another Unicode form, or a client's header applied."""
    if cause is Cause.HEADER:
        return re.sub(r"\n{2,}", "\n", _HEADER.sub("", text)).lstrip("\n") if _HEADER.search(text) else text
    if cause is Cause.UNICODE:
        return unicodedata.normalize("NFC", _INVISIBLE.sub("", text).translate(_QUOTES))
    lines = (line.rstrip() for line in text.replace("\r\n", "\n").replace("\u00a0", " ").split("\n"))
    return re.sub(r"[ \t]+", " ", re.sub(r"\n{2,}", "\n", "\n".join(lines))).strip()


def parsed_calls(value: object) -> object:
    """Return tool calls with arguments that are still text taken apart."""
    if isinstance(value, list):
        return [parsed_calls(item) for item in value]
    if not isinstance(value, dict):
        return value
    parsed = {key: parsed_calls(item) for key, item in value.items()}
    arguments = parsed.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed["arguments"] = json.loads(arguments)
        except (ValueError, RecursionError):
            return parsed
    return parsed


def _without_headers(text: str) -> str:
    return "".join(_HEADER.sub("", text).split("\n"))


def _embedded(a: str, b: str, at: int) -> list[tuple[str, str]]:
    """Return JSON values of both texts that begin at one place before the difference and reach over it, the longest first."""
    decoder, found = json.JSONDecoder(), []
    for match in list(re.finditer(r"[{\[]", a[: at + 1]))[:50]:
        begin = match.start()
        try:
            ends = [decoder.raw_decode(text, begin)[1] for text in (a, b)]
        except (ValueError, RecursionError):
            continue
        if min(ends) > at:
            found.append((a[begin : ends[0]], b[begin : ends[1]]))
    return found


def _value_at(text: str, pattern: re.Pattern[str], at: int) -> str | None:
    return next((match.group() for match in pattern.finditer(text) if match.start() <= at <= match.end()), None)
