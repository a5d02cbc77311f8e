"""What the numbers in vLLM's KV mean: the checkpoint's files, its configuration as vLLM changed it, adapters. By content."""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

from headstart.block.identity import Identity, canonical_architecture
from headstart.connect.vllm.layout import NotStored
from headstart.connect.vllm.settings import ConnectorSettings
from headstart.engine.checkpoint import file_digests, identity_of, read_config
from headstart.errors import ModelError

_MEDIA_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "video_pruning_method")
_MEDIA_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_CHANGED = ("an adapter that was changed after it was loaded",)
_FROM_FILES = frozenset({"auto", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor", "mmap"})


def identity_for(vllm_config: Any, settings: ConnectorSettings) -> Identity:
    """Return the identity of the model that vLLM serves. The folder's files are digested, or their digests recalled.

    With `version` the operator answers for the weights: needed where no file tells them. Raises NotStored."""
    model = vllm_config.model_config
    folder = checkpoint_folder(model.model, model.revision)
    if settings.version is None and vllm_config.load_config.load_format not in _FROM_FILES:
        raise NotStored(
            f"weights loaded by load_format={vllm_config.load_config.load_format!r} are not told by the files of a checkpoint; "
            'say which they are with "version" in kv_connector_extra_config'
        )
    try:
        if settings.version is not None:
            weights = hashlib.sha256(b"headstart version 1\0" + settings.version.encode()).digest()
            identity = Identity(weights, canonical_architecture(read_config(folder)), version=settings.version)
        else:
            identity = identity_of(folder, digests=_digests(settings))
    except ModelError as error:
        raise NotStored(str(error)) from error
    if not model.hf_overrides:
        return identity
    if callable(model.hf_overrides):
        raise NotStored("hf_overrides is a function; what it changes in the configuration cannot be told")
    changed = json.dumps(model.hf_overrides, sort_keys=True, default=repr).encode()
    return replace(identity, architecture=identity.architecture + b"\0hf_overrides" + changed)


def checkpoint_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model: itself, or where the hub's library keeps what vLLM has fetched. Raises NotStored."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError, OSError) as error:
        raise NotStored(f"the files of {model} are not on this machine ({error}), so its weights cannot be told") from error


def media_digest(model_config: Any) -> bytes:
    """Return how images and sounds are made tokens of: settings and files of the model's processor. vLLM's own digests of media
    leave out what no request can change; they do not outlive its process, and what is stored does."""
    media = getattr(model_config, "multimodal_config", None)
    if media is None:
        return b""
    said = [getattr(media, name, None) for name in _MEDIA_SETTINGS]
    total = hashlib.sha256(b"headstart vllm media 1\0" + json.dumps(said, sort_keys=True, default=repr).encode())
    try:
        folder = checkpoint_folder(model_config.model, model_config.revision)
    except NotStored:  # then nothing is stored at all
        return total.digest()
    for name in _MEDIA_FILES:
        try:
            content = (folder / name).read_bytes()
        except OSError:
            content = b""
        total.update(struct.pack("<Q", len(content)) + content)
    return total.digest()


class AdapterDigests:
    """Content digests of LoRA folders, in the order in which they were asked for. For one thread."""

    def __init__(self, settings: ConnectorSettings) -> None:
        self._settings = settings
        self._known: dict[tuple[object, ...], bytes | None] = {}
        self._loaded: dict[int, tuple[object, ...]] = {}

    def of(self, lora: Any) -> bytes | None:
        """Return the digest of the adapter that a request names, by vLLM's `LoRARequest`. None, and the request is not for the
        cache, where its folder is not on this machine or cannot be read, and where it is not what it was when the adapter's
        number was first seen: which of the two vLLM computes with, and since when, is not known."""
        folder = Path(lora.lora_path).expanduser()
        try:
            files = sorted(file for file in folder.iterdir() if file.name == "adapter_config.json" or _holds_weights(file))
            asked = (str(folder.resolve()), *((file.name, *_facts(file)) for file in files))
        except OSError:
            return None
        if not any(_holds_weights(file) for file in files):
            return None
        if self._loaded.setdefault(lora.lora_int_id, asked) != asked:
            self._loaded[lora.lora_int_id] = _CHANGED
            return None
        if asked not in self._known:
            try:
                self._known[asked] = _adapter_digest(files, self._settings)
            except ModelError:
                self._known[asked] = None
        return self._known[asked]


def _adapter_digest(files: list[Path], settings: ConnectorSettings) -> bytes:
    total = hashlib.sha256(b"headstart vllm adapter 1\0")
    for file, digest in zip(files, file_digests(files, digests=_digests(settings)), strict=True):
        name = file.name.encode()
        total.update(struct.pack("<I", len(name)) + name + digest)
    return total.digest()


def _holds_weights(file: Path) -> bool:
    return file.suffix in (".safetensors", ".bin", ".pt")


def _facts(file: Path) -> tuple[int, int, int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def _digests(settings: ConnectorSettings) -> Path:
    return settings.config.models_directory.expanduser() / "digests.json"
