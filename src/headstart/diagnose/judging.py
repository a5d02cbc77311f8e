"""What made two prompts part: one cause for each difference, with what speaks for it. Pure.

A cause is named only where it explains the whole of a difference: a time is the cause where both texts are the same once
every time in them is taken out. What nothing explains is plain other text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from headstart.diagnose.causes import Cause, Verdict, told
from headstart.diagnose.differences import Difference, alike, at_tools, index_of, role_of
from headstart.diagnose.placing import Place, Side
from headstart.diagnose.requests import Conversation, equal_form
from headstart.diagnose.texts import changing, form, header, parsed_calls, same_json, spaces

_AROUND = 80  # characters before and behind a difference in which a value may begin or end
_LONGEST = 1 << 14  # characters of a difference that may be nothing but times and ids; texts part and meet again between them


def verdict_of(difference: Difference, *, begin_id: int | None) -> Verdict:
    """Return the cause of one difference and what speaks for it."""
    for judge in (_begin_or_same_text(begin_id), _image, _tools, _reasoning, _shape, _text, _template, _history):
        verdict = judge(difference)
        if verdict is not None:
            return verdict
    return Verdict(Cause.OTHER, "nothing explains the difference but another text")


class Apart(NamedTuple):
    """A field at `path` that keeps two requests from sharing anything."""

    path: str
    verdict: Verdict


def apart(a: Conversation, b: Conversation, *, exact: bool) -> Iterator[Apart]:
    """Yield what keeps the two requests from sharing anything, whatever their tokens are.

    A prompt_cache_key is a hint for routing and keeps nothing apart here, but does where it is somebody else's server."""
    if a.model and b.model and a.model != b.model:
        yield Apart("model", Verdict(Cause.MODEL, f"the model is {told(a.model)} in A and {told(b.model)} in B"))
    for cause, ours, theirs in ((Cause.ADAPTER, a.adapter, b.adapter), (Cause.SALT, a.namespace, b.namespace)):
        for name in sorted(ours.keys() | theirs.keys()):
            x, y = ours.get(name), theirs.get(name)
            if x != y and not (exact and name == "prompt_cache_key"):
                yield Apart(name, Verdict(cause, f"{name} is {told(x)} in A and {told(y)} in B"))


def _begin_or_same_text(begin_id: int | None) -> Callable[[Difference], Verdict | None]:
    def judge(d: Difference) -> Verdict | None:
        a, b = d.a.units[: d.hunk.a_end], d.b.units[: d.hunk.b_end]
        if (
            d.a.exact
            and begin_id is not None
            and d.hunk.a < 2
            and begin_id in (a.tolist() or [0])[:2] + (b.tolist() or [0])[:2]
        ):
            ours, theirs = (_leading(side.units.tolist(), begin_id) for side in (d.a, d.b))
            rest_a, rest_b = d.a.units[ours : ours + 8].tolist(), d.b.units[theirs : theirs + 8].tolist()
            if ours != theirs and (rest_a[:1] == rest_b[:1]):
                return Verdict(Cause.BOS, f"A begins with {ours} beginning-of-text tokens (id {begin_id}), B with {theirs}")
        if d.same_text:
            return Verdict(Cause.SAME_TEXT, f"the same text {told(d.a_text or d.b_text)} has other token ids")
        return None

    return judge


def _leading(ids: list[int], token: int) -> int:
    return next((n for n, one in enumerate(ids) if one != token), len(ids))


def _image(d: Difference) -> Verdict | None:
    for place in (d.a_place, d.b_place):
        if place.piece is not None and place.piece.kind == "image":
            return Verdict(Cause.IMAGE, f"the content of {place.path} is another one, by its digest")
    return None


def _tools(d: Difference) -> Verdict | None:
    ours, theirs = d.a.conversation.tools or [], d.b.conversation.tools or []
    if not (at_tools(d.a_place) or at_tools(d.b_place)) or _spelled(ours, theirs):
        return None
    forms = [[equal_form(tool) for tool in tools] for tools in (ours, theirs)]
    if forms[0] == forms[1]:
        n = next(n for n, (x, y) in enumerate(zip(ours, theirs, strict=True)) if json.dumps(x) != json.dumps(y))
        return Verdict(Cause.TOOLS_RESERIALISED, f"tools[{n}] ({_name(ours[n])}) says the same in another order or spelling")
    if sorted(forms[0]) == sorted(forms[1]):
        order = [", ".join(_name(tool) for tool in tools[:6]) for tools in (ours, theirs)]
        return Verdict(Cause.TOOLS_REORDERED, f"the same {len(ours)} tools come as {order[0]} in A and as {order[1]} in B")
    if len(ours) == len(theirs) and (verdict := _text(d)) is not None:
        return verdict
    gone = sorted({_name(tool) for tool in ours} - {_name(tool) for tool in theirs})
    new = sorted({_name(tool) for tool in theirs} - {_name(tool) for tool in ours})
    said = [f"only in {side}: {', '.join(names[:6])}" for side, names in (("A", gone), ("B", new)) if names]
    return Verdict(Cause.TOOLS_CHANGED, "; ".join(said) or f"{_name_at(d)} is described otherwise")


def _name(tool: dict[str, Any]) -> str:
    return str(tool.get("function", {}).get("name"))


def _name_at(d: Difference) -> str:
    return d.a_place.path or d.b_place.path or "a tool"


def _first_unequal(a: Conversation, b: Conversation) -> int:
    pairs = zip(a.messages, b.messages, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(len(a.messages), len(b.messages)))


_THINK = re.compile(r"<(think|thinking|reasoning)>.*?</\1>\s*", re.DOTALL)
_THOUGHT = ("reasoning_content", "reasoning", "thinking")


def _reasoning(d: Difference) -> Verdict | None:
    ours, theirs = d.a.conversation.messages, d.b.conversation.messages
    n = _first_unequal(d.a.conversation, d.b.conversation)
    if n < len(ours) and n < len(theirs):
        # Several turns may have lost theirs; this hunk is of the one that it stands in.
        at = [index_of(place) for place in (d.a_place, d.b_place)]
        for i in (*at, n):
            if i is None or i >= min(len(ours), len(theirs)) or ours[i] == theirs[i]:
                continue
            thoughts = [_thought(messages[i]) for messages in (ours, theirs)]
            if thoughts[0] != thoughts[1] and without_thought(ours[i]) == without_thought(theirs[i]):
                side, lost = ("B", thoughts[0]) if len(thoughts[0]) > len(thoughts[1]) else ("A", thoughts[1])
                return Verdict(
                    Cause.REASONING,
                    f"the {ours[i]['role']} turn messages[{i}] has {len(lost)} characters less of reasoning in {side}; "
                    "the client sends it so",
                )
        return None
    tags = [_tag_at(text or "", char) for text, char in ((d.a.text, d.a_char), (d.b.text, d.b_char))]
    tag = tags[0] or tags[1]
    if tag is None or tags[0] == tags[1]:
        return None
    return Verdict(
        Cause.REASONING,
        f"the messages are the same, but the template writes {tag!r} only in {'A' if tags[0] else 'B'}: "
        "it opens a turn with it and leaves it out of history",
    )


def _tag_at(text: str, char: int) -> str | None:
    """Return the tag of reasoning that character `char` stands in, or that begins at most some line breaks behind it."""
    begin = max(0, char - 12)
    found = re.finditer(r"</?(?:think|thinking|reasoning)>", text[begin : char + 14])
    return next((tag.group() for tag in found if begin + tag.start() <= char + 2 and begin + tag.end() > char), None)


def _thought(message: dict[str, Any]) -> str:
    said = next((str(message[name]) for name in _THOUGHT if message.get(name)), "")
    return said + "".join(match.group() for match in _THINK.finditer(str(message.get("content") or "")))


def without_thought(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message without its reasoning, however it is written."""
    kept = {key: value for key, value in message.items() if key not in _THOUGHT}
    return {**kept, "content": _THINK.sub("", str(kept.get("content") or "")).strip()}


def _shape(d: Difference) -> Verdict | None:
    n = index_of(d.a_place)
    shapes = [side.conversation.shapes.get(-1 if n is None else n) for side in (d.a, d.b)]
    if d.a.exact or n is None or None in shapes or shapes[0] == shapes[1]:
        return None
    contents = [side.conversation.messages[n].get("content") for side in (d.a, d.b)]
    if contents[0] != contents[1]:
        return None
    words = {"string": "a string", "parts": "a list of parts"}
    return Verdict(
        Cause.SHAPE, f"the content is {words[str(shapes[0])]} in A and {words[str(shapes[1])]} in B, with the same text"
    )


def _text(d: Difference) -> Verdict | None:
    """Judge by the two texts with what is around them, which is the same on both sides."""
    if d.a.text is None or d.b.text is None:
        return None
    before = d.a.text[max(0, d.a_char - _AROUND) : d.a_char]
    # No farther than both are alike: the next difference may be near.
    behind = alike(d.a.text[d.a_end : d.a_end + _AROUND], d.b.text[d.b_end : d.b_end + _AROUND])
    a = before + d.a.text[d.a_char : d.a_end + behind]
    b = before + d.b.text[d.b_char : d.b_end + behind]
    if (said := header(_lines(d.a.text, d.a_char, d.a_end), _lines(d.b.text, d.b_char, d.b_end))) is not None:
        return Verdict(Cause.HEADER, said)
    if (said := _json(d)) is not None:
        return Verdict(Cause.JSON, said)
    if (said := spaces(a, b)) is not None:
        return Verdict(Cause.WHITESPACE, said)
    if (said := form(a, b)) is not None:
        return Verdict(Cause.UNICODE, said)
    if max(d.a_end - d.a_char, d.b_end - d.b_char) > _LONGEST:
        return None
    standing = any(_is_standing(side, place) for side, place in ((d.a, d.a_place), (d.b, d.b_place)))
    return changing(a, b, len(before), numbers=standing)


def _lines(text: str, begin: int, end: int) -> str:
    """Return the whole lines that characters begin to end stand in."""
    stop = text.find("\n", end)
    return text[text.rfind("\n", 0, begin) + 1 : len(text) if stop < 0 else stop]


def _json(d: Difference) -> str | None:
    a, b = d.a_place, d.b_place
    if a.piece is not None and b.piece is not None:
        said = same_json(a.piece.text, b.piece.text, a.offset or 0)
        if said is not None:
            return said
    return "a tool call's arguments mean the same, in another order or spelling" if _equal_calls(d) else None


def _equal_calls(d: Difference) -> bool:
    """Whether the message at the difference is the same but for how the arguments of its tool calls are written."""
    near = [n for n in (index_of(d.a_place), index_of(d.b_place)) if n is not None]
    ours, theirs = d.a.conversation.messages, d.b.conversation.messages
    for n in {*near, *(n - 1 for n in near if n)}:
        if (
            n >= min(len(ours), len(theirs))
            or not ours[n].get("tool_calls")
            or (ours[n] == theirs[n] and _spelled(ours[n], theirs[n]))
        ):
            continue
        if equal_form(parsed_calls(ours[n])) == equal_form(parsed_calls(theirs[n])):
            return True
    return False


def _spelled(x: object, y: object) -> bool:
    return x is y or json.dumps(x, default=str) == json.dumps(y, default=str)


def _is_standing(side: Side, place: Place) -> bool:
    """Whether a place is in the standing part of a prompt, where a number that changes is no content."""
    piece = place.piece
    return piece is not None and (piece.where[0] == "tools" or role_of(side, place) == "system")


def _template(d: Difference) -> Verdict | None:
    a, b = d.a.conversation, d.b.conversation
    if d.a.text is None or d.b.text is None or a.prompt is not None or b.prompt is not None:
        return None
    tools = json.dumps(a.tools, default=str) == json.dumps(b.tools, default=str)
    n = _first_unequal(a, b)
    own = d.a_place.piece is None or d.b_place.piece is None
    other = sorted(name for name in a.template.keys() | b.template.keys() if a.template.get(name) != b.template.get(name))
    if other and (own or (tools and a.messages == b.messages)):
        said = (f"{name} is {told(a.template.get(name))} in A, {told(b.template.get(name))} in B" for name in other)
        return Verdict(Cause.TEMPLATE, "; ".join(said))
    if tools and a.messages == b.messages:
        return Verdict(Cause.TEMPLATE, "the same messages and tools are rendered otherwise")
    ahead = a.messages if n == len(a.messages) else b.messages if n == len(b.messages) else None
    if ahead is None or not tools:
        return None
    if any(at_tools(place) for place in (d.a_place, d.b_place)) and a.tools:
        return Verdict(Cause.TEMPLATE, "the template has moved the tools as the conversation grew")
    longer = b.messages if n == len(a.messages) else a.messages
    at = min(index_of(d.a_place) or 0, index_of(d.b_place) or 0)
    if (own and (at < n - 1 or longer[n]["role"] == "assistant")) or (not own and at < n):
        return Verdict(
            Cause.TEMPLATE, "the messages up to here are the same, but the template writes them otherwise as history"
        )
    return None


_SUMMARY = re.compile(r"(?i)\bsummar(?:y|ise|ize)|compacted|conversation so far|earlier (?:messages|turns)|previously")


def _history(d: Difference) -> Verdict | None:
    a, b = d.a.conversation.messages, d.b.conversation.messages
    i, j = index_of(d.a_place), index_of(d.b_place)
    if i is None or j is None:
        return None
    i, j = min(i, len(a) - 1), min(j, len(b) - 1)
    n = _first_unequal(d.a.conversation, d.b.conversation)
    if a[i] == b[j] and n < min(i, j, n + 2):
        i = j = n  # the message before parts in what the template shows behind it, if at all
    standing = [message["role"] in ("system", "developer") for message in (a[i], b[j])]
    if standing[0] != standing[1] and min(i, j) == 0:
        return Verdict(Cause.SYSTEM, f"there is a system prompt only in {'A' if standing[0] else 'B'}")
    if all(standing):
        return Verdict(Cause.SYSTEM, f"{d.a_place.path or d.b_place.path} has another text")
    m = min(i, j)
    if a[m] != b[m] and a[m]["role"] == b[m]["role"] and a[m + 1 : m + 3] == b[m + 1 : m + 3] != []:
        i = j = m  # one message has changed where it stands, however its text meets the other's
    else:
        verdict = _moved(d.a, i, a[i:], b[j:])
        if verdict is not None:
            return verdict
    if n == len(b) < len(a):
        return Verdict(Cause.OTHER, f"B ends before {_path(d.a, n)}, and opens an answer there")
    if i == len(a) - 1 and (a[i]["role"] == "user" or j == len(b) - 1):
        return Verdict(Cause.OTHER, "the last message of A has another text in B")
    if _SUMMARY.search(str(b[j].get("content"))[:400]) and not _SUMMARY.search(str(a[i].get("content"))[:400]):
        return Verdict(Cause.SUMMARISED, f"{_path(d.a, i)} is a summary in B")
    sizes = [len(str(message.get("content") or "")) for message in (a[i], b[j])]
    shorter = " and is shorter" if sizes[1] < 0.8 * sizes[0] else ""
    return Verdict(Cause.EDITED, f"{_path(d.a, i)}, of role {a[i]['role']}, has another text in B{shorter}")


def _moved(side: Side, i: int, a: list[dict[str, Any]], b: list[dict[str, Any]]) -> Verdict | None:
    """Judge by where the messages of A from the `i`th on, and those of B, are the same again."""
    dropped = next((n for n in range(1, len(a)) if a[n : n + 2] == b[: min(2, len(a) - n)]), None)
    if dropped is not None:
        return Verdict(Cause.TRUNCATED, f"{_messages(dropped)} from {_path(side, i)} on are gone in B")
    for n in range(1, len(a)):
        m = next((m for m in range(1, min(n, len(b))) if b[m] == a[n]), None)
        if m is not None:
            return Verdict(Cause.SUMMARISED, f"{_messages(n)} from {_path(side, i)} on have become {_messages(m)} in B")
    if len(b) < len(a) and _SUMMARY.search(str(b[0].get("content"))[:400]):
        return Verdict(Cause.SUMMARISED, f"{_messages(len(a))} from {_path(side, i)} on have become {_messages(len(b))} in B")
    if a[0] in b[1:]:
        return Verdict(Cause.EDITED, f"before {_path(side, i)} there are new in B: {_messages(b.index(a[0]))}")
    return None


def _messages(n: int) -> str:
    return "1 message" if n == 1 else f"{n} messages"


def _path(side: Side, n: int) -> str:
    path = next(piece.path for piece in side.conversation.pieces if piece.where[:2] == ("messages", n))
    return re.sub(r"\.(role|content).*$", "", path)
