"""A prompt computed by one worker and answered by another, against one worker that does both.

Three servers: one alone, one that computes prompts, one that decodes. Each prompt is new, and is asked of the one alone and of
the two; rounds are interleaved over the ways (shared memory, TCP). While it is computed, another answer is being written where
it will be answered: the longest gap between two of that one's tokens is what the prompt costs others. Shown besides: from the
prompt's first token to the next one, and how much of the KV had been sent before the first token was told.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from headstart.cli.server_process import ServerProcess

TOKENS = 2048
WAYS = ("shared memory", "TCP")
_ANSWER = 16
_BESIDE = 400  # tokens of the answer beside


@dataclass
class Answer:
    """When each piece of an answer came, in seconds from sending, and what it was."""

    times: list[float] = field(default_factory=list)
    text: str = ""

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def run(*, smoke: bool = False, model: str = "smollm2-135m", tokens: int = TOKENS, rounds: int = 5) -> dict[str, Any]:
    """Return what was measured, by way."""
    if smoke:
        tokens, rounds = 512, 1
    with tempfile.TemporaryDirectory(dir=benchmark_home()) as directory:
        home = Path(directory)
        listen = f"ipc://{home}/p.sock, tcp://127.0.0.1:0"
        common = [model, "--cache-capacity", "0", "--cache-memory", "2GiB", "--context", str(max(2048, tokens + 1024))]
        with (
            ServerProcess(common, log=home / "alone.log") as alone,
            ServerProcess([*common, "--role", "prefill", "--handoff-listen", listen], log=home / "prefill.log") as prefill,
            ServerProcess([*common, "--role", "decode"], log=home / "decode.log") as decode,
        ):
            addresses = httpx.get(f"{prefill.url}/v1/headstart/role", trust_env=False).json()["addresses"]
            _measure(alone, prefill, decode, addresses, tokens=256, rounds=1)  # for what is made on first use
            ways = _measure(alone, prefill, decode, addresses, tokens=tokens, rounds=rounds)
    return {"where": where_it_ran(benchmark_home()), "model": model, "tokens": tokens, "rounds": rounds, "ways": ways}


def _measure(
    alone: ServerProcess, prefill: ServerProcess, decode: ServerProcess, addresses: Sequence[str], *, tokens: int, rounds: int
) -> dict[str, Any]:
    seen: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, address in zip(WAYS, addresses, strict=True):
            prompt = _prompt(tokens, seed=tokens + 2 * number + WAYS.index(way))
            before = [prefill.metric(f"headstart_engine_handoff_sent{kind}_bytes_total") for kind in ("", "_early")]
            together, beside_together = _both(alone, alone, prompt, "")
            apart, beside_apart = _both(decode, decode, prompt, address)
            after = [prefill.metric(f"headstart_engine_handoff_sent{kind}_bytes_total") for kind in ("", "_early")]
            sent, early = (b - a for a, b in zip(before, after, strict=True))
            seen[way].append(
                {
                    "same": float(together.text == apart.text),
                    "first_together_s": together.times[0],
                    "first_apart_s": apart.times[0],
                    "next_together_s": together.times[1] - together.times[0],
                    "next_apart_s": apart.times[1] - apart.times[0],
                    "gap_together_s": beside_together.longest_gap_s,
                    "gap_apart_s": beside_apart.longest_gap_s,
                    "early": early / max(1.0, sent),
                    "mb": sent / 1e6,
                }
            )
            print(
                f"{way:13} {tokens} tokens, {number + 1} of {rounds}: {together.times[0]:.1f} s, {apart.times[0]:.1f} s",
                flush=True,
            )
    return {way: _told(rows) for way, rows in seen.items()}


def _told(rows: Sequence[dict[str, float]]) -> dict[str, Any]:
    told: dict[str, Any] = {name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "same"}
    told["same_tokens"] = all(row["same"] for row in rows)
    for name in ("first", "gap"):
        ratio = paired_ratio([row[f"{name}_apart_s"] for row in rows], [row[f"{name}_together_s"] for row in rows])
        told[f"{name}_ratio"] = [ratio.median, ratio.low, ratio.high]
    return told


def _both(server: ServerProcess, beside: ServerProcess, prompt: Sequence[int], prefill_at: str) -> tuple[Answer, Answer]:
    """Ask for `prompt` while `beside` writes another answer; return both answers, the other from then on."""
    other, begun, done = Answer(), threading.Event(), threading.Event()

    def write() -> None:
        _stream(beside, _prompt(64, seed=1), _BESIDE, other, begun=begun, done=done)

    writing = threading.Thread(target=write)
    writing.start()
    begun.wait(60)
    answer = Answer()
    _stream(server, prompt, _ANSWER, answer, prefill_at=prefill_at)
    done.set()
    writing.join()
    return answer, other


def _stream(
    server: ServerProcess,
    prompt: Sequence[int],
    tokens: int,
    into: Answer,
    *,
    prefill_at: str = "",
    begun: threading.Event | None = None,
    done: threading.Event | None = None,
) -> None:
    body = {"prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    headers = {"x-headstart-prefill-at": prefill_at} if prefill_at else {}
    started = time.perf_counter()
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, headers=headers, timeout=600, trust_env=False
    ) as lines:
        for line in lines.iter_lines():
            if not line.startswith("data: {"):
                continue
            if text := json.loads(line[6:])["choices"][0]["text"]:
                into.times.append(time.perf_counter() - started)
                into.text += text
                if begun is not None:
                    begun.set()
            if done is not None and done.is_set():
                return


def _prompt(tokens: int, *, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000, 40_000) for _ in range(tokens)]


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    columns = [
        "way",
        "KV",
        "first token, together",
        "apart",
        "ratio",
        "to the next token",
        "longest gap of others, together",
        "apart",
        "ratio",
        "sent before the first token",
        "same tokens",
    ]
    lines = [
        f"A prompt of {result['tokens']:,} tokens, {result['rounds']} rounds; medians, ratios with their 95 % interval.",
        "",
        f"| {' | '.join(columns)} |",
        "|" + "---|" * len(columns),
    ]
    for way, one in result["ways"].items():
        first, gap = ("{:.2f} [{:.2f} … {:.2f}]".format(*one[f"{name}_ratio"]) for name in ("first", "gap"))
        cells = [way, f"{one['mb']:.0f} MB", f"{one['first_together_s']:.2f} s", f"{one['first_apart_s']:.2f} s", first]
        cells += [f"{one[f'{name}_s'] * 1000:.0f} ms" for name in ("next_apart", "gap_together", "gap_apart")]
        cells += [gap, f"{one['early']:.1%}", "yes" if one["same_tokens"] else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
