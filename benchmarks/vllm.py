"""headstart under vLLM against vLLM's ExampleConnector and LMCache: first token from disk, bytes on disk, what cold costs.

Each connector gets the same prompts, on a vLLM of its own over an empty directory: computed cold, everything killed, the page
cache emptied of its files, everything started again, asked again. `none` is vLLM without a connector: what cold costs there,
and a hit in its own memory as the floor. All take turns, in rounds, every other round the other way about. What cold costs is
told by CPU seconds too, of all processes, until nothing is written any more. Others' processes take a core away even where they
are niced (the kernel weighs sessions before what is in them), and vLLM's threads then take turns on the other: so it is told
what others took meanwhile. Needs the environment that `make test-vllm` makes, and the model.

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
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import benchmark_home, where_it_ran
from benchmarks.vllm_server import ROOT, Answer, connector, group_cpu_s, machine_cpu_s, serving
from headstart.tier import page_cache

PYTHON = ROOT / "build" / "venv-vllm" / "bin" / "python"
LMCACHE = ROOT / "build" / "venv-lmcache" / "bin" / "python"
MODEL = Path(os.environ.get("HEADSTART_MODELS_DIRECTORY", ROOT / "models")).expanduser() / "smollm2-135m"
LMCACHE_PORT = 25_555
STORED, SUFFIX, PROMPTS, ROUNDS = 1024, 16, 3, 2
# A prompt in one step: ExampleConnector stores the first step of a prompt and takes it for all, which ends vLLM at the hit.
ONE_STEP = ("--max-num-batched-tokens", "2048")


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
def lmcache_server(directory: Path) -> Iterator[int | None]:
    """LMCache's own server over files, started before vLLM and killed with it; gives its process group."""
    directory.mkdir(parents=True, exist_ok=True)
    command = [str(LMCACHE.parent / "lmcache"), "server", "--port", str(LMCACHE_PORT), "--http-port", str(LMCACHE_PORT + 1)]
    command += ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--supported-transfer-mode", "engine_driven"]
    command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(directory)})]
    with (directory.parent / "lmcache.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield process.pid
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def nothing_beside(directory: Path) -> Iterator[int | None]:
    yield None


@dataclass(frozen=True, slots=True)
class Contender:
    transfer: Callable[[Path], dict[str, Any] | None]
    python: Path
    beside: Callable[[Path], AbstractContextManager[int | None]] = nothing_beside


NONE = "none"
CONTENDERS = {
    NONE: Contender(lambda _: None, PYTHON),
    "headstart": Contender(connector, PYTHON),
    "vLLM's ExampleConnector": Contender(example, PYTHON),
    "LMCache 0.5.6, MP with files": Contender(lmcache, LMCACHE, lmcache_server),
}


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return seconds to the first token by connector, cold and from disk, and bytes on disk."""
    if not PYTHON.exists() or not (MODEL / "model.safetensors").exists():
        return {"skipped": f"no vLLM at {PYTHON}, or no model at {MODEL}: make test-vllm brings both"}
    dice = random.Random(5)
    rounds, count = (1, 1) if smoke else (ROUNDS, PROMPTS)
    contenders = [(name, one) for name, one in CONTENDERS.items() if one.python.exists()]
    missing = [name for name, one in CONTENDERS.items() if not one.python.exists()]
    found: dict[str, dict[str, list[Any]]] = {name: defaultdict(list) for name, _ in contenders}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-vllm-", dir=benchmark_home()) as name:
        home = Path(name)
        where = where_it_ran(home)
        for number in range(rounds):
            prompts = [[dice.randrange(200, 40_000) for _ in range(STORED + SUFFIX)] for _ in range(count)]
            tokens: dict[str, list[Answer]] = {}
            for label, one in contenders if number % 2 == 0 else reversed(contenders):
                if label in failed:
                    continue
                try:
                    tokens[label] = _measure(
                        one, found[label], prompts, home / f"{number}-{label.split()[0]}", plain=label == NONE
                    )
                except (AssertionError, httpx.HTTPError) as error:  # of the server: one that fails ends only its own row
                    if label in (NONE, "headstart"):
                        raise
                    failed[label] = str(error)[:300]
                print(
                    number,
                    label,
                    failed.get(label) or {what: values[-count:] for what, values in found[label].items()},
                    flush=True,
                )
            for label in tokens:
                found[label]["same"].append(_same(tokens[NONE], tokens[label]))
    connectors = {
        label: {what: list(values) for what, values in one.items()} for label, one in found.items() if label not in failed
    }
    return {
        "where": where,
        "prompts": rounds * count,
        "tokens": STORED + SUFFIX,
        "connectors": connectors,
        "missing": missing,
        "failed": failed,
        "load_average": os.getloadavg()[2],
    }


def _measure(
    one: Contender, found: dict[str, list[Any]], prompts: list[list[int]], directory: Path, *, plain: bool
) -> list[Answer]:
    """Ask cold and again, over an empty directory; note what came of it, and return all answers."""
    dice = random.Random(6)
    warm_up = [dice.randrange(200, 40_000) for _ in range(300)]
    log = directory.with_suffix(".log")
    started = partial(
        serving, MODEL.resolve(), transfer=one.transfer(directory), python=str(one.python), log=log, arguments=ONE_STEP
    )
    with one.beside(directory) as beside, started() as server:
        groups = [server.process.pid, *([] if beside is None else [beside])]
        server.ask(warm_up)
        _wait_until_written(directory)
        began_s, busy_s, before_s = time.monotonic(), machine_cpu_s(), sum(map(group_cpu_s, groups))
        cold = [server.ask(prompt) for prompt in prompts]
        others_s = machine_cpu_s() - busy_s - (sum(map(group_cpu_s, groups)) - before_s)
        found["others"].append(round(others_s / (time.monotonic() - began_s) / (os.cpu_count() or 1), 3))
        _wait_until_written(directory)
        found["cold_cpu_s"].append(round((sum(map(group_cpu_s, groups)) - before_s) / len(prompts), 3))
        if plain:
            hits = [server.ask(prompt) for prompt in prompts]
    files = [file for file in directory.rglob("*") if file.is_file()]
    page_cache.drop(files)
    found["cached_bytes"].append(page_cache.resident_bytes(files))
    found["bytes"].append(sum(file.stat().st_blocks * 512 for file in files))
    if not plain:
        with one.beside(directory), started() as server:
            server.ask(warm_up)
            hits = [server.ask(prompt) for prompt in prompts]
    found["cold_s"] += _first(cold)
    found["hit_s"] += _first(hits)
    return [*cold, *hits]


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return str(result["skipped"])
    plain = result["connectors"][NONE]
    rows = [
        f"{result['prompts']} prompts of {result['tokens']:,} tokens, vLLM 0.32 on a CPU, SmolLM2-135M in float32; medians "
        "[least … most] of the time to the first token. The row without a connector hits in vLLM's own memory. CPU: seconds of "
        "all processes for a cold prompt, the rounds' median. The machine's load average at the end: "
        f"{result['load_average']:.1f}. Others: the share of the cores that others had during a row's cold prompts.",
        "",
        "| connector | cold | to none | CPU, cold | to none | others | hit, restarted, page cache emptied | cold ÷ hit "
        "| on disk | same tokens |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in result["connectors"].items():
        cold, hit, cpu = (statistics.median(one[what]) for what in ("cold_s", "hit_s", "cold_cpu_s"))
        rows.append(
            f"| {name} | {_spread(one['cold_s'])} | {cold / statistics.median(plain['cold_s']):.2f} | {cpu:.2f} s | "
            f"{cpu / statistics.median(plain['cold_cpu_s']):.2f} | {statistics.median(one['others']):.0%} | "
            f"{_spread(one['hit_s'])} | {cold / hit:.1f} | "
            f"{statistics.median(one['bytes']) / 1e6:,.0f} MB | {'yes' if all(one['same']) else 'no'} |"
        )
    for name, error in result["failed"].items():
        rows += ["", f"{name} failed, so it was not measured: {' '.join(error.split())}"]
    if result["missing"]:
        rows += ["", f"Not there, so not measured: {', '.join(result['missing'])}."]
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
