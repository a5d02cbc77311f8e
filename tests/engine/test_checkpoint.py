"""A checkpoint is checked before it is used, and what its numbers mean is told by content alone."""

from __future__ import annotations

import builtins
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from headstart.engine.checkpoint import SETTLED_NS, check_folder, identity_of
from headstart.errors import ModelError

CONFIG = {
    "model_type": "llama",
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "sliding_window": None,
    "_name_or_path": "a",
    "transformers_version": "5.0.0",
}


def later() -> int:
    return 2**62


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint(tmp_path / "model")


def checkpoint(folder: Path, *, files: int = 1, seed: int = 0) -> Path:
    folder.mkdir()
    rng = np.random.default_rng(seed)
    names = ["model.safetensors"] if files == 1 else [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    for name in names:
        save_file({"weight": rng.standard_normal((8, 8), dtype=np.float32)}, folder / name)
    if files > 1:
        index = {"weight_map": {f"layer.{i}": name for i, name in enumerate(names)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def configure(folder: Path, **changes: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))


@pytest.mark.parametrize("files", [1, 3])
def test_a_whole_checkpoint_passes(tmp_path: Path, files: int) -> None:
    check_folder(checkpoint(tmp_path / "model", files=files))


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_model_saved_by_transformers_passes(tiny_model_folder: Callable[..., Path], kind: str) -> None:
    check_folder(tiny_model_folder(kind))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text('{"model_type": "lla'), "config.json is not valid JSON"),
        (lambda f: (f / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json is not valid JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), "config.json does not hold a JSON object"),
        (lambda f: (f / "config.json").write_text("{}"), "names no model_type"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (lambda f: (f / "tokenizer.json").write_text('{"mod'), "tokenizer.json is not valid JSON"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json describes no tokenizer"),
        (lambda f: (f / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "convert them to safetensors"),
        (lambda f: (f / "adapter_config.json").write_text("{}"), "it is an adapter"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "model.safetensors is not a safetensors file"),
        (
            lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1"),
            "not a safetensors file",
        ),
        (lambda f: os.truncate(f / "model.safetensors", 20), "model.safetensors is not a safetensors file"),
        (lambda f: os.truncate(f / "model.safetensors", 200), "its header says"),
        (lambda f: flip(f / "model.safetensors", 8), "model.safetensors has a damaged header"),
    ],
)
def test_a_spoiled_checkpoint_is_refused_with_the_file_named(folder: Path, spoil: Callable[[Path], object], said: str) -> None:
    spoil(folder)
    with pytest.raises(ModelError, match=said) as caught:
        check_folder(folder)
    assert str(folder) in str(caught.value)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 0xFF
    file.write_bytes(data)


def test_only_what_is_loaded_counts(tmp_path: Path) -> None:
    """Some models come twice in one folder; the copy in its makers' own form is neither read nor part of the identity."""
    for i, files in enumerate((1, 3)):
        folder = checkpoint(tmp_path / f"model-{i}", files=files)
        before = identity_of(folder)
        (folder / "consolidated.safetensors").write_bytes(b"not even a safetensors file")
        check_folder(folder)
        assert identity_of(folder) == before


def test_the_makers_own_form_alone_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "consolidated.safetensors")
    with pytest.raises(ModelError, match=r"has no model\.safetensors"):
        check_folder(folder)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks model-00002-of-00003\.safetensors"):
        check_folder(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 500000.0},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"sliding_window": 4096},
        {"num_key_value_heads": 4},
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    ],
)
def test_settings_that_change_the_numbers_change_the_root(folder: Path, change: dict[str, object]) -> None:
    before = identity_of(folder).root()
    configure(folder, **change)
    assert identity_of(folder).root() != before


@pytest.mark.parametrize("change", [{"_name_or_path": "b"}, {"transformers_version": "6.0.0"}])
def test_settings_that_only_describe_leave_the_root(folder: Path, change: dict[str, object]) -> None:
    before = identity_of(folder).root()
    configure(folder, **change)
    assert identity_of(folder).root() == before


def test_the_folder_s_name_and_times_do_not_matter(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "another-name"
    shutil.copytree(folder, copy, copy_function=shutil.copyfile)
    assert identity_of(copy) == identity_of(folder)


def test_links_into_a_hub_cache_count_as_the_files_they_name(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    check_folder(snapshot)
    assert identity_of(snapshot) == identity_of(folder)


def test_one_flipped_bit_in_the_weights_changes_the_root(folder: Path) -> None:
    before = identity_of(folder).root()
    flip(folder / "model.safetensors", -1)
    assert identity_of(folder).root() != before


def test_weights_that_change_places_between_shards_change_the_root(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "model", files=2)
    before = identity_of(folder).root()
    first, second = sorted(folder.glob("*.safetensors"))
    first.rename(tmp_path / "kept")
    second.rename(first)
    (tmp_path / "kept").rename(second)
    assert identity_of(folder).root() != before


def test_a_remembered_digest_spares_reading_the_weights(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "models" / "digests.json"
    first = identity_of(folder, digests=memory, clock_ns=later)
    # Another digest in the memory shows that it is used, and that nothing else was read.
    entries = msgspec.json.decode(memory.read_bytes())
    for entry in entries.values():
        entry["sha256"] = msgspec.to_builtins(b"\1" * 32)
    memory.write_bytes(msgspec.json.encode(entries))
    assert identity_of(folder, digests=memory, clock_ns=later).weights != first.weights


@pytest.mark.parametrize("change", ["content", "mtime", "inode"])
def test_a_file_whose_facts_changed_is_read_again(folder: Path, tmp_path: Path, change: str) -> None:
    memory = tmp_path / "digests.json"
    first = identity_of(folder, digests=memory, clock_ns=later)
    stale = memory.read_bytes().replace(first_digest(memory).encode(), msgspec.to_builtins(b"\1" * 32).encode())
    memory.write_bytes(stale)
    weights = folder / "model.safetensors"
    if change == "content":
        flip(weights, -1)
        flip(weights, -1)
    elif change == "mtime":
        os.utime(weights, ns=(1, 1))
    else:
        shutil.copy2(weights, tmp_path / "copy")
        os.replace(tmp_path / "copy", weights)
    assert identity_of(folder, digests=memory, clock_ns=later) == first


@pytest.mark.parametrize("at", [-1, 64])
def test_a_file_of_equal_facts_and_other_content_is_read_again(tmp_path: Path, at: int) -> None:
    """As in two builds of one image: size, times, inode and device agree, the weights do not."""
    folder, memory = checkpoint(tmp_path / "model"), tmp_path / "digests.json"
    before = identity_of(folder, digests=memory, clock_ns=later)
    flip(folder / "model.safetensors", at)
    entries = msgspec.json.decode(memory.read_bytes())
    stat = (folder / "model.safetensors").stat()
    for entry in entries.values():
        entry |= {"size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "ctime_ns": stat.st_ctime_ns}
        entry |= {"inode": stat.st_ino, "device": stat.st_dev}
    memory.write_bytes(msgspec.json.encode(entries))
    assert identity_of(folder, digests=memory, clock_ns=later) == identity_of(folder) != before


def test_a_sample_reads_little_of_a_large_file(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"weight": np.zeros((4 << 20,), dtype=np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    memory = tmp_path / "digests.json"
    first = identity_of(folder, digests=memory, clock_ns=later)
    read = []

    class Counting(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            read.append(len(buffer))
            return super().readinto(buffer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "open", lambda path, mode: io.BufferedReader(Counting(path)))
        assert identity_of(folder, digests=memory, clock_ns=later) == first
    assert 0 < sum(read) < 2 << 20


def first_digest(memory: Path) -> str:
    return str(next(iter(msgspec.json.decode(memory.read_bytes()).values()))["sha256"])


def test_a_file_that_just_changed_is_not_remembered(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    changed = (folder / "model.safetensors").stat().st_ctime_ns
    identity_of(folder, digests=memory, clock_ns=lambda: changed + SETTLED_NS)
    assert not memory.exists()
    identity_of(folder, digests=memory, clock_ns=lambda: changed + SETTLED_NS + 1)
    assert memory.exists()


@pytest.mark.parametrize("damage", [b"", b"{", b'{"a": 1}', b"\xff"])
def test_a_damaged_memory_is_forgotten_and_written_anew(folder: Path, tmp_path: Path, damage: bytes) -> None:
    memory = tmp_path / "digests.json"
    memory.write_bytes(damage)
    assert identity_of(folder, digests=memory, clock_ns=later) == identity_of(folder)
    assert len(msgspec.json.decode(memory.read_bytes())) == 1


def test_a_memory_that_cannot_be_written_costs_only_time(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert identity_of(folder, digests=tmp_path / "file" / "digests.json", clock_ns=later) == identity_of(folder)


def test_digests_of_files_that_are_gone_are_dropped(folder: Path, tmp_path: Path) -> None:
    memory = tmp_path / "digests.json"
    gone = checkpoint(tmp_path / "gone", seed=1)
    identity_of(gone, digests=memory, clock_ns=later)
    shutil.rmtree(gone)
    identity_of(folder, digests=memory, clock_ns=later)
    assert list(msgspec.json.decode(memory.read_bytes())) == [str(folder / "model.safetensors")]
    assert sorted(tmp_path.glob("digests*")) == [memory]
