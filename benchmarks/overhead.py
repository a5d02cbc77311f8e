"""What a cold request pays for the cache: CPU seconds, first token and time per token, cache on against off.

One engine, prompts that nobody has seen, in pairs: one with the cache, one past it (`use_cache=False`), in random order; alone,
and eight at once. CPU seconds are those of the whole process until the save has ended, so hashing, copying, checks and writing
are all in it.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from headstart.config import CacheConfig, Config, prefer_sleeping_threads

if TYPE_CHECKING:
    from headstart.cache.prefix_cache import PrefixCache
    from headstart.engine.base import Engine


BATCHES = {1: 12, 8: 5}  # requests at once, and pairs of such


def run(
    *, smoke: bool = False, batches: Mapping[int, int] = BATCHES, prompt_tokens: int = 512, output_tokens: int = 16
) -> dict[str, Any]:
    """Return the three ratios (on over off) and the medians they come from, by how many requests were asked at once."""
    if smoke:
        batches, prompt_tokens, output_tokens = dict.fromkeys(batches, 1), 128, 4
    prefer_sleeping_threads()
    home = benchmark_home()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        cache = CacheConfig(directory=Path(folder), capacity="8GiB")
        measured = _measure(Config(cache=cache), batches=batches, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        where = where_it_ran(Path(folder))
    return {
        "where": where,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "batches": {str(batch): _compared(samples) for batch, samples in measured.items()},
    }


def _compared(samples: dict[bool, list[dict[str, float]]]) -> dict[str, Any]:
    on, off = samples[True], samples[False]
    result: dict[str, Any] = {"pairs": len(on)}
    for measure in ("cpu_s", "first_token_s", "per_token_s"):
        with_cache, without = [sample[measure] for sample in on], [sample[measure] for sample in off]
        result[measure] = {
            "on": statistics.median(with_cache),
            "off": statistics.median(without),
            # The claim is about medians; the pairs' own ratios give the interval.
            "ratio_of_medians": statistics.median(with_cache) / statistics.median(without),
            "ratio": dataclasses.asdict(paired_ratio(with_cache, without)),
        }
    return result


def _measure(
    config: Config, *, batches: Mapping[int, int], prompt_tokens: int, output_tokens: int
) -> dict[int, dict[bool, list[dict[str, float]]]]:
    from headstart.cli.opening import open_model

    served = open_model(config, on_progress=lambda stage, fraction: None)
    engine, stored = served.engine, served.cache
    assert stored is not None
    rng = random.Random(7)
    measured: dict[int, dict[bool, list[dict[str, float]]]] = {}
    try:
        for batch, pairs in batches.items():
            measured[batch] = {True: [], False: []}
            for pair in range(-1, pairs):  # pair -1 warms up and is not counted
                for use_cache in rng.sample((True, False), 2):
                    prompts = [
                        tuple(rng.randrange(1000, engine.info.vocabulary) for _ in range(prompt_tokens)) for _ in range(batch)
                    ]
                    sample = _ask(engine, stored, prompts, output_tokens, use_cache=use_cache)
                    if pair >= 0:
                        measured[batch][use_cache].append(sample)
    finally:
        engine.close()
    return measured


def _ask(
    engine: Engine, stored: PrefixCache, prompts: Sequence[tuple[int, ...]], output_tokens: int, *, use_cache: bool
) -> dict[str, float]:
    """Ask all prompts at once; return CPU seconds and the mean times of one."""
    from headstart.engine.base import GenerationRequest, TokenEvent

    events: queue.Queue[tuple[int, float, TokenEvent]] = queue.Queue()
    times: list[list[float]] = [[] for _ in prompts]
    left = len(prompts)
    cpu, start = time.process_time(), time.perf_counter()
    for number, prompt in enumerate(prompts):
        asked = GenerationRequest(id=f"{start}-{number}", prompt=prompt, max_tokens=output_tokens, use_cache=use_cache)
        engine.submit(asked, lambda event, number=number: events.put((number, time.perf_counter(), event)))  # type: ignore[misc]
    while left:
        number, moment, event = events.get(timeout=600)
        times[number] += [moment] if event.token is not None else []
        if event.finish is not None:
            assert event.finish == "length", event
            assert event.receipt is not None
            assert event.receipt.cached_tokens == 0
            left -= 1
    while (counters := stored.statistics().counters).get("saves_done", 0) < counters.get("save_calls", 0):
        time.sleep(0.002)
    return {
        "cpu_s": (time.process_time() - cpu) / len(prompts),
        "first_token_s": statistics.fmean(one[0] - start for one in times),
        "per_token_s": statistics.fmean((one[-1] - one[0]) / (len(one) - 1) for one in times),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    batches = result.get("batches", {"1": result})  # as results were before several were asked at once
    pairs = ", ".join(f"{one['pairs']} of {batch}" for batch, one in batches.items())
    rows = [
        f"Cold prompts of {result['prompt_tokens']:,} tokens, {result['output_tokens']} tokens of answer, interleaved pairs: "
        f"{pairs} at once.",
        "",
        "| at once | | cache on | cache off | ratio of medians | median ratio of pairs [95 %] |",
        "|---|---|---|---|---|---|",
    ]
    for batch, measured in batches.items():
        for measure, name, unit, scale in (
            ("cpu_s", "CPU seconds a request", "s", 1),
            ("first_token_s", "first token", "s", 1),
            ("per_token_s", "time per token", "ms", 1000),
        ):
            one = measured[measure]
            ratio = one["ratio"]
            rows.append(
                f"| {batch} | {name} | {one['on'] * scale:.2f} {unit} | {one['off'] * scale:.2f} {unit} | "
                f"{one['ratio_of_medians']:.3f} | {ratio['median']:.3f} [{ratio['low']:.3f} … {ratio['high']:.3f}] |"
            )
    return "\n".join(rows)
