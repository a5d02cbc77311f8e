"""Transcripts of coding agents as the requests that their models got. Pure.

A transcript has what was said, each once; the request of a turn is everything said before it. What the agent keeps to itself,
its system prompt and tools, is not in it: token counts are lower than what a provider counts by as much.

    Claude Code   a line for every content block, chained by parentUuid; sub-agents on side chains
    Codex         rollout: response items in order, token counts between them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from headstart.diagnose.entries import Entry, Usage, time_of, usage_of
from headstart.diagnose.sources import Source

_CLAUDE = {"user", "assistant", "system", "summary", "attachment", "progress", "file-history-snapshot", "queue-operation"}
_CODEX = {"session_meta", "response_item", "event_msg", "turn_context", "compacted"}
_MADE = {"function_call", "custom_tool_call", "local_shell_call", "reasoning", "web_search_call"}


def is_claude(line: object) -> bool:
    return (
        isinstance(line, Mapping)
        and str(line.get("type")) in _CLAUDE
        and ("sessionId" in line or "leafUuid" in line or "messageId" in line)
        and "messages" not in line
    )


def is_codex(line: object) -> bool:
    return isinstance(line, Mapping) and str(line.get("type")) in _CODEX and isinstance(line.get("payload"), Mapping)


def claude_requests(name: str, lines: Sequence[Any], *, only: int | None = None) -> Iterator[Entry]:
    """Yield the request of every answer in a Claude Code transcript, or of the one with the number `only`, from 0."""
    said = [line for line in lines if isinstance(line, Mapping) and isinstance(line.get("message"), Mapping)]
    parents = {line["uuid"]: line for line in lines if isinstance(line, Mapping) and isinstance(line.get("uuid"), str)}
    done: set[str] = set()
    turns: dict[str, list[Mapping[str, Any]]] = {}
    for line in said:
        if line.get("type") == "assistant":
            turns.setdefault(_turn(line), []).append(line)
    for n, line in enumerate(said):
        turn = _turn(line)
        if line.get("type") != "assistant" or turn in done:
            continue
        done.add(turn)
        if only is not None and only != len(done) - 1:
            continue
        before = _before(line, parents) if line.get("uuid") else said[:n]
        messages = _anthropic_messages(before)
        message = line["message"]
        usage = next((told for one in reversed(turns[turn]) if (told := usage_of(one["message"].get("usage")))), None)
        side = ":side" if line.get("isSidechain") else ""
        session = str(line["sessionId"]) + side if line.get("sessionId") else None
        body = {"model": message.get("model"), "anthropic_version": "transcript", "messages": messages}
        yield Entry(
            id=str(message.get("id") or line.get("requestId") or f"{name}:{n + 1}"),
            source=Source(f"{name}:{n + 1}", body=body),
            at=time_of(line.get("timestamp")),
            session=session,
            tags=("sub-agent",) if side else (),
            usage=usage or Usage(),
        )


def _turn(line: Mapping[str, Any]) -> str:
    message = line["message"]
    return str(message.get("id") or line.get("requestId") or line.get("uuid"))


def _before(line: Mapping[str, Any], parents: Mapping[Any, Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return what was said before a line, oldest first, by the chain of parents."""
    found: list[Mapping[str, Any]] = []
    seen: set[Any] = set()
    at = line.get("parentUuid")
    while isinstance(at, str) and at in parents and at not in seen:
        seen.add(at)
        found.append(parents[at])
        at = parents[at].get("parentUuid") or parents[at].get("logicalParentUuid")
    return [one for one in reversed(found) if isinstance(one.get("message"), Mapping)]


def _anthropic_messages(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of alternating roles: blocks of one turn stand on lines of their own."""
    messages: list[dict[str, Any]] = []
    for line in lines:
        role, content = line["message"].get("role", line.get("type")), line["message"].get("content")
        if role not in ("user", "assistant") or content is None:
            continue
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            continue
        if messages and messages[-1]["role"] == role:
            messages[-1]["content"] = [*messages[-1]["content"], *blocks]
        else:
            messages.append({"role": role, "content": list(blocks)})
    return messages


def codex_requests(name: str, lines: Sequence[Any], *, only: int | None = None) -> Iterator[Entry]:
    """Yield the request of every answer in a Codex rollout, or of the one with the number `only`, from 0."""
    requests = _codex_requests(name, lines)
    yield from requests if only is None else islice(requests, only, only + 1)


def _codex_requests(name: str, lines: Sequence[Any]) -> Iterator[Entry]:
    items: list[tuple[Any, bool]] = []  # and whether the model made it
    session: str | None = None
    instructions, model = None, None
    pending: dict[str, Any] | None = None

    def entry(asked: dict[str, Any], usage: Usage) -> Entry:
        body = {"model": model, "instructions": instructions or "", "input": asked["input"]}
        where = f"{name}:{asked['line']}"
        return Entry(id=where, source=Source(where, body=body), at=asked["at"], session=session, usage=usage)

    for n, line in enumerate(lines, start=1):
        if not is_codex(line):
            continue
        kind, payload = line["type"], line["payload"]
        if kind == "session_meta":
            session = str(payload.get("id") or "") or None
            base = payload.get("base_instructions")
            instructions = base.get("text") if isinstance(base, Mapping) else payload.get("instructions")
        elif kind == "turn_context":
            model = payload.get("model") or model
        elif kind == "compacted":
            replaced = payload.get("replacement_history")
            summary = {"type": "message", "role": "user", "content": str(payload.get("message", ""))}
            items = [(item, False) for item in (replaced if isinstance(replaced, list) else [summary])]
        elif kind == "event_msg" and payload.get("type") == "token_count" and pending is not None:
            info = payload.get("info")
            last = info.get("last_token_usage") if isinstance(info, Mapping) else None
            if isinstance(last, Mapping):
                cached = last.get("cached_input_tokens")
                usage = usage_of(last) or Usage()
                yield entry(pending, Usage(usage.prompt_tokens, cached if isinstance(cached, int) else None))
                pending = None
        elif kind == "response_item":
            made = str(payload.get("type")) in _MADE or payload.get("role") == "assistant"
            if made and (not items or not items[-1][1]):
                if pending is not None:
                    yield entry(pending, Usage())
                asked = [item for item, _ in items]
                pending = {"input": asked, "line": n, "at": time_of(line.get("timestamp"))} if asked else None
            items.append((_item(payload), made))
    if pending is not None:
        yield entry(pending, Usage())


def _item(payload: Mapping[str, Any]) -> dict[str, Any]:
    """A response item in the form of a request's input; calls of a kind of their own are functions."""
    kind = payload.get("type")
    if kind == "custom_tool_call":
        call = {"name": payload.get("name"), "arguments": {"input": payload.get("input")}}
        return {"type": "function_call", "call_id": payload.get("call_id"), **call}
    if kind == "local_shell_call":
        return {
            "type": "function_call",
            "call_id": payload.get("call_id"),
            "name": "shell",
            "arguments": payload.get("action") or {},
        }
    if kind == "web_search_call":
        return {"type": "function_call", "call_id": payload.get("id"), "name": kind, "arguments": payload.get("action") or {}}
    output = payload.get("output")
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = output.get("content") if isinstance(output, Mapping) else output
        said = text if isinstance(text, str | list) else str(text)
        return {"type": "function_call_output", "call_id": payload.get("call_id"), "output": said}
    return dict(payload)
