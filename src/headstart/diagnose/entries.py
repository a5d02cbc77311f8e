"""What one line of somebody's log says: the request, whose it was, when, and what was counted. Pure.

request bodies (OpenAI chat and Responses, Anthropic), alone or under body, request …        ┐
proxies: LiteLLM's payloads, batches, HAR entries; usage beside a body; what `record` kept   ├─▶ Entry, Entry, …
ShareGPT conversations: a request for every question                                         ┘
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headstart.diagnose.prints import Print, print_of_line
from headstart.diagnose.sources import Source, ids_of, source_of

_AT = ("timestamp", "ts", "at", "time", "startTime", "start_time", "startedDateTime", "created_at", "created")
_END = ("endTime", "end_time", "completed_at", "finished_at")
_SESSIONS = ("session_id", "sessionId", "session", "conversation_id", "thread_id", "litellm_session_id", "trace_id")
_TENANTS = ("tenant", "tenant_id", "organization", "org_id", "team_id", "team", "customer_id", "end_user", "user", "key_id")
_TAGS = ("tags", "request_tags", "tag", "route", "label", "class")
_WITHIN = ("metadata", "body", "request", "proxy_server_request", "litellm_params")
_USER_SESSION = re.compile(r"session_([0-9a-fA-F-]{8,})")  # how a coding agent writes its session into metadata.user_id
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant"}
_ROLES |= {"system": "system", "tool": "tool", "observation": "tool", "function_call": "assistant"}
_MINUTE_MS = 100_000_000_000  # a time in seconds is smaller, in milliseconds larger
_LATEST_MS = 1 << 52


@dataclass(frozen=True, slots=True)
class Usage:
    """What a server counted: tokens of the prompt, and how many of them it had cached; None where it did not say."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One request. `source` is what was asked, or `kept` what `record` kept of it; `answer` is the text that was generated."""

    id: str
    source: Source | None
    kept: Print | None = None
    at: float | None = None
    end: float | None = None
    session: str | None = None
    tenant: str | None = None
    tags: tuple[str, ...] = ()
    usage: Usage = Usage()
    answer: str | None = None
    cut: bool = False  # whether the answer was ended by its limit


def entries_of(name: str, value: object) -> list[Entry]:
    """Return the requests that one value of a log holds, in order; none where it holds none."""
    if isinstance(value, Mapping):
        if isinstance(value.get("conversations"), list):
            return list(_sharegpt(name, value))
        if "startedDateTime" in value and isinstance(value.get("request"), Mapping):
            return _har(name, value)
        kept = print_of_line(value)
        if kept is not None:
            return [_entry(name, value, None, kept)]
        value = _proxied(value)
    source = source_of(name, value)
    return [] if source is None else [_entry(name, value if isinstance(value, Mapping) else {}, source, None)]


def _entry(name: str, value: Mapping[str, Any], source: Source | None, kept: Print | None) -> Entry:
    response = _response(value)
    places = [value, *_inside(value)]
    return Entry(
        id=next(iter(ids_of(value)), name),
        source=source,
        kept=kept,
        at=begun_and_ended(value)[0],
        end=begun_and_ended(value)[1],
        session=_named(places, _SESSIONS) or _agent_session(places),
        tenant=_named(places, _TENANTS),
        tags=_tags(places),
        usage=usage_in(value),
        answer=answer_of(response),
        cut=_is_cut(response),
    )


def _response(value: Mapping[str, Any]) -> object:
    response = value.get("response")
    return response["body"] if isinstance(response, Mapping) and isinstance(response.get("body"), Mapping) else response


def usage_in(value: Mapping[str, Any]) -> Usage:
    """Return what an entry's server counted, wherever that stands."""
    places = (value, _response(value))
    told = (usage_of(place.get("usage")) for place in places if isinstance(place, Mapping))
    return next((usage for usage in told if usage), usage_of(value) or Usage())


def _inside(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key in _WITHIN:
        inner = value.get(key)
        if isinstance(inner, str) and inner.startswith("{") and key == "metadata":
            try:
                inner = json.loads(inner)
            except ValueError:
                continue
        if isinstance(inner, Mapping):
            yield inner
            if key != "metadata":
                yield from _inside(inner)


def _named(places: list[Mapping[str, Any]], names: tuple[str, ...]) -> str | None:
    for place in places:
        for name in names:
            if isinstance(place.get(name), str | int) and not isinstance(place[name], bool) and str(place[name]):
                return str(place[name])
    return None


def _agent_session(places: list[Mapping[str, Any]]) -> str | None:
    for place in places:
        user = place.get("user_id")
        if isinstance(user, str) and (found := _USER_SESSION.search(user)):
            return found[1]
    key = _named(places, ("prompt_cache_key",))
    return key


def _tags(places: list[Mapping[str, Any]]) -> tuple[str, ...]:
    for place in places:
        for name in _TAGS:
            told = place.get(name)
            if isinstance(told, str) and told:
                return (told,)
            if isinstance(told, list) and told and all(isinstance(one, str) for one in told):
                return tuple(told)
            if isinstance(told, Mapping) and told:
                return tuple(f"{key}={one}" for key, one in told.items())
    return ()


def begun_and_ended(value: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Return when the request of an entry was sent and had its answer, in seconds since 1970."""
    found = ((time_of(value.get(key)) for key in keys) for keys in (_AT, _END))
    begun, ended = (next((at for at in times if at is not None), None) for times in found)
    return begun, ended


def time_of(value: object) -> float | None:
    """Return seconds since 1970 of a time as logs write it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = value / 1000 if _MINUTE_MS < value < _LATEST_MS else value
        return float(seconds) if abs(seconds) < _LATEST_MS else None  # NaN and infinity are none either
    if not isinstance(value, str):
        return None
    try:
        moment = datetime.fromisoformat(value.replace("Z", "+00:00"))
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def usage_of(told: object) -> Usage | None:
    """Return what a usage object of any dialect counts, in tokens of the whole prompt; None where it counts no prompt."""
    if not isinstance(told, Mapping):
        return None
    read, written = _number(told.get("cache_read_input_tokens")), _number(told.get("cache_creation_input_tokens"))
    prompt = _number(told.get("prompt_tokens"))
    if (
        prompt is None
        and (prompt := _number(told.get("input_tokens"))) is not None
        and (read is not None or written is not None)
    ):
        return Usage(prompt + (read or 0) + (written or 0), read or 0)  # Anthropic's input_tokens are what is left
    if prompt is None:
        return None
    nested = [told.get("prompt_tokens_details"), told.get("input_tokens_details")]
    counted = [one.get("cached_tokens") for one in nested if isinstance(one, Mapping)]
    cached = [_number(one) for one in (*counted, told.get("prompt_cache_hit_tokens"), told.get("cached_tokens"), read)]
    return Usage(prompt, next((one for one in cached if one is not None), None))


def _number(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def answer_of(response: object) -> str | None:
    """Return the text that an answer has, where it has nothing else."""
    if not isinstance(response, Mapping):
        return None
    choices = response.get("choices")
    if isinstance(choices, list) and len(choices) == 1 and isinstance(choices[0], Mapping):
        message = choices[0].get("message")
        if isinstance(message, Mapping):
            plain = not (message.get("tool_calls") or message.get("reasoning_content"))
            return message["content"] if plain and isinstance(message.get("content"), str) else None
        return choices[0]["text"] if isinstance(choices[0].get("text"), str) else None
    parts = response.get("content")  # Anthropic's
    output = response.get("output")
    if isinstance(output, list) and len(output) == 1 and isinstance(output[0], Mapping):  # a Response's only message
        parts = output[0].get("content")
    if not isinstance(parts, list) or not parts:
        return None
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") in ("text", "output_text")]
    said = [text for text in texts if isinstance(text, str)]
    return "".join(said) if len(said) == len(parts) else None


def _is_cut(response: object) -> bool:
    """Whether an answer was ended by its limit: its last token was made, and nothing computed of it."""
    if not isinstance(response, Mapping):
        return False
    choices = response.get("choices")
    if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
        return choices[0].get("finish_reason") == "length"
    return response.get("stop_reason") == "max_tokens" or response.get("status") == "incomplete"


def _proxied(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A proxy's payload has the body that came in, or its messages with their parameters beside them."""
    proxied = value.get("proxy_server_request")
    if isinstance(proxied, Mapping) and isinstance(proxied.get("body"), Mapping):
        return {**{key: one for key, one in value.items() if key not in ("messages", "prompt")}, "body": proxied["body"]}
    parameters = value.get("model_parameters", value.get("optional_params"))
    if isinstance(parameters, Mapping) and "messages" in value:
        kept = {"messages": value["messages"], "model": value.get("model"), **{k: v for k, v in parameters.items() if v}}
        return {**{key: one for key, one in value.items() if key != "messages"}, "body": kept}
    return value


def _sharegpt(name: str, value: Mapping[str, Any]) -> Iterator[Entry]:
    id = next(iter(ids_of(value)), name)
    messages: list[dict[str, Any]] = []
    if isinstance(value.get("system"), str) and value["system"]:
        messages.append({"role": "system", "content": value["system"]})
    for turn in value["conversations"]:
        if not isinstance(turn, Mapping):
            continue
        role = _ROLES.get(str(turn.get("from", turn.get("role"))), "user")
        messages = [*messages, {"role": role, "content": str(turn.get("value", turn.get("content", "")))}]
        if role == "user":
            yield Entry(f"{id}:{len(messages)}", Source(f"{name}:{len(messages)}", body={"messages": messages}), session=id)


def _har(name: str, value: Mapping[str, Any]) -> list[Entry]:
    """A browser's or a proxy's record of one exchange; what is no request of a model gives none."""
    posted = value["request"].get("postData")
    try:
        body = json.loads(posted["text"]) if isinstance(posted, Mapping) else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    source = source_of(name, body) if isinstance(body, Mapping) else None
    if source is None:
        return []
    answer = value.get("response")
    content = answer.get("content") if isinstance(answer, Mapping) else None
    response = whole_answer(str(content.get("text", ""))) if isinstance(content, Mapping) else None
    at, took = time_of(value["startedDateTime"]), value.get("time")
    end = at + took / 1000 if at is not None and isinstance(took, int | float) else None
    told = {"body": body, "response": response, "timestamp": value["startedDateTime"], "endTime": end}
    return [_entry(name, told, source, None)]


def whole_answer(text: str) -> dict[str, Any] | None:
    """Return an answer's JSON; of a stream of events one object with the usage that it told."""
    text = text.strip()
    try:
        value = json.loads(text) if text.startswith("{") else None
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        return value
    usage: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("data:") and '"usage"' in line:
            try:
                event = json.loads(line[5:])
            except (ValueError, RecursionError):
                continue
            for place in (event, event.get("message"), event.get("response")):
                if isinstance(place, Mapping) and isinstance(place.get("usage"), Mapping):
                    usage.update({key: one for key, one in place["usage"].items() if one is not None})
    return {"usage": usage} if usage else None
