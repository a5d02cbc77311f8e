"""Tools, the choice among them and formats, as OpenAI's dialects write them: into what `Ask` says of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from headstart.api.ask import Format, ToolChoice
from headstart.errors import RequestError


def choice_of(choice: object, *, any_word: str = "required") -> ToolChoice:
    """Return what tool_choice says: a word, or an object that names a function. Raises RequestError."""
    if choice is None:
        return ToolChoice()
    if choice in ("auto", "none"):
        return ToolChoice("auto" if choice == "auto" else "none")
    if choice == any_word:
        return ToolChoice("required")
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("allowed_tools")
            allowed = allowed if isinstance(allowed, Mapping) else choice
            tools = allowed.get("tools")
            if not isinstance(tools, list):
                raise _wrong("tool_choice.tools", "must be a list of tools")
            names = tuple(name for tool in tools if (name := _named(tool)) is not None)
            return ToolChoice("required" if allowed.get("mode") == any_word else "auto", names)
        if (name := _named(choice)) is not None:
            return ToolChoice("required", (name,))
    raise _wrong("tool_choice", f"must be auto, none, {any_word}, or an object that names a function")


def _named(tool: object) -> str | None:
    if not isinstance(tool, Mapping):
        return None
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return name if isinstance(name, str) else None


def functions_of(tools: Iterable[object], *, path: str = "tools") -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """Return the functions among tools that are written flat, in the form of chat completions, and the kinds of the others,
    which would be a provider's own to run. Raises RequestError naming the place."""
    functions, others = [], []
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise _wrong(f"{path}[{i}]", "must be an object")
        if tool.get("type", "function") != "function":
            others.append(f"tool of type {str(tool.get('type'))[:48]}")
            continue
        name = tool.get("name")
        if not isinstance(name, str):
            raise _wrong(f"{path}[{i}].name", "must be a text")
        functions.append({"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}})
    return tuple(functions), tuple(dict.fromkeys(others))


def format_of(form: object, *, param: str) -> Format | None:
    """Return what response_format, or Responses' text.format, says; None for text. Raises RequestError naming the place."""
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise _wrong(param, "must be an object with a type")
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Format(None, param=param)
    if kind == "json_schema":
        nested = form.get("json_schema")
        told, where = (nested, f"{param}.json_schema") if isinstance(nested, Mapping) else (form, param)
        schema = told.get("schema")
        if not isinstance(schema, Mapping):
            raise _wrong(f"{where}.schema", "must be a JSON schema, which is an object")
        return Format(schema, strict=told.get("strict") is True, param=f"{where}.schema")
    raise _wrong(f"{param}.type", f"is {str(kind)[:48]!r}; it must be text, json_object or json_schema")


def _wrong(param: str, what: str) -> RequestError:
    return RequestError(f"{param} {what}", param=param)
