"""`headstart cache` where a disk hangs, fails, is being drained, or has no room to give: one sentence, nothing lost."""

from __future__ import annotations

import os
import re
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from cli.cache_kit import CAPACITY, Run, family, found_pieces, key_of, kv, tier_at, write
from headstart.cli.cache import cached as cached_module
from headstart.cli.cache import looking
from headstart.testing.fake_kv import UNEVEN
from headstart.tier.devices import add_device, drain_device
from headstart.tier.disk import exchange
from headstart.tier.disk.look import Look


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def kv_root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def test_a_device_that_hangs_is_told_and_the_others_are_looked_at(
    tmp_path: Path, kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, _ = family(kv_root)
    add_device(kv_root, tmp_path / "b")
    answers, real = Event(), cached_module._real_cache
    monkeypatch.setattr(cached_module, "_ANSWER_S", 0.2)
    monkeypatch.setattr(cached_module, "_real_cache", lambda path: answers.wait(30) if path.name == "b" else real(path))
    said = run("ls", "--directory", kv_root)
    answers.set()
    assert key_of(one)[:12] in said
    assert f"device {tmp_path / 'b'} is not there or does not answer" in said


def test_a_directory_that_hangs_is_a_sentence(kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    family(kv_root)
    answers = Event()
    monkeypatch.setattr(cached_module, "_ANSWER_S", 0.2)
    monkeypatch.setattr(Path, "resolve", lambda self, **_: answers.wait(30))
    said = run("stat", "--directory", kv_root, code=4)
    answers.set()
    assert "does not answer; check its disk or mount" in said


def test_a_disk_that_fails_ends_a_command_in_a_sentence(kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = family(kv_root)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error", str(kv_root / "segments"))

    monkeypatch.setattr(Look, "read", fail)
    said = run("rm", "--yes", key_of(one, 2), "--directory", kv_root, code=4)
    assert f"{kv_root / 'segments'}: Input/output error; check the disk" in said
    assert found_pieces(kv_root, two) == 6


def test_what_is_to_stay_free_is_not_taken_by_an_import(
    tmp_path: Path, kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    family(kv_root)
    run("export", "--all", tmp_path / "all.hs", "--directory", kv_root)
    (tmp_path / "other").mkdir()
    monkeypatch.setenv("HEADSTART_CACHE_MIN_FREE", "99.99999%")
    taken = run.json("import", tmp_path / "all.hs", "--directory", tmp_path / "other", code=5)
    assert taken["stored"] == 0
    assert any("cache.min_free" in reason for reason in taken["left_out"])


def test_an_import_goes_to_no_device_that_is_being_drained(tmp_path: Path, kv_root: Path, run: Run) -> None:
    one, _ = family(tmp_path / "source")
    run("export", "--all", tmp_path / "all.hs", "--directory", tmp_path / "source")
    with tier_at(kv_root):
        pass
    add_device(kv_root, tmp_path / "b")
    drain_device(kv_root, tmp_path / "b")
    both = ("--directory", tmp_path / "b", "--directory", kv_root)
    run("import", tmp_path / "all.hs", *both)
    assert found_pieces(kv_root, one) == 8
    assert "drained" in run("import", tmp_path / "all.hs", "--directory", tmp_path / "b", code=4)


def test_a_representation_that_another_directory_of_the_cache_serves_is_compared_with(tmp_path: Path, run: Run) -> None:
    with tier_at(tmp_path / "a") as tier:
        write(tier, kv(2, seed=9, layout=UNEVEN))
    with tier_at(tmp_path / "b"):
        pass
    family(tmp_path / "source")
    run("export", "--all", tmp_path / "all.hs", "--directory", tmp_path / "source")
    both = ("--directory", tmp_path / "b", "--directory", tmp_path / "a")
    assert "--any-representation" in run("import", tmp_path / "all.hs", *both, code=2)


def test_an_export_takes_nobodys_name_that_came_meanwhile(
    tmp_path: Path, kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    family(kv_root)
    file, write_out = tmp_path / "all.hs", exchange._write

    def slow(*arguments: Any, **named: Any) -> int:
        file.write_text("mine")
        return write_out(*arguments, **named)

    monkeypatch.setattr(exchange, "_write", slow)
    assert "is there already" in run("export", "--all", file, "--directory", kv_root, code=4)
    assert file.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.hs", "kv"]


def test_an_export_does_without_second_names(tmp_path: Path, kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    family(kv_root)

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    run("export", "--all", tmp_path / "all.hs", "--directory", kv_root)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.hs", "kv"]


def test_stat_tells_why_a_server_stores_nothing(kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    family(kv_root)
    assert run.json("stat", "--directory", kv_root)["devices"][0]["paused"] == ""
    monkeypatch.setenv("HEADSTART_CACHE_MIN_FREE", "99.99999%")
    assert "not storing  cache.min_free keeps" in run("stat", "--directory", kv_root)
    monkeypatch.undo()
    monkeypatch.setattr(looking.os, "ST_RDONLY", -1)
    assert "its file system is read-only" in run("stat", "--directory", kv_root)


def test_stat_tells_that_the_days_writes_are_spent(kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    family(kv_root)
    (device,) = run.json("stat", "--directory", kv_root)["devices"]
    assert device["paused"] == ""
    monkeypatch.setenv("HEADSTART_CACHE_WRITE_BUDGET", str(4 * device["live_bytes"]))
    assert re.search(r"not storing  cache.write_budget \(\d+ MiB a day.* is used up", run("stat", "--directory", kv_root))
    monkeypatch.setenv("HEADSTART_CACHE_WRITE_BUDGET", "unlimited")
    assert "not storing" not in run("stat", "--directory", kv_root)


def test_stat_tells_a_device_that_is_being_drained_and_each_ones_part(
    tmp_path: Path, kv_root: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    family(kv_root)
    add_device(kv_root, tmp_path / "b")
    drain_device(kv_root, tmp_path / "b")
    monkeypatch.setenv("HEADSTART_CACHE_CAPACITY", str(CAPACITY))
    devices = run.json("stat", "--directory", kv_root)["devices"]
    assert [(Path(one["directory"]).name, one["state"]) for one in devices] == [("kv", "active"), ("b", "draining")]
    assert [one["capacity_bytes"] for one in devices] == [CAPACITY // 2] * 2
