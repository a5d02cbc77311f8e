"""`headstart cache devices`: a set of devices is told and changed from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.cache_kit import Run, family
from headstart.cli.cache.commands import devices
from headstart.errors import NotThere, TierUnavailable
from headstart.tier.devices import DeviceTier
from headstart.tier.disk import DiskTier


def told(*arguments: object) -> list[dict[str, object]]:
    result = CliRunner().invoke(devices, [*map(str, arguments), "--json"], catch_exceptions=False)
    found: list[dict[str, object]] = json.loads(result.output)["devices"]
    return found


def test_a_device_is_added_drained_and_removed_by_command(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    DiskTier.open(a, capacity_bytes=1 << 20).close()
    assert told(a) == [{"name": "", "path": str(a), "state": "active", "there": True}]
    assert [one["path"] for one in told(a, "--add", b)] == [str(a), str(b)]
    assert [one["state"] for one in told(b, "--drain", b)] == ["active", "draining"]
    with pytest.raises(TierUnavailable, match="has not been drained"):
        told(a, "--remove", b)
    assert [one["state"] for one in told(a, "--remove", b, "--force")] == ["active", "removed"]
    assert told(b) == [{"name": "", "path": str(b), "state": "active", "there": True}]  # a cache of its own again


def test_removing_the_directory_that_the_configuration_names_says_where_the_cache_is_now(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, a, b = Run(capsys), tmp_path / "a", tmp_path / "b"
    family(a)
    run("devices", a, "--add", b)
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", str(a))
    said = run("devices", "--remove", a, "--force")
    assert f"cache.directory still names {a}: take it out and name {b}" in said
    assert [line.split()[0] for line in said.splitlines() if line.endswith((str(a), str(b)))] == ["active", "removed"]
    # Where it names both, what a server leaves out is left out here too, unless it is asked for.
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", f"{a}:{b}")
    assert f"{a} was removed from this cache" in run("stat")
    assert [one["directory"] for one in run.json("stat")["devices"]] == [str(b)]
    assert len(run.json("ls", "--directory", a)["prefixes"]) == 2


def test_a_directory_without_a_cache_has_no_devices(tmp_path: Path) -> None:
    with pytest.raises(NotThere):
        told(tmp_path / "nowhere", "--add", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_devices_are_called_in_metrics_what_the_command_calls_them(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    tier = DeviceTier.open(
        paths,
        open_directory=lambda path, nbytes: DiskTier.open(path, capacity_bytes=nbytes),
        capacities=lambda rooms: [1 << 20] * len(rooms),
    )
    assert {one.name for one in tier.statistics().devices} == {one["name"] for one in told(tmp_path / "a")}
    tier.close()
