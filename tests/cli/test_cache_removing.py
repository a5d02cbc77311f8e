"""`headstart cache rm | gc | pin | unpin`: what goes is what was named, and nothing that somebody else needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.cache_kit import Run, bytes_of, family, found_pieces, key_of, kv, tier_at, write
from headstart.block.representation import Representation
from headstart.testing.fake_kv import TINY


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def test_rm_takes_what_only_the_named_prefix_needs(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    done = run.json("rm", key_of(one), "--directory", tmp_path / "kv")
    assert (done["extents"], [key[:16] for key in done["prefixes"]]) == (1, [key_of(one)])
    assert (found_pieces(tmp_path / "kv", one), found_pieces(tmp_path / "kv", two)) == (4, 6)


def test_rm_of_a_beginning_takes_all_that_continues_it(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    done = run.json("rm", key_of(one, 0), "--directory", tmp_path / "kv", "--yes")
    assert (done["extents"], len(done["prefixes"])) == (3, 2)
    assert (found_pieces(tmp_path / "kv", one), found_pieces(tmp_path / "kv", two)) == (0, 0)


def test_rm_cuts_an_extent_of_which_others_need_the_beginning(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    run("rm", key_of(one), "--directory", tmp_path / "kv")
    done = run.json("rm", key_of(one, 2), "--directory", tmp_path / "kv")
    assert done["shortened_extents"] == 1
    with tier_at(tmp_path / "kv") as tier:
        assert (tier.locate(TINY.digest, one.keys).extents >= 0).tolist() == [True] * 2 + [False] * 6
        assert tier.check() == []
    assert found_pieces(tmp_path / "kv", two) == 6


def test_rm_of_more_than_one_prefix_asks_for_yes_and_does_nothing_without(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    before = bytes_of(tmp_path / "kv")
    assert "--yes" in run("rm", "--all", "--directory", tmp_path / "kv", code=2)
    assert bytes_of(tmp_path / "kv") == before
    assert run.json("rm", "--all", "--yes", "--directory", tmp_path / "kv")["extents"] == 3
    assert run.json("ls", "--directory", tmp_path / "kv")["prefixes"] == []


def test_rm_without_saying_what_is_refused(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    assert "say what is to go" in run("rm", "--directory", tmp_path / "kv", code=2)
    assert "say what is to go" in run("rm", key_of(one), "--all", "--directory", tmp_path / "kv", code=2)


def test_a_dry_run_of_rm_says_what_the_real_one_does(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    said = run.json("rm", "--tenant", "acme", "--dry-run", "--directory", tmp_path / "kv")
    done = run.json("rm", "--tenant", "acme", "--directory", tmp_path / "kv")
    assert {**said, "dry_run": False} == done
    assert done["extents"] == 1


def test_rm_of_a_tenant_takes_what_is_stored_twice_as_well(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    longer = kv(9, seed=3, like=one, shared=8)
    with tier_at(tmp_path / "kv") as tier:
        write(tier, longer, 4, 5, tenant="acme")  # its first four pieces are there already
        tier.delete([info.id for info in tier.scan() if info.tenant == "" and info.parent == one.keys[3][:16]], reason="user")
        write(tier, kv(12, seed=4, like=longer, shared=9), 8, 4)
    run("rm", "--tenant", "acme", "--yes", "--directory", tmp_path / "kv")
    assert {info["tenant"] for info in run.json("ls", "--directory", tmp_path / "kv")["prefixes"]} == {""}


def test_a_pinned_prefix_is_refused_until_it_is_unpinned(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    pinned = run.json("pin", key_of(two), "--for", "7d", *here)
    assert ([key[:16] for key in pinned["pinned"]], pinned["refused"]) == ([key_of(two)], [])
    (line,) = run.json("ls", "--pinned", *here)["prefixes"]
    assert line["pinned_until"] == pinned["until"]
    assert "unpin" in run("rm", key_of(two), *here, code=5)
    assert "unpin" in run("rm", "--all", "--yes", *here, code=5)
    assert (found_pieces(tmp_path / "kv", one), found_pieces(tmp_path / "kv", two)) == (4, 6)
    run("unpin", key_of(two), *here)
    run("rm", key_of(two), *here)
    assert found_pieces(tmp_path / "kv", two) == 2


def test_unpin_leaves_pinned_what_another_pinned_prefix_runs_on_from(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    run("pin", key_of(one), key_of(two), *here)
    assert run.json("unpin", key_of(one), *here)["still_pinned_extents"] == 1
    with tier_at(tmp_path / "kv") as tier:
        assert sorted(info.tenant for info in tier.scan() if info.pinned_until_ms is not None) == ["", "acme"]


def test_pins_beyond_half_of_the_capacity_are_refused_as_its_server_would(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = Representation(kind="gqa", layout="fake/1", dtype="float32", layer_bytes=(64 << 10,) * 4)
    prompts = [kv(4, seed=seed, layout=large) for seed in range(3)]
    with tier_at(tmp_path / "kv") as tier:
        for prompt in prompts:
            write(tier, prompt)
    here = ("--directory", tmp_path / "kv")
    monkeypatch.setenv("HEADSTART_CACHE_CAPACITY", "5MiB")  # each takes a mebibyte
    done = run.json("pin", *map(key_of, prompts), *here, code=5)
    assert (len(done["pinned"]), len(done["refused"])) == (2, 1)
    assert "more than half of cache.capacity" in run("pin", done["refused"][0], *here, code=5)
    assert len(run.json("ls", "--pinned", *here)["prefixes"]) == 2


def test_what_is_pinned_without_a_deadline_is_told_so(tmp_path: Path, run: Run) -> None:
    _, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    run("pin", key_of(two), *here)
    (line,) = run.json("ls", "--pinned", *here)["prefixes"]
    assert (line["pinned"], line["pinned_until"]) == (True, None)
    assert "until unpinned" in run("ls", "--pinned", *here)
    assert "until unpinned" in run("show", key_of(two), *here)


@pytest.mark.parametrize("verb", [["ls"], ["rm", "--dry-run"], ["export", "x.hs"]])
def test_an_age_that_is_none_is_refused_also_by_an_empty_cache(tmp_path: Path, run: Run, verb: list[str]) -> None:
    with tier_at(tmp_path / "kv"):
        pass
    assert "is no time" in run(*verb, "--older-than", "1y", "--directory", tmp_path / "kv", code=2)


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (["--for", "soon"], "write"),
        (["--until", "tomorrow"], "write 2030-01-31"),
        (["--until", "1999-01-01"], "is over"),
        (["--for", "1d", "--until", "2100-01-01"], "give one"),
    ],
)
def test_a_time_that_makes_no_sense_is_refused(tmp_path: Path, run: Run, when: list[str], said: str) -> None:
    one, _ = family(tmp_path / "kv")
    assert said in run("pin", key_of(one), *when, "--directory", tmp_path / "kv", code=2)


def test_gc_lets_go_what_is_older_than_its_class_may_grow(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    assert run.json("gc", "--dry-run", *here)["extents"] == 0
    monkeypatch.setenv("HEADSTART_CACHE_RETENTION", "chat=0s..1s")
    assert run.json("gc", "--dry-run", *here)["expired_extents"] == 1
    done = run.json("gc", *here)
    assert (done["expired_extents"], done["extents"]) == (1, 1)
    assert {line["class"] for line in run.json("ls", *here)["prefixes"]} == {"default"}


def test_gc_to_a_size_lets_the_least_used_go_first_and_never_what_others_need(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    with tier_at(tmp_path / "kv") as tier:
        for prompt in (one, two):
            tier.touch([*dict.fromkeys(tier.locate(TINY.digest, prompt.keys).extents.tolist())])
    charged = run.json("du", *here)["charged_bytes"]
    said = run.json("gc", "--to", str(charged - 1), "--dry-run", *here)
    done = run.json("gc", "--to", str(charged - 1), *here)
    assert said["extents"] == done["extents"] == 1
    assert (found_pieces(tmp_path / "kv", one), found_pieces(tmp_path / "kv", two)) == (4, 6)
    assert run.json("gc", "--to", str(charged - 1), *here)["extents"] == 0


def test_gc_spares_what_is_pinned_and_says_when_a_size_cannot_be_reached(tmp_path: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    run("pin", key_of(two), *here)
    assert "unpin" in run("gc", "--to", "4KiB", "--dry-run", *here, code=5)
    assert "unpin" in run("gc", "--to", "4KiB", *here, code=5)
    assert (found_pieces(tmp_path / "kv", one), found_pieces(tmp_path / "kv", two)) == (4, 6)


def test_gc_joins_short_runs_whether_or_not_anybody_used_them(tmp_path: Path, run: Run) -> None:
    large = Representation(kind="gqa", layout="fake/1", dtype="float32", layer_bytes=(64 << 10, 64 << 10))
    prompt = kv(12, seed=1, layout=large)
    with tier_at(tmp_path / "kv") as tier:
        for piece in range(12):
            write(tier, prompt, piece, 1)
    done = run.json("gc", "--directory", tmp_path / "kv")
    assert done["joined_extents"] == 12
    with tier_at(tmp_path / "kv") as tier:
        assert tier.statistics().extents < 12
        assert tier.check() == []
    assert found_pieces(tmp_path / "kv", prompt) == 12


def test_one_is_told_as_one_and_more_as_more(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    assert f"{tmp_path / 'a'} holds 2 extents of 1 prefix, " in run("export", key_of(one), tmp_path / "a", *here)
    assert "is right: 2 extents of 8 blocks, " in run("import", tmp_path / "a", "--dry-run")
    assert run("rm", key_of(one), *here).startswith("1 prefix went: 1 extent, ")
    assert "continued by    1 prefix\n" in run("show", key_of(one, 0), *here)
    assert run("verify", *here).startswith("2 extents, ")
    assert run("gc", "--to", "0", *here).startswith("2 extents went (0 too old): ")
