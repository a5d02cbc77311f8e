"""`headstart cache verify`: each kind of damage is found, told and dropped, and what is right stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from block.extents import seal_random
from cli.cache_kit import Run, bytes_of, family, found_pieces, image_of, key_of, kv, tier_at, write
from headstart.block.extent import ExtentHeader, decode_header, encode_header
from headstart.errors import ExtentCorrupt
from headstart.testing.fake_kv import OPAQUE, STATEFUL, TINY, UNEVEN
from headstart.tier.disk.door import Handle, RealDisk
from headstart.tier.disk.scrub import require_same

EXTENT = 4 * 4096 * 3 + 4096  # of four pieces


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def segment_of(root: Path) -> Path:
    (path,) = root.glob("segments/*/*.seg")
    return path


def change(path: Path, offset: int, new: Callable[[bytes], bytes], nbytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(nbytes)
        file.seek(offset)
        file.write(new(old))


def flip(old: bytes) -> bytes:
    return bytes(byte ^ 1 for byte in old)


def damage_header(path: Path) -> None:
    change(path, 4096 + 36, flip)


def damage_piece(path: Path) -> None:
    change(path, 4096 + 4096 + 5000, flip)


def damage_token_ids(path: Path) -> None:
    """A writer that was wrong: the header's own check holds, the keys do not follow."""
    data = path.read_bytes()[4096 : 4096 + EXTENT]
    header = decode_header(data, TINY)
    tokens = header.tokens.copy()
    tokens[3] ^= 1
    fields = {name: getattr(header, name) for name in ExtentHeader.__slots__}
    change(path, 4096, lambda _: encode_header(ExtentHeader(**fields | {"tokens": tokens}), TINY), 4096)


def damage_with_a_hole(path: Path) -> None:
    change(path, 4096, lambda old: bytes(len(old)), EXTENT)


def damage_by_cutting(path: Path) -> None:
    os.truncate(path, 4096 + 3 * EXTENT - 4096)


def damage_by_exchanging(path: Path) -> None:
    data = path.read_bytes()
    change(path, 4096, lambda _: data[4096 + EXTENT : 4096 + 2 * EXTENT] + data[4096 : 4096 + EXTENT], 2 * EXTENT)


def damage_segment(path: Path) -> None:
    change(path, 8, flip)


@pytest.mark.parametrize(
    ("damage", "reasons"),
    [
        (damage_header, ["header-check"]),
        (damage_piece, ["piece"]),
        (damage_token_ids, ["chain"]),
        (damage_with_a_hole, ["magic"]),
        (damage_by_cutting, ["short-read"]),
        (damage_by_exchanging, ["keys", "keys"]),
        (damage_segment, ["header-check"] * 3),
    ],
)
def test_verify_finds_the_damage_tells_it_and_drops_it(
    tmp_path: Path, run: Run, damage: Callable[[Path], None], reasons: list[str]
) -> None:
    one, two = family(tmp_path / "kv")
    here = ("--directory", tmp_path / "kv")
    damage(segment_of(tmp_path / "kv"))
    before = bytes_of(tmp_path / "kv")
    told = run.json("verify", "--no-repair", *here, code=7)
    assert sorted(fault["reason"] for fault in told["faults"]) == sorted(reasons)
    assert (told["dropped"], told["unreadable"]) == (0, 0)
    assert bytes_of(tmp_path / "kv") == before
    done = run.json("verify", *here, code=6)
    assert (len(done["faults"]), done["dropped"], done["problems"]) == (len(reasons), len(reasons), [])
    assert run.json("verify", *here)["faults"] == []
    assert len(run.json("ls", *here)["prefixes"]) <= 2
    with tier_at(tmp_path / "kv") as tier:
        assert tier.check() == []
        left = {key for info in tier.scan() for key in info.keys}
    assert len(left) == 12 - 4 * len(reasons)
    assert found_pieces(tmp_path / "kv", one) + found_pieces(tmp_path / "kv", two) <= 14


def test_what_is_found_is_told_with_its_place_once_and_counted(tmp_path: Path, run: Run) -> None:
    family(tmp_path / "kv")
    segment = segment_of(tmp_path / "kv")
    damage_by_cutting(segment)
    (tmp_path / "kv" / "notes.txt").touch()
    said = run("verify", "--directory", tmp_path / "kv", code=7)
    assert all(line.count(str(segment)) <= 1 for line in said.splitlines())
    assert str(segment) in said
    assert "1 wrong, 1 dropped, 0 not readable, 1 other problem above" in said


def test_what_is_dropped_is_remembered_as_quarantined(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    damage_piece(segment_of(tmp_path / "kv"))
    run("verify", "--directory", tmp_path / "kv", code=6)
    (removal,) = run.json("show", key_of(one, 0), "--directory", tmp_path / "kv", code=3)["removals"]
    assert (removal["quarantined"], removal["reason"]) == (True, "corrupt")


def test_verify_of_every_kind_of_representation_is_clean(tmp_path: Path, run: Run) -> None:
    with tier_at(tmp_path / "kv") as tier:
        for layout in (TINY, UNEVEN, OPAQUE):
            write(tier, kv(3, seed=7, layout=layout))
        sealed = seal_random(UNEVEN, state_bytes=5000, extras=(b"", b"x" * 30))
        assert tier.write(memoryview(sealed.image), UNEVEN).stored
    done = run.json("verify", "--directory", tmp_path / "kv")
    assert (done["extents"], done["faults"], done["problems"]) == (4, [], [])


def test_show_of_a_damaged_prefix_says_so(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    damage_piece(segment_of(tmp_path / "kv"))
    assert "WRONG" in run("show", key_of(one), "--directory", tmp_path / "kv", code=7)


def test_what_cannot_be_read_is_left_alone_and_told(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = family(tmp_path / "kv")
    read = RealDisk.read

    def failing(self: RealDisk, handle: Handle, buffers: list[memoryview], offset: int) -> int:
        if offset == 4096:
            raise OSError(5, "Input/output error")
        return read(self, handle, buffers, offset)

    with monkeypatch.context() as patched:
        patched.setattr(RealDisk, "read", failing)
        done = run.json("verify", "--directory", tmp_path / "kv", code=4)
    assert (done["unreadable"], done["dropped"]) == (1, 0)
    assert found_pieces(tmp_path / "kv", one) == 8


def test_an_interrupt_ends_verify_with_what_was_found_so_far(tmp_path: Path) -> None:
    family(tmp_path / "kv")
    # Of what a shell started behind, interrupts are ignored.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    program += "from headstart.cli import main; sys.argv = ['headstart', *sys.argv[1:]]; main()"
    arguments = ["cache", "verify", "--rate", "4KiB", "--json", "--directory", str(tmp_path / "kv")]
    with subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        assert command.stderr is not None
        assert command.stderr.readline() == "reading\n"
        command.send_signal(signal.SIGINT)
        said, errors = command.communicate(timeout=60)
    assert (command.returncode, "Traceback" in errors) == (130, False)
    assert '"interrupted": true' in said


def test_verify_beside_a_living_writer_drops_what_it_would_have_served(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    with tier_at(tmp_path / "kv") as server:
        damage_piece(segment_of(tmp_path / "kv"))
        run("verify", "--directory", tmp_path / "kv", code=6)
        server.refresh()
        assert (server.locate(TINY.digest, one.keys).extents >= 0).tolist() == [False] * 4 + [True] * 4
        assert server.write(image_of(one, 0, 4), TINY).reason == "written"


def test_what_is_wrong_is_dropped_though_it_is_pinned(tmp_path: Path, run: Run) -> None:
    one, _ = family(tmp_path / "kv")
    run("pin", key_of(one), "--directory", tmp_path / "kv")
    damage_piece(segment_of(tmp_path / "kv"))
    assert run.json("verify", "--directory", tmp_path / "kv", code=6)["dropped"] == 1


def test_an_extent_is_not_the_one_that_was_meant_if_one_has_a_state_and_the_other_none(tmp_path: Path) -> None:
    prompt = kv(3, layout=STATEFUL)
    with tier_at(tmp_path / "kv") as tier:
        assert tier.write(prompt.image(state_bytes=100), STATEFUL).stored
        (info,) = tier.scan()
    require_same(decode_header(prompt.image(state_bytes=100), STATEFUL), info)
    with pytest.raises(ExtentCorrupt, match="another extent"):
        require_same(decode_header(prompt.image(), STATEFUL), info)
