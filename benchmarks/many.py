"""Many requests at once against the same ones, one by one: throughput, the longest gap between tokens, memory and its bound.

Requests come in groups that share a beginning, as agents with one system prompt do, and all are there from the start. KV
memory is too little for all of them, so some give way and go on from the cache. Both ways begin with an empty cache of their
own.
"""

from __future__ import annotations

import queue
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.config import CacheConfig, Config, EngineConfig, prefer_sleeping_threads


def run(
    *,
    smoke: bool = False,
    requests: int = 32,
    groups: int = 4,
    shared_tokens: int = 512,
    own_tokens: int = 64,
    output_tokens: int = 64,
    running: int = 16,
    memory_tokens: int = 6144,
) -> dict[str, Any]:
    """Return wall and CPU seconds of both ways, gaps, preemptions and the most memory that was in use."""
    if smoke:
        requests, groups, shared_tokens, own_tokens, output_tokens, running, memory_tokens = 4, 2, 64, 8, 4, 4, 512
    prefer_sleeping_threads()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as folder:
        ways = {}
        for way, at_once in (("one by one", 1), ("at once", requests)):
            config = Config(
                cache=CacheConfig(directory=Path(folder) / way.replace(" ", "-"), capacity="8GiB"),
                engine=EngineConfig(max_running=running, context=shared_tokens + own_tokens + output_tokens),
            )
            prompts = (requests, groups, shared_tokens, own_tokens)
            ways[way] = _measure(config, prompts, output_tokens=output_tokens, at_once=at_once, memory_tokens=memory_tokens)
        where = where_it_ran(Path(folder))
    return {
        "where": where,
        "requests": requests,
        "groups": groups,
        "prompt_tokens": shared_tokens + own_tokens,
        "shared_tokens": shared_tokens,
        "output_tokens": output_tokens,
        "running": running,
        "ways": ways,
        "same_tokens": ways["at once"].pop("tokens") == ways["one by one"].pop("tokens"),
    }


def _prompts(vocabulary: int, requests: int, groups: int, shared_tokens: int, own_tokens: int) -> list[tuple[int, ...]]:
    draw = random.Random(5)

    def some(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(1000, vocabulary) for _ in range(count))

    beginnings = [some(shared_tokens) for _ in range(groups)]
    return [beginnings[number % groups] + some(own_tokens) for number in range(requests)]


def _measure(
    config: Config, prompts: tuple[int, int, int, int], *, output_tokens: int, at_once: int, memory_tokens: int
) -> dict[str, Any]:
    from dataclasses import replace

    from headstart.cli.opening import open_model
    from headstart.engine.base import GenerationRequest, TokenEvent

    # A token of SmolLM2-135M's KV in float32 is 46,080 bytes.
    config = replace(config, engine=replace(config.engine, kv_memory=str(memory_tokens * 46_080)))
    served = open_model(config, on_progress=lambda stage, fraction: None)
    engine = served.engine
    events: queue.Queue[tuple[int, float, TokenEvent]] = queue.Queue()
    todo = list(enumerate(_prompts(engine.info.vocabulary, *prompts)))
    tokens: dict[int, list[int]] = {number: [] for number, _ in todo}
    gaps, firsts, used, preemptions, left = [], [], 0, 0, len(todo)
    cpu, start = time.process_time(), time.perf_counter()

    def ask() -> None:
        number, prompt = todo.pop(0)
        asked = GenerationRequest(id=str(number), prompt=prompt, max_tokens=output_tokens, tenant=f"t{number % 4}")
        engine.submit(asked, lambda event: events.put((number, time.perf_counter(), event)))

    try:
        for _ in range(min(at_once, len(todo))):
            ask()
        while left:
            number, _, event = events.get(timeout=600)
            used = max(used, engine.load().kv_used_bytes)
            tokens[number] += [] if event.token is None else [event.token]
            if event.finish is None:
                continue
            assert event.finish == "length", event
            assert event.receipt is not None
            left -= 1
            gaps.append(event.receipt.longest_gap_s)
            firsts.append(event.receipt.first_token_s or 0.0)
            preemptions += event.receipt.preemptions
            if todo:
                ask()
        load = engine.load()
        return {
            "wall_s": time.perf_counter() - start,
            "cpu_s": time.process_time() - cpu,
            "gap_s": max(gaps),
            "gap_median_s": statistics.median(gaps),
            "first_token_median_s": statistics.median(firsts),
            "preemptions": preemptions,
            "resumed_tokens": load.counters.get("resumed_tokens", 0),
            "recomputed_tokens": load.counters.get("recomputed_tokens", 0),
            "kv_used_bytes": used,
            "kv_capacity_bytes": load.kv_capacity_bytes,
            "tokens": tokens,
        }
    finally:
        engine.close()


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    ways = result["ways"]
    one, all_ = ways["one by one"], ways["at once"]
    rows = [
        f"{result['requests']} requests of {result['prompt_tokens']:,} tokens in {result['groups']} groups that share "
        f"{result['shared_tokens']:,}, {result['output_tokens']} tokens of answer each; at most {result['running']} at once.",
        "",
        "| | one by one | at once |",
        "|---|---|---|",
        f"| all answers | {one['wall_s']:.1f} s | {all_['wall_s']:.1f} s |",
        f"| CPU seconds | {one['cpu_s']:.1f} | {all_['cpu_s']:.1f} |",
        f"| longest gap between two tokens: worst, median request | {one['gap_s']:.2f} s, {one['gap_median_s']:.2f} s "
        f"| {all_['gap_s']:.2f} s, {all_['gap_median_s']:.2f} s |",
        f"| KV memory, most in use of its bound | {_share(one)} | {_share(all_)} |",
        f"| gave way; tokens that came back, computed again | {_again(one)} | {_again(all_)} |",
        "",
        f"Throughput ratio {one['wall_s'] / all_['wall_s']:.2f} (CPU seconds {one['cpu_s'] / all_['cpu_s']:.2f}); "
        f"the same tokens: {'yes' if result['same_tokens'] else 'no'}.",
    ]
    return "\n".join(rows)


def _share(way: dict[str, Any]) -> str:
    return f"{way['kv_used_bytes'] / 1e6:.0f} of {way['kv_capacity_bytes'] / 1e6:.0f} MB"


def _again(way: dict[str, Any]) -> str:
    return f"{way['preemptions']}; {way['resumed_tokens']:,}, {way['recomputed_tokens']:,}"
