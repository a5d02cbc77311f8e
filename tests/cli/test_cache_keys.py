"""`headstart cache` on a pool whose checks are made with a key: with the key as anywhere, without it nothing is harmed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cli.cache_kit import CAPACITY, Run, image_of, key_of, kv, tier_at, write
from headstart.block.checks import Sealing, keyed
from headstart.testing.fake_kv import TINY
from headstart.tier.pool import PoolTier

pytest.importorskip("blake3")
SECRET = bytes(range(32))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory with a prompt, and a keyed pool with another; the configuration names both, and the key."""
    disk, pool, file = tmp_path / "disk", tmp_path / "pool", tmp_path / "key"
    pool.mkdir()
    file.write_text(SECRET.hex())
    os.chmod(file, 0o600)
    with tier_at(disk) as tier:
        write(tier, kv(4, seed=1))
    tier = PoolTier.open(pool, capacity_bytes=CAPACITY, background=False, sealing=Sealing((keyed(SECRET),)))
    tier.write(image_of(kv(4, seed=2)), TINY)
    tier.close()
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", str(disk))
    monkeypatch.setenv("HEADSTART_CACHE_POOL", str(pool))
    monkeypatch.setenv("HEADSTART_CACHE_CHECK_KEY_FILE", str(file))
    return disk, pool


def test_what_moves_to_a_keyed_pool_is_sealed_there_and_what_comes_back_is_as_before(
    run: Run, places: tuple[Path, Path]
) -> None:
    _, pool = places
    assert run.json("move", "--from", "disk", "--to", "pool")["moved"] == 1
    for seed in (1, 2):
        [extent] = run.json("show", key_of(kv(4, seed=seed)), "--pool", pool)["prefixes"][0]["extents"]
        assert extent["check"] == "blake3-keyed-128"
    assert run.json("verify", "--pool", pool)["faults"] == []
    assert run.json("move", "--from", "pool", "--to", "disk")["moved"] == 2
    assert run.json("verify")["extents"] == 2
    [extent] = run.json("show", key_of(kv(4, seed=2)))["prefixes"][0]["extents"]
    assert extent["check"] == "xxh3-128"


def test_without_the_key_nothing_is_dropped_moved_or_exported(
    run: Run, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, pool = places
    monkeypatch.delenv("HEADSTART_CACHE_CHECK_KEY_FILE")
    assert "1 extent was written with another key, or none, and left alone" in run("verify", "--pool", pool)
    moved = run.json("move", "--from", "pool", "--to", "disk", code=5)
    assert (moved["moved"], moved["left_out"]) == (0, {"key": 1})
    assert "not looked into: it was written with another key" in run("show", key_of(kv(4, seed=2)), "--pool", pool)
    found = run.json("export", "--all", tmp_path / "file", "--pool", pool, code=5)
    assert list(found["left_out"]) == ["written with another key; give its file as cache.check_key_file"]
    monkeypatch.setenv("HEADSTART_CACHE_CHECK_KEY_FILE", str(tmp_path / "key"))
    assert run.json("verify", "--pool", pool)["extents"] == 1


def test_rm_without_the_key_cuts_nothing_and_says_so(
    run: Run, places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, pool = places
    one = kv(4, seed=2)
    two = kv(6, seed=3, like=one, shared=2)
    tier = PoolTier.open(pool, capacity_bytes=CAPACITY, background=False, sealing=Sealing((keyed(SECRET),)))
    tier.write(image_of(two, 2, 4), TINY)
    tier.close()
    monkeypatch.delenv("HEADSTART_CACHE_CHECK_KEY_FILE")
    assert "1 extent stays whole" in run("rm", key_of(one, 2), "--pool", pool, code=5)
    done = run.json("rm", key_of(one, 2), "--pool", pool, code=5)
    assert (done["extents"], done["shortened_extents"], len(done["left_for_their_key"])) == (0, 0, 1)


def test_what_is_exported_with_the_key_needs_none_elsewhere(run: Run, places: tuple[Path, Path], tmp_path: Path) -> None:
    disk, pool = places
    assert run.json("export", "--all", tmp_path / "file", "--pool", pool)["extents"] == 1
    assert run.json("import", tmp_path / "file", "--directory", disk)["stored"] == 1


def test_what_is_wrong_in_a_pool_is_dropped_by_who_can_tell(run: Run, places: tuple[Path, Path]) -> None:
    _, pool = places
    (segment,) = pool.rglob("*.seg")
    with segment.open("r+b") as file:
        file.seek(-100, 2)
        file.write(b"poison")
    assert run.json("verify", "--pool", pool, code=6)["dropped"] == 1
    assert run.json("verify", "--pool", pool)["extents"] == 0
