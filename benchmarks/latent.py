"""Latent attention: CPU seconds of a layer in either form, by how many new rows there are, and which form the rule takes.

Both forms compute the same rows over the same latents, in turn, in one process; CPU seconds, because other work on the machine
changes them less than the clock. Shapes are those of models that people run; weights and latents are random.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.harness import paired_ratio, where_it_ran
from headstart.config import prefer_sleeping_threads
from headstart.policy.latent import LatentShape, absorbs

_MODELS = {
    "DeepSeek-V2-Lite": (16, LatentShape(rank=512, nope=128, rope=64, value=128)),
    "GLM-4.7-Flash": (20, LatentShape(rank=512, nope=192, rope=64, value=256)),
}
_ROWS = (1, 16, 64, 128, 192, 256, 384, 512)


def run(*, smoke: bool = False, rounds: int = 7, prefix_tokens: int = 4096) -> dict[str, Any]:
    """Return CPU seconds a layer of both forms, for each model and number of rows."""
    models, rows = dict(_MODELS), _ROWS
    if smoke:
        rounds, prefix_tokens, rows = 1, 128, (1, 64)
        models = {"tiny": (2, LatentShape(rank=32, nope=16, rope=8, value=16))}
    prefer_sleeping_threads()
    result: dict[str, Any] = {"where": where_it_ran(Path.cwd()), "prefix_tokens": prefix_tokens, "rounds": rounds}
    result["models"] = {name: _measured(*one, rows, prefix_tokens, rounds) for name, one in models.items()}
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    apart = max(one["apart"] for rows in result["models"].values() for one in rows)
    lines = [
        f"One layer, new rows over {result['prefix_tokens']:,} tokens in memory, median of {result['rounds']} interleaved "
        f"rounds; largest difference of the two forms {apart:.1e}.",
    ]
    for name, rows in result["models"].items():
        lines += [
            "",
            f"| {name}: rows | absorbed, CPU | expanded, CPU | absorbed / expanded [95 %] | the rule takes |",
            "|---|---|---|---|---|",
        ]
        for one in rows:
            ratio = one["ratio"]
            lines.append(
                f"| {one['rows']} | {1000 * one['absorbed_s']:.0f} ms | {1000 * one['expanded_s']:.0f} ms "
                f"| {ratio['median']:.2f} [{ratio['low']:.2f} … {ratio['high']:.2f}] | {one['takes']} |"
            )
    return "\n".join(lines)


def _measured(heads: int, shape: LatentShape, rows: tuple[int, ...], prefix: int, rounds: int) -> list[dict[str, Any]]:
    import torch
    from torch import nn

    from headstart.engine.torch import mla
    from headstart.engine.torch.attention import Rule, Segment, Step
    from headstart.engine.torch.hardware import keep_freed_memory, use_physical_cores
    from headstart.engine.torch.kv_memory import KVShape, LayerKV, ScratchKV

    use_physical_cores()
    keep_freed_memory()
    torch.manual_seed(5)
    plain = nn.Linear(shape.rank, heads * (shape.nope + shape.value), bias=False).requires_grad_(False)
    module = mla.Heads(plain, shape)
    kept = KVShape((LayerKV(0, 1, shape.rank + shape.rope, latent=True),), torch.float32)
    kv = ScratchKV(kept, prefix + max(rows), torch.device("cpu"))
    kv.keys(0).normal_()
    order = random.Random(1)
    measured = []
    for count in rows:
        query = torch.randn(1, heads, count, shape.nope + shape.rope)
        segments = [Segment(kv, 0, count, prefix)]
        seconds: dict[bool, list[float]] = {True: [], False: []}
        outs: dict[bool, torch.Tensor] = {}
        for round_ in range(-1, rounds):  # round -1 warms up and is not counted
            for absorbed in order.sample((True, False), 2):
                with patch.object(mla, "absorbs", lambda *_, absorbed=absorbed, **__: absorbed), torch.inference_mode():
                    step = Step(segments)
                    started = time.process_time()
                    rule = Rule((shape.nope + shape.rope) ** -0.5, None, None, step.masks)
                    outs[absorbed] = module.attend(step, 0, query, segments, rule)
                    if round_ >= 0:
                        seconds[absorbed].append(time.process_time() - started)
        pairs = count * prefix + count * (count + 1) // 2
        measured.append(
            {
                "rows": count,
                "absorbed_s": statistics.median(seconds[True]),
                "expanded_s": statistics.median(seconds[False]),
                "ratio": dataclasses.asdict(paired_ratio(seconds[True], seconds[False])),
                "apart": float((outs[True] - outs[False]).abs().max()),
                "takes": "absorbed" if absorbs(shape, rows=count, keys=prefix + count, pairs=pairs) else "expanded",
            }
        )
    return measured
