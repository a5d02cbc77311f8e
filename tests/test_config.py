"""Configuration: four places, later wins; whatever is unknown or wrong is refused with its place and the nearest name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from headstart.config import Config, ConfigError, load_config, parse_size, prefer_sleeping_threads, settings


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("HEADSTART_")]:
        monkeypatch.delenv(name)


def toml(folder: Path, text: str) -> Path:
    file = folder / "headstart.toml"
    file.write_text(text)
    return file


def test_defaults_hold_where_nothing_is_said() -> None:
    config = load_config()
    assert config.server == replace(Config().server, usage_log=Path("~/.cache/headstart/usage").expanduser())
    assert config.engine == Config().engine
    assert config.cache.directory == Path("~/.cache/headstart/kv").expanduser()


def test_later_places_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = toml(tmp_path, '[cache]\nmemory = "1GiB"\ncapacity = "5%"\nload_timeout_s = 2\n[server]\nport = 1\n')
    monkeypatch.setenv("HEADSTART_CACHE_CAPACITY", "7%")
    monkeypatch.setenv("HEADSTART_SERVER_PORT", "2")
    config = load_config(file, overrides={"server.port": "3"})
    assert (config.cache.memory, config.cache.capacity, config.server.port) == ("1GiB", "7%", 3)
    assert config.cache.load_timeout_s == 2.0


def test_the_file_may_be_named_in_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CONFIG", str(toml(tmp_path, 'model = "other"')))
    assert load_config().model == "other"


def test_every_key_has_a_variable_and_a_flag_of_its_own() -> None:
    found = settings().values()
    assert len({setting.variable for setting in found}) == len({setting.flag for setting in found}) == len(found)
    assert settings()["cache.directory"].variable == "HEADSTART_CACHE_DIRECTORY"
    assert settings()["cache.directory"].flag == "--cache-directory"
    assert settings()["engine.kv_memory"].flag == "--kv-memory"
    assert settings()["cache.enabled"].flag == "--no-cache"
    assert all(setting.help for setting in found)


def test_a_cache_may_lie_in_several_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    several = (tmp_path / "kv", Path("/mnt/kv"))
    assert load_config(toml(tmp_path, '[cache]\ndirectory = ["~/kv", "/mnt/kv", "~/kv"]')).cache.directories == several
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", "~/kv:/mnt/kv")
    assert load_config().cache.directories == several
    assert load_config(overrides={"cache.directory": "/a"}).cache.directories == (Path("/a"),)
    assert load_config(toml(tmp_path, '[cache]\ndirectory = "/a:b"'), overrides={}).cache.directories == several  # as above
    monkeypatch.delenv("HEADSTART_CACHE_DIRECTORY")
    assert load_config(toml(tmp_path, '[cache]\ndirectory = "/a:b"')).cache.directory == Path("/a:b")


def test_paths_know_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", "~/kv")
    assert load_config().cache.directory == tmp_path / "kv"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('[cache]\nmemroy = "1GiB"', "unknown configuration key 'cache.memroy' in FILE; did you mean 'cache.memory'?"),
        ("[cahce]\nenabled = true", "unknown configuration key 'cahce.enabled' in FILE; did you mean 'cache.enabled'?"),
        ("[telemetry]", "unknown configuration key 'telemetry' in FILE; known are model,"),
        ("port = 8000", "unknown configuration key 'port' in FILE; did you mean 'server.port'?"),
        ("cache = true", "'cache' in FILE is a section; write [cache]"),
        ('[server]\nport = "8000"', "configuration key 'server.port' in FILE cannot be '8000': write a whole number"),
        ('[cache]\nenabled = "yes"', "cannot be 'yes': write true or false"),
        ("[server]\nport = 70000", "write a whole number of at most 65535 (port to listen on"),
        ("[engine]\nmax_running = 0", "write a whole number of at least 1 ("),
        ('[engine]\ndtype = "fp8"', "cannot be 'fp8': it is none of these (auto, float32"),
        ('[engine]\ndevice = "tpu"', "cannot be 'tpu': it is none of these (auto, cpu"),
        ('[cache]\nmemory = "lots"', "'lots' is not a size"),
        ('[cache]\nmemory = "10%"', "'10%' is not a size"),
        ('[cache]\ncapacity = "110%"', "write a share of at most 100%"),
        ('[cache]\nwrite_budget = "0"', "cannot be '0': it keeps nothing; write \"unlimited\" for no limit"),
        ("[cache]\nwrite_budget = 0", "it keeps nothing"),
        ('[cache]\nwrite_budget = "0.0%"', "it keeps nothing"),
        ('[cache]\nmin_free = "100 %"', "cannot be '100 %': nothing could be stored"),
        ('[cache]\ndurability = "full"', 'cannot be \'full\': it is none of these ("none" or "data"'),
        ("[cache]\nload_timeout_s = nan", "load_timeout_s"),
        ("[cache", "is not valid TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path: Path, text: str, says: str) -> None:
    file = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert says.replace("FILE", str(file)) in caught.value.message
    assert caught.value.exit_code == 2


def test_a_missing_file_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_config(tmp_path / "absent.toml")


def test_a_mistake_in_the_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_MEMROY", "1GiB")
    with pytest.raises(ConfigError, match=r"HEADSTART_CACHE_MEMROY; did you mean 'HEADSTART_CACHE_MEMORY'"):
        load_config()
    monkeypatch.delenv("HEADSTART_CACHE_MEMROY")
    monkeypatch.setenv("HEADSTART_SERVER_PORT", "http")
    with pytest.raises(ConfigError, match=r"'server.port' in environment variable HEADSTART_SERVER_PORT cannot be 'http'"):
        load_config()


def test_variables_that_kubernetes_sets_for_a_service_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv("HEADSTART_SERVICE_HOST", "10.0.0.1")
    with pytest.raises(ConfigError):
        load_config()
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.2")
    assert load_config().server.port == 8000


def test_a_mistake_in_a_flag_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'engine.context' given as --context cannot be '0'"):
        load_config(overrides={"engine.context": "0"})
    with pytest.raises(ConfigError, match=r"'engine.contxt' given as an override; did you mean 'engine.context'"):
        load_config(overrides={"engine.contxt": 5})


def test_a_size_may_be_a_number_of_bytes() -> None:
    assert load_config(overrides={"cache.memory": 4096}).cache.memory == "4096"


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("1KiB", 1024), (" 2 gib ", 2 << 30), ("1.5MB", 1_500_000), ("3TiB", 3 << 40), ("10B", 10)],
)
def test_sizes_are_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


def test_shares_need_a_whole() -> None:
    assert parse_size("12.5%", of_bytes=800) == 100
    with pytest.raises(ConfigError):
        parse_size("12.5%")


@pytest.mark.parametrize("text", ["", "-1", "1e9", "GiB", "1 GiBs", "1GB2", "nan", "½GiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text, of_bytes=100)


def test_idle_threads_sleep_unless_someone_knows_better(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    prefer_sleeping_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"
    monkeypatch.delenv("OMP_WAIT_POLICY")
    prefer_sleeping_threads()
    assert os.environ["OMP_WAIT_POLICY"] == "PASSIVE"
