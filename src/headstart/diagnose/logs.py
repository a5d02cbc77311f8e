"""Logs as requests, one after another, whatever wrote them; each can be read again later. Reads files, bounded.

A log is a file of JSON lines, a JSON array, a HAR, or a coding agent's transcript, also compressed with gzip, or standard
input. It is read in pieces, whatever its size; one value of it is bounded, and a transcript as a whole. Several logs are read
side by side, in the order of their times, where they have times.
"""

from __future__ import annotations

import gzip
import heapq
import io
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, cast

import msgspec

from headstart.diagnose.entries import Entry, entries_of, time_of
from headstart.diagnose.sources import MOST_BYTES
from headstart.diagnose.transcripts import claude_requests, codex_requests, is_claude, is_codex
from headstart.errors import NotThere, RequestError

Form = Literal["lines", "array", "har", "claude", "codex", "one"]
_CHUNK = 1 << 20
_BUFFER = 1 << 16
_PROBED_LINES = 40
_TRANSCRIPTS = 2  # that are held as a whole
_TRANSCRIPT_BYTES = 64 << 20
_DAMAGED = (msgspec.DecodeError, ValueError, RecursionError)
_ITEM = re.compile(rb"[^ \t\r\n,]")
_STRUCTURE = re.compile(rb'["{}\[\]]')
_IN_STRING = re.compile(rb'"|\\.?', re.DOTALL)


class Locator(NamedTuple):
    """Where a request is: bytes of a file, the how-many'th line or item these are, and which request is made of them."""

    file: int
    offset: int
    length: int
    number: int
    turn: int


class Unread(NamedTuple):
    """A place in a log that gave no request, and why."""

    name: str
    why: str


class Found(NamedTuple):
    """One request, or why there is none, and how many bytes of its file are read up to here."""

    locator: Locator
    entry: Entry | Unread
    done_bytes: int


class Log:
    """Requests of several files. A context manager: `close` lets copies of what cannot be read twice go."""

    def __init__(self, names: Sequence[str], *, read_stdin: Callable[[], IO[bytes]]) -> None:
        """Look at the files. Raises NotThere or RequestError."""
        self._parsed: list[_File] = []
        self.files: list[_File] = []
        try:
            for name in _spread(names):
                self.files.append(_File(name, read_stdin))
        except BaseException:
            self.close()
            raise
        self.size_bytes = sum(file.size_bytes for file in self.files)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self.files:
            file.close()

    def __iter__(self) -> Iterator[Found]:
        """Yield every request, or place without one, from the beginning.

        Transcripts come one after another, by the times at which they begin: they are held as a whole."""
        order = sorted(range(len(self.files)), key=lambda n: self.files[n].begins)
        whole = [n for n in order if self.files[n].is_transcript]
        streams = [_timed((found for n in whole for found in self._requests(n)), 0)]
        streams += [_timed(self._requests(n), n + 1) for n in order if not self.files[n].is_transcript]
        yield from (found for _, _, _, found in heapq.merge(*streams))

    def read(self, locator: Locator) -> Entry:
        """Return a request once more."""
        self._hold(self.files[locator.file])
        return self.files[locator.file].again(locator)

    def _requests(self, number: int) -> Iterator[Found]:
        self._hold(self.files[number])
        yield from self.files[number].requests(number)

    def _hold(self, file: _File) -> None:
        """Let all but the transcripts read last be read anew."""
        if file.is_transcript:
            self._parsed = [file, *(one for one in self._parsed if one is not file)]
            for old in self._parsed[_TRANSCRIPTS:]:
                old.forget()
            del self._parsed[_TRANSCRIPTS:]


def _timed(requests: Iterator[Found], number: int) -> Iterator[tuple[float, int, int, Found]]:
    last = float("-inf")  # what has no time follows what it stands behind
    for n, found in enumerate(requests):
        at = found.entry.at if isinstance(found.entry, Entry) else None
        last = last if at is None else max(last, at)
        yield last, number, n, found


def _spread(names: Sequence[str]) -> Iterator[str]:
    """Yield files; of a folder every log in it."""
    for name in names:
        path = Path(name).expanduser()
        if name != "-" and path.is_dir():
            inside = sorted(
                str(file)
                for file in path.rglob("*")
                if file.name.removesuffix(".gz").endswith((".jsonl", ".json", ".har", ".ndjson"))
            )
            if not inside:
                raise NotThere(
                    f"there is no log in {name}: files that end in .jsonl, .ndjson, .json, .har, or these with .gz", path=path
                )
            yield from inside
        else:
            yield name


class _File:
    """One log. `begins` is the first time that stands in it."""

    def __init__(self, name: str, read_stdin: Callable[[], IO[bytes]]) -> None:
        self.name = "standard input" if name == "-" else name
        self._path = Path(name).expanduser()
        self._transcript: list[Any] | None = None
        self._copy = self._copied(name, read_stdin)
        try:
            with self._opened() as content:
                self.size_bytes = content.seek(0, io.SEEK_END)
                self.form, self.begins = self._probed(content)
        except BaseException:
            self.close()
            raise

    @property
    def is_transcript(self) -> bool:
        return self.form in ("claude", "codex")

    def _copied(self, name: str, read_stdin: Callable[[], IO[bytes]]) -> IO[bytes] | None:
        """Return a copy of what is compressed, or cannot be read twice; None where the file will do."""
        if name == "-":
            return _copy(read_stdin())
        try:
            with self._path.open("rb") as content:
                if content.peek(2)[:2] == b"\x1f\x8b":
                    with gzip.open(content) as plain:
                        return _copy(cast(IO[bytes], plain))
                return None if content.seekable() else _copy(content)
        except FileNotFoundError:
            raise NotThere(
                f"there is no file {name}; give logs, folders with logs, or - for standard input", path=self._path
            ) from None
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise RequestError(f"{name} is no whole gzip file: {error}") from error
        except OSError as error:
            raise NotThere(f"{name} cannot be read: {error.strerror}", path=self._path, errno=error.errno) from error

    @contextmanager
    def _opened(self) -> Iterator[IO[bytes]]:
        if self._copy is not None:
            yield self._copy
            return
        try:
            content = self._path.open("rb", buffering=_BUFFER)
        except OSError as error:
            raise NotThere(f"{self.name} cannot be read: {error.strerror}", path=self._path, errno=error.errno) from error
        with content:
            yield content

    def close(self) -> None:
        if self._copy is not None:
            self._copy.close()

    def forget(self) -> None:
        self._transcript = None

    def requests(self, number: int) -> Iterator[Found]:
        """Yield what the file holds."""
        if self.form in ("claude", "codex"):
            for turn, entry in enumerate(self._turns()):
                yield Found(Locator(number, 0, 0, 0, turn), entry, self.size_bytes)
            return
        for n, (offset, content) in enumerate(self._values(), start=1):
            done, name = offset + len(content), self._name(n)
            locator = Locator(number, offset, len(content), n, 0)
            try:
                entries = entries_of(name, _decoded(content))
            except (RequestError, *_DAMAGED) as error:
                yield Found(locator, Unread(name, str(getattr(error, "message", error))), done)
                continue
            if not entries:
                yield Found(locator, Unread(name, "holds no request"), done)
            for turn, entry in enumerate(entries):
                yield Found(locator._replace(turn=turn), entry, done)

    def again(self, locator: Locator) -> Entry:
        if self.is_transcript:
            return next(iter(self._turns(only=locator.turn)))
        with self._opened() as file:
            file.seek(locator.offset)
            content = file.read(locator.length)
        return entries_of(self._name(locator.number), _decoded(content))[locator.turn]

    def _name(self, number: int) -> str:
        """Return what to call the how-many'th line or item, as `diff` finds it."""
        return self.name if self.form == "one" else f"{self.name}#{number}"

    def _turns(self, *, only: int | None = None) -> Iterator[Entry]:
        if self.size_bytes > _TRANSCRIPT_BYTES:
            raise RequestError(f"{self.name} is a transcript of more than {_TRANSCRIPT_BYTES >> 20} MiB; give it in parts")
        if self._transcript is None:
            self._transcript = []
            for _, content in self._lines():
                try:
                    self._transcript.append(_decoded(content))
                except _DAMAGED:
                    self._transcript.append(None)  # the last line of a session that still runs
        made = claude_requests if self.form == "claude" else codex_requests
        return made(self.name, self._transcript, only=only)

    def _values(self) -> Iterator[tuple[int, bytes]]:
        """Yield where each value begins, and its bytes."""
        if self.form == "lines":
            yield from self._lines()
        elif self.form == "one":
            if self.size_bytes > MOST_BYTES:
                raise RequestError(f"{self.name} is one value of more than {MOST_BYTES >> 20} MiB; give a log with one a line")
            with self._opened() as file:
                file.seek(0)
                content = file.read()
            yield 0, content
        else:
            yield from self._items()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = 0
        with self._opened() as file:
            while True:
                if file is self._copy or not offset:
                    file.seek(offset)  # somebody may have read elsewhere in the copy meanwhile
                line = file.readline(MOST_BYTES)
                if not line:
                    return
                if line.strip():
                    yield offset, line
                offset += len(line)

    def _items(self) -> Iterator[tuple[int, bytes]]:
        """Yield the items of an array; of a HAR those of its entries."""
        with self._opened() as file:
            begin = _after(file, b'"entries"', self.name) if self.form == "har" else 0
            yield from _items_from(file, _after(file, b"[", self.name, begin), self.name)

    def _probed(self, file: IO[bytes]) -> tuple[Form, float]:
        """Return what the file is, by its beginning, and its first time."""
        file.seek(0)
        head = file.read(_CHUNK)
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n")
        if not first:
            raise RequestError(f"{self.name} is empty; give a log with a request a line")
        values: list[Any] = []
        for _, line in self._lines():
            try:
                values.append(_decoded(line))
            except _DAMAGED:
                break
            if len(values) == _PROBED_LINES:
                break
        objects = [value for value in values if isinstance(value, dict)]
        times = (time_of(value.get("timestamp", value.get("at"))) for value in objects)
        begins = next((time for time in times if time is not None), float("-inf"))
        form: Form = "lines"
        if any(map(is_codex, objects)):
            form = "codex"
        elif any(map(is_claude, objects)):
            form = "claude"
        elif objects[:1] and _is_har(objects[0]):
            form = "har"
        elif values and isinstance(values[0], list):
            inside = values[0]
            form = "array" if inside and all(isinstance(one, dict) and "role" not in one for one in inside) else "lines"
        elif not values and first.startswith(b"["):
            form = "array"
        elif not values and first.startswith(b"{") and not _is_whole_line(head):
            form = "har" if b'"entries"' in head and b'"log"' in head else "one"
        return form, begins


def _is_har(value: dict[str, Any]) -> bool:
    return isinstance(value.get("log"), dict) and "entries" in value["log"]


def _is_whole_line(head: bytes) -> bool:
    """Whether the first line begins and ends like an object, be it a damaged one."""
    line = head.partition(b"\n")[0].strip()
    return line.startswith(b"{") and line.endswith(b"}")


def _decoded(content: bytes) -> Any:
    content = content.strip().removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return json.loads(content)  # it takes lone surrogates and NaN, as what writes logs may


def _copy(content: IO[bytes]) -> IO[bytes]:
    """Return a nameless copy that can be read twice."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115
    try:
        shutil.copyfileobj(content, copy, _CHUNK)
    except BaseException:
        copy.close()
        raise
    return copy


def _after(content: IO[bytes], mark: bytes, name: str, begin: int = 0) -> int:
    """Return the offset behind the next `mark`."""
    content.seek(begin)
    window, at = b"", begin
    while chunk := content.read(_CHUNK):
        window += chunk
        if (found := window.find(mark)) >= 0:
            return at + found + len(mark)
        at += max(0, len(window) - len(mark))
        window = window[-len(mark) :]
    raise RequestError(f"{name} has no {mark.decode()}; is it whole?")


def _items_from(file: IO[bytes], begin: int, name: str) -> Iterator[tuple[int, bytes]]:
    """Yield the objects of an array whose first item begins behind `begin`, without holding more than one and a chunk."""
    window, offset, at = b"", begin, 0  # `window` is what stands at `offset`; what is before `at` is done

    def read_more(nbytes: int) -> bool:
        nonlocal window, offset, at
        file.seek(offset + len(window))  # somebody may have read elsewhere meanwhile
        more = file.read(nbytes)
        window, offset, at = window[at:] + more, offset + at, 0
        return bool(more)

    while True:
        while not (found := _ITEM.search(window, at)):
            at = len(window)
            if not read_more(_CHUNK):
                return
        if found.group() != b"{":
            return  # the end of the array
        at = found.start()
        scan = _Scan()
        while (end := scan.end(window, at)) is None:
            scan.moved(at)
            if len(window) - at > MOST_BYTES or not read_more(max(_CHUNK, len(window))):
                raise RequestError(f"{name} ends, or has no end in sight, within an object at byte {offset + at}")
        yield offset + at, window[at:end]
        at = end


class _Scan:
    """Finds where a JSON object ends, going on where it stopped."""

    def __init__(self) -> None:
        self._at = 0
        self._depth = 0
        self._quoted = False

    def moved(self, by: int) -> None:
        """What is scanned has moved to the left."""
        self._at -= by

    def end(self, window: bytes, begin: int) -> int | None:
        """Return the offset behind the object that begins at `begin`; None where it goes on behind `window`."""
        self._at = max(self._at, begin)
        while found := (_IN_STRING if self._quoted else _STRUCTURE).search(window, self._at):
            sign = found.group()
            if sign == b"\\":
                self._at = found.start()  # what it escapes is not read yet
                return None
            self._at = found.end()
            if sign == b'"':
                self._quoted = not self._quoted
            elif sign in (b"{", b"["):
                self._depth += 1
            elif sign in (b"}", b"]"):
                self._depth -= 1
                if self._depth == 0:
                    return self._at
        self._at = len(window)
        return None
