"""Joining short runs: what it does to the prefixes of 40 real agent sessions, what it writes for that, and what a read gains.

*Counted* for every request of every session, and for a conversation trace, by the policy alone: in how many reads a layer
of the prefix lies, which part of its bytes lies in reads below the size that a disk is fast at, and bytes written over bytes
saved. Each session is alone in an unbounded store; a minute without a request is a pause.

*Measured* on the disk: one session, less its first prompt, which is one long run, saved request by request into two
directories, one of which is tended in its pauses; then its longest prompt is loaded from both in turn, every piece verified,
the page cache emptied before each load.
"""

from __future__ import annotations

import gzip
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Ratio, benchmark_home, paired_ratio, where_it_ran
from benchmarks.stored import IDENTITY, MLA, SMOLLM2, Destination, Prefix, touched
from benchmarks.trace import TOKENS, read_trace
from headstart.block.keys import BLOCK_TOKENS, chain_keys
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.policy.joining import IDLE_S, KNEE_BYTES, USED_AGAIN, Run, chains, choose_joins
from headstart.tier import page_cache
from headstart.tier.disk import DiskTier

SESSIONS = Path(__file__).parent / "traces" / "agent_sessions"
SMALL = Representation(kind="gqa", layout="benchmark/2", dtype="bfloat16", layer_bytes=(32_768,) * 24)
MODELS = {"SmolLM2-135M, 46 KB a token": SMOLLM2, "MLA, 70 KB a token": MLA, "12 KB a token": SMALL}
EXTENT_BYTES = 64 << 20
NOTES = 2  # of use for each request: at the end of its prompt and of its answer
MEASURED_BYTES = 1 << 30
ROUNDS = 10


@dataclass(frozen=True, slots=True)
class Request:
    at_s: float
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _Extent:
    blocks: tuple[int, ...]
    parent: int
    uses: int = 0
    used_s: float = 0.0


@dataclass(slots=True)
class Shelf:
    """Extents of one session as the disk tier would have them, without a disk. `joining`: whether what pauses is joined."""

    representation: Representation
    joining: bool
    written: int = 0  # blocks
    joined: int = 0
    reads: list[int] = field(default_factory=list)  # a layer of the prefix, request by request
    short: list[float] = field(default_factory=list)  # share of it that lies in short reads
    where: dict[int, _Extent] = field(default_factory=dict)
    used: dict[int, _Extent] = field(default_factory=dict)  # by identity, since they were looked at; longest ago first

    def serve(self, request: Request) -> None:
        if self.joining:
            self._join(request.at_s)
        hit = next((n for n, block in enumerate(request.blocks) if block not in self.where), len(request.blocks))
        runs = _runs([self.where[block] for block in request.blocks[:hit]])
        if runs:
            self.reads.append(len(runs))
            knee = KNEE_BYTES / (self.representation.layer_bytes[0] or 1)
            self.short.append(sum(run for run in runs if run < knee) / hit)
        self._save(request.blocks)
        for extent in {id(found): found for found in map(self.where.__getitem__, request.blocks)}.values():
            extent.uses += NOTES
            extent.used_s = request.at_s
            self.used.pop(id(extent), None)
            self.used[id(extent)] = extent

    def _save(self, blocks: Sequence[int]) -> None:
        most = EXTENT_BYTES // self._block_bytes
        first = 0
        while first < len(blocks):
            end = first
            while end < len(blocks) and blocks[end] not in self.where:
                end += 1
            for start, stop in _evenly(first, end, most):
                self._put(_Extent(tuple(blocks[start:stop]), blocks[start - 1] if start else -1))
            self.written += end - first
            first = max(end, first + 1)

    def _put(self, extent: _Extent) -> None:
        self.where |= dict.fromkeys(extent.blocks, extent)

    def _join(self, now_s: float) -> None:
        idle: dict[int, _Extent] = {}
        while self.used:
            name, extent = next(iter(self.used.items()))
            if extent.used_s > now_s - IDLE_S:
                break
            idle[name] = self.used.pop(name)
        again = [extent for extent in idle.values() if extent.uses >= USED_AGAIN]
        runs = [
            Run(id(e), e.parent.to_bytes(8, "big", signed=True), e.blocks[-1].to_bytes(8, "big"), self._size(e), None)
            for e in again
        ]
        for chain in chains(runs):
            sizes = [run.nbytes for run in chain]
            for group in choose_joins(sizes, layers=self.representation.layers, most_bytes=EXTENT_BYTES):
                parts = [idle[run.name] for run in chain[group.start : group.stop]]
                blocks = tuple(block for part in parts for block in part.blocks)
                self._put(_Extent(blocks, parts[0].parent, USED_AGAIN, max(part.used_s for part in parts)))
                self.joined += len(blocks)

    def _size(self, extent: _Extent) -> int:
        return len(extent.blocks) * self._block_bytes

    @property
    def _block_bytes(self) -> int:
        return sum(size or 0 for size in self.representation.layer_bytes)


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return what was counted by model, and what was measured."""
    sessions = list(read_sessions(4 if smoke else None))
    conversation = [Request(r.at_s, _finer(r.blocks)) for r in read_trace()[: 500 if smoke else None]]
    counted = {
        model: {
            "sessions": _count([sessions], representation),
            "conversation": _count([[conversation]], representation),
        }
        for model, representation in MODELS.items()
    }
    home = benchmark_home()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        measured = _measure(
            [_without_head(session) for session in sessions],
            Path(folder),
            rounds=2 if smoke else ROUNDS,
            most_bytes=MEASURED_BYTES >> 4 if smoke else MEASURED_BYTES,
        )
        return {"where": where_it_ran(Path(folder)), "sessions": len(sessions), "counted": counted, "measured": measured}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        f"Prefixes of all requests of {result['sessions']} agent sessions, before and after. *Short*: bytes of a prefix in "
        f"reads below {KNEE_BYTES >> 10} KiB. *Amplification*: bytes written over bytes saved, for the sessions and for the "
        "conversation trace.",
        "",
        "| | reads a layer, median (most) | joined | short | joined | amplification, sessions | conversation |",
        "|---|---|---|---|---|---|---|",
    ]
    for model, found in result["counted"].items():
        before, after = found["sessions"]["before"], found["sessions"]["after"]
        lines.append(
            f"| {model} | {before['reads']:.0f} ({before['most']}) | {after['reads']:.0f} ({after['most']}) | "
            f"{before['short']:.1%} | {after['short']:.1%} | {after['amplification']:.3f} | "
            f"{found['conversation']['after']['amplification']:.3f} |"
        )
    measured = result["measured"]
    before, after = measured["before"], measured["after"]
    lines += [
        "",
        f"Read from the disk, {measured['model']}: a prompt of {measured['tokens']:,} tokens "
        f"({measured['bytes'] / 1e6:,.0f} MB) in {before['extents']} extents took {before['ms']:,.0f} ms "
        f"({before['mb_s']:,.0f} MB/s), in {after['extents']} {after['ms']:,.0f} ms ({after['mb_s']:,.0f} MB/s); median ratio "
        f"of {measured['rounds']} pairs [95 %]: {Ratio(**measured['ratio'])}. "
        f"Written for it: {measured['amplification']:.3f} times what was saved.",
    ]
    return "\n".join(lines)


def read_sessions(count: int | None) -> Iterator[list[Request]]:
    """Yield the requests of each session in their order, those of sub-agents among them."""

    def flat(requests: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for request in requests:
            if "requests" in request:
                yield from flat(request["requests"])
            elif request["hash_ids"]:
                yield request

    for path in sorted(SESSIONS.glob("*.json.gz"))[:count]:
        with gzip.open(path, "rt") as stream:
            found = sorted(flat(json.load(stream)["requests"]), key=lambda request: float(request["t"]))
        yield [Request(float(request["t"]), tuple(request["hash_ids"])) for request in found]


def _without_head(session: Sequence[Request]) -> list[Request]:
    """Return a session as if its first prompt, which is one long run, were nearly empty."""
    head = session[0].blocks[:-8]
    return [
        Request(request.at_s, request.blocks[len(head) :])
        for request in session
        if request.blocks[: len(head)] == head and len(request.blocks) > len(head)
    ]


def _finer(blocks: Sequence[int]) -> tuple[int, ...]:
    """Return the blocks of 64 tokens that blocks of the conversation trace consist of."""
    parts = TOKENS // BLOCK_TOKENS
    return tuple(block * parts + part for block in blocks for part in range(parts))


def _count(groups: Sequence[Sequence[Sequence[Request]]], representation: Representation) -> dict[str, dict[str, float]]:
    found = {}
    for name, joining in (("before", False), ("after", True)):
        shelves = []
        for requests in (requests for group in groups for requests in group):
            shelf = Shelf(representation, joining)
            for request in requests:
                shelf.serve(request)
            shelves.append(shelf)
        reads = [number for shelf in shelves for number in shelf.reads]
        written = sum(shelf.written for shelf in shelves)
        found[name] = {
            "reads": statistics.median(reads),
            "most": max(reads),
            "short": statistics.fmean(share for shelf in shelves for share in shelf.short),
            "amplification": 1 + sum(shelf.joined for shelf in shelves) / written,
        }
    return found


def _runs(extents: Sequence[_Extent]) -> list[int]:
    """Return how many blocks each read of a layer has."""
    lengths: list[int] = []
    before: _Extent | None = None
    for extent in extents:
        if extent is before:
            lengths[-1] += 1
        else:
            lengths.append(1)
        before = extent
    return lengths


def _evenly(first: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of as few parts as `most` allows, evenly long, as saves cut runs."""
    if first == end:
        return
    parts = -(-(end - first) // most)
    length = -(-(end - first) // parts)
    for start in range(first, end, length):
        yield start, min(start + length, end)


# On the disk.


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class _Tended(DiskTier):
    """A tier that is tended when this benchmark says so, and not by the cache's thread, whose clock is another one."""

    def tend(self) -> bool:
        return False

    def pause(self) -> None:
        while super().tend():
            pass


def _measure(sessions: Sequence[Sequence[Request]], folder: Path, *, rounds: int, most_bytes: int) -> dict[str, Any]:
    model, representation = "12 KB a token", SMALL
    block_bytes = sum(size or 0 for size in representation.layer_bytes)
    fitting = [[request for request in session if len(request.blocks) * block_bytes <= most_bytes] for session in sessions]
    requests = max(fitting, key=len)
    longest = max(requests, key=lambda request: len(request.blocks)).blocks
    tokens = _tokens(longest)
    prefix = Prefix(representation, 1, np.append(tokens, np.uint32(0)), chain_keys(tokens, root=IDENTITY.root()))
    memory = touched(prefix.nbytes, "destination")
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(2).integers(0, 256, memory.nbytes, np.uint8)
    kv = Destination(prefix, memory)
    caches: dict[str, tuple[PrefixCache, _Tended]] = {}
    for name in ("before", "after"):
        clock = _Clock()
        tier = _Tended.open(folder / name, capacity_bytes=16 * most_bytes, clock=clock, wall_clock=clock)
        cache = PrefixCache([tier], identity=IDENTITY, representation=representation, match_timeout_s=30.0)
        caches[name] = cache, tier
        _save(cache, tier, clock, requests, kv, tended=name == "after")
    seconds: dict[str, list[float]] = {"before": [], "after": []}
    rng = random.Random(5)
    for turn in range(rounds + 1):
        for name in rng.sample(list(caches), 2):
            took = _read(caches[name][0], prefix, kv, list((folder / name).rglob("*.seg")))
            if turn:  # once before anything counts: threads are started
                seconds[name].append(took)
    counters = caches["after"][1].statistics().counters
    found: dict[str, Any] = {
        name: {
            "extents": len(set(tier.locate(representation.digest, prefix.keys).extents.tolist())),
            "ms": statistics.median(seconds[name]) * 1e3,
            "mb_s": prefix.nbytes / statistics.median(seconds[name]) / 1e6,
        }
        for name, (_, tier) in caches.items()
    }
    for cache, _ in caches.values():
        cache.close()
    rewritten = counters.get("joined_bytes", 0) + counters.get("moved_bytes", 0)
    return found | {
        "model": model,
        "tokens": len(tokens),
        "bytes": prefix.nbytes,
        "requests": len(requests),
        "rounds": rounds,
        "ratio": asdict(paired_ratio(seconds["before"], seconds["after"])),
        "amplification": counters["bytes_written"] / (counters["bytes_written"] - rewritten),
        "raw": seconds,
    }


def _save(
    cache: PrefixCache, tier: _Tended, clock: _Clock, requests: Sequence[Request], kv: Destination, *, tended: bool
) -> None:
    for request in requests:
        clock.now = max(clock.now, request.at_s)
        if tended:
            tier.pause()
        for _ in range(NOTES):
            saved = cache.save(_tokens(request.blocks), kv).wait(60.0)
            assert saved.reason is None, saved
    clock.now += IDLE_S + 1
    if tended:
        tier.pause()


def _read(cache: PrefixCache, prefix: Prefix, destination: Destination, files: list[Path]) -> float:
    destination.poison()
    page_cache.drop(files)
    with cache.match(prefix.tokens) as lease:
        assert lease.tokens == len(prefix.keys) * BLOCK_TOKENS, lease
        began = time.perf_counter()
        load = lease.load(destination)
        usable = load.result(timeout_s=60.0)
        took = time.perf_counter() - began
    assert usable == lease.tokens, load.faults[:1]
    return took


def _tokens(blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Return token ids that are the same exactly where the blocks are."""
    starts = np.array(blocks, np.uint32) * BLOCK_TOKENS
    return (starts[:, None] + np.arange(BLOCK_TOKENS, dtype=np.uint32)).ravel()
