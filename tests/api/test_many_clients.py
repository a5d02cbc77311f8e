"""Many streaming clients of a real model that leave when they like: every request ends with an answer or a named error, all KV
memory comes back, nothing is left lying, memory does not grow, and the usage log is what the engine counted."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import sys
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
import pytest

from api.serving import listening
from gguf_fixtures import make_gguf
from headstart.api.accounts import Accounts
from headstart.api.asked import AskedPrompts
from headstart.api.generation import Generation
from headstart.api.receipts import Receipts
from headstart.api.service import Service
from headstart.cli.opening import open_model
from headstart.config import load_config
from headstart.ledger.log import UsageLog
from headstart.ledger.reading import Reading, add_up, entries

CLIENTS = 64
BEGINNINGS = [f"Clients of kind {n} begin their prompts alike, for some blocks of tokens. " * 4 for n in range(4)]


@dataclass(frozen=True, slots=True)
class Memory:
    """Of this process, server and clients together, noted in numbers that take next to none themselves. `blocks`: of Python's
    objects; what libraries take is in `resident_kib` alone."""

    resident_kib: array[int] = field(default_factory=lambda: array("q"))
    blocks: array[int] = field(default_factory=lambda: array("q"))

    def note(self) -> None:
        lines = Path("/proc/self/status").read_text().splitlines()
        self.resident_kib.append(next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")))
        self.blocks.append(sys.getallocatedblocks())

    def growth(self) -> dict[str, float]:
        """Return what there was in the last quarter of the time by what there was in the third, medians both."""
        quarter = len(self.blocks) // 4
        both = {"resident_kib": self.resident_kib, "blocks": self.blocks}
        return {name: median(some[3 * quarter :]) / median(some[2 * quarter : 3 * quarter]) for name, some in both.items()}


@dataclass
class Storm:
    """`rounds`: requests of each client; or until `seconds` have passed."""

    url: str
    rounds: int = 1
    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    memory: Memory = field(default_factory=Memory)

    async def run(self) -> None:
        until_s = time.monotonic() + self.seconds
        limits = httpx.Limits(max_connections=2 * CLIENTS)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as http:
            await asyncio.gather(*(self._client(http, random.Random(seed), until_s) for seed in range(CLIENTS)))

    async def _client(self, http: httpx.AsyncClient, dice: random.Random, until_s: float) -> None:
        done = 0
        while done < self.rounds or time.monotonic() < until_s:
            done += 1
            self.ended[await self._request(http, dice)] += 1
            if self.seconds:
                self.memory.note()

    async def _request(self, http: httpx.AsyncClient, dice: random.Random) -> str:
        """Return how a request ended: "left", a finish reason, or the code of an error."""
        body = {
            "prompt": dice.choice(BEGINNINGS)[: dice.randint(1, 300)] + str(dice.random()),
            "max_tokens": dice.randint(1, 12),
            "stream": True,
            "temperature": dice.choice([0, 1]),
            "n": dice.choice([1, 1, 1, 2]),
            "prompt_cache_options": {"prewarm": dice.random() < 0.1},
            "cache_salt": dice.choice(["a", "b"]),
        }
        headers = {"x-headstart-deadline": str(dice.choice([0.05, 200, 200, 200]))}
        leaves_after = dice.choice([0, 1, 3, None, None, None])
        async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
            if response.status_code != 200:
                return str(json.loads(await response.aread())["error"]["code"])
            finish, count = "", 0
            if leaves_after == 0:
                return "left"
            async for line in _lines(response):
                if not line.startswith("data: {"):
                    if line == "data: [DONE]":
                        assert finish
                        return finish
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    return str(event["error"]["code"])
                finish = event["choices"][0]["finish_reason"] or finish
                count += 1
                if count == leaves_after:
                    return "left"
            raise AssertionError("the stream ended without a word")


async def _lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yield lines as SSE has them; httpx's own end at every line separator of Unicode, which answers may contain."""
    rest = b""
    async for piece in response.aiter_raw():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.decode()


def weathered(folder: Path, model: Path, **storm: float) -> Storm:
    """Let a storm go over a server and check what it leaves."""
    config = load_config(
        overrides={
            "model": str(model),
            "models_directory": folder,
            "cache.directory": folder / "kv",
            "cache.capacity": "64MiB",
            "cache.memory": "8MiB",
            "engine.kv_memory": "4MiB",
        }
    )
    accounts = Accounts(log=UsageLog(folder / "usage", keep_bytes=1 << 30))
    accounts.receipts = Receipts(most=200)  # what is remembered is full soon, so that nothing may grow
    service = Service(accounts=accounts, max_waiting=70)
    service.asked = AskedPrompts(most_bytes=1 << 18)
    served = open_model(config, on_progress=lambda stage, fraction: None)
    service.ready(served)
    try:
        with listening(service) as url:
            found = Storm(url, **storm)  # type: ignore[arg-type]
            asyncio.run(found.run())
            deadline = time.monotonic() + 60
            while served.engine.load().running or served.engine.load().waiting or served.engine.load().kv_used_bytes:
                assert time.monotonic() < deadline, served.engine.load()
                time.sleep(0.02)
            assert not service._flights
            assert accounts.log is not None
            assert accounts.log.flush()
            counters = served.engine.load().counters
    finally:
        served.engine.close()
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Generation], "a request's state outlives it"
    lines = list(entries(folder / "usage", Reading()))
    assert sum(line.requests for line in lines) == sum(found.ended.values())
    assert len({line.id for line in lines}) == len(lines)
    assert all(0 <= line.cached_memory + line.cached_disk + line.written <= line.prompt for line in lines)
    (sums,) = add_up(lines, []).values()
    for name, counter in (
        ("prompt", "prompt_tokens"),
        ("cached_memory", "cached_memory_tokens"),
        ("cached_disk", "cached_disk_tokens"),
        ("generated", "generated_tokens"),
        ("written", "written_tokens"),
        ("kept_output", "kept_output_tokens"),
    ):
        assert sums.counts[f"engine_{name}"] == counters.get(counter, 0), name
    assert set(found.ended) <= {"left", "length", "stop", "rate_limit_exceeded", "deadline_exceeded"}
    return found


def test_many_clients_that_leave_when_they_like_leave_nothing_behind(
    tiny_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    storm = weathered(tmp_path, tiny_model_folder("llama"), rounds=2)
    assert sum(storm.ended.values()) == 2 * CLIENTS
    assert storm.ended["length"] + storm.ended["stop"] > 0
    assert storm.ended["left"] > 0


def test_the_usage_log_is_what_libllama_counted_too(tmp_path: Path) -> None:
    storm = weathered(tmp_path, make_gguf(tmp_path / "tiny.gguf"), rounds=1)
    assert sum(storm.ended.values()) == CLIENTS
    assert storm.ended["left"] > 0


@pytest.mark.soak
def test_ten_minutes_of_many_clients_leave_memory_flat(
    tiny_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What torch keeps of the kernels that it made, one for each matrix and number of rows, would grow for long: 1,024 twice.
    for kernels in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        monkeypatch.setenv(kernels, "16")  # it counts only where nothing was multiplied before
    storm = weathered(tmp_path, tiny_model_folder("llama"), seconds=600.0)
    growth = storm.memory.growth()
    print(f"{sum(storm.ended.values()):,} requests; {growth}; {max(storm.memory.resident_kib):,} KiB at most")
    assert growth["blocks"] <= 1.01, growth
    assert growth["resident_kib"] <= 1.05, growth
