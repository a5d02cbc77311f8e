"""How fast whole logs are linted, and in how much memory: a log of agents' and chats' requests, made anew each time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import benchmark_home, where_it_ran

BYTES = 1_000_000_000
SMOKE_BYTES = 2_000_000
MODEL = "smollm2-135m"
SMALL_SHARE = 10  # of the log so many times less is read more than once, and with a tokenizer
_WORDS = [
    f"{a}{b}{c}" for a in ("ga", "ti", "so", "mar", "lo", "ver") for b in ("te", "do", "ri", "na") for c in ("", "s", "n", "ld")
]
_LINE_WORDS = 12


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return what reading a log costs: alone, with three changes replayed, and with a tokenizer."""
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as folder:
        log, small = Path(folder) / "log.jsonl", Path(folder) / "small.jsonl"
        size = SMOKE_BYTES if smoke else BYTES
        requests = write_log(log, size)
        write_log(small, size // SMALL_SHARE)
        runs = [
            _linted("read", log, "--changes", "0"),
            _linted("read, and three changes replayed", small),
            _linted(f"read with the tokenizer of {MODEL}", small, "--changes", "0", "--model", MODEL),
        ]
        return {"where": where_it_ran(Path(folder)), "bytes": log.stat().st_size, "requests": requests, "runs": runs}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = ["| | log | CPU time | rate | memory at most |", "|---|---|---|---|---|"]
    for one in result["runs"]:
        rate = one["bytes"] / 1e6 / one["cpu_s"]
        rows.append(
            f"| {one['what']} | {one['bytes'] / 1e6:,.0f} MB | {one['cpu_s']:,.0f} s | {rate:,.1f} MB/s | "
            f"{one['peak_bytes'] / 1e6:,.0f} MB |"
        )
    first = result["runs"][0]["told"]
    return "\n".join(
        [
            *rows,
            "",
            f"{result['requests']:,} requests; {first['ideal_rate']:.0%} of their tokens found again, "
            f"{first['lost_tokens'] / first['tokens']:.0%} lost, by {', '.join(first['causes'])}. Rates are by CPU time.",
        ]
    )


def _linted(what: str, log: Path, *more: str) -> dict[str, Any]:
    """Lint in a process of its own."""
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-m", "headstart.cli", "lint", str(log), "--json", *more]
        begun = time.perf_counter()
        child = subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with {child.returncode}")
        seconds = time.perf_counter() - begun
        out.seek(0)
        told = json.load(out)
    return {
        "what": what,
        "bytes": log.stat().st_size,
        "wall_s": seconds,
        "cpu_s": used.ru_utime + used.ru_stime,
        "peak_bytes": used.ru_maxrss * 1024,
        "told": {
            key: told[key] for key in ("requests", "tokens", "ideal_rate", "lost_tokens", "differences", "differences_judged")
        }
        | {"causes": sorted({one["cause"] for one in told["findings"][:4]})},
    }


def write_log(path: Path, nbytes: int, *, seed: int = 1) -> int:
    """Write about `nbytes` of requests and return how many; equal seeds give equal logs."""
    r, written, requests = random.Random(seed), 0, 0
    agents = [_Agent(r, n) for n in range(24)]
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(r, agents):
            written += file.write(json.dumps(line) + "\n")
            requests += 1
            if written >= nbytes:
                return requests
    raise AssertionError


def _lines(r: random.Random, agents: list[_Agent]) -> Iterator[dict[str, Any]]:
    """Yield the requests of many sessions side by side; one that is over gives way to a new one."""
    at, sessions = 1_790_000_000.0, [_Session(r, r.choice(agents), n) for n in range(16)]
    for n in range(16, 1 << 30):
        slot = r.randrange(len(sessions))
        at += r.expovariate(0.5)
        yield sessions[slot].request(r, at)
        if not sessions[slot].left:
            sessions[slot] = _Session(r, r.choice(agents), n)


class _Agent:
    """What all sessions of one application have in common, and what it does wrong."""

    def __init__(self, r: random.Random, number: int) -> None:
        self.name = f"app-{number}"
        self.system = _text(r, r.choice((1_500, 6_000, 12_000)))
        self.tools = [_tool(r, n) for n in range(r.choice((0, 6, 24)))]
        self.turns = r.choice((2, 8, 40))
        self.said = r.choice((300, 1_500, 5_000))  # characters of an answer or a result
        self.fault = ("", "", "", "time", "header", "tools", "id", "edited")[number % 8]


class _Session:
    def __init__(self, r: random.Random, agent: _Agent, number: int) -> None:
        self._agent = agent
        self._name = f"s-{number}"
        self._tenant = f"tenant-{r.randrange(40)}"
        self._messages: list[dict[str, Any]] = []
        self.left = 1 + r.randrange(agent.turns)

    def request(self, r: random.Random, at: float) -> dict[str, Any]:
        agent, system = self._agent, self._agent.system
        self.left -= 1
        self._messages.append({"role": "user", "content": _text(r, agent.said // 3)})
        tools = agent.tools
        if agent.fault == "time":
            system = f"It is {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(at))}.\n{system}"
        elif agent.fault == "header":
            system = f"x-anthropic-billing-header: cc_version=2.1.4; cch={r.randrange(1 << 20):05x};\n{system}"
        elif agent.fault == "id":
            system = f"{system}\nSession {r.getrandbits(64):016x}"
        elif agent.fault == "tools":
            tools = r.sample(tools, len(tools))
        elif agent.fault == "edited" and len(self._messages) > 6:
            self._messages[1] = {"role": "assistant", "content": "(removed)"}
        body = {"model": "m", "messages": [{"role": "system", "content": system}, *self._messages], "tools": tools}
        answer = _text(r, agent.said)
        self._messages.append({"role": "assistant", "content": answer})
        names = {"tenant": self._tenant, "session_id": self._name, "tags": [agent.name]}
        return {"timestamp": at, **names, "body": body, "response": {"choices": [{"message": {"content": answer}}]}}


def _tool(r: random.Random, number: int) -> dict[str, Any]:
    properties = {r.choice(_WORDS): {"type": "string", "description": _text(r, 80)} for _ in range(4)}
    function = {
        "name": f"tool_{number}",
        "description": _text(r, 400),
        "parameters": {"type": "object", "properties": properties},
    }
    return {"type": "function", "function": function}


def _text(r: random.Random, characters: int) -> str:
    """Return lines of words."""
    words = r.choices(_WORDS, k=max(1, characters // 5))
    return "\n".join(" ".join(words[n : n + _LINE_WORDS]) for n in range(0, len(words), _LINE_WORDS))
