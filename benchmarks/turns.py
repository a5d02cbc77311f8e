"""The second turn of a long conversation: what rendering and tokenising it costs against the first turn.

A conversation of 100,000 tokens becomes token ids as in the server, canonical form and memory of answers included, in a server
that has seen nothing; then the same with an answer and a question more, in the same server; then in one that has seen nothing,
whose tokens must be the same. Rounds are interleaved over numbers of messages.
"""

from __future__ import annotations

import random
import statistics
import time
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from headstart.api.ask import Ask
from headstart.api.prompting import Prompting
from headstart.api.served import Served
from headstart.cli.demo import PROMPT_FOLDER
from headstart.config import load_config
from headstart.engine.models import resolve_tokenizer
from headstart.render import Renderer

TOKENS = 100_000
MESSAGES = (40, 200, 1000)
_CHARACTERS = 4  # a token, about


def run(*, smoke: bool = False, rounds: int = 7) -> dict[str, Any]:
    """Return times for each number of messages."""
    tokens, rounds, counts = (4_000, 1, (20,)) if smoke else (TOKENS, rounds, MESSAGES)
    folder = resolve_tokenizer("smollm2-135m", load_config().models_directory, on_progress=lambda stage, fraction: None)
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in counts}
    sizes: dict[int, int] = {}
    for number in range(rounds):
        for count in counts:
            first, second, sizes[count] = _turns(Renderer.load(folder), count, tokens, seed=number)
            times[count].append((first, second))
    return {
        "where": where_it_ran(benchmark_home()),
        "turns": [
            {
                "messages": count,
                "tokens": sizes[count],
                "rounds": rounds,
                "first_s": statistics.median(first for first, _ in of_count),
                "second_s": statistics.median(second for _, second in of_count),
                "ratio": [
                    (ratio := paired_ratio([second for _, second in of_count], [first for first, _ in of_count])).median,
                    ratio.low,
                    ratio.high,
                ],
            }
            for count, of_count in times.items()
        ],
    }


def table(result: dict[str, Any]) -> str:
    lines = ["| messages | tokens | first turn | second turn | ratio |", "|---|---|---|---|---|"]
    for one in result["turns"]:
        median, low, high = one["ratio"]
        lines.append(
            f"| {one['messages']:,} | {one['tokens']:,} | {one['first_s'] * 1000:.0f} ms | {one['second_s'] * 1000:.1f} ms "
            f"| {median:.1%} [{low:.1%} … {high:.1%}] |"
        )
    return "\n".join(lines)


def _turns(renderer: Renderer, count: int, tokens: int, *, seed: int) -> tuple[float, float, int]:
    """Return the seconds of the first and of the second turn, and the first one's tokens. The tokens of the second are those
    that a server gives which has seen nothing."""
    renderer.warm_up()
    info = SimpleNamespace(context_tokens=10 * tokens)
    served = cast(Served, SimpleNamespace(renderer=renderer, engine=SimpleNamespace(info=info)))
    text = "".join((PROMPT_FOLDER / name).read_text() for name in ("handbook.md", "logbook.md"))
    size = tokens * _CHARACTERS // count

    lines, draw = text.splitlines(), random.Random(seed)

    def message(at: int) -> dict[str, str]:
        """Lines in any order, each with a number of its own: nothing is said twice, so nothing of a first turn is known."""
        said: list[str] = []
        while sum(map(len, said)) < size:
            said.append(f"{draw.choice(lines)} {draw.randrange(10**6)}\n")
        return {"role": ("user", "assistant")[at % 2], "content": "".join(said)[:size]}

    messages = tuple(message(at) for at in range(count - 1))  # the last one is a question
    prompting = Prompting()
    begun = time.perf_counter()
    first = prompting.prompt(served, Ask(id_prefix="", messages=messages))
    first_s = time.perf_counter() - begun
    prompting.heard(served, Ask(id_prefix="", messages=messages), first, renderer.completion("Yes."), content="Yes.")
    history = (*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And what of turbine 3?"})
    begun = time.perf_counter()
    second = prompting.prompt(served, Ask(id_prefix="", messages=history))
    second_s = time.perf_counter() - begun
    assert second.ids == tuple(renderer._backend.encode(renderer.write(history), add_special_tokens=False).ids)
    return first_s, second_s, len(first.ids)
