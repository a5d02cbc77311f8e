"""headstart under vLLM against vLLM's ExampleConnector and LMCache: first token from disk, bytes on disk, what cold costs.

Each connector gets the same prompts, on a vLLM of its own over an empty directory: computed cold, everything killed, the page
cache emptied of its files, everything started again, asked again. `none` is vLLM without a connector: what cold costs there,
and a hit in its own memory as the floor. Needs the environment that `make test-vllm` makes, and the model.

LMCache changes many of vLLM's packages, so it takes part only where a second environment has it (build/venv-lmcache: a copy of
the first, and `pip install lmcache==0.5.6`). Its MP connector with its file tier, by a server of its own that is killed too.
"""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import benchmark_home, where_it_ran
from benchmarks.vllm_server import ROOT, Answer, connector, serving
from headstart.tier import page_cache

PYTHON = ROOT / "build" / "venv-vllm" / "bin" / "python"
LMCACHE = ROOT / "build" / "venv-lmcache" / "bin" / "python"
MODEL = ROOT / "models" / "smollm2-135m"
LMCACHE_PORT = 25_555
STORED, SUFFIX, PROMPTS = 1024, 16, 5


def example(directory: Path) -> dict[str, Any]:
    """ExampleConnector keeps one file a layer and a prompt, below a folder that must be there."""
    directory.mkdir(parents=True, exist_ok=True)
    extra = {"shared_storage_path": str(directory)}
    return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def lmcache(directory: Path) -> dict[str, Any]:
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://localhost", "lmcache.mp.port": LMCACHE_PORT},
    }


@contextmanager
def lmcache_server(directory: Path) -> Iterator[None]:
    """LMCache's own server over files, started before vLLM and killed with it."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(LMCACHE.parent / "lmcache"), "server", "--port", str(LMCACHE_PORT), "--l1-size-gb", "1"]
    command += ["--supported-transfer-mode", "engine_driven", "--http-port", str(LMCACHE_PORT + 1)]
    command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(directory)})]
    with (directory.parent / "lmcache.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def nothing_beside(directory: Path) -> Iterator[None]:
    yield


@dataclass(frozen=True, slots=True)
class Contender:
    transfer: Callable[[Path], dict[str, Any]]
    python: Path
    beside: Callable[[Path], AbstractContextManager[None]] = nothing_beside


CONTENDERS = {
    "headstart": Contender(connector, PYTHON),
    "vLLM's ExampleConnector": Contender(example, PYTHON),
    "LMCache 0.5.6, MP with files": Contender(lmcache, LMCACHE, lmcache_server),
}


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return seconds to the first token by connector, cold and from disk, and bytes on disk."""
    if not PYTHON.exists() or not (MODEL / "model.safetensors").exists():
        return {"skipped": f"no vLLM at {PYTHON}, or no model at {MODEL}: make test-vllm brings both"}
    model = MODEL.resolve()
    dice = random.Random(5)
    count = 1 if smoke else PROMPTS
    prompts = [[dice.randrange(200, 40_000) for _ in range(STORED + SUFFIX)] for _ in range(count)]
    warm_up = [dice.randrange(200, 40_000) for _ in range(300)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-", dir=benchmark_home()) as name:
        home = Path(name)
        with serving(model, log=home / "plain.log", python=str(PYTHON)) as server:
            server.ask(warm_up)
            plain = [server.ask(prompt) for prompt in prompts]
            floor = [server.ask(prompt) for prompt in prompts]
        found["none"] = {"cold_s": _first(plain), "hit_s": _first(floor), "bytes": 0, "same": _same(plain, floor)}
        for number, (label, one) in enumerate(CONTENDERS.items()):
            if not one.python.exists():
                continue
            directory = home / str(number)
            started = partial(serving, model, transfer=one.transfer(directory), python=str(one.python))
            with one.beside(directory), started(log=home / "cold.log") as server:
                server.ask(warm_up)
                cold = [server.ask(prompt) for prompt in prompts]
                _wait_until_written(directory)
            files = [file for file in directory.rglob("*") if file.is_file()]
            page_cache.drop(files)
            cached = page_cache.resident_bytes(files)
            with one.beside(directory), started(log=home / "hit.log") as server:
                server.ask(warm_up)
                hits = [server.ask(prompt) for prompt in prompts]
            found[label] = {
                "cold_s": _first(cold),
                "hit_s": _first(hits),
                "bytes": sum(file.stat().st_blocks * 512 for file in files),
                "cached_bytes": cached,
                "same": _same(plain, cold) and _same(plain, hits),
            }
            print(label, found[label])
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


def _wait_until_written(directory: Path) -> None:
    """Saving is behind the answer: wait until nothing was added for three seconds."""
    seen, since = -1, time.monotonic()
    while time.monotonic() - since < 3.0:
        nbytes = sum(file.stat().st_blocks for file in directory.rglob("*") if file.is_file())
        if nbytes != seen:
            seen, since = nbytes, time.monotonic()
        time.sleep(0.1)


def _first(answers: list[Answer]) -> list[float]:
    return [round(answer.first_token_s, 4) for answer in answers]


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.2f} s [{min(seconds):.2f} … {max(seconds):.2f}]"


def _same(one: list[Answer], other: list[Answer]) -> bool:
    return all(a.tokens == b.tokens for a, b in zip(one, other, strict=True))
