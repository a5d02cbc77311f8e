"""What a cold request pays for the cache: CPU seconds, first token and time per token, cache on against off.

One engine, prompts that nobody has seen, in pairs: one with the cache, one past it (`use_cache=False`), in random order. CPU
seconds are those of the whole process until the save has ended, so hashing, copying, checks and writing are all in it.
"""

from __future__ import annotations

import dataclasses
import queue
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from headstart.config import CacheConfig, Config, prefer_sleeping_threads


def run(*, smoke: bool = False, pairs: int = 20, prompt_tokens: int = 512, output_tokens: int = 32) -> dict[str, Any]:
    """Return the three ratios (on over off) and the medians they come from."""
    if smoke:
        pairs, prompt_tokens, output_tokens = 1, 128, 4
    prefer_sleeping_threads()
    home = benchmark_home()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=home) as folder:
        cache = CacheConfig(directory=Path(folder), capacity="8GiB")
        samples = _measure(Config(cache=cache), pairs=pairs, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        where = where_it_ran(Path(folder))
    on, off = samples[True], samples[False]
    result: dict[str, Any] = {"where": where, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens, "pairs": pairs}
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


def _measure(config: Config, *, pairs: int, prompt_tokens: int, output_tokens: int) -> dict[bool, list[dict[str, float]]]:
    from headstart.cli.opening import open_model
    from headstart.engine.base import GenerationRequest, TokenEvent

    served = open_model(config, on_progress=lambda stage, fraction: None)
    engine, stored = served.engine, served.cache
    assert stored is not None
    rng = random.Random(7)
    samples: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    try:
        for pair in range(-1, pairs):  # pair -1 warms up and is not counted
            for use_cache in rng.sample((True, False), 2):
                prompt = tuple(rng.randrange(1000, engine.info.vocabulary) for _ in range(prompt_tokens))
                events: queue.Queue[tuple[float, TokenEvent]] = queue.Queue()
                asked = GenerationRequest(
                    id=f"{pair}-{use_cache}", prompt=prompt, max_tokens=output_tokens, use_cache=use_cache
                )
                cpu, start = time.process_time(), time.perf_counter()
                engine.submit(asked, lambda event, put=events.put: put((time.perf_counter(), event)))  # type: ignore[misc]
                times = []
                while True:
                    moment, event = events.get(timeout=600)
                    times += [moment] if event.token is not None else []
                    if event.finish is not None:
                        assert event.finish == "length", event
                        assert event.receipt is not None
                        assert event.receipt.cached_tokens == 0
                        break
                while (counters := stored.statistics().counters).get("saves_done", 0) < counters.get("save_calls", 0):
                    time.sleep(0.002)
                if pair >= 0:
                    samples[use_cache].append(
                        {
                            "cpu_s": time.process_time() - cpu,
                            "first_token_s": times[0] - start,
                            "per_token_s": (times[-1] - times[0]) / (len(times) - 1),
                        }
                    )
    finally:
        engine.close()
    return samples


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [
        f"Cold prompts of {result['prompt_tokens']:,} tokens, {result['output_tokens']} tokens of answer, "
        f"{result['pairs']} interleaved pairs.",
        "",
        "| | cache on | cache off | ratio of medians | median ratio of pairs [95 %] |",
        "|---|---|---|---|---|",
    ]
    for measure, name, unit, scale in (
        ("cpu_s", "CPU seconds a request", "s", 1),
        ("first_token_s", "first token", "s", 1),
        ("per_token_s", "time per token", "ms", 1000),
    ):
        one = result[measure]
        ratio = one["ratio"]
        rows.append(
            f"| {name} | {one['on'] * scale:.2f} {unit} | {one['off'] * scale:.2f} {unit} | {one['ratio_of_medians']:.3f} | "
            f"{ratio['median']:.3f} [{ratio['low']:.3f} … {ratio['high']:.3f}] |"
        )
    return "\n".join(rows)
