"""cluster.toml: what it may say, and that a wrong word is refused with the right one."""

from __future__ import annotations

from pathlib import Path

import pytest

from headstart.cli import run_cli
from headstart.errors import ConfigError
from headstart.gateway.cluster_file import read_cluster
from headstart.policy.planning import Window

WHOLE = """
model = "smollm2-135m"
directory = "/tmp/one"
launcher = "ray"
ray_address = "10.0.0.1:6379"

[pool]
directory = "/mnt/pool"
capacity = "1TiB"

[router]
host = "127.0.0.1"
port = 8123
arguments = ["--max-waiting", "9"]

[[workers]]
count = 2
role = "prefill"
arguments = ["--kv-memory", "2GiB"]
cpus = 4
gpus = 1
resources = { big = 1 }

[[workers]]
role = "decode"
command = ["vllm", "serve", "{model}", "--host", "{host}", "--port", "{port}"]
environment = { OMP_NUM_THREADS = "1" }

[planner]
first_token_s = 1.5
maximum = 6

[[planner.windows]]
start = "22:00"
end = "06:30"
maximum = 2
days = ["mon", "sun"]
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def test_everything_that_it_may_say_is_read(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, WHOLE))
    prefill, _, decode = cluster.specs()
    assert prefill.command[3:] == (
        *("serve", "smollm2-135m", "--host", "{host}", "--port", "0", "--usage-keep", "0"),
        *("--pool", "/mnt/pool", "--pool-capacity", "1TiB"),
        *("--role", "prefill", "--handoff-listen", "ipc://{folder}/handoff.sock"),
        *("--kv-memory", "2GiB"),
    )
    assert (prefill.role, prefill.cpus, prefill.gpus, prefill.resources) == ("prefill", 4, 1, {"big": 1})
    assert decode.command == ("vllm", "serve", "smollm2-135m", "--host", "{host}", "--port", "{port}")
    assert cluster.spec_for("decode") == decode
    assert cluster.spec_for("both").role == "both"
    assert cluster.planner is not None
    assert cluster.planner.targets.first_token_s == 1.5
    assert cluster.planner.limits.windows == (Window(1320, 390, minimum=1, maximum=2, days=frozenset({0, 6})),)


def test_an_empty_file_is_one_worker_and_no_planner(tmp_path: Path) -> None:
    cluster = read_cluster(written(tmp_path, ""))
    assert [spec.role for spec in cluster.specs()] == ["both"]
    assert cluster.planner is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('modle = "x"', "unknown key 'modle'; did you mean 'model'?"),
        ("[[workers]]\ncuont = 2", "unknown key 'workers.cuont'; did you mean 'count'?"),
        ("[planner]\nfirst_tokens = 2", "unknown key 'planner.first_tokens'; did you mean 'first_token_s'?"),
        ('[[planner.windows]]\nbegin = "22:00"', "unknown key 'planner.windows.begin'"),
        ('[[planner.windows]]\nstart = "22:00"', "[[planner.windows]] has no end"),
        ('[[planner.windows]]\nstart = "25:00"\nend = "06:00"', "'25:00': write a time such as \"22:00\""),
        (
            '[[planner.windows]]\nstart = "22:00"\nend = "06:00"\ndays = ["monday"]',
            "write one of mon, tue, wed, thu, fri, sat, sun",
        ),
        ('launcher = "rya"', "'launcher' cannot be 'rya': write one of local, ray"),
        ("workers = 3", "'workers' is a table; write [[workers]] above its keys"),
        ("[workers]\ncount = 3", "'workers' is a table; write [[workers]] above its keys"),
        ("planner = true", "'planner' is a table; write [planner] above its keys"),
        ('[router]\nport = "8000"', "'router.port' cannot be '8000': Expected int"),
        ('[[workers]]\nrole = "prefil"', "'workers.role' cannot be 'prefil': write one of both, prefill, decode"),
        ("[planner]\nminimum = 9", "planner.minimum 9 is more than its maximum 8"),
        ("[[workers]]\ncount = 0\n[planner]", "a planner needs a worker to look at"),
        ('[pool]\ncapacity = "1GiB"', "[pool] wants a directory"),
        ("workers = []", "names no workers"),
        ("[", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_named(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as raised:
        read_cluster(path)
    assert says in raised.value.message
    assert run_cli(["up", str(path), "--dry-run"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_file_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["up", str(tmp_path / "none.toml")]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_a_dry_run_tells_what_would_be_started_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, WHOLE.replace("/tmp/one", str(tmp_path / "one")))
    assert run_cli(["up", str(path), "--dry-run"]) == 0
    said = capsys.readouterr().out
    for part in (
        "router http://127.0.0.1:8123",
        "2 x prefill on the Ray cluster 10.0.0.1:6379",
        "22:00 to 06:30 mon,sun: 1 to 2",
    ):
        assert part in said
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize("command", ["ps", "top", "plan"])
def test_where_no_cluster_runs_that_is_said(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, f'directory = "{tmp_path / "one"}"')
    assert run_cli([command, str(path)]) == 3
    assert "start one with headstart up" in capsys.readouterr().err
    assert run_cli([command, "--router", "http://127.0.0.1:9"]) == 4
    assert "no router answers at http://127.0.0.1:9" in capsys.readouterr().err
    assert run_cli([command, "--router", "127.0.0.1:9"]) == 2
    assert "--router '127.0.0.1:9' is no address; write it as in --router http://" in capsys.readouterr().err


def test_down_of_nothing_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["down", str(written(tmp_path, f'directory = "{tmp_path / "one"}"'))]) == 0
    assert "no cluster runs in" in capsys.readouterr().out
