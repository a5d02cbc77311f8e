"""The llama engine against llama-server: behind a long prompt that was computed before, in memory and after SIGKILL.

Servers and texts as of `llama`. First a prompt of PREFIX tokens is computed by both, once, and is on disk: here by itself,
there after its slot was saved by hand. Then rounds, with who is first changing from round to round:

    memory   another question of some 30 tokens over the same prefix
    disk     both killed, their files out of the page cache; started, a short request, and a third question: from our disk tier;
             from the slot file, whose restoring counts
    turn     the same with TURN tokens that are new, as an agent adds them

Ours finds whole blocks of 64 tokens and computes what is behind the last one again; llama-server's slot is used to the token.
So each round asks behind a prefix that is some tokens shorter, which spreads what is left of a block evenly.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.harness import where_it_ran
from benchmarks.llama import Side, alike, both, in_turn, rows
from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.host import physical_cores

ROUNDS = 6
PREFIX, TURN = 4160, 512
_ANSWER = 8

_ROWS = (
    ("prefix in memory, a question: first token", "memory_s", "s"),
    ("CPU seconds to it", "memory_cpu_s", "s"),
    ("after SIGKILL, page cache empty, a question: first token", "disk_s", "s"),
    ("CPU seconds to it", "disk_cpu_s", "s"),
    ("after SIGKILL, page cache empty, a turn of an agent: first token", "turn_s", "s"),
    ("CPU seconds to it", "turn_cpu_s", "s"),
)


def run(*, smoke: bool = False, rounds: int = ROUNDS, file: Path | None = None) -> dict[str, Any]:
    """Return seconds, round by round, of both, and where that was. `file`: another model than the demo's."""
    rounds, prefix, turn = (1, 300, 70) if smoke else (rounds, PREFIX, TURN)
    with both(file) as (sides, prompts, home):
        first, *others, short = prompts
        common = next(at for at, (a, b) in enumerate(zip(first, others[0], strict=False)) if a != b)
        questions = [one[common:] for one in others]

        def parting(number: int, end: list[int]) -> list[int]:
            """Return a prompt that leaves the prefix a while before its end, up to a block, by which round it is."""
            return first[: prefix - (2 * number + 1) * BLOCK_TOKENS // (2 * rounds)] + end

        cold: dict[str, dict[str, float]] = {}
        for name, side in sides.items():
            side.ask(short, 4)
            got = side.ask(first[:prefix] + first[common:], _ANSWER)
            cold[name] = {"first_s": got.first_s, "first_cpu_s": got.first_cpu_s, "keep_cpu_s": side.keep()}
        told: list[dict[str, dict[str, Any]]] = [{name: {} for name in sides} for _ in range(rounds)]
        for number in range(rounds):
            for name, side in in_turn(sides, number):
                got = side.ask(parting(number, questions[0]), _ANSWER)
                told[number][name] |= {"memory_s": got.first_s, "memory_cpu_s": got.first_cpu_s, "memory": got.text}
        for number in range(rounds):
            added = first[prefix + 8 * number :][:turn]
            for name, side in in_turn(sides, number):
                told[number][name] |= _after_sigkill(side, short, parting(number, questions[1]), "disk")
                told[number][name] |= _after_sigkill(side, short, parting(number, added), "turn")
        return {
            "where": where_it_ran(home),
            "prefix_tokens": prefix,
            "question_tokens": max(map(len, questions)),
            "turn_tokens": turn,
            "threads": physical_cores(),
            "rounds": rounds,
            "cold": cold,
            "headstart": [one["headstart"] for one in told],
            "llama_server": [one["llama_server"] for one in told],
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    ours, theirs = result["cold"]["headstart"], result["cold"]["llama_server"]
    restored = statistics.median(one["disk_restored_s"] for one in result["llama_server"])
    return "\n".join(
        [
            f"SmolLM2-135M-Instruct, Q4_1, f16 KV, a prefix of {result['prefix_tokens']:,} tokens, questions of up to "
            f"{result['question_tokens']}, turns of {result['turn_tokens']}, {result['threads']} threads, medians of "
            f"{result['rounds']} interleaved rounds.",
            "",
            *rows(result, _ROWS),
            "",
            f"Computed cold, once each: the first token after {ours['first_s']:.1f} s and {ours['first_cpu_s']:.1f} CPU "
            f"seconds here, {theirs['first_s']:.1f} s and {theirs['first_cpu_s']:.1f} there; on disk after "
            f"{ours['keep_cpu_s']:.2f} and {theirs['keep_cpu_s']:.2f} CPU seconds more. Of llama-server's first token after "
            f"SIGKILL restoring its slot by hand is {restored:.3f} s. {alike(result, ('memory', 'disk', 'turn'))}",
        ]
    )


def _after_sigkill(side: Side, short: list[int], prompt: list[int], name: str) -> dict[str, Any]:
    side.start_cold()
    side.ask(short, 4)
    side.restore()
    got = side.ask(prompt, _ANSWER)
    return {
        f"{name}_s": side.restored_s + got.first_s,
        f"{name}_cpu_s": side.restored_cpu_s + got.first_cpu_s,
        f"{name}_restored_s": side.restored_s,
        name: got.text,
    }
