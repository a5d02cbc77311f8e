"""`headstart demo`: the main job on a real model. A prompt is computed once; the server dies; its successor answers from disk.

What is compared with what, so that the figures mean something:

    first token cold        a server with an empty cache, the whole prompt computed
    first token from disk   another process after SIGKILL, page cache empty (checked), same beginning, another question
    the floor               the same computed suffix over the same KV already in memory, no server in between
    the disk alone          the bytes of the hit read from the same files by a plain loop that computes nothing
    stock transformers      its first token of the first question with everything computed, once; and of each question over
                            the same beginning in its own DynamicCache, as the floor is over ours

Every other figure is the median over the rounds; each round is a new process and a new question. A GGUF has no stock.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from headstart.cli.demo_probe import Probed, ProbeRequest
from headstart.cli.demo_stock import StockRequest, StockTimes
from headstart.cli.server_process import Answer, ServerProcess
from headstart.config import load_config
from headstart.errors import HeadstartError
from headstart.tier import page_cache

if TYPE_CHECKING:
    from rich.table import Table

PROMPT_FOLDER = Path(__file__).parent / "agent_prompt"
MAX_TOKENS = 32
FIRST_QUESTION = "Why did the oil of turbine 2 contain water, and what was done about it?"
QUESTIONS = (
    "May the rake run while turbine 3 produces at full load, and which section says so?",
    "Gate G5 stopped again with its cylinders 16 mm apart. Which order covers that, and what is it waiting for?",
    "What must be true before a turbine starts, and how long does the start take?",
    "Which parts are always kept in the store, and what happens when one is taken?",
    "Whom do we call when more than five litres of oil reach the sea?",
)


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What one demo measured. Times in seconds, medians over the rounds."""

    prompt_tokens: int
    cached_tokens: int
    bytes_read: int
    cold_ttft_s: float
    hit_ttft_s: float
    floor_ttft_s: float
    disk_s: float
    speedup: float
    ratio_to_limit: float
    same_tokens: bool
    shared_prefix_tokens: int
    rounds: int
    page_cache_bytes: int | None
    hits: tuple[float, ...]
    floors: tuple[float, ...]
    stock_cold_s: float | None
    stock_floor_s: float | None
    stock_speedup: float | None  # stock, cold, over from disk
    floor_to_stock: float | None


def system_prompt() -> str:
    """The agent's constant beginning: instructions, tool schemas, handbook, logbook."""
    parts = [PROMPT_FOLDER / name for name in ("system.md", "tools.json", "handbook.md", "logbook.md")]
    missing = [path.name for path in parts if not path.is_file()]
    if missing:
        raise HeadstartError(
            f"the demo's prompt is not complete: {PROMPT_FOLDER} lacks {', '.join(missing)}; reinstall headstart"
        )
    return "\n\n".join(path.read_text(encoding="utf-8").strip() for path in parts)


def messages_for(question: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": system_prompt()}, {"role": "user", "content": question}]


def run_demo(model: str, *, rounds: int, folder: Path, say: Callable[[str], None]) -> DemoResult:
    """Run the demo with its cache under `folder` and return what it measured; `say` gets one line a step."""
    cache, log = folder / "kv", folder / "server.log"
    common = [model, "--cache-directory", str(cache), "--cache-capacity", "4GiB"]
    server = ServerProcess(common, log=log)
    stages = _say_changes(say)
    try:
        say("this takes some four minutes on two cores, and one more the first time, to get the model")
        say("starting the first server")
        server.start(on_progress=stages)
        say("first request: the whole prompt is computed …")
        cold = server.ask(messages_for(FIRST_QUESTION), max_tokens=MAX_TOKENS)
        say(f"  first token after {cold.first_token_s:.2f} s; prompt {cold.usage['prompt_tokens']:,} tokens")
        _wait_until_saved(server)
        hits: list[Answer] = []
        bytes_read: list[int] = []
        disk_times: list[float] = []
        resident: list[int | None] = []
        for question in QUESTIONS[:rounds]:
            say("SIGKILL; emptying the page cache; starting the next server")
            server.kill()
            segments = sorted(cache.rglob("*.seg"))
            page_cache.drop(segments)
            server.start(on_progress=stages)
            resident.append(page_cache.resident_bytes(segments))
            answer = server.ask(messages_for(question), max_tokens=MAX_TOKENS)
            _wait_until_saved(server)
            hits.append(answer)
            bytes_read.append(int(server.metric("headstart_load_bytes_read_total")))
            disk_times.append(_read_alone(segments, bytes_read[-1]))
            usage = answer.usage
            told = f"prompt {usage['prompt_tokens']:,} tokens, {usage['prompt_cache_hit_tokens']:,} of them from disk"
            say(f"  first token after {answer.first_token_s:.2f} s; {told}")
        server.kill()
        say("the same question with the cache off …")
        plain = ServerProcess([model, "--no-cache"], log=log)
        try:
            plain.start(on_progress=stages)
            reference = plain.ask(messages_for(QUESTIONS[0]), max_tokens=MAX_TOKENS)
        finally:
            plain.stop()
        say("the floor: the same suffix over KV that is already in memory …")
        asked = list(zip(QUESTIONS, (hit.usage["prompt_cache_hit_tokens"] for hit in hits), strict=False))
        probed = probe(model, cache, asked=asked, compare=None if hits[0].text == reference.text else QUESTIONS[0])
        stock = None
        if (checkpoint := _checkpoint(model)) is not None:
            say("plain transformers on the same prompt …")
            stock = stock_times(checkpoint, asked=asked)
    finally:
        server.kill()
    hit = statistics.median(answer.first_token_s for answer in hits)
    floor, disk = statistics.median(probed.floor_s), statistics.median(disk_times)
    middle = sorted(hits, key=lambda answer: answer.first_token_s)[len(hits) // 2]
    unchecked = any(count is None for count in resident)
    return DemoResult(
        prompt_tokens=middle.usage["prompt_tokens"],
        cached_tokens=middle.usage["prompt_cache_hit_tokens"],
        bytes_read=int(statistics.median(bytes_read)),
        cold_ttft_s=cold.first_token_s,
        hit_ttft_s=hit,
        floor_ttft_s=floor,
        disk_s=disk,
        speedup=cold.first_token_s / hit,
        ratio_to_limit=hit / max(floor, disk),
        same_tokens=probed.same_tokens,
        shared_prefix_tokens=probed.shared_prefix_tokens,
        rounds=rounds,
        page_cache_bytes=None if unchecked else max(count or 0 for count in resident),
        hits=tuple(answer.first_token_s for answer in hits),
        floors=tuple(probed.floor_s),
        stock_cold_s=None if stock is None else stock.cold_s,
        stock_floor_s=None if stock is None else (stock_floor := statistics.median(stock.over_own_cache_s)),
        stock_speedup=None if stock is None else stock.cold_s / hit,
        floor_to_stock=None if stock is None else floor / stock_floor,
    )


@click.command()
@click.argument("model", default="smollm2-135m")
@click.option(
    "--rounds", default=3, show_default=True, type=click.IntRange(1, len(QUESTIONS)), help="restarts to take medians over"
)
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="where to keep the demo's cache and log")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object instead of a table")
def demo(model: str, rounds: int, folder: Path | None, as_json: bool) -> None:
    """Compute a long prompt once, kill the server, and answer its successor's first request from disk."""
    from rich.console import Console

    console = Console(stderr=True)
    start = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[dim]{time.monotonic() - start:6.1f} s[/dim]  {text}", soft_wrap=True, highlight=False)

    # Not in /tmp, which may be memory: the point is the disk that the cache would lie on.
    home = folder or Path("~/.cache/headstart").expanduser()
    home.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix="demo-", dir=home))
    try:
        result = run_demo(model, rounds=rounds, folder=place, say=say)
    finally:
        if folder is None:
            shutil.rmtree(place, ignore_errors=True)
    if as_json:
        click.echo(json.dumps(asdict(result)))
    else:
        Console().print(_table(result))
        say(f"next: headstart serve {model}")
    if not result.same_tokens:
        raise HeadstartError("the answer from disk differs from the answer without a cache; please report this")


def _table(result: DemoResult) -> Table:
    from rich.table import Table

    table = Table(title="a prompt is computed once", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")
    cached = result.page_cache_bytes
    if cached is None:
        checked = "page cache not checked on this system"
    else:  # opening the directory reads the segments' headers
        checked = f"checked: {cached / 1024:.0f} KiB of the files in the page cache"
    for name, value, note in (
        ("prompt", f"{result.prompt_tokens:,} tokens", f"shared beginning {result.shared_prefix_tokens:,}"),
        ("read from disk", f"{result.cached_tokens:,} tokens", checked),
        ("", f"{result.bytes_read / 1e6:,.1f} MB", ""),
        ("first token, cold", f"{result.cold_ttft_s:.2f} s", "everything computed"),
        ("first token, from disk", f"{result.hit_ttft_s:.2f} s", f"after SIGKILL and restart, median of {result.rounds}"),
        ("the floor", f"{result.floor_ttft_s:.2f} s", "same suffix, KV already in memory"),
        ("the disk alone", f"{result.disk_s:.2f} s", f"{result.bytes_read / result.disk_s / 1e9:.2f} GB/s"),
        ("speed-up", f"{result.speedup:.1f}x", "cold over from disk"),
        ("ratio to the limit", f"{result.ratio_to_limit:.2f}", "from disk over the larger of floor and disk"),
        *_stock_rows(result),
        (
            "same tokens",
            "yes" if result.same_tokens else "NO",
            f"greedy, {MAX_TOKENS} tokens, against a run with the cache off",
        ),
    ):
        table.add_row(name, value, note)
    return table


def _stock_rows(result: DemoResult) -> list[tuple[str, str, str]]:
    if result.stock_cold_s is None or result.stock_floor_s is None:
        return []
    return [
        ("stock transformers, cold", f"{result.stock_cold_s:.2f} s", f"{result.stock_speedup:.1f} times from disk"),
        (
            "stock transformers, warm",
            f"{result.stock_floor_s:.2f} s",
            f"its own KV in memory; the floor is {result.floor_to_stock:.2f} of it",
        ),
    ]


def _say_changes(say: Callable[[str], None]) -> Callable[[str], None]:
    """Pass on each stage once: progress is polled twenty times a second."""
    last = ""

    def changed(stage: str) -> None:
        nonlocal last
        if stage and stage != last:
            last = stage
            say(f"  {stage}")

    return changed


def _wait_until_saved(server: ServerProcess, timeout_s: float = 60.0) -> None:
    """Return when nothing waits to be written. Saving is behind the answer; a kill before its end would lose, never lie."""
    deadline = time.monotonic() + timeout_s
    while server.metric("headstart_saves_pending") > 0:
        if time.monotonic() > deadline:
            raise HeadstartError(f"the server had not finished saving after {timeout_s:.0f} s")
        time.sleep(0.05)


def _read_alone(paths: list[Path], nbytes: int, *, threads: int = 8, request_bytes: int = 2 << 20) -> float:
    """Seconds to read `nbytes` of the files with O_DIRECT into huge-page buffers, computing nothing. Median of three."""
    from headstart.tier.arena import Arena

    jobs: list[tuple[int, int]] = []  # (file, offset)
    arena = Arena(threads * request_bytes, name="demo")
    arena.touch(arena.capacity_bytes)
    descriptors = [_open_direct(path) for path in paths]
    try:
        for fd in descriptors:
            jobs += [(fd, offset) for offset in range(0, os.fstat(fd).st_size, request_bytes)]
        jobs = jobs[: max(1, nbytes // request_bytes)]
        regions = [arena.allocate(request_bytes) for _ in range(threads)]
        views = [region.view for region in regions if region is not None]

        def worker(which: int) -> int:
            return sum(os.preadv(fd, [views[which]], offset) for fd, offset in jobs[which::threads])

        times = []
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(3):
                start = time.perf_counter()
                read = sum(pool.map(worker, range(threads)))
                times.append((time.perf_counter() - start) * nbytes / max(read, 1))
        return statistics.median(times)
    finally:
        for fd in descriptors:
            os.close(fd)


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    except OSError:  # a file system that has no such thing; the page cache then takes part
        return os.open(path, os.O_RDONLY)


def probe(model: str, cache: Path, *, asked: Sequence[tuple[str, int]], compare: str | None) -> Probed:
    """Ask an engine in a process of its own: this one must hold no tensor library and its threads while servers are timed."""
    request = ProbeRequest(
        model=model,
        cache=str(cache),
        prompts=[messages_for(question) for question, _ in asked],
        other=messages_for(FIRST_QUESTION),
        cached_tokens=[cached for _, cached in asked],
        compare=None if compare is None else messages_for(compare),
        max_tokens=MAX_TOKENS,
    )
    return msgspec.json.decode(_asked("headstart.cli.demo_probe", request, "measuring the floor"), type=Probed)


def stock_times(checkpoint: Path, *, asked: Sequence[tuple[str, int]]) -> StockTimes:
    """Time plain transformers on the prompts, in a process of its own."""
    request = StockRequest(
        folder=str(checkpoint),
        prompts=[messages_for(question) for question, _ in asked],
        cached_tokens=[cached for _, cached in asked],
    )
    return msgspec.json.decode(_asked("headstart.cli.demo_stock", request, "timing plain transformers"), type=StockTimes)


def _checkpoint(model: str) -> Path | None:
    """Return the folder that transformers loads the model from; None for a GGUF."""
    from headstart.engine.models import resolve_model

    found = resolve_model(model, load_config().models_directory, on_progress=lambda *_: None)
    return None if found.is_gguf else found.path


def _asked(program: str, request: msgspec.Struct, what: str) -> bytes:
    """Return the last line that a program of ours prints for a request."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", program],
            input=msgspec.json.encode(request),
            capture_output=True,
            timeout=900,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise HeadstartError(f"{what} took longer than a quarter of an hour; is the machine busy?") from error
    if done.returncode != 0:
        raise HeadstartError(f"{what} failed:\n{done.stderr.decode(errors='replace')[-2000:]}")
    return done.stdout.splitlines()[-1]
