"""Agents' sessions over restarts: what a turn computes is what it adds, and one block at most."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from llama_kit import WORDS, Made, opened, receipt_of, saved

from asking import ask, eventually, some_tokens
from headstart.block.keys import BLOCK_TOKENS
from headstart.cli.server_process import ServerProcess

TURNS, LIVES = 40, 4
TEXT = (Path(__file__).parents[3] / "LICENSE").read_text().split()


def test_each_of_40_turns_up_to_the_full_context_computes_what_it_adds_and_at_most_a_block(gguf: Made, tmp_path: Path) -> None:
    draw, text, known = random.Random(5), some_tokens(600, 1, WORDS), 0
    for _ in range(LIVES):
        with opened(gguf("llama"), tmp_path, cache={"memory": "0"}, context=4096) as engine:
            for _ in range(TURNS // LIVES):
                text += some_tokens(draw.randrange(30, 120), len(text), WORDS)
                answer = ask(engine, text, draw.randrange(1, 40), session="agent")
                receipt = receipt_of(answer)
                found = receipt.decision.matched_tokens
                assert found >= known - BLOCK_TOKENS
                if not receipt.notes:  # a busy machine may read slower than it computes, and says so
                    assert receipt.cached_tokens == found
                text += answer.tokens
                known = len(text)
                saved(engine)
    assert 3900 < len(text) < 4096


@pytest.mark.soak
@pytest.mark.real_model
def test_the_real_server_killed_every_10_turns_computes_what_each_adds_and_at_most_a_block(tmp_path: Path) -> None:
    cache = ["--cache-directory", str(tmp_path / "kv"), "--cache-capacity", "1GiB", "--cache-min-free", "0"]
    models = str(Path(__file__).parents[3] / "models")
    server = ServerProcess(["smollm2-135m-gguf", *cache, "--models-directory", models], log=tmp_path / "log")
    messages, known = [{"role": "system", "content": " ".join(TEXT[:400])}], 0
    try:
        for turn in range(TURNS):
            if turn % (TURNS // LIVES) == 0:
                server.kill()
                server.start()
            messages.append({"role": "user", "content": " ".join(TEXT[15 * turn : 15 * turn + 85])})
            answer = server.ask(messages, max_tokens=40)
            prompt, cached = answer.usage["prompt_tokens"], answer.usage["prompt_tokens_details"]["cached_tokens"]
            receipt = server.receipt(answer)
            found = receipt["load_decision"]["matched_tokens"]
            assert prompt - found <= prompt - known + BLOCK_TOKENS, f"turn {turn}: {found} of {prompt}, {known} known"
            if not receipt["notes"]:  # a busy machine may read slower than it computes, and says so
                assert cached == found
            known = prompt + answer.usage["completion_tokens"]
            messages.append({"role": "assistant", "content": answer.text})
            eventually(lambda: not server.metric("headstart_saves_pending"))
        assert known > 7000
    finally:
        server.stop()
        server._client.close()
