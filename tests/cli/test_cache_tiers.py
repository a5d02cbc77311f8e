"""`headstart cache` across tiers: rules checked and explained, moves by query, and a pool looked at like a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cli.cache_kit import CAPACITY, Run, bytes_of, image_of, key_of, kv, tier_at, write
from headstart.cli.cache.between_tiers import Limit
from headstart.testing.fake_kv import TINY, FakeKV
from headstart.tier.base import Terms
from headstart.tier.pool import PoolTier


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory with an agent's and a chat's prompt, and an empty pool; the configuration names both."""
    disk, pool = tmp_path / "disk", tmp_path / "pool"
    pool.mkdir()
    with tier_at(disk) as tier:
        write(tier, kv(4, seed=1), retention="agent")
        write(tier, kv(4, seed=2), retention="chat", tenant="acme")
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", str(disk))
    monkeypatch.setenv("HEADSTART_CACHE_POOL", str(pool))
    PoolTier.open(pool, capacity_bytes=CAPACITY, background=False).close()
    return disk, pool


def config_of(tmp_path: Path, *rules: str) -> Path:
    file = tmp_path / "headstart.toml"
    file.write_text(f"[cache.tiering]\nrules = {json.dumps(rules)}\n")
    return file


def test_rules_are_checked_and_what_does_nothing_is_told(run: Run, places: tuple[Path, Path], tmp_path: Path) -> None:
    file = config_of(tmp_path, 'when class="agent" and idle>6h then move to pool', "move to object")
    said = run("policy", "check", file)
    assert '  1  when class = "agent" and idle > 6h then move to pool\n' in said
    assert "  2  move to object   does nothing: there is no tier 'object'\n" in said
    assert "2 rules are right; tiers: memory, disk, pool" in said
    found = run.json("policy", "check", file)
    assert [rule["does_nothing"] for rule in found["rules"]] == ["", "there is no tier 'object'"]


def test_a_wrong_rule_is_pointed_at(run: Run, tmp_path: Path) -> None:
    file = config_of(tmp_path, "when idle > 6h then move to pol")
    said = run("policy", "check", file, code=2)
    assert "rule 1, character 29: one of memory, disk, pool, object is needed, not 'pol'; did you mean 'pool'?" in said
    assert "    when idle > 6h then move to pol\n                                ^" in said
    assert run.json("policy", "check", file, code=2)["at"] == 28
    assert "cache.tiering.rules: rule 1, character 29" in run("ls", "--config", file, code=2)


def test_what_becomes_of_a_block_is_explained(run: Run, places: tuple[Path, Path], tmp_path: Path) -> None:
    file = config_of(
        tmp_path, "when class = chat then keep in disk", "when age > 5s and tenant = none then move to pool", "move to pool"
    )
    said = run("policy", "explain", key_of(kv(4, seed=1)), "--config", file)
    assert "  rule 1 does not hold: " in said
    assert 'class = "chat": it is "agent"' in said
    assert "yes  age > 5s: it is " in said
    assert "  rule 3 applies: move to pool\n" in said
    assert "  next: it is moved to 'pool' within seconds" in said
    [found] = run.json("policy", "explain", key_of(kv(4, seed=2)), "--config", file)["found"]
    assert (found["tier"], found["rule"], found["next"]) == ("disk", 1, "it stays in 'disk'")
    away = config_of(tmp_path, "move to object", "drop from pool")
    said = run("policy", "explain", key_of(kv(4, seed=2)), "--config", away)
    assert "  rule 1 does nothing (there is no tier 'object'): move to object\n" in said
    assert "  rule 2 is not about what lies in 'disk': drop from pool\n  next: it stays in 'disk': no rule applies" in said
    missed = run("policy", "explain", "0123456789abcdef", "--config", file, code=3)
    assert "no tier" in missed
    assert "name the file with --config" in missed


def test_what_a_query_selects_is_moved_and_given_again_nothing_is_left_to_do(run: Run, places: tuple[Path, Path]) -> None:
    _, pool = places
    asked = ("move", "--from", "disk", "--to", "pool", "--where", 'class = "agent" and age > 1s', "--limit", "100MB/s")
    before = bytes_of(pool)
    assert "1 extent would move from disk to pool" in run(*asked, "--dry-run")
    assert bytes_of(pool) == before
    found = run.json(*asked)
    assert (found["moved"], found["extents"], found["left_out"]) == (1, 1, {})
    assert run.json(*asked)["extents"] == 0
    assert [one["class"] for one in run.json("ls")["prefixes"]] == ["chat"]
    [moved] = run.json("ls", "--pool", pool)["prefixes"]
    assert (moved["class"], moved["tokens"]) == ("agent", 4 * TINY.piece_tokens)
    assert run.json("move", "--from", "pool", "--to", "disk")["moved"] == 1
    assert len(run.json("ls")["prefixes"]) == 2


def test_an_object_store_that_would_hold_nothing_is_told_in_a_sentence(
    run: Run, places: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_OBJECT_STORE", f"file://{tmp_path}")
    monkeypatch.setenv("HEADSTART_CACHE_OBJECT_CAPACITY", "1kB")
    said = run("move", "--from", "disk", "--to", "object", code=2)
    assert "cache.object_capacity: an object store of 1000 bytes holds nothing; give at least" in said


def test_pins_go_along_and_a_tenant_over_its_quota_is_left_where_it_is(
    run: Run, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pool = places
    run("pin", key_of(kv(4, seed=1)))
    monkeypatch.setenv("HEADSTART_CACHE_QUOTAS", "acme=4KiB")
    found = run.json("move", "--from", "disk", "--to", "pool", code=5)
    assert (found["moved"], found["left_out"]) == (1, {"quota": 1})
    assert [one["pinned"] for one in run.json("ls", "--pool", pool)["prefixes"]] == [True]
    assert [one["tenant"] for one in run.json("ls")["prefixes"]] == ["acme"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--from", "disk"), "give both --from and --to"),
        (("--from", "disk", "--to", "disk"), "two tiers"),
        (("a", "b", "--where", "idle > 6h"), "go with --from and --to"),
        (("--from", "disk", "--to", "pool", "--where", "idle > "), "--where: character"),
        (("--from", "disk", "--to", "pool", "--limit", "fast"), "write 100MB/s"),
        (("--from", "disk", "--to", "pool", "--limit", "0"), "nothing would ever move"),
        ((), "give SOURCE and DESTINATION"),
    ],
)
def test_a_move_that_is_asked_for_wrongly_is_refused(run: Run, arguments: tuple[str, ...], says: str) -> None:
    assert says in run("move", *arguments, code=2)


def test_a_pool_is_looked_at_and_changed_like_a_directory(run: Run, places: tuple[Path, Path]) -> None:
    _, pool = places
    one = kv(4, seed=7)
    tier = PoolTier.open(pool, capacity_bytes=CAPACITY, background=False)
    tier.write(image_of(one), TINY, terms=Terms("agent", "acme"))
    try:
        assert [p["key"][:16] for p in run.json("ls", "--pool", pool)["prefixes"]] == [key_of(one)]
        [device] = run.json("stat", "--pool", pool)["devices"]
        assert (device["directory"], device["extents"]) == (str(pool), 1)
        assert run.json("du", "--pool", pool)["by_tenant"]["acme"] > 0
        assert run.json("show", key_of(one), "--pool", pool)["prefixes"][0]["tenant"] == "acme"
        assert run.json("pin", key_of(one), "--pool", pool)["refused"] == []
        assert run.json("rm", key_of(one), "--pool", pool, code=5)["pinned_prefixes"] == 1
        run("unpin", key_of(one), "--pool", pool)
        assert run.json("rm", key_of(one), "--pool", pool)["extents"] == 1
        tier.step()
        assert tier.statistics().extents == 0
        assert tier.check() == []
    finally:
        tier.close()
    assert "is a pool of many machines: give it as --pool, to `headstart cache` too" in run("ls", "--directory", pool, code=4)
    assert "--directory and --pool are given" in run("ls", "--directory", pool, "--pool", pool, code=2)
    assert "there is no" in run("ls", "--pool", pool / "nowhere", code=3)


def test_nothing_is_changed_in_a_pool_that_may_only_be_read(
    run: Run, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_POOL_READ_ONLY", "true")
    assert "cache.pool_read_only is set" in run("move", "--from", "disk", "--to", "pool", code=4)
    assert len(run.json("ls")["prefixes"]) == 2


def test_a_rate_is_kept_by_waiting_before_each_extent(monkeypatch: pytest.MonkeyPatch) -> None:
    now, slept = [100.0], list[float]()
    monkeypatch.setattr("headstart.cli.cache.between_tiers.time.monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr("headstart.cli.cache.between_tiers.time.sleep", sleep)
    limit = Limit(1000)
    for _ in range(5):
        limit.wait(500)
        now[0] += 0.1  # what reading it takes
    assert sum(slept) + 5 * 0.1 == pytest.approx(4 * 0.5 + 0.1)
    Limit(None).wait(1 << 40)


def found_in(tier: PoolTier, prompt: FakeKV) -> bool:
    return tier.locate(TINY.digest, prompt.keys).holds(state=False)


def killed_moves(tmp_path: Path, rounds: int) -> None:
    """Move between a directory and a pool in a process that is killed somewhere, and again, until it ends by itself: nothing is
    lost or doubled, and all of it is right."""
    disk, pool = tmp_path / "disk", tmp_path / "pool"
    pool.mkdir()
    prompts = [kv(4, seed=seed) for seed in range(40)]
    with tier_at(disk) as tier:
        for prompt in prompts:
            write(tier, prompt)
    command = [
        sys.executable,
        "-m",
        "headstart.cli",
        "cache",
        "move",
        "--from",
        "disk",
        "--to",
        "pool",
        "--directory",
        str(disk),
    ]
    command += ["--pool", str(pool), "--limit", "20MB/s"]
    PoolTier.open(pool, capacity_bytes=CAPACITY, background=False).close()
    for number in range(rounds):
        child = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ)
        assert child.stderr is not None
        for line in child.stderr:
            if line.startswith(b"moving"):
                break
        time.sleep(0.02 * (number % 10))  # where it is killed is left to chance
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        child.stderr.close()
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0
    with tier_at(disk) as tier:
        assert tier.statistics().extents == 0
        assert tier.check() == []
    there = PoolTier.open(pool, capacity_bytes=CAPACITY, background=False)
    try:
        there.step()
        assert all(found_in(there, prompt) for prompt in prompts)
        assert there.statistics().extents == len(prompts)
        assert there.check() == []
    finally:
        there.close()


def test_a_move_that_is_killed_loses_and_doubles_nothing(tmp_path: Path) -> None:
    killed_moves(tmp_path, rounds=1)


@pytest.mark.soak
def test_moves_that_are_killed_at_many_points_lose_and_double_nothing(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).mkdir()
        killed_moves(tmp_path / str(number), rounds=8)


def test_gc_of_a_pool_lets_the_least_used_go_once_however_late_its_files_go(run: Run, places: tuple[Path, Path]) -> None:
    _, pool = places
    tier = PoolTier.open(pool, capacity_bytes=CAPACITY, background=False)
    try:
        for seed in (11, 12, 13):
            tier.write(image_of(kv(4, seed=seed)), TINY, terms=Terms())
        nbytes = image_of(kv(4)).nbytes
        assert run.json("gc", "--pool", pool, "--to", str(2 * nbytes), "--dry-run")["extents"] == 1
        for gone in (1, 0):  # its bytes are still there the second time
            assert run.json("gc", "--pool", pool, "--to", str(2 * nbytes))["extents"] == gone
        left = {prefix["key"][:16] for prefix in run.json("ls", "--pool", pool)["prefixes"]}
        assert left == {key_of(kv(4, seed=12)), key_of(kv(4, seed=13))}
    finally:
        tier.close()
