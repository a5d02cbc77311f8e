"""The usage log read back and added up: whole numbers, exact, whoever wrote the lines and whether it still does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from headstart.errors import NotThere
from headstart.ledger.entry import Entry, decode
from headstart.ledger.log import PATTERN

_LINE_BYTES = 1 << 20  # a longer one is none of ours
SUMS = ("requests", "prompt", "cached_memory", "cached_disk", "computed", "written", "output", "kept_output")
ENGINE_SUMS = tuple(
    f"engine_{name}" for name in ("prompt", "cached_memory", "cached_disk", "generated", "written", "kept_output")
)

GROUPS: dict[str, Callable[[Entry], str]] = {
    "tenant": lambda one: one.tenant,
    "key": lambda one: one.key,
    "model": lambda one: one.model,
    "class": lambda one: one.retention,
    "endpoint": lambda one: one.endpoint,
    "session": lambda one: one.session,
    "finish": lambda one: one.finish,
    "status": lambda one: str(one.status),
    "hour": lambda one: _when(one.time, "%Y-%m-%dT%H"),
    "day": lambda one: _when(one.time, "%Y-%m-%d"),
    "month": lambda one: _when(one.time, "%Y-%m"),
}


@dataclass(slots=True)
class Reading:
    """How many lines were read, how many were torn (the last of a file, unfinished) and how many are none of ours."""

    lines: int = 0
    torn: int = 0
    wrong: int = 0


@dataclass(slots=True)
class Sums:
    """What the requests of one group used together."""

    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*SUMS, *ENGINE_SUMS), 0))

    def add(self, entry: Entry) -> None:
        counts = self.counts
        for name in SUMS:
            counts[name] += getattr(entry, name)
        for name in ENGINE_SUMS:
            counts[name] += getattr(entry.engine, name.removeprefix("engine_"))


def entries(directory: Path, reading: Reading) -> Iterator[Entry]:
    """Yield every line of the log, file by file in the order in which they were begun; `reading` counts along. A log that is
    being written is read up to its last whole line. Raises NotThere where there is no log."""
    if not directory.is_dir():
        raise NotThere(f"there is no usage log in {directory}; name its folder with --usage-log", path=directory)
    for file in sorted(directory.glob(PATTERN)):
        try:
            stream = file.open("rb")
        except FileNotFoundError:  # the oldest go while we read
            continue
        with stream:
            while line := stream.readline(_LINE_BYTES):  # whatever stands in the folder, it is not held at once
                entry = decode(line)
                if entry is not None:
                    reading.lines += 1
                    yield entry
                elif line.endswith(b"\n"):
                    reading.wrong += 1
                else:
                    reading.torn += 1


def add_up(some: Iterable[Entry], by: Sequence[str]) -> dict[tuple[str, ...], Sums]:
    """Return what was used in each group, in the order of their names."""
    of = [GROUPS[name] for name in by]
    found: dict[tuple[str, ...], Sums] = {}
    for entry in some:
        group = tuple(name(entry) for name in of)
        if group not in found:
            found[group] = Sums()
        found[group].add(entry)
    return dict(sorted(found.items()))


def _when(seconds: float, form: str) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime(form)
