"""The second turn of a long conversation: what rendering and tokenising it costs against the first turn.

A conversation of 100,000 tokens becomes token ids as in the server, canonical form and memory of answers included, in a server
that has seen nothing; then the same with an answer and a question more, in the same server; then in one that has seen nothing,
whose tokens must be the same. Rounds are interleaved over numbers of messages.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from headstart.api.ask import Ask
from headstart.api.prompting import Prompt, Prompting
from headstart.api.served import Served
from headstart.cli.demo import PROMPT_FOLDER
from headstart.config import load_config
from headstart.engine.models import resolve_tokenizer
from headstart.render import Renderer

TOKENS = 100_000
MESSAGES = (40, 200, 1000)
_CHARACTERS = 4  # a token, about


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds, by the wall's clock and of CPUs: a first turn is tokenised on all of them."""

    wall_s: float
    cpu_s: float


def run(*, smoke: bool = False, rounds: int = 7) -> dict[str, Any]:
    """Return what both turns cost for each number of messages."""
    tokens, rounds, counts = (4_000, 1, (20,)) if smoke else (TOKENS, rounds, MESSAGES)
    folder = resolve_tokenizer("smollm2-135m", load_config().models_directory, on_progress=lambda stage, fraction: None)
    costs: dict[int, list[tuple[Cost, Cost]]] = {count: [] for count in counts}
    sizes: dict[int, int] = {}
    for number in range(rounds):
        for count in counts:
            first, second, sizes[count] = _turns(Renderer.load(folder), count, tokens, seed=number)
            costs[count].append((first, second))
    return {
        "where": where_it_ran(benchmark_home()),
        "turns": [
            {"messages": count, "tokens": sizes[count], "rounds": rounds, **_told(pairs)} for count, pairs in costs.items()
        ],
    }


def table(result: dict[str, Any]) -> str:
    lines = [
        "| messages | tokens | first turn | second turn | ratio | first turn, CPU | second turn, CPU | ratio of CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in result["turns"]:
        cells = [f"{one['messages']:,}", f"{one['tokens']:,}"]
        for kind in ("wall", "cpu"):
            median, low, high = one[f"{kind}_ratio"]
            cells += [f"{one[f'first_{kind}_s'] * 1000:.0f} ms", f"{one[f'second_{kind}_s'] * 1000:.1f} ms"]
            cells.append(f"{median:.1%} [{low:.1%} … {high:.1%}]")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _told(pairs: Sequence[tuple[Cost, Cost]]) -> dict[str, Any]:
    told: dict[str, Any] = {}
    for kind in ("wall", "cpu"):
        first, second = ([getattr(pair[turn], f"{kind}_s") for pair in pairs] for turn in (0, 1))
        ratio = paired_ratio(second, first)
        told |= {f"first_{kind}_s": statistics.median(first), f"second_{kind}_s": statistics.median(second)}
        told[f"{kind}_ratio"] = [ratio.median, ratio.low, ratio.high]
    return told


def _timed(work: Callable[[], Prompt]) -> tuple[Prompt, Cost]:
    wall, cpu = time.perf_counter(), time.process_time()
    prompt = work()
    return prompt, Cost(time.perf_counter() - wall, time.process_time() - cpu)


def _turns(renderer: Renderer, count: int, tokens: int, *, seed: int) -> tuple[Cost, Cost, int]:
    """Return what the first and the second turn cost, and the first one's tokens. The tokens of the second are those
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
    asked = Ask(id_prefix="", messages=messages)
    first, first_cost = _timed(lambda: prompting.prompt(served, asked))
    prompting.heard(served, asked, first, renderer.completion("Yes."), content="Yes.")
    history = (*messages, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "And what of turbine 3?"})
    second, second_cost = _timed(lambda: prompting.prompt(served, Ask(id_prefix="", messages=history)))
    assert second.ids == tuple(renderer._backend.encode(renderer.write(history), add_special_tokens=False).ids)
    return first_cost, second_cost, len(first.ids)
