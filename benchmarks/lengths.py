"""Time to first token by the length of the prefix, with a short question behind it: where a stored prefix begins to pay.

What is compared with what, for each length; every length has a text of its own, so that none is a part of another:

    stock        plain `transformers` in a process of its own: one pass over the prompt, its own DynamicCache, one greedy token;
                 its idle threads sleep like ours, so that other work on the machine disturbs it no more than us
    cold         our engine, past the cache
    disk hit     the engine opened anew, so its memory tier is empty, and the page cache emptied (checked); the prefix was
                 stored with another question behind it
    memory hit   the same request once more: the prefix is in the memory tier now
    floor        the question alone, over KV that lies in the request's memory already: what no cache can beat

Rounds are interleaved and their lengths in random order; stock and cold take part in the first one only, they take longest.
From submit to the first token, within the process: what HTTP adds is in `benchmarks/hit.py`.

Beside them a session: turns of a tiny random model until its context is full, each behind all before it, and the first token of
the last turn cold and from disk.
"""

from __future__ import annotations

import functools
import multiprocessing
import queue
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import benchmark_home, where_it_ran
from headstart.cli.demo import FIRST_QUESTION, QUESTIONS, messages_for
from headstart.config import CacheConfig, Config, prefer_sleeping_threads
from headstart.tier import page_cache

if TYPE_CHECKING:
    from headstart.engine.base import Receipt
    from headstart.engine.torch.engine import TorchEngine

LENGTHS = (512, 1024, 2048, 4096, 8000)
QUESTION_TOKENS = 64
_TURN_TOKENS, _ANSWER_TOKENS = 500, 16
_TIMEOUT_S = 600.0
_Stock = Callable[[Sequence[int]], tuple[float, int]]  # prompt → seconds, first token
_TOLERANCE = 1e-3  # of logits, as in the demo

WAYS = {  # name → what it is called, and how it is drawn: apart without colours, too
    "stock": ("stock transformers, cold", {"color": "#000000", "marker": "s", "linestyle": ":"}),
    "cold": ("headstart, cold", {"color": "#0072b2", "marker": "o", "linestyle": "--"}),
    "disk": ("headstart, hit on disk", {"color": "#d55e00", "marker": "^", "linestyle": "-"}),
    "memory": ("headstart, hit in memory", {"color": "#009e73", "marker": "v", "linestyle": "-."}),
}


def run(
    *,
    smoke: bool = False,
    model: str = "smollm2-135m",
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 5,
    slow_rounds: int = 1,
    session_tokens: int = 32_000,
    session_rounds: int = 3,
) -> dict[str, Any]:
    """Return medians in seconds for each length, the same of the session, and whether all first tokens were the same."""
    if smoke:
        lengths, rounds, slow_rounds, session_tokens, session_rounds = lengths[:1], 1, 1, 2_000, 1
    prefer_sleeping_threads()
    from headstart.engine.models import resolve_model

    folder = resolve_model(model, Config().models_directory, on_progress=lambda *_: None).path
    with tempfile.TemporaryDirectory(prefix="bench-", dir=benchmark_home()) as place:
        curves = _Curves(_Store(folder, Path(place) / "kv"), lengths)
        with _stock(folder) as stock:
            curves.measure(stock, rounds=rounds, slow_rounds=slow_rounds)
        return {
            "where": where_it_ran(Path(place)),
            "question_tokens": QUESTION_TOKENS,
            "rounds": rounds,
            "slow_rounds": slow_rounds,
            "lengths": curves.medians(),
            "same_tokens": curves.same_tokens,
            "page_cache_bytes": curves.store.page_cache_bytes,
            "session": _session(Path(place), tokens=session_tokens, rounds=session_rounds),
        }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    session, cached = result["session"], result["page_cache_bytes"]
    rows = [
        f"First token of {result['question_tokens']} tokens behind a prefix; medians of {result['rounds']} interleaved rounds, "
        f"cold ones of {result['slow_rounds']}.",
        "",
        "![Time to first token against the length of the prefix](lengths.svg)",
        "",
        "| prefix, tokens | stock, cold | ours, cold | **disk hit** | memory hit | floor "
        "| stock ÷ disk hit | ours, cold ÷ disk hit | disk hit ÷ floor |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in result["lengths"]:
        disk = one["disk"]
        rows.append(
            f"| {one['tokens']:,} | {_s(one['stock'])} | {_s(one['cold'])} | **{_s(disk)}** | {_s(one['memory'])} "
            f"| {_s(one['floor'])} | **{one['stock'] / disk:.1f}** | {one['cold'] / disk:.1f} | {disk / one['floor']:.2f} |"
        )
    hits = sum(one["hits"] for one in result["lengths"])
    whole = sum(one["whole_hits"] for one in result["lengths"])
    rows += [
        "",
        f"The same first token everywhere: {'yes' if result['same_tokens'] else 'no'}. Hits that brought the whole prefix from "
        f"where they should: {whole} of {hits}. "
        + (
            "The page cache was not checked on this system."
            if cached is None
            else f"In the page cache before a hit on disk: at most {cached / 1024:.0f} KiB."
        ),
        "",
        f"A session of {session['tokens']:,} tokens in {session['turns']} turns on a tiny random model, the last turn, "
        f"{session['cached_tokens']:,} of its {session['prompt_tokens']:,} tokens from disk, median of {session['rounds']} "
        "openings:",
        "",
        "| | cold | disk hit | cold ÷ disk hit |",
        "|---|---|---|---|",
        f"| first token of the last turn | {_s(session['cold'])} | **{_s(session['disk'])}** "
        f"| **{session['cold'] / session['disk']:.1f}** |",
        "",
        f"The same first token: {'yes' if session['same_tokens'] else 'no'}.",
    ]
    return "\n".join(rows)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw time to first token over the length of the prefix, as SVG at `path`. Equal results give equal bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    tokens = [one["tokens"] for one in result["lengths"]]
    with matplotlib.rc_context({"svg.hashsalt": "headstart", "svg.fonttype": "none", "font.size": 11}):
        figure, axes = pyplot.subplots(figsize=(7.5, 4.8), layout="constrained")
        for way, (name, style) in WAYS.items():
            axes.plot(tokens, [one[way] for one in result["lengths"]], label=name, markersize=7, linewidth=1.8, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(tokens))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_xlabel(f"prefix (tokens), with {result['question_tokens']} new tokens behind it")
        axes.set_ylabel("time to first token (s)")
        axes.grid(True, which="major", color="#cccccc", linewidth=0.7)
        axes.legend(loc="best", framealpha=1.0, handlelength=3.5)
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds:.3f} s"


class _Store:
    """One model over one cache directory, opened as often as one likes; each time with an empty memory tier."""

    def __init__(self, folder: Path, directory: Path) -> None:
        self.folder = folder
        self._directory = directory
        self.page_cache_bytes: int | None = 0  # the most that was there before a hit on disk; None: cannot be asked

    @contextmanager
    def engine(self) -> Iterator[TorchEngine]:
        from headstart.engine.torch import open_engine

        cache = CacheConfig(directory=self._directory, capacity="8GiB")
        engine = open_engine(self.folder, Config(cache=cache), on_progress=lambda *_: None)
        try:
            yield engine
        finally:
            engine.close()

    def empty_page_cache(self) -> None:
        segments = sorted(self._directory.rglob("*.seg"))
        page_cache.drop(segments)
        left = page_cache.resident_bytes(segments)
        self.page_cache_bytes = None if left is None or self.page_cache_bytes is None else max(self.page_cache_bytes, left)


@dataclass(frozen=True, slots=True)
class _Answer:
    tokens: list[int]
    receipt: Receipt

    @property
    def first_token_s(self) -> float:
        assert self.receipt.first_token_s is not None
        return self.receipt.first_token_s


def _ask(engine: TorchEngine, prompt: Sequence[int], *, count: int = 1, use_cache: bool = True) -> _Answer:
    """Return the answer once everything that is to be kept of it has been written."""
    from headstart.engine.base import GenerationRequest, TokenEvent

    events: queue.Queue[TokenEvent] = queue.Queue()
    engine.submit(GenerationRequest(id="lengths", prompt=tuple(prompt), max_tokens=count, use_cache=use_cache), events.put)
    tokens: list[int] = []
    while True:
        event = events.get(timeout=_TIMEOUT_S)
        tokens += [] if event.token is None else [event.token]
        if event.finish is not None:
            break
    assert event.finish == "length", event
    assert event.receipt is not None
    assert engine.cache is not None
    deadline = time.monotonic() + _TIMEOUT_S
    while (counters := engine.cache.statistics().counters).get("saves_done", 0) < counters.get("save_calls", 0):
        assert time.monotonic() < deadline, "saving does not end"
        time.sleep(0.002)
    return _Answer(tokens, event.receipt)


def _all_same(engine: TorchEngine, prompt: Sequence[int], firsts: Sequence[int]) -> bool:
    from headstart.engine.exactness import same_tokens

    return all(same_tokens(engine.next_logits, prompt, firsts[:1], [other], tolerance=_TOLERANCE) for other in set(firsts))


class _Curves:
    """What was measured of each length, and how."""

    def __init__(self, store: _Store, lengths: Sequence[int]) -> None:
        from headstart.render import Renderer

        self.store = store
        self.same_tokens = True
        renderer = Renderer.load(store.folder)
        text = renderer.chat(messages_for(FIRST_QUESTION))
        other = text[-QUESTION_TOKENS:]
        question = renderer.chat(messages_for(QUESTIONS[0]))[-QUESTION_TOKENS:]
        self._prompts: dict[int, list[int]] = {}
        self._stored: dict[int, list[int]] = {}
        for number, length in enumerate(lengths):
            prefix = [text[(101 * number + at) % len(text)] for at in range(length)]
            self._prompts[length] = prefix + question
            self._stored[length] = prefix + other
        self._samples: dict[int, dict[str, list[float]]] = {length: {} for length in lengths}
        self._firsts: dict[int, list[int]] = {length: [] for length in lengths}
        self._hits = {length: [0, 0] for length in lengths}  # whole ones, all

    def measure(self, stock: _Stock, *, rounds: int, slow_rounds: int) -> None:
        order = random.Random(5)
        with self.store.engine() as engine:
            for stored in self._stored.values():
                _ask(engine, stored)
        for round_ in range(rounds):
            slow = ("stock", "cold") if round_ < slow_rounds else ()
            with self.store.engine() as engine:
                for length in order.sample(list(self._prompts), len(self._prompts)):
                    # A hit in memory needs one on disk before it, since this opening; the others may come in any order.
                    for way in order.sample((*slow, "hits"), len(slow) + 1):
                        self._measure_one(engine, stock, length, way)
                if round_ == rounds - 1:
                    self.same_tokens = all(
                        _all_same(engine, self._prompts[length], firsts) for length, firsts in self._firsts.items()
                    )

    def medians(self) -> list[dict[str, Any]]:
        return [
            {
                "tokens": length,
                **{way: statistics.median(seconds) for way, seconds in self._samples[length].items()},
                "whole_hits": self._hits[length][0],
                "hits": self._hits[length][1],
            }
            for length in self._prompts
        ]

    def _measure_one(self, engine: TorchEngine, stock: _Stock, length: int, way: str) -> None:
        prompt = self._prompts[length]
        if way == "stock":
            self._note(length, way, *stock(prompt))
        elif way == "cold":
            answer = _ask(engine, prompt, use_cache=False)
            self._note(length, way, answer.first_token_s, answer.tokens[0])
        else:
            self.store.empty_page_cache()
            for tier in ("disk", "memory"):
                answer = _ask(engine, prompt)
                self._note(length, tier, answer.first_token_s, answer.tokens[0])
                receipt = answer.receipt
                cached = receipt.cached_disk_tokens if tier == "disk" else receipt.cached_memory_tokens
                self._hits[length][0] += cached == length
                self._hits[length][1] += 1
            floor = statistics.median(engine.measure_floor(prompt, length, 3))
            self._samples[length].setdefault("floor", []).append(floor)

    def _note(self, length: int, way: str, seconds: float, token: int) -> None:
        self._samples[length].setdefault(way, []).append(seconds)
        self._firsts[length].append(token)


def _session(place: Path, *, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the first token of the last turn, cold and from disk. Each round has another last turn, since one is stored by
    being asked."""
    draw = random.Random(3)
    store = _Store(_tiny_model(place / "tiny", context=tokens + _ANSWER_TOKENS), place / "session")

    def turn() -> list[int]:
        return [draw.randrange(3, 512) for _ in range(_TURN_TOKENS - _ANSWER_TOKENS)]

    session: list[int] = []
    with store.engine() as engine:
        while len(session) + _TURN_TOKENS < tokens:
            session += turn()
            session += _ask(engine, session, count=_ANSWER_TOKENS).tokens
    cold, disk, same = [], [], True
    for _ in range(rounds):
        last = session + turn()
        with store.engine() as engine:
            store.empty_page_cache()
            hit = _ask(engine, last)
            plain = _ask(engine, last, use_cache=False)
            same = same and _all_same(engine, last, [hit.tokens[0], plain.tokens[0]])
        disk.append(hit.first_token_s)
        cold.append(plain.first_token_s)
    return {
        "tokens": len(last) + _ANSWER_TOKENS,
        "turns": -(-len(last) // _TURN_TOKENS),
        "prompt_tokens": len(last),
        "cached_tokens": hit.receipt.cached_disk_tokens,
        "rounds": rounds,
        "cold": statistics.median(cold),
        "disk": statistics.median(disk),
        "same_tokens": same,
        "page_cache_bytes": store.page_cache_bytes,
    }


def _tiny_model(folder: Path, *, context: int) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        initializer_range=0.2,  # wide enough that greedy tokens depend on the whole prompt
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2024)
        LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


@contextmanager
def _stock(folder: Path) -> Iterator[_Stock]:
    """Yield a function that answers a prompt in a process of its own, where nothing of ours is loaded: seconds, token."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def answer(prompt: Sequence[int]) -> tuple[float, int]:
            return process.submit(_stock_first_token, folder, list(prompt)).result(_TIMEOUT_S)

        answer([1] * QUESTION_TOKENS)  # pays for loading, and for what is made on first use
        yield answer


def _stock_first_token(folder: Path, prompt: list[int]) -> tuple[float, int]:
    import torch

    model = _stock_model(folder)
    started = time.perf_counter()
    with torch.inference_mode():
        output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)  # makes its DynamicCache itself
        token = int(output.logits[0, -1].argmax())
    return time.perf_counter() - started, token


@functools.cache
def _stock_model(folder: Path) -> Any:
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
