"""The llama engine against llama-server of the same llama.cpp: the same GGUF, tokens, threads and KV type, one after the other.

llama-server is the one that the wheel `xllamacpp` carries, started through its own class in a process of its own. What is
compared: the first token cold, with the prefix in memory, and after SIGKILL and a restart with an empty page cache (from our
disk tier; from a slot file that was saved and is restored by hand, which is counted), the speed of decoding, CPU seconds of a
cold request.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.cli.demo import FIRST_QUESTION, QUESTIONS, messages_for
from headstart.cli.server_process import ServerProcess
from headstart.engine.host import physical_cores
from headstart.engine.llama.binding import Library
from headstart.engine.llama.weights import Weights
from headstart.engine.smollm2 import GGUF_ALIAS, fetch_smollm2_gguf
from headstart.render import GGUFRenderer
from headstart.tier import page_cache

CONTEXT = 8192
ANSWER = 32

_LLAMA_SERVER = """
import sys, xllamacpp as x
p = x.CommonParams()
p.model.path, p.slot_save_path = sys.argv[1], sys.argv[2]
p.n_ctx, p.n_parallel, p.n_batch, p.n_ubatch = int(sys.argv[3]), 1, 2048, 512
p.cpuparams.n_threads = p.cpuparams_batch.n_threads = int(sys.argv[4])
p.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
p.verbosity, p.endpoint_slots, p.warmup = 0, True, True
server = x.Server(p)
print(server.listening_address, flush=True)
sys.stdin.read()
"""


def run(*, smoke: bool = False, rounds: int = 3) -> dict[str, Any]:
    """Return seconds and rates of both, and where that was."""
    threads = physical_cores()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as folder:
        home = Path(folder)
        models = Path(os.environ.get("HEADSTART_MODELS_DIRECTORY", "~/.cache/headstart/models")).expanduser()
        file = fetch_smollm2_gguf(models / GGUF_ALIAS, lambda *_: None)
        prompts = _prompts(file, tokens=200 if smoke else None)
        ours = _headstart(file, home, prompts, rounds=1 if smoke else rounds)
        theirs = _llama_server(file, home, prompts, rounds=1 if smoke else rounds, threads=threads)
        return {
            "where": where_it_ran(home),
            "prompt_tokens": len(prompts[0]),
            "threads": threads,
            "rounds": 1 if smoke else rounds,
            "headstart": ours,
            "llama_server": theirs,
            "same_tokens": ours["text"] == theirs["text"],
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    ours, theirs = result["headstart"], result["llama_server"]

    def row(name: str, key: str, unit: str, digits: int = 2) -> str:
        return f"| {name} | {ours[key]:.{digits}f} {unit} | {theirs[key]:.{digits}f} {unit} | {ours[key] / theirs[key]:.2f} |"

    return "\n".join(
        [
            f"SmolLM2-135M-Instruct, Q4_1, f16 KV, a prompt of {result['prompt_tokens']:,} tokens, {result['threads']} "
            f"threads, medians of {result['rounds']}.",
            "",
            "| | headstart | llama-server | ratio |",
            "|---|---|---|---|",
            row("first token, cold", "cold_s", "s"),
            row("CPU seconds, cold, with the answer", "cold_cpu_s", "s"),
            row("first token, prefix in memory, another question", "memory_s", "s"),
            row("first token after SIGKILL, page cache empty, another question", "disk_s", "s"),
            row("decoding, tokens a second", "decode_per_s", "", 1),
            "",
            f"Of llama-server's first token after SIGKILL restoring its slot is {theirs['restore_s']:.2f} s. The same "
            f"greedy tokens from both: {'yes' if result['same_tokens'] else 'no'}.",
        ]
    )


def _prompts(file: Path, *, tokens: int | None) -> list[list[int]]:
    weights = Weights(Library(), file, vocabulary_only=True)
    renderer = GGUFRenderer(weights.vocabulary, template=weights.chat_template)
    asked = [renderer.chat(messages_for(question)) for question in (FIRST_QUESTION, *QUESTIONS)]
    weights.close()
    return [one[:tokens] + one[-20:] if tokens else one for one in asked]


def _headstart(file: Path, home: Path, prompts: list[list[int]], *, rounds: int) -> dict[str, Any]:
    cache = home / "kv"
    arguments = [str(file), "--cache-directory", str(cache), "--cache-capacity", "4GiB", "--context", str(CONTEXT)]
    server = ServerProcess(arguments, log=home / "log")
    try:
        server.start()
        assert server._process is not None
        cpu = _cpu_s(server._process.pid)
        cold = _ask(f"{server.url}/v1/completions", prompts[0])
        cpu = _cpu_s(server._process.pid) - cpu
        _until_saved(server)
        memory = [_ask(f"{server.url}/v1/completions", prompt)["first_s"] for prompt in prompts[1 : rounds + 1]]
        _until_saved(server)
        disk = []
        for prompt in prompts[1 : rounds + 1]:
            server.kill()
            page_cache.drop(sorted(cache.rglob("*.seg")))
            server.start()
            disk.append(_ask(f"{server.url}/v1/completions", [*prompt[:-8], 10, *prompt[-7:]])["first_s"])
            _until_saved(server)
    finally:
        server.stop()
    return {
        "cold_s": cold["first_s"],
        "cold_cpu_s": cpu,
        "memory_s": statistics.median(memory),
        "disk_s": statistics.median(disk),
        "decode_per_s": cold["decode_per_s"],
        "text": cold["text"],
    }


def _llama_server(file: Path, home: Path, prompts: list[list[int]], *, rounds: int, threads: int) -> dict[str, Any]:
    slots = home / "slots"
    slots.mkdir()

    def start() -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, "-c", _LLAMA_SERVER, str(file), f"{slots}/", str(CONTEXT), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # as our own server has it
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("http"):
                return process, line.strip()
        raise RuntimeError("llama-server did not start")

    process, url = start()
    try:
        cpu = _cpu_s(process.pid)
        cold = _ask(f"{url}/completion", prompts[0])
        cpu = _cpu_s(process.pid) - cpu
        httpx.post(f"{url}/slots/0?action=save", json={"filename": "slot"}, timeout=60).raise_for_status()
        memory = [_ask(f"{url}/completion", prompt)["first_s"] for prompt in prompts[1 : rounds + 1]]
        disk, restore = [], []
        for prompt in prompts[1 : rounds + 1]:
            process.send_signal(signal.SIGKILL)
            process.communicate()
            page_cache.drop([slots / "slot"])
            process, url = start()
            begun = time.perf_counter()
            httpx.post(f"{url}/slots/0?action=restore", json={"filename": "slot"}, timeout=60).raise_for_status()
            restore.append(time.perf_counter() - begun)
            disk.append(restore[-1] + _ask(f"{url}/completion", [*prompt[:-8], 10, *prompt[-7:]])["first_s"])
    finally:
        process.kill()
        process.communicate()
    return {
        "cold_s": cold["first_s"],
        "cold_cpu_s": cpu,
        "memory_s": statistics.median(memory),
        "disk_s": statistics.median(disk),
        "restore_s": statistics.median(restore),
        "decode_per_s": cold["decode_per_s"],
        "text": cold["text"],
    }


def _ask(url: str, prompt: list[int]) -> dict[str, Any]:
    """Return seconds to the first token, tokens a second behind it, and the text, of a streamed greedy answer."""
    body = {"prompt": prompt, "max_tokens": ANSWER, "n_predict": ANSWER, "temperature": 0, "stream": True}
    if url.endswith("/completion"):
        body |= {"cache_prompt": True, "id_slot": 0, "ignore_eos": False}
    else:
        body |= {"model": "x"}
    times, text = [], []
    begun = time.perf_counter()
    with httpx.stream("POST", url, json=body, timeout=600) as response:
        response.raise_for_status() if response.is_success else response.read()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            piece = event["content"] if "content" in event else "".join(one.get("text") or "" for one in event["choices"])
            if piece:
                times.append(time.perf_counter() - begun)
                text.append(piece)
    return {"first_s": times[0], "decode_per_s": (len(times) - 1) / (times[-1] - times[0]), "text": "".join(text)}


def _until_saved(server: ServerProcess) -> None:
    deadline = time.monotonic() + 60
    while server.metric("headstart_saves_pending") and time.monotonic() < deadline:
        time.sleep(0.05)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
