"""`headstart cache ls | show | stat | du`: what is said is what is there, and looking changes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cli.cache_kit import Run, bytes_of, family, key_of, kv, tier_at, write
from headstart.cli.cache import looking
from headstart.testing.fake_kv import TINY, UNEVEN
from headstart.tier import disk
from headstart.tier.disk import RealDisk
from headstart.tier.disk.door import Handle, OpenMode
from headstart.tier.disk.look import Look


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def test_ls_lists_a_line_a_prefix_and_not_an_extent(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    found = {line["key"][:16]: line for line in run.json("ls", "--directory", tmp_path / "kv")["prefixes"]}
    assert set(found) == {key_of(one), key_of(two)}
    assert (found[key_of(one)]["tokens"], found[key_of(two)]["tokens"]) == (8 * 64, 6 * 64)
    extent = found[key_of(two)]["own_bytes"]
    assert found[key_of(two)]["bytes"] == 2 * extent
    assert (found[key_of(two)]["class"], found[key_of(two)]["tenant"]) == ("chat", "acme")
    said = run("ls", "--directory", tmp_path / "kv")
    assert key_of(one)[:12] in said
    assert "104 KiB" in said


@pytest.mark.parametrize(
    ("filters", "which"),
    [
        (["--tenant", "acme"], [1]),
        (["--class", "default"], [0]),
        (["--pinned"], []),
        (["--representation", "fake/1"], [0, 1]),
        (["--representation", TINY.digest.hex()[:6]], [0, 1]),
        (["--representation", "other"], []),
        (["--older-than", "1h"], []),
        (["--limit", "1", "--sort", "tokens"], [0]),
    ],
)
def test_ls_shows_what_the_filters_let_through(tmp_path: Path, run: Run, filters: list[str], which: list[int]) -> None:
    prompts = family(tmp_path / "kv")
    found = run.json("ls", "--directory", tmp_path / "kv", *filters)["prefixes"]
    assert {line["key"][:16] for line in found} == {key_of(prompts[i]) for i in which}


def test_show_tells_where_a_prefix_lies_and_what_it_begins_with(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    (prefix,) = run.json("show", key_of(two), "--directory", tmp_path / "kv")["prefixes"]
    first, last = prefix["extents"]
    assert (first["used_blocks"], first["blocks"], last["used_blocks"]) == (2, 4, 4)
    assert prefix["first_tokens"] == one.tokens[:16].tolist()
    assert (prefix["layers"], prefix["dtype"]) == (3, "float32")
    assert last["key"] == two.keys[-1].hex()
    image = Path(last["file"]).read_bytes()[last["offset"] :]
    assert image[:8] == b"HSEXTENT"


def test_show_tells_a_promise_only_as_long_as_it_holds(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")  # of classes "default" and "chat"
    here = ("--directory", tmp_path / "kv")
    assert "promised        nothing" in run("show", key_of(one), *here)
    assert "promised        until 2" in run("show", key_of(two), *here)


def test_show_tells_the_class_of_each_block_that_differs(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    said = run("show", key_of(two), *here)
    assert re.search(r"class, tenant +chat, acme +\(of its last block", said)
    first, last = [line for line in said.splitlines() if line.startswith("extent")]
    assert first.endswith(", default, -")
    assert "chat" not in last
    assert "(of its last block" not in run("show", key_of(one), *here)


def test_every_reason_that_eviction_gives_is_told_in_words() -> None:
    source = "".join(path.read_text() for path in Path(disk.__file__).parent.glob("*.py"))
    given = set(re.findall(r'evict\([^"\n]*"([a-z-]+)"\)', source)) | set(
        re.findall(r'remove\([^"\n]*reason="([a-z-]+)"', source)
    )
    assert {"capacity", "full", "min-free", "expired"} <= given <= set(looking.REASONS)


def test_show_tells_a_prefix_in_the_middle_and_what_continues_it(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    (prefix,) = run.json("show", key_of(one, 1), "--directory", tmp_path / "kv")["prefixes"]
    assert (prefix["tokens"], prefix["continued_by"]) == (2 * 64, 2)


def test_show_tells_when_and_why_a_prefix_went(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    run("rm", key_of(one), "--directory", tmp_path / "kv")
    found = run.json("show", key_of(one), "--directory", tmp_path / "kv", code=3)
    assert [(r["key"][:16], r["reason"], r["quarantined"]) for r in found["removals"]] == [(key_of(one), "user", False)]
    assert "headstart cache rm" in run("show", key_of(one), "--directory", tmp_path / "kv", code=3)
    assert "never" in run("show", "0123456789abcdef", "--directory", tmp_path / "kv", code=3)


def test_a_key_that_names_several_blocks_is_refused_with_them(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = family(tmp_path / "kv")
    monkeypatch.setattr("headstart.cli.cache.cached.LEAST_DIGITS", 1)
    by_digit: dict[str, set[str]] = {}
    for key in {*one.keys, *two.keys}:
        by_digit.setdefault(key.hex()[0], set()).add(key.hex())
    digit, keys = max(by_digit.items(), key=lambda item: len(item[1]))
    assert len(keys) > 1
    said = run("show", digit, "--directory", tmp_path / "kv", code=2)
    assert all(key[:12] in said for key in keys)


@pytest.mark.parametrize("key", ["0123", "nothexatall", ""])
def test_what_is_no_key_is_told_in_a_sentence(tmp_path: Path, run: Run, key: str) -> None:
    family(tmp_path / "kv")
    assert "at least 8 hex digits" in run("show", key, "--directory", tmp_path / "kv", code=2)


def test_stat_and_du_count_each_extent_once(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    with tier_at(tmp_path / "kv") as tier:
        write(tier, kv(2, seed=9, layout=UNEVEN))
        live = tier.statistics().live_bytes
    stat = run.json("stat", "--directory", tmp_path / "kv")
    assert (stat["live_bytes"], stat["prefixes"]) == (live, 3)
    assert f"prefixes       3, 0 pinned; {stat['tokens']:,} tokens stored" in run("stat", "--directory", tmp_path / "kv")
    for name in ("class", "tenant", "representation"):
        assert sum(stat[f"live_bytes_by_{name}"].values()) == live
    du = run.json("du", "--directory", tmp_path / "kv")
    assert du["total_bytes"] == sum(du["by_directory"].values()) == live
    assert set(du["by_class"]) == {"default", "chat"}
    files = sum(path.stat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*") if path.is_file())
    assert du["charged_bytes"] == files
    for verb in ("stat", "du"):
        assert "acme" in run(verb, "--directory", tmp_path / "kv")


def test_several_directories_are_one_cache(tmp_path: Path, run: Run) -> None:
    one = kv(8, seed=1)
    for name, first in (("a", 0), ("b", 4)):
        with tier_at(tmp_path / name) as tier:
            write(tier, one, first, 4)
    both = ("--directory", tmp_path / "a", "--directory", tmp_path / "b")
    (prefix,) = run.json("ls", *both)["prefixes"]
    assert (prefix["key"][:16], prefix["tokens"]) == (key_of(one), 8 * 64)
    assert len(run.json("stat", *both)["devices"]) == 2


@pytest.mark.parametrize("verb", [["ls"], ["stat"], ["du"], ["verify"], ["gc"], ["show", "0123456789"], ["pin", "0123456789"]])
def test_a_directory_that_is_not_there_is_a_sentence_and_not_made(tmp_path: Path, run: Run, verb: list[str]) -> None:
    said = run(*verb, "--directory", tmp_path / "none", code=3)
    assert "there is no cache in" in said
    assert not (tmp_path / "none").exists()


def test_a_directory_of_another_version_is_a_sentence(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    marker = tmp_path / "kv" / "headstart.json"
    marker.write_text(marker.read_text().replace('"version": 1', '"version": 9'))
    assert "format version 9" in run("ls", "--directory", tmp_path / "kv", code=4)


def test_looking_changes_not_a_byte(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    before = bytes_of(tmp_path / "kv")
    for verb in (["ls"], ["stat"], ["du"], ["show", key_of(one)], ["verify", "--no-repair"], ["rm", "--all", "--dry-run"]):
        run(*verb, "--directory", tmp_path / "kv")
    assert bytes_of(tmp_path / "kv") == before


class ReadOnlyDisk(RealDisk):
    """A file system that is mounted read-only."""

    def open(self, path: Path, mode: OpenMode, *, bulk: bool = False) -> Handle:
        assert mode == "read", path
        return super().open(path, mode, bulk=bulk)

    def _refuse(self, *_: object, **__: object) -> None:
        raise AssertionError("something was to be changed")

    write = truncate = rename = unlink = make_directory = reserve = punch = sync = sync_directory = lock_file = _refuse  # type: ignore[assignment]


def test_a_read_only_directory_can_be_looked_at_and_read(tmp_path: Path) -> None:
    family(tmp_path / "kv")
    with Look(tmp_path / "kv", disk=ReadOnlyDisk()) as look:
        extents = look.extents()
        assert len(extents) == 3
        assert all(look.read(info.id) is not None for info in extents)


def in_a_process(arguments: Sequence[str], *, and_then: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys; from headstart.cli import run_cli; code = run_cli({list(arguments)!r});{and_then} sys.exit(code)"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)


def test_ls_imports_no_tensor_library_and_no_server(tmp_path: Path) -> None:
    family(tmp_path / "kv")
    heavy = "heavy = {'torch', 'transformers', 'uvicorn', 'starlette', 'httpx'} & set(sys.modules); code = heavy or code;"
    done = in_a_process(["cache", "ls", "--directory", str(tmp_path / "kv")], and_then=heavy)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("KEY ")


def test_the_command_sees_what_a_living_writer_wrote_and_the_writer_what_the_command_removed(tmp_path: Path) -> None:
    one, two = family(tmp_path / "kv")
    new = kv(4, seed=5)
    here = ["--directory", str(tmp_path / "kv")]
    with tier_at(tmp_path / "kv") as server:
        write(server, new)
        assert key_of(new)[:12] in in_a_process(["cache", "ls", *here]).stdout
        assert in_a_process(["cache", "rm", key_of(one), *here]).returncode == 0
        server.refresh()
        assert (server.locate(TINY.digest, one.keys).extents >= 0).tolist() == [True] * 4 + [False] * 4
        assert in_a_process(["cache", "pin", key_of(two), *here]).returncode == 0
        server.refresh()
        assert sum(info.pinned_until_ms is not None for info in server.scan()) == 2
        assert server.check() == []


def test_a_lease_of_a_living_reader_keeps_an_extent_from_rm(tmp_path: Path) -> None:
    one, _ = family(tmp_path / "kv")
    with tier_at(tmp_path / "kv") as server:
        (extent,) = {int(e) for e in server.locate(TINY.digest, one.keys[4:]).extents}
        assert server.lease([extent]) == [True]  # type: ignore[list-item]
        done = in_a_process(["cache", "rm", key_of(one), "--directory", str(tmp_path / "kv")])
        assert done.returncode == 5
        assert "1 extent is being read and stays" in done.stderr
        server.refresh()
        assert server.info(extent) is not None  # type: ignore[arg-type]
        server.release([extent])  # type: ignore[list-item]
