"""First token with a cache on a disk that is slow, or fails: against no cache, all loaded, and all computed.

A real model, a prompt whose beginning is stored, and a disk tier throttled by `FaultyTier`: reads come at a fixed rate, one
after the other. "Failing" gives every read an error, "stalled" never an answer. In each round one prompt is asked in every way,
in random order; "first" is the first prompt of a process, which knows nothing of the disk yet. All is loaded in the first round
only: it takes as long as the disk.
"""

from __future__ import annotations

import queue
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.config import prefer_sleeping_threads

DISKS: dict[str, float | str] = {
    "2 MB/s": 2e6,
    "8 MB/s": 8e6,
    "200 MB/s": 2e8,
    "failing": "eio",
    "stalled": "stall",
}
WAYS = ("without", "first", "with", "load")  # of which "load" only where it ends
TARGET = 1.05
_GIVEN_UP_S = 600.0


def run(*, smoke: bool = False, rounds: int = 3, prompt_tokens: int = 1024, suffix_tokens: int = 64) -> dict[str, Any]:
    """Return seconds to the first token by disk and way, what was decided, and how much of it was read."""
    disks = DISKS
    if smoke:
        rounds, prompt_tokens = 1, 256
        disks = {name: DISKS[name] for name in ("8 MB/s", "failing")}
    prefer_sleeping_threads()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home())))
        model = _model()
        prompts = [_prompt(model.vocabulary, prompt_tokens + suffix_tokens, seed=round_) for round_ in range(rounds)]
        measured = {
            name: _measure(model, folder / str(number), disk, prompts, prompt_tokens)
            for number, (name, disk) in enumerate(disks.items())
        }
        return {
            "where": where_it_ran(folder),
            "prompt_tokens": prompt_tokens + suffix_tokens,
            "suffix_tokens": suffix_tokens,
            "rounds": rounds,
            "token_bytes": model.shape.token_bytes,
            "disks": measured,
        }


def _model() -> Any:
    from headstart.config import Config
    from headstart.engine.models import resolve_model
    from headstart.engine.torch.hardware import keep_freed_memory, use_physical_cores
    from headstart.engine.torch.model import load_model

    use_physical_cores()
    keep_freed_memory()
    config = Config()
    folder = resolve_model(config.model, config.models_directory.expanduser(), on_progress=lambda stage, fraction: None).path
    return load_model(folder, device="cpu", dtype="float32", on_progress=lambda stage, fraction: None)


def _measure(model: Any, folder: Path, disk: float | str, prompts: Sequence[Sequence[int]], stored: int) -> dict[str, Any]:
    samples: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    rng = random.Random(3)
    with _Served(model, folder) as served:
        for prompt in prompts:
            served.store(prompt[:stored])
        served.spoil(disk)
        samples["first"].append(served.ask(prompts[0]))
    with _Served(model, folder) as served:
        served.spoil(disk)
        served.ask(prompts[-1])  # its tier's speed is known from here on
        for prompt in prompts:
            ways = ["without", "with"]
            if prompt is prompts[0] and isinstance(disk, float):
                ways.append("load")
            for way in rng.sample(ways, len(ways)):
                samples[way].append(served.ask(prompt, use_cache=way != "without", load_all=way == "load"))
    without = statistics.median(one["first_token_s"] for one in samples["without"])
    return {
        way: {
            "first_token_s": (seconds := statistics.median(one["first_token_s"] for one in found)),
            "ratio": seconds / without,
            "choice": found[-1]["choice"],
            "read_tokens": round(statistics.median(one["read_tokens"] for one in found)),
        }
        for way, found in samples.items()
        if found
    }


class _Served:
    """An engine over a directory, whose disk can be spoilt."""

    def __init__(self, model: Any, folder: Path) -> None:
        from headstart.block.identity import Identity
        from headstart.cache.prefix_cache import PrefixCache
        from headstart.engine.base import EngineInfo
        from headstart.engine.torch.engine import TorchEngine
        from headstart.engine.torch.kv_memory import KVMemory
        from headstart.testing.faults import FaultyTier
        from headstart.tier.disk import DiskTier

        context = 4096
        self.tier = FaultyTier(DiskTier.open(folder, capacity_bytes=8 << 30), stall_s=2 * _GIVEN_UP_S)
        representation = model.shape.representation(query_heads=model.heads)
        identity = Identity(weights=b"w" * 32, architecture=b"{}")
        self.cache = PrefixCache(
            [self.tier], identity=identity, representation=representation, load_timeout_s=_GIVEN_UP_S, match_timeout_s=5.0
        )
        memory = KVMemory(model.shape, 4 * model.shape.region_bytes(context), context_tokens=context)
        info = EngineInfo(
            model=model.name,
            context_tokens=context,
            vocabulary=model.vocabulary,
            device="cpu",
            dtype="float32",
            layers=len(model.shape.layers),
            kv_bytes_per_token=model.shape.token_bytes,
            cache="",
        )
        self.engine = TorchEngine(model, memory, info=info, cache=self.cache, load_timeout_s=_GIVEN_UP_S)
        self.engine.warm_up()
        self._asked = 0

    def __enter__(self) -> _Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.heal()
        self.engine.close()

    def store(self, prompt: Sequence[int]) -> None:
        self.ask([*prompt, 1])
        while (counters := self.cache.statistics().counters).get("saves_done", 0) < counters.get("save_calls", 0):
            time.sleep(0.01)

    def spoil(self, disk: float | str) -> None:
        from headstart.testing.faults import Fault

        if isinstance(disk, str):
            self.tier.inject(Fault("read", disk))  # type: ignore[arg-type]
        else:
            self.tier.slow_down(disk)

    def ask(self, prompt: Sequence[int], *, use_cache: bool = True, load_all: bool = False) -> dict[str, Any]:
        from headstart.engine.base import GenerationRequest, TokenEvent
        from headstart.policy.loading import Plan, plan_load

        def everything(stretches: Any, **others: Any) -> Plan:
            tokens = sum(stretch.tokens for stretch in stretches)
            return replace(plan_load(stretches, **others), choice="load", at_once_tokens=tokens, compute_s=None)

        events: queue.Queue[tuple[float, TokenEvent]] = queue.Queue()
        self._asked += 1
        asked = GenerationRequest(id=str(self._asked), prompt=tuple(prompt), max_tokens=1, use_cache=use_cache)
        with ExitStack() as stack:
            if load_all:
                stack.enter_context(patch("headstart.engine.torch.prefix.plan_load", everything))
            started = time.perf_counter()
            self.engine.submit(asked, lambda event: events.put((time.perf_counter(), event)))
            moment, event = events.get(timeout=2 * _GIVEN_UP_S)
        assert event.finish == "length", event
        assert event.receipt is not None
        time.sleep(0.2)  # what was cancelled ends
        return {
            "first_token_s": moment - started,
            "choice": event.receipt.decision.choice,
            "read_tokens": event.receipt.cached_tokens,
        }


def _prompt(vocabulary: int, tokens: int, *, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, vocabulary) for _ in range(tokens)]


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [
        f"A prompt of {result['prompt_tokens']:,} tokens, all but the last {result['suffix_tokens']} stored, "
        f"{result['token_bytes']:,} bytes a token; medians of {result['rounds']} rounds. In brackets the ratio to no cache, "
        f"which is to be at most {TARGET}, and the tokens that were read.",
        "",
        "| disk | no cache | cache | cache, first prompt of a process | all loaded |",
        "|---|---|---|---|---|",
    ]
    for name, ways in result["disks"].items():
        cells = [f"{ways['without']['first_token_s']:.2f} s"]
        for way in ("with", "first", "load"):
            one = ways.get(way)
            told = "–"
            if one is not None:
                told = f"{one['first_token_s']:.2f} s ({one['ratio']:.2f}; {one['choice']}, {one['read_tokens']:,})"
            cells.append(f"**{told}**" if way == "with" else told)
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows)
