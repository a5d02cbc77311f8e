"""What is asked of a fleet: requests by time, or turns of sessions that wait for the answer before. Lengths and keys, no text.

Read are Mooncake's JSON lines (`timestamp` in ms, `input_length`, `output_length`, `hash_ids` of 512 tokens, one id space) and
agent sessions (`{"block_size", "requests": [{"t", "in", "out", "hash_ids", "think_time"}]}`, .json or .json.gz, ids of their
own).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from headstart.errors import RequestError
from headstart.policy.routing.holders import Keys

_FACTORS = {"K": 1e3, "M": 1e6, "G": 1e9}
_MOONCAKE_TOKENS = 512
_COARSE_TOKENS = 512  # sessions' blocks of 64 are taken eight at a time: the same hits to an eighth, an eighth of the work


@dataclass(frozen=True, slots=True)
class Ask:
    """A prompt of `tokens` with the keys of its full blocks, and how long its answer is. `wait_s`: since the trace began, or,
    of a later turn of its session, since the answer before."""

    wait_s: float
    tokens: int
    answer: int
    keys: Keys


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions of asks; one ask a session where requests do not know each other."""

    sessions: Sequence[Sequence[Ask]]
    block_tokens: int

    def faster(self, factor: float) -> Trace:
        """Return the trace with its beginnings `factor` times as close; people think as long as before."""
        return replace(self, sessions=[[replace(s[0], wait_s=s[0].wait_s / factor), *s[1:]] for s in self.sessions])


def read(path: Path, *, limit: int | None = None) -> Trace:
    """Return the trace of a file, or of a folder of sessions. Raises RequestError for what is none."""
    if path.is_dir():
        files = sorted(one for one in path.iterdir() if one.name.endswith((".json", ".json.gz")))[:limit]
        if not files:
            raise RequestError(f"{path} holds no .json or .json.gz file; give a file, or a folder of session files")
        return Trace([_session(one, number) for number, one in enumerate(files)], _COARSE_TOKENS)
    if path.name.endswith((".json", ".json.gz")):
        return Trace([_session(path, 0)], _COARSE_TOKENS)
    return Trace([[ask] for ask in _mooncake(path, limit)], _MOONCAKE_TOKENS)


def tokens_of(text: str) -> int:
    """Return a number of tokens such as 400K or 5.1M. Raises RequestError for what is none.

    >>> tokens_of("400K"), tokens_of("5.1M")
    (400000, 5100000)
    """
    number, factor = text.strip(), 1.0
    if number[-1:].upper() in _FACTORS:
        number, factor = number[:-1], _FACTORS[number[-1].upper()]
    try:
        tokens = int(float(number) * factor)
    except (ValueError, OverflowError):
        tokens = 0
    if tokens < 1:
        raise RequestError(f"{text!r} is no number of tokens; such as 400K, 5.1M or 2G")
    return tokens


def repeated(trace: Trace, *, times: int, over_s: float, random: Random) -> Trace:
    """Return every session `times` times, each with keys of its own, beginning evenly somewhere in `over_s`."""
    sessions = []
    for _ in range(times):
        for session in trace.sessions:
            own = np.uint64(random.getrandbits(64))
            turns = [replace(ask, keys=ask.keys ^ own) for ask in session]
            sessions.append([replace(turns[0], wait_s=random.random() * over_s), *turns[1:]])
    return replace(trace, sessions=sorted(sessions, key=lambda session: session[0].wait_s))


def day(trace: Trace, *, copies: int, peak: float, random: Random, span_s: float = 86_400.0) -> Trace:
    """Return a day of `copies` of the trace one behind the other, each with keys of its own, in which `peak` times as many
    requests come at 16 o'clock as at 4: in between as a cosine squared goes, so that the busy hours are some of the day. What
    comes close together in the trace does so here; requests that it has at one time are spread until its next."""
    own = [np.uint64(random.getrandbits(64)) for _ in range(copies)]
    starts = _spread([session[0].wait_s for session in trace.sessions])
    whole_s = starts[-1] + (starts[-1] - starts[0]) / max(1, len(starts) - 1)
    at_s = np.linspace(0.0, span_s, 24 * 60 + 1)
    height = 1 + (peak - 1) * ((1 - np.cos(2 * np.pi * (at_s / span_s - 4 / 24))) / 2) ** 2
    passed = np.concatenate([[0.0], np.cumsum((height[1:] + height[:-1]) / 2)])
    sessions = []
    for copy in range(copies):
        share = (np.array(starts) + copy * whole_s) / (copies * whole_s)
        for session, begin_s in zip(trace.sessions, np.interp(share * passed[-1], passed, at_s).tolist(), strict=True):
            turns = [replace(ask, keys=ask.keys ^ own[copy]) for ask in session]
            sessions.append([replace(turns[0], wait_s=begin_s), *turns[1:]])
    return replace(trace, sessions=sessions)


def _spread(starts: Sequence[float]) -> list[float]:
    """Return ordered times with those that are equal spread evenly until the next.

    >>> _spread([0.0, 0.0, 3.0])
    [0.0, 1.5, 3.0]
    """
    spread: list[float] = []
    at = 0
    while at < len(starts):
        end = next((n for n in range(at, len(starts)) if starts[n] > starts[at]), len(starts))
        until = starts[end] if end < len(starts) else starts[at]
        spread += [starts[at] + (until - starts[at]) * n / (end - at) for n in range(end - at)]
        at = end
    return spread


def hot_prefix(*, requests: int, per_s: float, shared: int, own: int, answer: int, random: Random) -> Trace:
    """Return requests that all begin with the same `shared` tokens and go on each with its `own`."""
    common = np.array([random.getrandbits(63) for _ in range(shared // _COARSE_TOKENS)], np.uint64)
    sessions, at_s = [], 0.0
    for _ in range(requests):
        at_s += random.expovariate(per_s)
        rest = np.array([random.getrandbits(63) for _ in range(own // _COARSE_TOKENS)], np.uint64)
        sessions.append([Ask(at_s, shared + own, answer, np.concatenate([common, rest]))])
    return Trace(sessions, _COARSE_TOKENS)


def _mooncake(path: Path, limit: int | None) -> Iterator[Ask]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
        for number, line in enumerate(stream, 1):
            if limit is not None and number > limit:
                return
            try:
                found: dict[str, Any] = json.loads(line)
                tokens, ids = int(found["input_length"]), found["hash_ids"]
                keys = np.array(ids[: tokens // _MOONCAKE_TOKENS], np.uint64) + np.uint64(1)
                yield Ask(float(found["timestamp"]) / 1000, tokens, int(found["output_length"]), keys)
            except (ValueError, KeyError, TypeError) as error:
                wanted = "timestamp, input_length, output_length, hash_ids"
                raise RequestError(f"{path}, line {number}: not a request of a trace ({wanted}): {error}") from error


def _session(path: Path, number: int) -> list[Ask]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as stream:
            found = json.load(stream)
        every = _COARSE_TOKENS // int(found["block_size"])
        asks: list[Ask] = []
        for request in found["requests"]:
            if request.get("in") is None or not request.get("hash_ids"):
                continue  # a sub-agent's own requests are another session
            last = request["hash_ids"][every - 1 :: every][: int(request["in"]) // _COARSE_TOKENS]
            keys = _chained(np.array(last, np.uint64) | np.uint64(number + 1 << 40))
            wait_s = float(request.get("think_time") or 0.0) if asks else float(request["t"])
            asks.append(Ask(wait_s, int(request["in"]), int(request["out"] or 1), keys))
        if not asks:
            raise RequestError(f"{path} has no request with block ids")
        return asks
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise RequestError(f"{path} is no agent session (block_size, requests with in, out, hash_ids): {error}") from error


def _chained(ids: Keys) -> Keys:
    """Return keys that stand for all ids before them, too: an id alone may come again behind another prefix."""
    return np.bitwise_xor.accumulate(ids * np.uint64(0x9E3779B97F4A7C15)) + np.arange(len(ids), dtype=np.uint64)
