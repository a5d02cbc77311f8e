"""Pairs of requests of which it is known why they part, and where: the labels that `diagnose` is held against.

Each maker changes one thing in a coding agent's request, by a seeded choice of place and value. `offset` is the first
character that differs in the value at `path`; None where the difference is not within one value.
"""

from __future__ import annotations

import copy
import json
import random
import unicodedata
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

from diagnose.families import AGENT
from headstart.diagnose.causes import Cause
from headstart.render import Renderer

Body = dict[str, Any]


@dataclass(frozen=True)
class Pair:
    """`cause` is that of the first difference, None where nothing differs, and `also` of others behind it. `path` is what the
    reported path must begin with. `only` and `without` name families, or "as sent"."""

    name: str
    a: Any
    b: Any
    cause: Cause | None
    path: str = ""
    offset: int | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    also: tuple[Cause, ...] = ()


TOOLS = [{"type": "function", "function": tool} for tool in json.loads((AGENT / "tools.json").read_text())[:4]]
SYSTEM = (AGENT / "system.md").read_text()[:900].replace("\n\n", "\n").strip()
LINES = [line for line in (AGENT / "handbook.md").read_text().splitlines() if len(line) > 60]
RESULT = {"tag": "TB1-GBX-TEMP", "value": 71.5, "unit": "°C", "quality": 1, "note": "café naïve", "path": "a/b"}


def body() -> Body:
    """A conversation of an agent: two questions, a tool call and its result, an answer."""
    call = {"tag": "TB1-GBX-TEMP", "max_age_s": 60, "why": "shift change"}
    return {
        "model": "any",
        "messages": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": f"Is gearbox one too warm? From the handbook: {LINES[0]}"},
            {
                "role": "assistant",
                "content": "I read the sensor first, then I compare.",
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "read_sensor", "arguments": json.dumps(call)}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": json.dumps(RESULT, ensure_ascii=False)},
            {"role": "assistant", "content": f"It is within limits, as the café of section two says. {LINES[1]}"},
            {"role": "user", "content": f"And what does this mean for the next tide? {LINES[2]}"},
        ],
        "tools": copy.deepcopy(TOOLS),
    }


def pairs(seed: int) -> Iterator[Pair]:
    """Yield pairs over all causes; another seed gives other places and values."""
    r = random.Random(seed)
    for make in _MAKERS:
        yield from make(r)


def _alike(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _text_pair(name: str, cause: Cause, at: int, a: str, b: str, **more: Any) -> Pair:
    left, right = body(), body()
    left["messages"][at]["content"], right["messages"][at]["content"] = a, b
    return Pair(name, left, right, cause, f"messages[{at}].content", _alike(a, b), **more)


def _at_word(text: str, r: random.Random) -> int:
    """A place behind a space, well inside the text."""
    places = [
        i + 1 for i, character in enumerate(text) if character == " " and 20 < i < len(text) - 20 and text[i + 1].isalpha()
    ]
    return r.choice(places)


def _put(text: str, place: int, what: str) -> str:
    return f"{text[:place]}{what} {text[place:]}"


def times(r: random.Random) -> Iterator[Pair]:
    day, hour, minute = r.randint(10, 27), r.randint(10, 22), r.randint(10, 58)
    for a, b in (
        (f"2026-11-{day}T{hour}:{minute}:00Z", f"2026-11-{day}T{hour}:{minute}:07Z"),
        (f"2026-11-{day} {hour}:{minute}", f"2026-11-{day + 1} {hour - 1}:{minute}"),
        (f"2026-11-{day}", f"2026-12-{day + 1}"),
        (f"Nov {day}, 2026", f"Nov {day + 1}, 2026"),
        (f"{day} November 2026", f"{day} December 2026"),
        (f"Monday {hour}:{minute}", f"Tuesday {hour}:{minute + 1}"),
        (f"{hour % 12 + 1}:{minute} PM", f"{hour % 12 + 1}:{minute + 1} PM"),
        (f"{1790000000 + day * 997}", f"{1790000000 + day * 997 + minute}"),
        (f"11/{day}/2026", f"11/{day + 1}/2026"),
    ):
        place = _at_word(SYSTEM, r)
        at = r.choice([0, 0, 1, 4])
        text = body()["messages"][at]["content"]
        place = _at_word(text, r)
        yield _text_pair(f"time {a}", Cause.TIME, at, _put(text, place, f"(now {a})"), _put(text, place, f"(now {b})"))


def ids(r: random.Random) -> Iterator[Pair]:
    def fresh() -> uuid.UUID:
        return uuid.UUID(int=r.getrandbits(128), version=4)

    def digits(n: int) -> str:
        return "".join(r.choice("0123456789abcdef") for _ in range(n - 2)) + r.choice("0123") + r.choice("abcd")

    for a, b in (
        (f"session {fresh()}", f"session {fresh()}"),
        (f"trace {digits(16)}", f"trace {digits(16)}"),
        (f"commit {digits(10)}", f"commit {digits(10)}"),
        (f"req_{digits(12)}", f"req_{digits(12)}"),
        (f"request #{r.randint(10, 99)}", f"request #{r.randint(100, 999)}"),
        (f"turn {r.randint(2, 5)}", f"turn {r.randint(6, 9)}"),
        (f"pid={r.randint(1000, 4000)}", f"pid={r.randint(5000, 9000)}"),
        (f"{r.randint(100, 400)} tokens left", f"{r.randint(500, 900)} tokens left"),
    ):
        place = _at_word(SYSTEM, r)
        yield _text_pair(f"id {a}", Cause.ID, 0, _put(SYSTEM, place, f"[{a}]"), _put(SYSTEM, place, f"[{b}]"))


def headers(r: random.Random) -> Iterator[Pair]:
    for _ in range(3):
        a, b = (f"x-anthropic-billing-header: cc_version=2.1; cch={r.randrange(16**5):05x};\n" for _ in range(2))
        yield _text_pair("header changed", Cause.HEADER, 0, a + SYSTEM, b + SYSTEM)
    yield _text_pair("header gone", Cause.HEADER, 0, a + SYSTEM, SYSTEM)
    yield _text_pair("header new", Cause.HEADER, 0, SYSTEM, b + SYSTEM)


def spaces(r: random.Random) -> Iterator[Pair]:
    at = r.choice([1, 4, 5])
    text = body()["messages"][at]["content"]
    lined = f"One.\nTwo.\nThree.\nFour. {text}"
    for name, a, b in (
        ("two spaces", text, _double(text, r)),
        ("no-break space", text, _instead(text, " ", "\u00a0", r)),
        ("line end", lined, lined.replace("\n", "\r\n")),
        ("trailing space", lined, lined.replace("\n", " \n", 1)),
        ("blank line", lined, lined.replace("\n", "\n\n", 1)),
        ("tab", text, _instead(text, " ", "\t", r)),
        ("space for a line", text, _instead(text, " ", "\n", r)),
    ):
        yield _text_pair(f"whitespace {name}", Cause.WHITESPACE, at, a, b)


def _double(text: str, r: random.Random) -> str:
    place = _at_word(text, r)
    return f"{text[:place]} {text[place:]}"


def _instead(text: str, old: str, new: str, r: random.Random) -> str:
    place = _at_word(text, r) - 1
    assert text[place] == old
    return text[:place] + new + text[place + 1 :]


def unicode_forms(r: random.Random) -> Iterator[Pair]:
    text = body()["messages"][4]["content"]
    for name, a, b in (
        ("decomposed", text, unicodedata.normalize("NFD", text)),
        ("zero width", text, _instead_after(text, "\u200b", r)),
        ("byte order mark", text, _instead_after(text, "\ufeff", r)),
        ("soft hyphen", text, _instead_after(text, "\u00ad", r)),
        ("quotes", text + " It's said.", text + " It’s said."),
        ("ellipsis", text + " And so on... then.", text + " And so on… then."),
        ("full width", text + " Unit 12A here.", text + " Unit １２Ａ here."),
    ):
        yield _text_pair(f"unicode {name}", Cause.UNICODE, 4, a, b)


def _instead_after(text: str, what: str, r: random.Random) -> str:
    place = _at_word(text, r)
    return text[:place] + what + text[place:]


def rewritten(r: random.Random) -> Iterator[Pair]:
    result = json.dumps(RESULT, ensure_ascii=False)
    turned = list(RESULT.items())
    while turned == list(RESULT.items()):
        r.shuffle(turned)
    for name, text in (
        ("keys", json.dumps(dict(turned), ensure_ascii=False)),
        ("spacing", json.dumps(RESULT, ensure_ascii=False, separators=(",", ":"))),
        ("indent", json.dumps(RESULT, ensure_ascii=False, indent=2)),
        ("escapes", json.dumps(RESULT)),
        ("numbers", result.replace('"quality": 1', '"quality": 1.0')),
        ("slash", result.replace("a/b", "a\\/b")),
    ):
        yield _text_pair(f"json {name}", Cause.JSON, 3, result, text)
        yield _text_pair(
            f"json inside {name}", Cause.JSON, 3, f"Result of the call: {result} done", f"Result of the call: {text} done"
        )
    left, right = body(), body()
    function = right["messages"][2]["tool_calls"][0]["function"]
    arguments = list(json.loads(function["arguments"]).items())
    function["arguments"] = json.dumps(dict(arguments[::-1]))
    yield Pair("arguments reordered", left, right, Cause.JSON, "messages[2].tool_calls[0]")
    right = copy.deepcopy(left)
    function = right["messages"][2]["tool_calls"][0]["function"]
    function["arguments"] = function["arguments"].replace(": ", ":")
    yield Pair("arguments spaced", left, right, Cause.JSON, "messages[2].tool_calls[0]", only=("as sent",))


def tools(r: random.Random) -> Iterator[Pair]:
    def with_tools(change: Callable[[list[Any]], list[Any]]) -> Body:
        changed = body()
        changed["tools"] = change(changed["tools"])
        return changed

    order = list(range(len(TOOLS)))
    while order == sorted(order):
        r.shuffle(order)
    first = next(i for i, n in enumerate(order) if i != n)
    yield Pair(
        "tools shuffled", body(), with_tools(lambda ts: [ts[n] for n in order]), Cause.TOOLS_REORDERED, f"tools[{first}]"
    )
    yield Pair("tools reversed", body(), with_tools(lambda ts: ts[::-1]), Cause.TOOLS_REORDERED, "tools[0]")

    def schema(change: Callable[[Any], Any]) -> Callable[[list[Any]], list[Any]]:
        def edit(ts: list[Any]) -> list[Any]:
            at = r.choice([n for n, tool in enumerate(ts) if len(tool["function"]["parameters"]["properties"]) > 1])
            ts[at]["function"] = change(ts[at]["function"])
            return ts

        return edit

    def turn_properties(f: Any) -> Any:
        f["parameters"]["properties"] = dict(reversed(f["parameters"]["properties"].items()))
        return f

    yield Pair("schema keys", body(), with_tools(schema(lambda f: dict(sorted(f.items())))), Cause.TOOLS_RESERIALISED, "tools[")
    yield Pair("schema properties", body(), with_tools(schema(turn_properties)), Cause.TOOLS_RESERIALISED, "tools[")
    required = with_tools(lambda ts: ts)
    required["tools"][1]["function"]["parameters"]["required"].reverse()
    yield Pair("schema required", body(), required, Cause.TOOLS_RESERIALISED, "tools[1].function.parameters.required")
    number = with_tools(lambda ts: ts)
    number["tools"][0]["function"]["parameters"]["properties"]["max_age_s"]["default"] = 900.0
    yield Pair(
        "schema number", body(), number, Cause.TOOLS_RESERIALISED, "tools[0].function.parameters.properties.max_age_s.default"
    )
    yield Pair("tool gone", body(), with_tools(lambda ts: ts[:1] + ts[2:]), Cause.TOOLS_CHANGED, "tools")
    yield Pair("tool new", with_tools(lambda ts: ts[:2] + ts[3:]), body(), Cause.TOOLS_CHANGED, "tools")
    described = with_tools(lambda ts: ts)
    old = described["tools"][2]["function"]["description"]
    described["tools"][2]["function"]["description"] = new = old.replace("newest", "oldest")
    yield Pair("tool described", body(), described, Cause.TOOLS_CHANGED, "tools[2].function.description", _alike(old, new))
    dated = [with_tools(lambda ts: ts) for _ in range(2)]
    for n, one in enumerate(dated):
        one["tools"][1]["function"]["description"] += f" Data up to 2026-11-{20 + n}."
    offset = len(TOOLS[1]["function"]["description"]) + len(" Data up to 2026-11-2")
    yield Pair("tool dated", *dated, Cause.TIME, "tools[1].function.description", offset)


def histories(r: random.Random) -> Iterator[Pair]:
    left = body()
    for at in (1, 4):
        text = left["messages"][at]["content"]
        words = text.split(" ")
        place = r.randrange(3, len(words) - 3)
        words[place] = "Quite" if words[place] != "Quite" else "Rather"
        yield _text_pair(f"edited {at}", Cause.EDITED, at, text, " ".join(words))
    short = "[old tool result cleared]"
    yield _text_pair("result cleared", Cause.EDITED, 3, json.dumps(RESULT, ensure_ascii=False), short)
    right = body()
    del right["messages"][1:5]
    yield Pair("truncated by four", left, right, Cause.TRUNCATED, "messages[1]")
    longer = body()
    longer["messages"][1:1] = [{"role": "user", "content": "First, hello."}, {"role": "assistant", "content": "Hello!"}]
    yield Pair("truncated by two", longer, body(), Cause.TRUNCATED, "messages[1]")
    right = body()
    right["messages"][1:5] = [{"role": "user", "content": "Summary of the conversation so far: gearbox one is within limits."}]
    yield Pair("summarised in one", left, right, Cause.SUMMARISED, "messages[1]")
    right = body()
    right["messages"][1:] = [{"role": "user", "content": "Earlier messages were compacted: all is well. Go on."}]
    yield Pair("summarised to the end", left, right, Cause.SUMMARISED, "messages[1]")
    right = body()
    right["messages"].insert(1, {"role": "user", "content": "Note that it rains."})
    yield Pair("put in", left, right, Cause.EDITED, "messages[1]")


def reasonings(r: random.Random) -> Iterator[Pair]:
    thought = "<think>\nThe limit is 80, so this is fine.\n</think>\n"
    text = body()["messages"][4]["content"]
    yield _text_pair("think removed", Cause.REASONING, 4, thought + text, text, without=("unigram",))
    left, right = body(), body()
    left["messages"][4]["reasoning_content"] = "The limit is 80, so this is fine."
    yield Pair("reasoning removed", left, right, Cause.REASONING, "messages[4]", only=("unigram", "as sent"))
    yield Pair("reasoning added", right, left, Cause.REASONING, "messages[4]", only=("unigram", "as sent"))
    ahead = body()
    ahead["chat_template_kwargs"] = {"enable_thinking": False}
    after = copy.deepcopy(ahead)
    after["messages"] += [{"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "Good."}]
    yield Pair("think opened and left out", ahead, after, Cause.REASONING, "", only=("unigram",))


def systems(r: random.Random) -> Iterator[Pair]:
    for _ in range(3):
        words = SYSTEM.split(" ")
        words[r.randrange(5, len(words) - 5)] = "elsewhere"
        yield _text_pair("system word", Cause.SYSTEM, 0, SYSTEM, " ".join(words))
    place = _at_word(SYSTEM, r)
    more = _put(SYSTEM, place, "Never guess, whatever they say.")
    yield _text_pair("system longer", Cause.SYSTEM, 0, SYSTEM, more)


def images(r: random.Random) -> Iterator[Pair]:
    def with_image(data: str) -> Body:
        one = body()
        parts = [{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}]
        one["messages"][1]["content"] = [*parts, {"type": "text", "text": LINES[3]}]
        return one

    for _ in range(2):
        a, b = (f"{r.getrandbits(200):x}" for _ in range(2))
        yield Pair("image", with_image(a), with_image(b), Cause.IMAGE, "messages[1].content[1]")


def namespaces(r: random.Random) -> Iterator[Pair]:
    def with_field(**fields: Any) -> Body:
        return {**body(), **fields}

    yield Pair("model", with_field(model="one"), with_field(model="two"), Cause.MODEL, "model")
    yield Pair("adapter", with_field(lora="one"), body(), Cause.ADAPTER, "lora")
    yield Pair("salt", with_field(cache_salt="x"), with_field(cache_salt="y"), Cause.SALT, "cache_salt")
    yield Pair("tenant", with_field(user_id="x"), body(), Cause.SALT, "user_id")
    yield Pair("key", with_field(prompt_cache_key="x"), body(), Cause.SALT, "prompt_cache_key", only=("as sent",))


def templates(r: random.Random) -> Iterator[Pair]:
    left, right = body(), body()
    right["chat_template_kwargs"] = {"enable_thinking": False}
    yield Pair("template argument", left, right, Cause.TEMPLATE, "", only=("unigram",))
    left, right = (
        {**body(), "chat_template": f"{mark}{{% for m in messages %}}{{{{ m.content }}}}\n{{% endfor %}}"} for mark in "ab"
    )
    yield Pair("template text", left, right, Cause.TEMPLATE, "", without=("as sent",))
    left, right = body(), body()
    right["messages"] += [{"role": "assistant", "content": "Nothing."}, {"role": "user", "content": "Good."}]
    moved = "{% for m in messages %}{% if loop.last %}{{ tools | tojson }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    moved += "<assistant>"
    left["chat_template"] = right["chat_template"] = moved
    yield Pair("template moves tools", left, right, Cause.TEMPLATE, "", without=("as sent",))


def shapes(r: random.Random) -> Iterator[Pair]:
    for at in (0, 1, 5):
        left, right = body(), body()
        text = left["messages"][at]["content"]
        right["messages"][at]["content"] = [{"type": "text", "text": text}]
        yield Pair(f"shape {at}", left, right, Cause.SHAPE, f"messages[{at}].content", only=("as sent",))
        yield Pair(f"shape alike {at}", left, right, None, without=("as sent",))


def others(r: random.Random) -> Iterator[Pair]:
    text = body()["messages"][5]["content"]
    yield _text_pair("other question", Cause.OTHER, 5, text, f"Who is on shift, and {text[:30]}?")
    yield _text_pair("other ending", Cause.OTHER, 5, text, f"{text[:40]} nobody knows this one yet")
    a, b = f"{LINES[4]} Then open the gate.", f"{LINES[4]} Then leave the gate."
    offset = len(LINES[4]) + len(" Then ")
    yield Pair("other completion", {"prompt": a}, {"prompt": b}, Cause.OTHER, "prompt", offset)


def coding(r: random.Random) -> Iterator[Pair]:
    """What coding agents do between two requests."""
    hint = "<system-reminder>The date is 2026-11-30</system-reminder>"
    code = "def f(x):\n    return x + 1\n" * 10

    def agent(
        *, date: str = "2026-11-29", git: str = "clean", commit: str = "a1b2c3d", user: str = "Fix bug 12.", result: str = code
    ) -> Body:
        about = (
            f"You are a coding tool.\n<env>\nToday's date: {date}\nGit status: {git}\nLast commit: {commit} Fix it\n</env>\n"
        )
        one = body()
        one["messages"][0]["content"] = about + "Rules follow, and they are long. " * 10
        one["messages"][1]["content"] = user
        one["messages"][3]["content"] = result
        return one

    def changed(change: Callable[[list[Any]], Any]) -> Body:
        one = agent()
        change(one["messages"])
        return one

    yield Pair("coding date", agent(), agent(date="2026-11-30"), Cause.TIME, "messages[0].content")
    yield Pair("coding git", agent(), agent(git="M src/a.py"), Cause.SYSTEM, "messages[0].content")
    yield Pair("coding commit", agent(), agent(commit="d4e5f6a"), Cause.ID, "messages[0].content")
    yield Pair(
        "coding both", agent(), agent(date="2026-11-30", commit="d4e5f6a"), Cause.TIME, "messages[0].content", also=(Cause.ID,)
    )
    yield Pair("coding bug", agent(), agent(user="Fix bug 13."), Cause.EDITED, "messages[1].content")
    yield Pair("coding names", agent(user="See user_name."), agent(user="See user_mail."), Cause.EDITED, "messages[1].content")
    yield Pair("coding tabs", agent(), agent(result=code.replace("    ", "\t")), Cause.WHITESPACE, "messages[3].content")
    yield Pair("coding cut", agent(), agent(result=code[:100] + "\n[truncated]"), Cause.EDITED, "messages[3].content")
    yield Pair(
        "coding role",
        agent(),
        changed(lambda ms: ms[4].update(role="user")),
        Cause.EDITED,
        "messages[4].role",
        without=("byte-fallback",),
    )
    yield Pair("coding pair dropped", agent(), changed(lambda ms: ms.__delitem__(slice(2, 4))), Cause.TRUNCATED, "messages[2]")
    yield Pair(
        "coding without system",
        agent(),
        changed(lambda ms: ms.pop(0)),
        Cause.SYSTEM,
        "messages[0]",
        also=(Cause.TRUNCATED, Cause.OTHER),
    )
    more = changed(lambda ms: ms[5].update(content=f"{ms[5]['content']}\n{hint}"))
    yield Pair("coding hint", agent(), more, Cause.OTHER, "messages[5].content")


def alike(r: random.Random) -> Iterator[Pair]:
    yield Pair("same", body(), body(), None)
    turned = dict(reversed(body().items()))
    turned["messages"][0]["cache_control"] = {"type": "ephemeral"}
    turned.update(temperature=0.5, stream=True, max_tokens=9)
    yield Pair("same, other order of fields", body(), turned, None)
    grown = body()
    grown["messages"] += [{"role": "assistant", "content": "It means nothing."}, {"role": "user", "content": "Good."}]
    yield Pair("grown", body(), grown, None)
    yield Pair("short", {"prompt": "Hello."}, {"prompt": "Hello. And more"}, None)
    yield Pair("cut", {"prompt": SYSTEM}, {"prompt": SYSTEM[:400]}, None, without=("byte-level", "byte-fallback", "unigram"))


_MAKERS = (
    times, ids, headers, spaces, unicode_forms, rewritten, tools, histories, reasonings, systems, images, namespaces, templates,
    shapes, others, coding, alike,
)  # fmt: skip


def pairs_of_ids(renderer: Renderer) -> Iterator[Pair]:
    """Yield pairs of token ids as tokenizers and models make them: a beginning too many or too few, a text in other tokens."""
    for n, text in enumerate((SYSTEM, LINES[0], f"{LINES[1]} {LINES[2]}")):
        ids = renderer.completion(text)
        if ids[0] == renderer.begin_id:
            yield Pair(f"begins twice {n}", ids, [ids[0], *ids], Cause.BOS)
            yield Pair(f"begins not {n}", ids, ids[1:], Cause.BOS)
        splits = ((at, pair) for at in range(4, len(ids)) if (pair := split_of(renderer, ids[at])) is not None)
        for at, (one, two) in islice(splits, 3):
            yield Pair(f"split {n} at {at}", ids, [*ids[:at], one, two, *ids[at + 1 :]], Cause.SAME_TEXT)
        yield Pair(f"the same ids {n}", ids, ids, None)


def split_of(renderer: Renderer, token: int) -> tuple[int, int] | None:
    """Return two tokens that are one's text."""
    text, singles = renderer.token_bytes(token), _tokens(renderer)
    cuts = ((text[:n], text[n:]) for n in range(1, len(text)))
    return next(((singles[a], singles[b]) for a, b in cuts if a in singles and b in singles), None)


@cache
def _tokens(renderer: Renderer) -> dict[bytes, int]:
    return {renderer.token_bytes(one): one for one in range(renderer.vocabulary)}
