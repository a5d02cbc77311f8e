"""What blocks are called, and what may be said in --kv-transfer-config; without a model."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import save_file
from vllm.config import MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from headstart.block.identity import Identity
from headstart.block.keys import chain_keys
from headstart.connect.vllm.identity import AdapterDigests, identity_for, media_digest
from headstart.connect.vllm.layout import NotStored
from headstart.connect.vllm.requests import prompt_of
from headstart.connect.vllm.settings import read_settings
from headstart.errors import ConfigError

IDENTITY = Identity(b"w" * 32, b"it")


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


def adapted(folder: Path, number: int, *, name: str = "sql") -> Any:
    return request(lora_request=LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(folder)))


def test_an_adapter_is_its_content_and_one_that_cannot_be_read_is_not_for_the_cache(tmp_path: Path, settings: Any) -> None:
    adapters = AdapterDigests(settings)
    first = key(adapted(weights(tmp_path / "a", "adapter_model.safetensors", 1.0), 1), adapters)
    assert first is not None
    assert first == key(adapted(weights(tmp_path / "b", "adapter_model.safetensors", 1.0), 2, name="another"), adapters)
    assert first != key(request(), adapters)
    second = key(adapted(weights(tmp_path / "a", "adapter_model.safetensors", 2.0), 3), adapters)  # the same name and place
    assert second not in (None, first)
    assert key(adapted(tmp_path / "none", 4), adapters) is None
    assert key(request(prompt_embeds=object()), adapters) is None


def test_an_adapter_that_changes_under_its_number_is_not_for_the_cache_until_it_is_loaded_anew(
    tmp_path: Path, settings: Any
) -> None:
    """vLLM goes on computing with what it has loaded, or with what it was told to load in its place."""
    adapters = AdapterDigests(settings)
    folder = weights(tmp_path / "a", "adapter_model.safetensors", 1.0)
    first = key(adapted(folder, 1), adapters)
    assert first is not None
    weights(folder, "adapter_model.safetensors", 2.0)
    assert key(adapted(folder, 1), adapters) is None
    weights(folder, "adapter_model.safetensors", 1.0)
    assert key(adapted(folder, 1), adapters) is None  # back again, but what was loaded meanwhile?
    assert key(adapted(folder, 2), adapters) == first
    assert key(adapted(weights(tmp_path / "b", "adapter_model.safetensors", 2.0), 2), adapters) is None  # loaded in its place
    assert key(adapted(folder, 2), adapters) is None


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


def picture(colour: int, **said: Any) -> str:
    """A picture's digest, by vLLM's own hasher."""
    data = Image.fromarray(np.full((8, 8, 3), colour, np.uint8))
    return str(MultiModalHasher.hash_kwargs("sha256", model_id="m", image=data, **said))


def real(*, images: tuple[tuple[str, int], ...] = (), salt: str | None = None, lora: LoRARequest | None = None) -> Request:
    """A request of vLLM's own class, with pictures at places: 20 placeholders each, of one id."""
    tokens = [7] * 256
    for _, at in images:
        tokens[at : at + 20] = [3] * 20
    features = [
        MultiModalFeatureSpec(data=None, modality="image", identifier=name, mm_position=PlaceholderRange(offset=at, length=20))
        for name, at in images
    ]
    return Request(
        request_id="it",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=features,
        cache_salt=salt,
        lora_request=lora,
        block_hasher=get_request_block_hasher(64, sha256_cbor),
    )


def test_what_vllm_s_own_block_hashes_tell_apart_ours_do_and_what_they_hold_for_equal_too(
    settings: Any, tmp_path: Path
) -> None:
    init_none_hash(sha256_cbor)
    red, blue = picture(1), picture(2)
    assert red == picture(1) != blue
    sql = LoRARequest("sql", 1, str(weights(tmp_path / "a", "adapter_model.safetensors", 1.0)))
    asked = {
        "none": real(),
        "none again": real(),
        "salt": real(salt="acme"),
        "red": real(images=((red, 10),)),
        "red again": real(images=((picture(1), 10),)),
        "blue": real(images=((blue, 10),)),
        "red elsewhere in the block": real(images=((red, 30),)),
        "red across an edge": real(images=((red, 50),)),
        "blue across an edge": real(images=((blue, 50),)),
        "red in the third block": real(images=((red, 130),)),
        "two": real(images=((red, 10), (blue, 40))),
        "two, the other way about": real(images=((blue, 10), (red, 40))),
        "red twice": real(images=((red, 10), (red, 40))),
        "red as vLLM was told to read it": real(images=((picture(1, mm_processor_kwargs={"num_crops": 4}), 10),)),
        "red under a salt": real(images=((red, 10),), salt="acme"),
        "adapter": real(lora=sql),
        "red, adapter": real(images=((red, 10),), lora=sql),
    }
    adapters, ours = AdapterDigests(settings), {}
    for name, one in asked.items():
        said = prompt_of(one, 256, adapters=adapters)
        assert said is not None
        ours[name] = said.keys(IDENTITY)
        assert len(ours[name]) == len(one.block_hashes) == 4
    for one, other in itertools.combinations(asked, 2):
        theirs = [a == b for a, b in zip(asked[one].block_hashes, asked[other].block_hashes, strict=True)]
        assert [a == b for a, b in zip(ours[one], ours[other], strict=True)] == theirs, (one, other)


def test_how_media_are_made_tokens_of_has_a_part_in_what_blocks_with_media_are_called(settings: Any, tmp_path: Path) -> None:
    def model(**said: Any) -> Any:
        return SimpleNamespace(model=str(tmp_path), revision=None, multimodal_config=MultiModalConfig(**said))

    def named(asked: Request, media: bytes) -> bytes:
        said = prompt_of(asked, 64, adapters=AdapterDigests(settings), media=media)
        assert said is not None
        return said.keys(IDENTITY)[0]

    plain = media_digest(model())
    (tmp_path / "preprocessor_config.json").write_text('{"do_normalize": false}')
    others = [media_digest(model()), media_digest(SimpleNamespace(multimodal_config=None))]
    (tmp_path / "preprocessor_config.json").unlink()
    assert media_digest(model()) == plain
    with_red = real(images=((picture(1), 10),))
    others.append(media_digest(model(mm_processor_kwargs={"num_crops": 4})))
    assert len({named(with_red, media) for media in (plain, *others)}) == 4
    assert len({named(real(), media) for media in (plain, *others)}) == 1


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
