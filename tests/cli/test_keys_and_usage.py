"""`headstart keys` and `headstart usage`, as they are typed."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from threading import Thread

import pytest

from headstart.api.keys import digest, find, read_keys
from headstart.cli import run_cli
from headstart.errors import KeysUnreadable
from headstart.ledger.entry import EngineCounts, Entry
from headstart.ledger.log import UsageLog

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "folder" / "keys.jsonl"


def keys(file: Path, *arguments: str) -> int:
    return run_cli(["keys", *arguments, "--keys", str(file)])


def test_a_key_is_shown_once_and_the_file_knows_its_hash_alone(file: Path, capsys: Captured) -> None:
    assert keys(file, "add", "--tenant", "acme", "--class", "agent", "--body", "1MiB", "--tokens-per-minute", "1000") == 0
    text, told = capsys.readouterr()
    text = text.strip()
    assert text not in told
    assert text not in file.read_text()
    assert text.rpartition("-")[2] not in file.read_text()
    (key,) = read_keys(file).values()
    assert (key.tenant, key.retention, key.body_bytes, key.tokens_per_minute) == ("acme", "agent", 1 << 20, 1000)
    assert key.hash == digest(text)
    assert find(read_keys(file), text) == key
    assert file.stat().st_mode & 0o777 == 0o600
    assert keys(file, "ls") == 0
    assert f"{key.id}  acme  agent" in (listed := capsys.readouterr().out)
    assert key.hash not in listed
    assert keys(file, "rm", key.id) == 0
    assert read_keys(file) == {}
    assert keys(file, "rm", key.id) == 3


def test_what_people_write_into_the_file_stays_and_what_is_broken_is_not_built_upon(file: Path, capsys: Captured) -> None:
    assert keys(file, "add", "--tenant", "a") == 0
    file.write_text("# of the first floor\n" + file.read_text())
    assert keys(file, "add", "--tenant", "b", "--json") == 0
    made = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert keys(file, "rm", made["id"]) == 0
    assert file.read_text().startswith("# of the first floor\n")
    assert [key.tenant for key in read_keys(file).values()] == ["a"]
    file.write_text(file.read_text() + '{"id": "abcd", "tenant": "c"}\n')
    with pytest.raises(KeysUnreadable, match="line 3"):
        read_keys(file)
    before = file.read_text()
    assert keys(file, "add", "--tenant", "d") == 2
    assert file.read_text() == before


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tenant", "two words"],
        ["--tenant", "*"],
        ["--tenant", "a", "--disk", "much"],
        ["--tenant", "a", "--class", "x" * 65],
        ["--tenant", "a", "--body", "0"],
        ["--tenant", "a", "--in-flight", "0"],
    ],
)
def test_a_wrong_field_is_refused_with_a_sentence(file: Path, arguments: list[str], capsys: Captured) -> None:
    assert keys(file, "add", *arguments) == 2
    assert "Error: " in capsys.readouterr().err
    assert not file.exists()


def test_keys_that_are_added_at_once_are_all_there(file: Path) -> None:
    threads = [Thread(target=keys, args=(file, "add", "--tenant", f"t{n}")) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(key.tenant for key in read_keys(file).values()) == [f"t{n}" for n in range(8)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with UsageLog(tmp_path / "usage", keep_bytes=1 << 20) as log:
        for n in range(10):
            log.add(
                Entry(
                    id=f"r{n}",
                    time=1_800_000_000.0 + 40_000 * n,
                    tenant="ab"[n % 2],
                    model="m",
                    prompt=100,
                    cached_disk=64,
                    written=32,
                    output=n,
                    engine=EngineCounts(prompt=200, generated=n + 1),
                )
            )
    return tmp_path / "usage"


def test_usage_is_summed_by_group_as_a_table_csv_or_json(folder: Path, capsys: Captured) -> None:
    def usage(*arguments: str) -> str:
        assert run_cli(["usage", "--usage-log", str(folder), *arguments]) == 0
        return capsys.readouterr().out

    table = [line.split() for line in usage().splitlines()]
    assert table[0] == [
        "tenant",
        "requests",
        "prompt",
        "cached_memory",
        "cached_disk",
        "computed",
        "written",
        "output",
        "kept_output",
    ]
    assert table[1] == ["a", "5", "500", "0", "320", "180", "160", "20", "0"]
    assert table[-1] == ["total", "10", "1,000", "0", "640", "360", "320", "45", "0"]
    rows = list(csv.DictReader(usage("--by", "tenant,day", "--csv").splitlines()))
    assert sum(int(row["prompt"]) for row in rows) == 1000
    assert {row["day"] for row in rows} == {"2027-01-15", "2027-01-16", "2027-01-17", "2027-01-18", "2027-01-19"}
    told = json.loads(usage("--by", "", "--json"))
    assert told["total"]["engine_prompt"] == 2000
    assert told["total"]["engine_generated"] == 55
    some = json.loads(usage("--json", "--tenant", "b", "--since", "2027-01-16", "--until", "2027-01-17T00:00:00+00:00"))
    assert some["total"]["requests"] == 1


def test_wrong_use_of_usage_is_told(folder: Path, tmp_path: Path, capsys: Captured) -> None:
    assert run_cli(["usage", "--usage-log", str(folder), "--by", "tenant,colour"]) == 2
    assert "'colour' is none of tenant, key" in capsys.readouterr().err
    assert run_cli(["usage", "--usage-log", str(folder), "--json", "--csv"]) == 2
    assert run_cli(["usage", "--usage-log", str(folder), "--since", "yesterday"]) == 2
    assert run_cli(["usage", "--usage-log", str(tmp_path / "none")]) == 3
