"""The demo's yardstick, in a process of its own where nothing of the engine is loaded: plain `transformers` on the same prompt.

Reads one `StockRequest` as JSON from standard input and prints one `StockTimes` as the last line of standard output. Its idle
threads sleep like the engine's, so that other work on the machine disturbs it no more.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec


class StockRequest(msgspec.Struct):
    """`folder`: of the model. `prompts[i]` begins with `cached_tokens[i]` tokens that were computed before."""

    folder: str
    prompts: list[list[dict[str, str]]]
    cached_tokens: list[int]


class StockTimes(msgspec.Struct):
    cold_s: float  # the first prompt, everything computed
    over_own_cache_s: list[float]  # of each prompt, what follows its cached tokens, over a DynamicCache that holds those


def main() -> None:
    """Answer the request on standard input."""
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=StockRequest)
    sys.stdout.buffer.write(msgspec.json.encode(answer(request)) + b"\n")


def answer(request: StockRequest) -> StockTimes:
    from headstart.config import prefer_sleeping_threads

    prefer_sleeping_threads()  # before the tensor library is imported
    import torch
    import transformers

    from headstart.render import Renderer

    transformers.utils.logging.disable_progress_bar()
    renderer = Renderer.load(Path(request.folder))
    prompts = [renderer.chat(messages) for messages in request.prompts]
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(request.folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def first_token(tokens: list[int], cache: Any) -> tuple[float, Any]:
        """Return seconds from token ids to the first token of the answer, and the cache with all of them."""
        started = time.perf_counter()
        output = model(torch.tensor([tokens]), cache=cache, use_cache=True, logits_to_keep=1)
        int(output.logits[0, -1].argmax())
        return time.perf_counter() - started, output.cache

    first_token(prompts[0][:64], None)  # pays for what is made on first use
    cold_s, cache = first_token(prompts[0], None)
    hits = []
    for prompt, cached in zip(prompts, request.cached_tokens, strict=True):
        times = []
        for _ in range(3):
            cache.crop(cached - cache.get_seq_length())  # below zero: so many less
            seconds, cache = first_token(prompt[cached:], cache)
            times.append(seconds)
        hits.append(statistics.median(times))
    return StockTimes(cold_s, hits)


if __name__ == "__main__":
    main()
