"""What A and B may be: a request's JSON, a text, a list of token ids, a line of a log. Reads files, decides nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart.diagnose.requests import Conversation, conversation_of
from headstart.errors import NotThere, RequestError

MOST_BYTES = 256 << 20
_IDS = ("request_id", "response_id", "id", "rid", "custom_id")
_BODIES = ("body", "request", "request_body", "input_body", "json")
_TOKENS = ("prompt_token_ids", "token_ids", "input_ids")
_BODY_KEYS = ("messages", "prompt", "input", "instructions")
_TEXT_FILES = {".txt", ".md", ".text"}


@dataclass(frozen=True, slots=True)
class Source:
    """`body` is a request's JSON; else there is a `text` or a list of `ids`. `line`: the entry of a log that holds it."""

    name: str
    body: Any = None
    text: str | None = None
    ids: tuple[int, ...] | None = None
    line: Any = None

    def conversation(self, *, as_sent: bool, rules: Collection[str] = ()) -> Conversation:
        """Return what is to be compared, as `conversation_of` has it. Raises RequestError naming the source and the place."""
        if self.ids is not None:
            return Conversation(prompt=self.ids, prompt_path="ids")
        if self.text is not None:
            return Conversation(prompt=self.text, prompt_path="text")
        try:
            return conversation_of(self.body, as_sent=as_sent, rules=rules)
        except RequestError as error:
            raise RequestError(f"{self.name}: {error.message}", param=error.param) from error


def read_source(name: str, *, read_stdin: Callable[[], bytes]) -> Source:
    """Return what `name` stands for: "-", a file, or a log's line as FILE#ID. Raises NotThere or RequestError."""
    if name == "-":
        return _understood("standard input", _text(read_stdin()[: MOST_BYTES + 1], "standard input"), suffix="")
    path, mark, id = Path(name).expanduser(), "", ""
    if not path.exists() and "#" in name:
        file, mark, id = name.rpartition("#")
        path = Path(file).expanduser()
    content = _read(path, name)
    if mark:
        return _line_of(path, content, id)
    if path.suffix.lower() in (".jsonl", ".ndjson"):
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) != 1:
            ids = [id for _, entry in _entries(path, content) for id in ids_of(entry)[:1]][:5]
            raise RequestError(
                f"{path} has {len(lines)} lines; say which with {path}#ID or #NUMBER" + _such_as(ids), param=None
            )
        return _line_of(path, content, "1")
    return _understood(name, content, suffix=path.suffix.lower())


def _read(path: Path, name: str) -> str:
    try:
        if path.is_dir():
            raise RequestError(f"{name} is a folder; give a file: a request's JSON, a text, or token ids")
        if path.stat().st_size > MOST_BYTES:
            raise RequestError(f"{name} has more than {MOST_BYTES >> 20} MiB; give one request, or a line of it")
        return _text(path.read_bytes(), name)
    except FileNotFoundError:
        raise NotThere(
            f"there is no file {name}; give a file, FILE#ID for a line of a log, or - for standard input", path=path
        ) from None
    except OSError as error:
        raise NotThere(f"{name} cannot be read: {error.strerror}", path=path, errno=error.errno) from error


def _text(content: bytes, name: str) -> str:
    if len(content) > MOST_BYTES:
        raise RequestError(f"{name} has more than {MOST_BYTES >> 20} MiB; give one request")
    try:
        return content.decode("utf-8")  # no universal newlines: a line end may be the difference
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is no UTF-8 text (byte {error.start}); give JSON or a text") from error


def _understood(name: str, content: str, *, suffix: str) -> Source:
    if not content:
        raise RequestError(f"{name} is empty; give a request's JSON, a text, or token ids")
    if suffix in _TEXT_FILES:
        return Source(name, text=content)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        if suffix == ".json":
            raise RequestError(f"{name} is not valid JSON: {error}; mend it, or name it .txt to compare its text") from error
        return Source(name, text=content)
    source = source_of(name, value)
    if source is None and suffix == ".json":
        raise RequestError(f"{name} holds no request: {' or '.join(_BODY_KEYS)} is missing, and it is no list of token ids")
    return Source(name, text=content) if source is None else replace(source, line=value)


def source_of(name: str, value: object) -> Source | None:
    """Return what a value of a log holds: a request, alone or under a name such as "body", or token ids; None for neither."""
    if isinstance(value, list) and value:
        if all(isinstance(token, int) and not isinstance(token, bool) for token in value):
            return Source(name, ids=tuple(value))
        return Source(name, body=value) if all(isinstance(one, Mapping) and "role" in one for one in value) else None
    if not isinstance(value, Mapping):
        return None
    for key in _BODIES:
        inner = value.get(key)
        if isinstance(inner, Mapping) and any(known in inner for known in _BODY_KEYS):
            return Source(name, body=inner)
    for key in _TOKENS:  # what was computed, rather than what was asked for
        if isinstance(value.get(key), list) and value[key]:
            return source_of(name, value[key])
    return Source(name, body=value) if any(known in value for known in _BODY_KEYS) else None


def _line_of(path: Path, content: str, id: str) -> Source:
    """Return the entry with this id, else the one with this number, counted from 1."""
    numbered = None
    for number, entry in _entries(path, content):
        if id in ids_of(entry):
            break
        if id == str(number):
            numbered = entry
    else:
        entry = numbered
    if entry is None:
        known = [one for _, other in _entries(path, content) for one in ids_of(other)[:1]][:5]
        raise NotThere(f"{path} has no line with the id {id!r}" + _such_as(known), path=path, id=id)
    name = f"{path}#{id}"
    source = source_of(name, entry)
    if source is None:
        raise RequestError(f"{name} holds no request: {' or '.join(_BODY_KEYS)} is missing, and it has no token ids")
    return replace(source, line=entry)


def _entries(path: Path, content: str) -> Iterator[tuple[int, Any]]:
    number = 0
    for line in content.split("\n"):
        if not line.strip():
            continue
        number += 1
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RequestError(
                f"{path}, line {number}, is not valid JSON: {error}; a log has one JSON object a line"
            ) from error


def ids_of(entry: object) -> list[str]:
    """Return the ids that an entry of a log goes by."""
    if not isinstance(entry, Mapping):
        return []
    nested = [entry[key] for key in (*_BODIES, "response") if isinstance(entry.get(key), Mapping)]
    return [str(one[key]) for one in (entry, *nested) for key in _IDS if isinstance(one.get(key), str | int)]


def _such_as(ids: list[str]) -> str:
    return f"; there are {', '.join(ids)} and so on" if ids else ""
