"""`headstart cache export | import | move`: what arrives is what left, to the byte, or it is refused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from block.extents import seal_random
from cli.cache_kit import Run, family, found_pieces, key_of, kv, tier_at, write
from headstart.block.representation import Representation
from headstart.errors import HeadstartError
from headstart.testing.fake_kv import OPAQUE, PAGED, STATE_BYTES, STATEFUL, TINY, UNEVEN, FakeKV
from headstart.tier.devices import add_device, devices_of
from headstart.tier.disk.exchange import CarriedFile, write_file


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture
def other(tmp_path: Path) -> Path:
    path = tmp_path / "other"
    path.mkdir()
    return path


@pytest.mark.parametrize("layout", [TINY, UNEVEN, PAGED, OPAQUE], ids=["tiny", "uneven", "paged", "opaque"])
def test_an_export_taken_in_elsewhere_is_found_and_loaded_to_the_byte(
    tmp_path: Path, other: Path, run: Run, layout: Representation
) -> None:
    prompt = kv(5, seed=3, layout=layout)
    with tier_at(tmp_path / "kv") as tier:
        write(tier, prompt, 0, 2, retention="agent", tenant="acme")
        write(tier, prompt, 2, 3)
    file = tmp_path / "prompt.hs"
    said = run.json("export", "--all", file, "--directory", tmp_path / "kv")
    assert (said["extents"], said["bytes"]) == (2, file.stat().st_size)
    assert file.stat().st_mode & 0o777 == 0o600
    taken = run.json("import", file, "--tenant", "beta", "--directory", other)
    assert (taken["stored"], taken["present"], taken["left_out"]) == (2, 0, {})
    assert found_pieces(other, prompt) == 5
    with tier_at(other) as tier:
        assert sorted((info.retention, info.tenant) for info in tier.scan()) == [("agent", "beta"), ("default", "beta")]
    again = run.json("import", file, "--directory", other)
    assert (again["stored"], again["present"]) == (0, 2)


def test_an_export_of_one_prefix_holds_nothing_beyond_it(tmp_path: Path, other: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    run("export", key_of(two), tmp_path / "two.hs", "--directory", tmp_path / "kv")
    run("import", tmp_path / "two.hs", "--directory", other)
    assert (found_pieces(other, two), found_pieces(other, one)) == (6, 2)
    assert one.tokens[2 * 64 : 3 * 64].tobytes() not in (tmp_path / "two.hs").read_bytes()


def test_an_export_needs_one_representation(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    with tier_at(tmp_path / "kv") as tier:
        write(tier, kv(2, seed=9, layout=UNEVEN))
    here = ("--directory", tmp_path / "kv")
    said = run("export", "--all", tmp_path / "x.hs", *here, code=2)
    assert "--representation" in said
    assert said.count("fake/1") == 2
    assert not (tmp_path / "x.hs").exists()
    run("export", "--all", tmp_path / "x.hs", "--representation", UNEVEN.digest.hex()[:8], *here)


def test_an_export_replaces_no_file_and_leaves_none_behind_when_it_fails(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    family(tmp_path / "kv")
    (tmp_path / "there").write_text("mine")
    assert "is there already" in run("export", "--all", tmp_path / "there", "--directory", tmp_path / "kv", code=4)
    assert (tmp_path / "there").read_text() == "mine"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headstart.tier.disk.exchange.os.fsync", full)
    assert "No space left" in run("export", "--all", tmp_path / "new", "--directory", tmp_path / "kv", code=4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv", "there"]


def test_an_export_leaves_out_what_is_damaged_and_what_runs_on_from_it(tmp_path: Path, other: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    (segment,) = (tmp_path / "kv").glob("segments/*/*.seg")
    with segment.open("r+b") as file:
        file.seek(4096 + 13 * 4096 + 6000)  # in a piece of the second extent
        file.write(b"!!!!")
    said = run.json("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv", code=5)
    assert (said["extents"], sum(said["left_out"].values())) == (2, 1)
    run("import", tmp_path / "x.hs", "--directory", other)
    assert (found_pieces(other, one), found_pieces(other, two)) == (4, 6)


def test_a_representation_that_the_cache_does_not_serve_is_refused_by_name(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    with tier_at(tmp_path / "b") as tier:
        write(tier, kv(2, seed=9, layout=UNEVEN))
    run("export", "--all", tmp_path / "b.hs", "--directory", tmp_path / "b")
    here = ("--directory", tmp_path / "kv")
    said = run("import", tmp_path / "b.hs", *here, code=2)
    assert f"float16@{UNEVEN.digest.hex()[:8]}" in said
    assert f"float32@{TINY.digest.hex()[:8]}" in said
    assert run.json("import", tmp_path / "b.hs", "--any-representation", *here)["stored"] == 1


def test_an_import_stores_what_fits_and_removes_nothing(tmp_path: Path, run: Run) -> None:
    many = [kv(16, seed=seed) for seed in range(12)]
    with tier_at(tmp_path / "kv") as tier:
        for prompt in many:
            write(tier, prompt, 0, 8)
            write(tier, prompt, 8, 8)
    run("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv")
    mine = kv(4, seed=99)
    with tier_at(tmp_path / "small", capacity_bytes=2 << 20) as tier:
        write(tier, mine)
    said = run.json("import", tmp_path / "x.hs", "--directory", tmp_path / "small", "--capacity", "2MiB", code=5)
    assert 0 < said["stored"] < 24
    assert said["stored"] + sum(said["left_out"].values()) == 24
    assert found_pieces(tmp_path / "small", mine) == 4
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "small").rglob("*") if path.is_file()) <= 2 << 20
    assert all(found_pieces(tmp_path / "small", prompt) in (0, 8, 16) for prompt in many)


def test_an_extent_that_is_too_large_for_the_cache_is_taken_in_parts(tmp_path: Path, other: Path, run: Run) -> None:
    prompt = kv(48, seed=3)
    with tier_at(tmp_path / "kv") as tier:
        write(tier, prompt)
    run("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv")
    assert run.json("import", tmp_path / "x.hs", "--directory", other, "--capacity", "2MiB")["stored"] == 1
    with tier_at(other, capacity_bytes=2 << 20) as tier:
        assert tier.statistics().extents > 1
    assert found_pieces(other, prompt) == 48


def test_an_import_makes_no_directory_and_touches_nobody_elses(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    run("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv")
    assert "make it first" in run("import", tmp_path / "x.hs", "--directory", tmp_path / "none", code=3)
    assert not (tmp_path / "none").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    assert "not empty" in run("import", tmp_path / "x.hs", "--directory", tmp_path / "home", code=4)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]
    assert "there is no file" in run("import", tmp_path / "none.hs", "--directory", tmp_path / "kv", code=3)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file with two layers of uneven pieces, extras and a boundary state in it."""
    sealed = seal_random(UNEVEN, pieces=2, seed=1, extras=(b"", b"x" * 30), state_bytes=700)
    more = seal_random(UNEVEN, pieces=1, seed=2)
    path = tmp_path_factory.mktemp("exported") / "x.hs"
    write_file(path, UNEVEN, [memoryview(sealed.image), memoryview(more.image)], now_ms=0)
    return path.read_bytes()


def taken(path: Path, data: bytes) -> int:
    """Return how many extents a file is said to hold; raises as it is refused."""
    path.write_bytes(data)
    with CarriedFile(path) as file:
        return len(list(file.extents()))


def test_one_wrong_bit_anywhere_refuses_the_file(tmp_path: Path, exported: bytes) -> None:
    assert taken(tmp_path / "x", exported) == 2
    source = random.Random(7)
    for at in [*range(0, len(exported), 97), *source.sample(range(len(exported)), 500)]:
        data = bytearray(exported)
        data[at] ^= 1 << source.randrange(8)
        with pytest.raises(HeadstartError):
            taken(tmp_path / "x", bytes(data))


@pytest.mark.parametrize("cut", [0, 1, 31, 100, 4096, 4096 + 31, -4096, -1])
def test_a_file_that_is_cut_or_longer_is_refused(tmp_path: Path, exported: bytes, cut: int) -> None:
    with pytest.raises(HeadstartError):
        taken(tmp_path / "x", exported[:cut])
    with pytest.raises(HeadstartError):
        taken(tmp_path / "x", exported + bytes(abs(cut) or 1))


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    kept=st.integers(0, 9000),
    noise=st.binary(max_size=300),
    at=st.integers(0, 9000),
    tail=st.booleans(),
)
def test_any_bytes_are_refused_without_a_crash(
    tmp_path: Path, exported: bytes, kept: int, noise: bytes, at: int, tail: bool
) -> None:
    data = bytearray(exported[:kept])
    data[at : at + len(noise)] = noise
    if tail:
        data += exported[len(data) :]
    if bytes(data) == exported:
        return
    with pytest.raises(HeadstartError):
        taken(tmp_path / "x", bytes(data))


def test_a_refused_file_is_a_sentence_and_writes_nothing(tmp_path: Path, other: Path, run: Run) -> None:
    family(tmp_path / "kv")
    run("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv")
    data = bytearray((tmp_path / "x.hs").read_bytes())
    data[-9000] ^= 1
    (tmp_path / "x.hs").write_bytes(data)
    said = run("import", tmp_path / "x.hs", "--directory", other, code=4)
    assert "is refused at byte" in said
    assert list(other.iterdir()) == []
    assert "no regular file" in run("import", "/dev/zero", "--directory", other, code=4)
    assert run("import", tmp_path / "kv" / "headstart.json", "--directory", other, code=4).count("\n") == 1


def test_a_file_that_is_no_export_is_called_that(tmp_path: Path, other: Path, run: Run) -> None:
    for content in (b"", b"hello", b"x" * 10_000):
        (tmp_path / "x.hs").write_bytes(content)
        assert "does not begin like one that `headstart cache export` wrote" in run(
            "import", tmp_path / "x.hs", "--directory", other, code=4
        )


def test_an_import_looks_for_its_directory_before_it_reads_the_file(tmp_path: Path, run: Run) -> None:
    (tmp_path / "x.hs").write_bytes(b"hello")
    assert "there is no directory" in run("import", tmp_path / "x.hs", "--directory", tmp_path / "nowhere", code=3)


def test_a_segment_of_another_version_is_refused(tmp_path: Path, exported: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr("headstart.tier.disk.segment.VERSION", 2)
        write_file(tmp_path / "new.hs", UNEVEN, [], now_ms=0)
    with pytest.raises(HeadstartError, match="version 2"):
        CarriedFile(tmp_path / "new.hs")


def test_move_carries_terms_pins_and_the_order_of_use_and_leaves_nothing(tmp_path: Path, other: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    run("pin", key_of(two), "--for", "7d", "--directory", tmp_path / "kv")
    with tier_at(tmp_path / "kv") as tier:
        tier.touch([info.id for info in tier.scan() if info.tenant == "acme"])
        before = [(i.retention, i.tenant, i.pinned_until_ms) for i in sorted(tier.scan(), key=lambda i: i.last_used)]
    said = run.json("move", tmp_path / "kv", other)
    assert (said["stored"], said["removed"], said["left_out"]) == (3, 3, {})
    with tier_at(other) as tier:
        after = [(i.retention, i.tenant, i.pinned_until_ms) for i in sorted(tier.scan(), key=lambda i: i.last_used)]
    assert after == before
    assert (found_pieces(other, one), found_pieces(other, two)) == (8, 6)
    assert run.json("ls", "--directory", tmp_path / "kv")["prefixes"] == []


def test_move_by_filter_leaves_behind_what_others_there_need(tmp_path: Path, other: Path, run: Run) -> None:
    one, two = family(tmp_path / "kv")
    said = run.json("move", tmp_path / "kv", other, "--tenant", "acme")
    assert (said["stored"], said["removed"]) == (2, 1)
    assert (found_pieces(other, two), found_pieces(tmp_path / "kv", two)) == (6, 2)
    assert found_pieces(tmp_path / "kv", one) == 8


def test_move_removes_nothing_that_did_not_arrive(tmp_path: Path, other: Path, run: Run) -> None:
    many = [kv(16, seed=seed) for seed in range(12)]
    with tier_at(tmp_path / "kv") as tier:
        for prompt in many:
            write(tier, prompt, 0, 8)
            write(tier, prompt, 8, 8)
    said = run.json("move", tmp_path / "kv", other, "--capacity", "2MiB", code=5)
    assert said["left_out"]
    for prompt in many:
        assert max(found_pieces(tmp_path / "kv", prompt), found_pieces(other, prompt)) == 16


def test_a_dry_run_of_move_and_import_writes_nothing(tmp_path: Path, other: Path, run: Run) -> None:
    family(tmp_path / "kv")
    assert run.json("move", tmp_path / "kv", other, "--dry-run")["extents"] == 3
    run("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv")
    assert run.json("import", tmp_path / "x.hs", "--dry-run", "--directory", other)["blocks"] == 12
    assert list(other.iterdir()) == []


def test_moving_a_whole_device_to_another_of_its_set_lets_nothing_new_go_to_it(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    add_device(tmp_path / "kv", tmp_path / "second")
    with tier_at(tmp_path / "second") as tier:
        write(tier, kv(4, seed=8))
    assert run.json("stat", "--directory", tmp_path / "kv")["prefixes"] == 3
    run("move", tmp_path / "kv", tmp_path / "second")
    states = {entry.path.name: entry.state for entry in devices_of(tmp_path / "second")}
    assert states == {"kv": "draining", "second": "active"}
    assert found_pieces(tmp_path / "second", one) == 8


def test_a_lone_copy_of_the_file_needs_no_source(tmp_path: Path, other: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    run("export", key_of(one), tmp_path / "x.hs", "--directory", tmp_path / "kv")
    shutil.rmtree(tmp_path / "kv")
    run("import", tmp_path / "x.hs", "--directory", other)
    assert found_pieces(other, one) == 8


def test_what_the_cache_refuses_is_counted_by_reason(
    tmp_path: Path, other: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    family(tmp_path / "kv")
    run("export", "--all", tmp_path / "x.hs", "--directory", tmp_path / "kv")
    monkeypatch.setenv("HEADSTART_CACHE_QUOTAS", "acme=60KiB")
    said = run.json("import", tmp_path / "x.hs", "--tenant", "acme", "--directory", other, code=5)
    assert said["stored"] + sum(said["left_out"].values()) == 3
    with tier_at(other) as tier:
        assert tier.statistics().live_bytes_by_tenant.get("acme", 0) <= 60 << 10


def with_states(root: Path) -> FakeKV:
    """A prompt of eight pieces with a state behind the last, and two that lie by themselves."""
    prompt = kv(8, seed=4, layout=STATEFUL)
    with tier_at(root) as tier:
        for first, pieces, state_bytes in ((0, 4, 0), (4, 4, STATE_BYTES), (2, 1, STATE_BYTES), (5, 1, STATE_BYTES)):
            assert tier.write(prompt.image(first, pieces, state_bytes=state_bytes), STATEFUL).reason == "written"
    return prompt


def found_behind(root: Path, prompt: FakeKV) -> list[int]:
    """How many pieces of longer and longer prompts match, all compared to the byte."""
    return sorted({found_pieces(root, FakeKV(STATEFUL, prompt.tokens[: 64 * n].tolist())) for n in range(1, 9)})


def test_states_are_exported_and_taken_in(tmp_path: Path, other: Path, run: Run) -> None:
    prompt = with_states(tmp_path / "kv")
    run("export", "--all", tmp_path / "all.hs", "--directory", tmp_path / "kv")
    taken = run.json("import", tmp_path / "all.hs", "--directory", other)
    assert (taken["stored"], taken["present"], taken["left_out"]) == (4, 0, {})
    assert found_behind(other, prompt) == [0, 3, 6, 8]
    again = run.json("import", tmp_path / "all.hs", "--directory", other)
    assert (again["stored"], again["present"]) == (0, 4)


def test_states_move_with_the_blocks_that_they_stand_behind(tmp_path: Path, other: Path, run: Run) -> None:
    prompt = with_states(tmp_path / "kv")
    said = run.json("move", tmp_path / "kv", other)
    assert (said["stored"], said["removed"]) == (4, 4)
    assert (found_behind(other, prompt), found_behind(tmp_path / "kv", prompt)) == ([0, 3, 6, 8], [0])


def test_a_pinned_prefix_is_pinned_with_its_states(tmp_path: Path, run: Run) -> None:
    prompt = with_states(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    for command, pinned in (("pin", 4), ("unpin", 0)):
        run(command, key_of(prompt), *here)
        with tier_at(tmp_path / "kv") as tier:
            assert sum(info.pinned_until_ms is not None for info in tier.scan()) == pinned


def test_a_state_with_a_changed_byte_is_found_and_dropped(tmp_path: Path, run: Run) -> None:
    prompt = with_states(tmp_path / "kv")
    (segment,) = (tmp_path / "kv").rglob("*.seg")
    at = segment.read_bytes().find(bytes(prompt.state(6)))
    with segment.open("r+b") as file:
        file.seek(at + 100)
        file.write(bytes([prompt.state(6)[100] ^ 1]))
    run("verify", "--directory", tmp_path / "kv", code=6)
    assert found_behind(tmp_path / "kv", prompt) == [0, 3, 8]


@pytest.mark.parametrize("tenant", ["x" * 256, "\udc80"])
def test_what_can_be_no_tenant_is_refused_before_anything_is_read(tmp_path: Path, run: Run, tenant: str) -> None:
    assert "is no name of at most 255 bytes" in run("import", tmp_path / "no-such-file", "--tenant", tenant, code=2)
