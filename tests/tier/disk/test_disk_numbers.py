"""Numbers at the end of their range, wherever they come from: nothing is written that cannot be read again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from disk_kit import CAPACITY, found, journals, save, segments

from headstart.tier.disk import DiskTier
from headstart.tier.disk.records import (
    HEADER_BYTES,
    Decoded,
    ExtentAdded,
    Record,
    Snapshot,
    Touched,
    decode_journal_header,
    decode_records,
    encode_journal_header,
    encode_record,
    milliseconds,
)

FOREIGN = b"f" * 16


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "kv"
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert all(save(tier, seed) for seed in range(3))
    tier.close()
    return root


def decoded(path: Path) -> list[Record]:
    data = memoryview(path.read_bytes())
    writer, generation, _ = decode_journal_header(data)
    state = Decoded(HEADER_BYTES)
    records = list(decode_records(data[HEADER_BYTES:], writer=writer, generation=generation, offset=HEADER_BYTES, state=state))
    assert state.stopped == ""
    return records


def write_journal(root: Path, writer: bytes, generation: int, records: list[Record]) -> Path:
    data = bytearray(encode_journal_header(writer, generation, 0, host=bytes(16)))
    for record in records:
        data += encode_record(record, writer=writer, generation=generation, offset=len(data))
    path = root / "journals" / f"{writer.hex()}-{generation:08x}.log"
    path.write_bytes(data)
    return path


def assert_goes_on(root: Path, seeds: set[int]) -> None:
    """What is stored from now on is found again by every later process, and by one that is there already."""
    for turn in range(10, 13):
        tier, other = (DiskTier.open(root, capacity_bytes=CAPACITY) for _ in range(2))
        assert found(tier, seeds) == seeds
        for seed in (turn, turn + 10):
            assert save(tier, seed)
        tier.touch([info.id for info in tier.scan()])
        other.refresh()
        seeds = seeds | {turn, turn + 10}
        assert found(other, seeds) == seeds
        assert tier.check() == []
        tier.close()
        other.close()


@pytest.mark.parametrize("counter", [2**56 - 1, 2**56, 2**62 - 1])
@pytest.mark.parametrize("foreign", [False, True])
def test_a_use_counter_at_its_end_stands_still(root: Path, counter: int, foreign: bool) -> None:
    if foreign:
        write_journal(root, FOREIGN, 0, [Snapshot(counter, 0)])
    else:
        path = journals(root)[0]
        write_journal(root, bytes.fromhex(path.name[:32]), 0, [*decoded(path), Snapshot(counter, 1)])
    assert_goes_on(root, {0, 1, 2})


@pytest.mark.parametrize("used", [2**56 - 1, 2**56])
def test_an_extent_used_that_often_ends_no_later_journal(root: Path, used: int) -> None:
    path = journals(root)[0]
    lies = [replace(r, last_used=used) if isinstance(r, ExtentAdded) else r for r in decoded(path)]
    write_journal(root, bytes.fromhex(path.name[:32]), 0, lies)
    assert_goes_on(root, {0, 1, 2} if used < 2**56 else set())


@pytest.mark.parametrize("sequence", [2**29, 2**30 - 2, 2**30 - 1, 2**30, 2**31 - 1, 2**32 - 1])
@pytest.mark.parametrize("said_by", ["file", "snapshot"])
def test_a_writer_whose_sequence_numbers_run_out_is_not_gone_on_with(root: Path, sequence: int, said_by: str) -> None:
    path = journals(root)[0]
    writer = path.name[:32]
    if said_by == "file":
        folder = root / "segments" / f"{sequence & 0xFF:02x}"
        folder.mkdir(exist_ok=True)
        (folder / f"{writer}-{sequence:08x}.seg").write_bytes(b"")
    else:
        write_journal(root, bytes.fromhex(writer), 0, [*decoded(path), Snapshot(1, sequence)])
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == {0, 1, 2}
    assert save(tier, 3)
    tier.close()
    assert {int(path.name[33:41], 16) for path in segments(root)} - {sequence} <= set(range(2**17))
    for stranger in root.glob(f"segments/*/*-{sequence:08x}.seg"):
        assert sequence >= 2**30  # no name of ours
        stranger.unlink()
    assert_goes_on(root, {0, 1, 2, 3})


@pytest.mark.parametrize("generation", [2**29, 2**30 - 1, 2**30, 2**32 - 1])
def test_a_writer_whose_generations_run_out_is_not_gone_on_with(root: Path, generation: int) -> None:
    path = journals(root)[0]
    records = decoded(path)
    path.unlink()
    strange = write_journal(root, bytes.fromhex(path.name[:32]), generation, records)
    with strange.open("ab") as file:
        file.write(b"torn")
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert found(tier, range(3)) == {0, 1, 2}
    assert save(tier, 3)
    tier.close()
    strange.unlink(missing_ok=True)  # from 2^30 on it is no journal of ours
    assert_goes_on(root, {3, 0, 1, 2})


@pytest.mark.parametrize("now", [-1e30, -1.0, float("nan"), float("inf"), -float("inf"), 1e300, 2.0**60, 0.0])
def test_a_clock_that_is_off_costs_nothing(tmp_path: Path, now: float) -> None:
    root = tmp_path / "kv"
    tier = DiskTier.open(root, capacity_bytes=CAPACITY, wall_clock=lambda: now)
    assert all(save(tier, seed) for seed in range(4))
    assert tier.delete([next(iter(tier.scan())).id], reason="user") == 1
    tier.close()
    tier = DiskTier.open(root, capacity_bytes=CAPACITY)
    assert len(found(tier, range(4))) == 3
    assert [removal.reason for removal in tier.removals()] == ["user"]
    tier.close()


def test_a_time_is_a_number_that_files_hold() -> None:
    assert milliseconds(1.5) == 1500
    assert [milliseconds(s) for s in (-1.0, float("nan"), float("inf"))] == [0, 0, 2**53]


def test_a_journal_may_tell_of_no_use_at_all(root: Path) -> None:
    write_journal(root, FOREIGN, 0, [Snapshot(0, 0), Touched(())])
    assert_goes_on(root, {0, 1, 2})
