"""What blocks are called, and what may be said in --kv-transfer-config; without a model."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headstart.block.keys import chain_keys
from headstart.connect.vllm.identity import AdapterDigests, identity_for
from headstart.connect.vllm.layout import NotStored
from headstart.connect.vllm.requests import prompt_of
from headstart.connect.vllm.settings import read_settings
from headstart.errors import ConfigError


def weights(folder: Path, name: str, value: float, **said: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({"w": np.full(8, value, np.float32)}, folder / name)
    (folder / ("adapter_config.json" if "adapter" in name else "config.json")).write_text(
        json.dumps({"model_type": "llama", **said})
    )
    return folder


def config(folder: Path, *, overrides: Any = None, load_format: str = "auto") -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(model=str(folder), revision=None, hf_overrides=overrides or {}),
        load_config=SimpleNamespace(load_format=load_format),
    )


def request(**more: Any) -> Any:
    plain = {
        "prompt_embeds": None,
        "lora_request": None,
        "kv_transfer_params": None,
        "all_token_ids": list(range(130)),
        "cache_salt": None,
        "mm_features": [],
        "session_id": None,
    }
    return SimpleNamespace(**{**plain, **more})


def image(identifier: str, *, at: int = 10, tokens: int = 20) -> Any:
    return SimpleNamespace(modality="image", identifier=identifier, mm_position=SimpleNamespace(offset=at, length=tokens))


def key(asked: Any, adapters: AdapterDigests) -> bytes | None:
    said = prompt_of(asked, 128, adapters=adapters)
    if said is None:
        return None
    root = b"r" * 32 if not said.adapters else said.adapters[0]
    return chain_keys(said.array, root=root, salt=said.salt, contents=said.contents)[0]


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    return read_settings({"models_directory": str(tmp_path / "models")})


def test_an_unknown_setting_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'cache.directroy' in kv_connector_extra_config; did you mean 'cache.directory'"
    ):
        read_settings({"cache.directroy": "/kv"})
    with pytest.raises(ConfigError, match="did you mean"):
        read_settings({"capacity": "1GiB"})
    with pytest.raises(ConfigError, match="known are"):
        read_settings({"zzzzzz": 1})


def test_settings_are_checked_as_everywhere_and_told_where_they_stand() -> None:
    assert read_settings({"cache": {"directory": "/kv", "capacity": "1GiB"}}).config.cache.capacity == "1GiB"
    with pytest.raises(ConfigError, match="in kv_connector_extra_config cannot be 'much'"):
        read_settings({"cache.capacity": "much"})
    with pytest.raises(ConfigError, match="vLLM's own KV memory is the memory tier"):
        read_settings({"cache.memory": "1GiB"})
    with pytest.raises(ConfigError, match="one of store, observe"):
        read_settings({"mode": "watch"})


def test_the_environment_counts_and_what_is_written_counts_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE_CAPACITY", "3GiB")
    monkeypatch.setenv("HEADSTART_CACHE_DIRECTORY", "/one")
    found = read_settings({"cache.directory": "/two"}).config.cache
    assert (found.capacity, found.directories) == ("3GiB", (Path("/two"),))


def test_weights_and_configuration_are_told_by_content(tmp_path: Path, settings: Any) -> None:
    one = identity_for(config(weights(tmp_path / "a", "model.safetensors", 1.0)), settings)
    same = identity_for(config(weights(tmp_path / "b", "model.safetensors", 1.0)), settings)
    others = [
        identity_for(config(weights(tmp_path / "c", "model.safetensors", 2.0)), settings),
        identity_for(config(weights(tmp_path / "d", "model.safetensors", 1.0, rope_theta=5.0)), settings),
        identity_for(config(tmp_path / "a", overrides={"rope_theta": 5.0}), settings),
    ]
    assert one == same
    assert len({identity.root() for identity in (one, *others)}) == 4


def test_weights_that_no_file_tells_are_stored_only_under_a_version(tmp_path: Path, settings: Any) -> None:
    folder = weights(tmp_path / "a", "model.safetensors", 1.0)
    with pytest.raises(NotStored, match="version"):
        identity_for(config(folder, load_format="dummy"), settings)
    with pytest.raises(NotStored, match="function"):
        identity_for(config(folder, overrides=lambda config: config), settings)
    with pytest.raises(NotStored, match="not on this machine"):
        identity_for(config(Path("nobody/nothing")), settings)
    named = [identity_for(config(folder, load_format="dummy"), read_settings({"version": name})) for name in ("1", "2")]
    assert named[0].root() != named[1].root()


def test_an_adapter_is_its_content_and_one_that_cannot_be_read_is_not_for_the_cache(tmp_path: Path, settings: Any) -> None:
    adapters = AdapterDigests(settings)

    def asked(folder: Path) -> Any:
        return request(lora_request=SimpleNamespace(lora_name="sql", lora_path=str(folder)))

    first = key(asked(weights(tmp_path / "a", "adapter_model.safetensors", 1.0)), adapters)
    assert first == key(asked(weights(tmp_path / "b", "adapter_model.safetensors", 1.0)), adapters)
    assert first != key(request(), adapters)
    assert first != key(asked(weights(tmp_path / "a", "adapter_model.safetensors", 2.0)), adapters)  # the same name and place
    assert key(asked(tmp_path / "none"), adapters) is None
    assert key(request(prompt_embeds=object()), adapters) is None


def test_images_and_salts_have_a_part_in_what_blocks_are_called(settings: Any) -> None:
    adapters = AdapterDigests(settings)
    asked = [
        request(),
        request(cache_salt="acme"),
        request(mm_features=[image("a")]),
        request(mm_features=[image("b")]),
        request(mm_features=[image("a", at=11)]),
        request(mm_features=[image("a")], cache_salt="acme"),
    ]
    assert len({key(one, adapters) for one in asked}) == len(asked)
    assert key(request(mm_features=[image("a", at=200)]), adapters) == key(request(), adapters)
    assert key(request(mm_features=[image("a", tokens=0)]), adapters) == key(request(), adapters)


@pytest.mark.parametrize(
    "said", [None, 5, {"headstart": 7}, {"headstart": {"retention": "a\nb", "tenant": 3, "session": "\ud800"}}]
)
def test_what_users_say_wrongly_is_as_if_unsaid(said: Any, settings: Any) -> None:
    found = prompt_of(request(kv_transfer_params=said), 128, adapters=AdapterDigests(settings))
    assert found is not None
    assert (found.retention, found.tenant, found.session) == ("default", "", "")


def test_where_a_request_belongs_is_passed_on(settings: Any) -> None:
    said = {"headstart": {"retention": "agent", "tenant": "acme"}}
    found = prompt_of(request(kv_transfer_params=said, session_id="7"), 128, adapters=AdapterDigests(settings))
    assert found is not None
    assert (found.retention, found.tenant, found.session, found.keep) == ("agent", "acme", "7", True)
    kept = prompt_of(request(kv_transfer_params={"headstart": {"keep": False}}), 128, adapters=AdapterDigests(settings))
    assert kept is not None
    assert not kept.keep
