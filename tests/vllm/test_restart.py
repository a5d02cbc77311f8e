"""The real vLLM and a real model: computed once, everything killed, answered from disk; tenants apart; torn files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from benchmarks.vllm_server import Answer, Server, connector, serving

PIECE = 128  # vLLM's block on a CPU
STORED = 1024


def prompt(seed: int, tokens: int = STORED + 16) -> list[int]:
    dice = random.Random(seed)
    return [dice.randrange(200, 40_000) for _ in range(tokens)]


LONG, TENANT, FRESH = prompt(1), prompt(2, 400), prompt(3, 300)


@pytest.fixture(scope="module")
def plain(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    """What vLLM answers without the connector."""
    with serving(smollm2, log=tmp_path_factory.mktemp("plain") / "log") as server:
        return {"long": server.ask(LONG), "tenant": server.ask(TENANT), "fresh": server.ask(FRESH)}


@pytest.fixture(scope="module")
def directory(smollm2: Path, plain: dict[str, Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a first vLLM has filled before it was killed."""
    place = tmp_path_factory.mktemp("kv")
    with serving(smollm2, log=tmp_path_factory.mktemp("cold") / "log", transfer=connector(place)) as server:
        assert server.ask(LONG).tokens == plain["long"].tokens
        assert server.ask(TENANT, cache_salt="acme").tokens == plain["tenant"].tokens
        server.wait_for("headstart_saves", 2)
        assert server.metric("headstart_loaded_tokens") == server.metric("headstart_saves_dropped") == 0
    return place


@pytest.fixture(scope="module")
def restarted(smollm2: Path, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Server:
    with serving(smollm2, log=tmp_path_factory.mktemp("hit") / "log", transfer=connector(directory)) as server:
        yield server


def test_after_everything_was_killed_a_prompt_comes_from_disk_with_the_same_tokens(
    restarted: Server, plain: dict[str, Answer]
) -> None:
    found = restarted.ask(LONG)
    assert found.tokens == plain["long"].tokens
    assert restarted.metric("headstart_loaded_tokens") == STORED, restarted.tail()
    assert restarted.metric("vllm:external_prefix_cache_hits") == STORED
    print(f"first token: plain {plain['long'].first_token_s:.3f} s, from disk {found.first_token_s:.3f} s")


def test_a_tenant_s_prompt_is_found_with_its_salt_and_only_with_it(restarted: Server, plain: dict[str, Answer]) -> None:
    before = restarted.metric("headstart_matched_tokens")
    assert restarted.ask(TENANT).tokens == plain["tenant"].tokens
    assert restarted.ask(TENANT, cache_salt="other").tokens == plain["tenant"].tokens
    assert restarted.metric("headstart_matched_tokens") == before
    assert restarted.ask(TENANT, cache_salt="acme").tokens == plain["tenant"].tokens
    assert restarted.metric("headstart_matched_tokens") == before + 3 * PIECE


def test_files_that_were_cut_off_are_a_miss_and_the_answer_is_the_same(
    restarted: Server, plain: dict[str, Answer], directory: Path
) -> None:
    cut = [file for file in directory.rglob("*") if file.is_file() and file.stat().st_size > 1 << 20]
    assert cut
    for file in cut:
        with file.open("r+b") as stream:
            stream.truncate(file.stat().st_size // 3)
    restarted.forget()
    before = restarted.metric("headstart_loaded_tokens")
    assert restarted.ask(LONG).tokens == plain["long"].tokens
    assert restarted.metric("headstart_loaded_tokens") < before + STORED
    assert restarted.ask(FRESH).tokens == plain["fresh"].tokens
