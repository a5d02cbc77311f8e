"""headstart under vLLM against vLLM's own ExampleConnector: first token from disk, bytes on disk, what the cold path costs.

Each connector gets the same prompts, on a vLLM of its own over an empty directory: computed cold, everything killed, the page
cache emptied of its files, everything started again, asked again. `none` is vLLM without a connector: what cold costs there,
and a hit in its own memory as the floor. Needs the environment that `make test-vllm` makes, and the model.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness import benchmark_home, where_it_ran
from benchmarks.vllm_server import ROOT, Answer, connector, serving
from headstart.tier import page_cache

PYTHON = ROOT / "build" / "venv-vllm" / "bin" / "python"
MODEL = ROOT / "models" / "smollm2-135m"
STORED, SUFFIX, PROMPTS = 1024, 16, 5


def example(directory: Path) -> dict[str, Any]:
    """ExampleConnector keeps one file a layer and a prompt, below a folder that must be there."""
    directory.mkdir(parents=True, exist_ok=True)
    extra = {"shared_storage_path": str(directory)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


CONNECTORS: dict[str, Callable[[Path], dict[str, Any]]] = {"headstart": connector, "vLLM's ExampleConnector": example}


def run(*, smoke: bool = False, python: Path = PYTHON, model: Path = MODEL) -> dict[str, Any]:
    """Return seconds to the first token by connector, cold and from disk, and bytes on disk."""
    if not python.exists() or not (model / "model.safetensors").exists():
        return {"skipped": f"no vLLM at {python}, or no model at {model}: make test-vllm brings both"}
    dice = random.Random(5)
    count = 1 if smoke else PROMPTS
    prompts = [[dice.randrange(200, 40_000) for _ in range(STORED + SUFFIX)] for _ in range(count)]
    warm_up = [dice.randrange(200, 40_000) for _ in range(300)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-", dir=benchmark_home()) as name:
        home = Path(name)
        with serving(model.resolve(), log=home / "plain.log", python=str(python)) as server:
            server.ask(warm_up)
            plain = [server.ask(prompt) for prompt in prompts]
            floor = [server.ask(prompt) for prompt in prompts]
        found["none"] = {"cold_s": _first(plain), "hit_s": _first(floor), "bytes": 0, "same": _same(plain, floor)}
        for label, transfer in CONNECTORS.items():
            directory = home / label.split()[-1]
            with serving(model.resolve(), log=home / "cold.log", transfer=transfer(directory), python=str(python)) as server:
                server.ask(warm_up)
                cold = [server.ask(prompt) for prompt in prompts]
                if label == "headstart":
                    server.wait_for("headstart_saves", count + 1)
            files = [file for file in directory.rglob("*") if file.is_file()]
            page_cache.drop(files)
            cached = page_cache.resident_bytes(files)
            with serving(model.resolve(), log=home / "hit.log", transfer=transfer(directory), python=str(python)) as server:
                server.ask(warm_up)
                hits = [server.ask(prompt) for prompt in prompts]
            found[label] = {
                "cold_s": _first(cold),
                "hit_s": _first(hits),
                "bytes": sum(file.stat().st_blocks * 512 for file in files),
                "cached_bytes": cached,
                "same": _same(plain, cold) and _same(plain, hits),
            }
        return {"where": where_it_ran(home), "prompts": count, "tokens": STORED + SUFFIX, "connectors": found}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return str(result["skipped"])
    plain = statistics.median(result["connectors"]["none"]["cold_s"])
    rows = [
        f"{result['prompts']} prompts of {result['tokens']:,} tokens, vLLM 0.32 on a CPU, SmolLM2-135M in float32; medians "
        "[least … most] of the time to the first token. The row without a connector hits in vLLM's own memory.",
        "",
        "| connector | cold | to none | hit, restarted, page cache emptied | cold ÷ hit | on disk | same tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in result["connectors"].items():
        cold, hit = statistics.median(one["cold_s"]), statistics.median(one["hit_s"])
        rows.append(
            f"| {name} | {_spread(one['cold_s'])} | {cold / plain:.2f} | {_spread(one['hit_s'])} | {cold / hit:.1f} | "
            f"{one['bytes'] / 1e6:,.0f} MB | {'yes' if one['same'] else 'no'} |"
        )
    return "\n".join(rows)


def _first(answers: list[Answer]) -> list[float]:
    return [round(answer.first_token_s, 4) for answer in answers]


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s [{min(seconds):.2f} … {max(seconds):.2f}]"


def _same(one: list[Answer], other: list[Answer]) -> bool:
    return all(a.tokens == b.tokens for a, b in zip(one, other, strict=True))
