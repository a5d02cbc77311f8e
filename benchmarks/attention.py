"""The torch engine's forward pass against stock `transformers`, over KV that is in memory: what is left once nothing is read.

Three questions, each in interleaved rounds in one process: a short question over a long cached prefix, a cold prefill, and a
decoding step of eight requests against eight steps of stock, one request each. Stock has its prefix in a `DynamicCache` of its
own, made outside of the timed part (making it copies the KV). The requests of the decoding step share their prefix.
"""

from __future__ import annotations

import ctypes
import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import paired_ratio, where_it_ran
from headstart.config import Config, prefer_sleeping_threads

if TYPE_CHECKING:
    import torch

    from headstart.engine.torch.kv_memory import ScratchKV
    from headstart.engine.torch.model import TorchModel

_OWN_TOKENS = 16  # of each decoding request, behind the prefix
_STEPS = 4  # of decoding a round


def run(
    *,
    smoke: bool = False,
    rounds: int = 10,
    prefix_tokens: int = 7500,
    question_tokens: int = 64,
    cold_tokens: int = 7500,
    cold_rounds: int = 3,
    shared_tokens: int = 4096,
    requests: int = 8,
) -> dict[str, Any]:
    """Return CPU seconds and wall seconds of both, and their ratios."""
    if smoke:
        rounds, prefix_tokens, cold_tokens, cold_rounds, shared_tokens = 1, 500, 500, 1, 500
    prefer_sleeping_threads()
    both = _Both()
    result: dict[str, Any] = {
        "where": where_it_ran(Path.cwd()),
        "prefix_tokens": prefix_tokens,
        "question_tokens": question_tokens,
        "cold_tokens": cold_tokens,
        "shared_tokens": shared_tokens,
        "requests": requests,
    }
    result["question"] = _compared(*both.question(prefix_tokens, question_tokens), rounds=rounds)
    result["decode"] = _compared(*both.decode(shared_tokens, requests), rounds=rounds)
    result["cold"] = _compared(*both.cold(cold_tokens), rounds=cold_rounds)
    return result


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [
        f"Interleaved rounds: {result['question']['rounds']} of the question and of decoding, {result['cold']['rounds']} cold; "
        f"largest difference of logits {max(result[name]['apart'] for name in ('question', 'decode', 'cold')):.1e}.",
        "",
        "| | ours, CPU | stock, CPU | ours, wall | stock, wall | ratio of CPU [95 %] | ratio of wall [95 %] |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, said in (
        ("question", f"{result['question_tokens']} tokens over {result['prefix_tokens']:,} cached"),
        ("cold", f"cold prefill of {result['cold_tokens']:,} tokens"),
        (
            "decode",
            f"a token for each of {result['requests']} requests over {result['shared_tokens']:,} shared ones; stock one by one",
        ),
    ):
        one = result[name]
        cells = [f"{one[who][kind]:.3f} s" for kind in ("cpu_s", "wall_s") for who in ("ours", "stock")]
        for kind in ("cpu_s", "wall_s"):
            ratio = one["ratio"][kind]
            cells.append(f"{ratio['median']:.3f} [{ratio['low']:.3f} … {ratio['high']:.3f}]")
        rows.append(f"| {said} | " + " | ".join(cells) + " |")
    decode = result["decode"]["ratio"]
    times = " and ".join(f"{1 / decode[kind]['median']:.2f} ({name})" for kind, name in (("wall_s", "wall"), ("cpu_s", "CPU")))
    return "\n".join([*rows, "", f"Decoding gives {times} times the tokens of stock."])


# What runs is timed from its own start, behind what prepares it, and returns logits [rows, vocabulary].
_Run = Callable[[], tuple[float, float, "torch.Tensor"]]


def _compared(ours: _Run, stock: _Run, *, rounds: int) -> dict[str, Any]:
    samples: dict[str, list[tuple[float, float, torch.Tensor]]] = {"ours": [], "stock": []}
    order = random.Random(1)
    for round_ in range(-1, rounds):  # round -1 warms up and is not counted
        for name, run_one in order.sample((("ours", ours), ("stock", stock)), 2):
            _allocate_as(name)
            sample = run_one()
            if round_ >= 0:
                samples[name].append(sample)
    compared: dict[str, Any] = {"rounds": rounds, "ratio": {}}
    compared["apart"] = max(float((a[2] - b[2]).abs().max()) for a, b in zip(samples["ours"], samples["stock"], strict=True))
    for index, kind in enumerate(("wall_s", "cpu_s")):
        times = {name: [sample[index] for sample in several] for name, several in samples.items()}
        for name, several in times.items():
            compared.setdefault(name, {})[kind] = statistics.median(several)
        compared["ratio"][kind] = dataclasses.asdict(paired_ratio(times["ours"], times["stock"]))
    return compared


def _allocate_as(name: str) -> None:
    """Let the C library treat freed memory as it does in each one's own process: ours keeps it, stock has what glibc's own
    adjusting comes to in the end, blocks up to 32 MiB and twice that of free memory."""
    from headstart.engine.torch.hardware import keep_freed_memory

    if keep_freed_memory() and name == "stock":
        adjust = ctypes.CDLL(None).mallopt
        adjust(-3, 32 << 20)
        adjust(-1, 64 << 20)


class _Both:
    """The same weights through the engine's forward pass and through stock `transformers`."""

    def __init__(self) -> None:
        import torch
        import transformers

        from headstart.engine.models import resolve_model
        from headstart.engine.torch.hardware import use_physical_cores
        from headstart.engine.torch.model import load_model

        use_physical_cores()
        place = Config().models_directory.expanduser()
        here = Path(__file__).parent.parent / "models" / "smollm2-135m"
        name = str(here) if here.is_dir() else "smollm2-135m"
        folder = resolve_model(name, place, on_progress=lambda *_: None).path
        self._ours: TorchModel = load_model(folder, device="cpu", dtype="float32", on_progress=lambda *_: None)
        self._stock = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._draw = random.Random(7)

    def question(self, prefix_tokens: int, question_tokens: int) -> tuple[_Run, _Run]:
        prefix, question = self._some(prefix_tokens), self._some(question_tokens)
        kv = self._computed(prefix, room=prefix_tokens + question_tokens)
        segment = _segment(kv, 0, question_tokens, prefix_tokens)

        def ours() -> tuple[float, float, torch.Tensor]:
            return _timed(lambda: self._forward(question, [segment], rows=[question_tokens - 1]))

        def stock() -> tuple[float, float, torch.Tensor]:
            cache = self._dynamic(kv, prefix_tokens)
            return _timed(lambda: self._stock_logits(question, cache))

        return ours, stock

    def cold(self, tokens: int) -> tuple[_Run, _Run]:
        prompt = self._some(tokens)
        return (
            lambda: _timed(lambda: self._ours.next_logits(prompt)[None]),
            lambda: _timed(lambda: self._stock_logits(prompt, self._dynamic(None, 0))),
        )

    def decode(self, shared_tokens: int, requests: int) -> tuple[_Run, _Run]:
        from headstart.engine.torch.attention import Prefix
        from headstart.engine.torch.kv_memory import ScratchKV

        model = self._ours
        prefix = Prefix(self._computed(self._some(shared_tokens), room=shared_tokens), shared_tokens)
        own = [ScratchKV(model.shape, _OWN_TOKENS + _STEPS, model.device) for _ in range(requests)]
        for kv in own:
            self._forward(self._some(_OWN_TOKENS), [_segment(kv, 0, _OWN_TOKENS, shared_tokens, prefix)], rows=[])
        tokens = [self._some(requests) for _ in range(_STEPS)]
        begin = shared_tokens + _OWN_TOKENS

        def steps() -> torch.Tensor:
            for step in range(_STEPS):
                segments = [_segment(kv, row, 1, begin + step, prefix) for row, kv in enumerate(own)]
                logits = self._forward(tokens[step], segments, rows=range(requests))
            return logits

        def ours() -> tuple[float, float, torch.Tensor]:
            wall, cpu, logits = _timed(steps)
            return wall / _STEPS, cpu / _STEPS, logits

        def stock() -> tuple[float, float, torch.Tensor]:
            import torch

            wall, cpu, ends = 0.0, 0.0, []
            for row, kv in enumerate(own):  # one cache at a time: eight copies of the prefix need not fit
                cache = self._dynamic(prefix.kv, shared_tokens, kv)
                for step in range(_STEPS):
                    more = _timed(lambda row=row, step=step, cache=cache: self._stock_logits([tokens[step][row]], cache))  # type: ignore[misc]
                    wall, cpu, logits = wall + more[0], cpu + more[1], more[2]
                ends.append(logits)
            return wall / _STEPS, cpu / _STEPS, torch.cat(ends)

        return ours, stock

    def _some(self, count: int) -> list[int]:
        return [self._draw.randrange(1000, self._ours.vocabulary) for _ in range(count)]

    def _forward(self, tokens: Sequence[int], segments: list[Any], *, rows: Sequence[int]) -> torch.Tensor:
        from headstart.engine.torch.attention import Step

        return self._ours.forward(tokens, Step(segments), rows=rows)

    def _computed(self, tokens: Sequence[int], *, room: int) -> ScratchKV:
        from headstart.engine.torch.kv_memory import ScratchKV

        kv = ScratchKV(self._ours.shape, room, self._ours.device)
        for first in range(0, len(tokens), 1024):
            chunk = tokens[first : first + 1024]
            self._forward(chunk, [_segment(kv, 0, len(chunk), first)], rows=[])
        return kv

    def _dynamic(self, kv: Any, tokens: int, behind: Any = None) -> Any:
        """Return a DynamicCache with copies of the first `tokens` tokens of `kv`, and of the own tokens behind them."""
        import torch
        import transformers

        def of(layer: int, name: str) -> torch.Tensor:
            begin = getattr(kv, name)(layer)[:, :tokens]
            whole = begin if behind is None else torch.cat([begin, getattr(behind, name)(layer)[:, :_OWN_TOKENS]], dim=1)
            return whole[None]

        if kv is None:
            return transformers.DynamicCache(config=self._stock.config)
        layers = self._ours.shape.numbers
        return transformers.DynamicCache(ddp_cache_data=[(of(layer, "keys"), of(layer, "values")) for layer in layers])

    def _stock_logits(self, tokens: Sequence[int], cache: Any) -> torch.Tensor:
        import torch

        with torch.inference_mode():
            output = self._stock(torch.tensor([list(tokens)]), cache=cache, use_cache=True, logits_to_keep=1)
            logits: torch.Tensor = output.logits[0].clone()
            return logits


def _segment(kv: Any, start: int, count: int, first: int, prefix: Any = None) -> Any:
    from headstart.engine.torch.attention import Segment

    return Segment(kv, start, count, first, prefix)


def _timed(function: Callable[[], torch.Tensor]) -> tuple[float, float, torch.Tensor]:
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return time.perf_counter() - wall, time.process_time() - cpu, result
