"""A checkpoint folder: is it whole, and what do its numbers mean? Reads `config.json` and `*.safetensors`, no tensors.

An identity is made from content alone: SHA-256 of every weights file and the fields of `config.json` that change the numbers.
Hashing gigabytes at every start would cost seconds, so digests are remembered in one small file by path, size, times, inode
and device, and by a sample of the content: images of file systems (squashfs, EROFS) often give every build the same times and
inodes. A file whose facts differ in any way is read again.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import msgspec

from headstart.block.identity import Identity, canonical_architecture
from headstart.errors import ModelError

HASH_THREADS = 4
# A file changed twice within one tick of the file system's clock looks unchanged; younger files are not remembered.
SETTLED_NS = 2_000_000_000
SAMPLES = 64
SAMPLE_BYTES = 4096
_GGUF_SAMPLE_BYTES = 1 << 20
_MAX_HEADER_BYTES = 100_000_000  # the bound that the safetensors format itself sets


def identity_of(folder: Path, *, digests: Path | None = None, clock_ns: Callable[[], int] = time.time_ns) -> Identity:
    """Return what the numbers of the checkpoint in `folder` mean; the folder's own name has no part in it.

    `digests` is the file where digests of weights are remembered; None reads every byte. Raises ModelError."""
    config = read_config(folder)
    files = weight_files(folder)
    total = hashlib.sha256(b"headstart weights 1\0")
    for file, digest in zip(files, _digest_files(files, digests, clock_ns), strict=True):
        name = file.name.encode()
        total.update(struct.pack("<I", len(name)) + name + digest)
    return Identity(weights=total.digest(), architecture=canonical_architecture(config))


def file_digests(files: Sequence[Path], *, digests: Path | None = None) -> list[bytes]:
    """Return the SHA-256 of each file, remembered in `digests` as those of weights are. Raises ModelError."""
    return _digest_files(files, digests, time.time_ns)


def check_folder(folder: Path) -> None:
    """Raise ModelError, naming the file, unless `folder` holds a whole checkpoint with its tokenizer. Of the weights only
    headers are read."""
    read_config(folder)
    if (folder / "adapter_config.json").exists():
        raise ModelError(
            f"{folder} has an adapter_config.json: it is an adapter; serve its base model, and name it in engine.adapters",
            path=folder,
        )
    for file in weight_files(folder):
        _check_safetensors(file)
    tokenizer = folder / "tokenizer.json"
    described = read_json(tokenizer)
    if described is None:
        raise ModelError(f"{folder} has no tokenizer.json; fetch the model again, with its tokenizer", path=tokenizer)
    if "model" not in described:
        raise ModelError(f"{tokenizer} describes no tokenizer; fetch the model again", path=tokenizer)


def read_config(folder: Path) -> dict[str, object]:
    """Return the folder's `config.json`. Raises ModelError if it is missing or is not a model's configuration."""
    file = folder / "config.json"
    config = read_json(file)
    if config is None:
        raise ModelError(f"{folder} has no config.json; give the folder of a Hugging Face model", path=file)
    if not isinstance(config.get("model_type"), str):
        raise ModelError(f"{file} names no model_type; give the folder of a Hugging Face language model", path=file)
    return config


def read_json(file: Path) -> dict[str, object] | None:
    """Return the JSON object in `file`, or None where there is no such file. Raises ModelError for anything else in it."""
    try:
        data = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise ModelError(f"{file} is not valid JSON ({error}); fetch the model again", path=file) from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", path=file, errno=error.errno) from error
    if not isinstance(data, dict):
        raise ModelError(f"{file} does not hold a JSON object; fetch the model again", path=file)
    return data


def weight_files(folder: Path) -> list[Path]:
    """Return the weights files that are loaded, sorted by name: model.safetensors, else what the index names.

    Other *.safetensors, such as the same weights once more in another form, stay unread. Raises ModelError if there is none
    or one is missing."""
    whole = folder / "model.safetensors"
    if whole.exists():
        return [whole]
    index_file = folder / "model.safetensors.index.json"
    index = read_json(index_file)
    if index is None:
        pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
        hint = "pickled weights are never read, convert them to safetensors" if pickled else "fetch the model again"
        raise ModelError(f"{folder} has no model.safetensors; {hint}", path=whole)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index_file} has no weight_map; fetch the model again", path=index_file)
    names = sorted({str(name) for name in weight_map.values()})
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ModelError(
            f"{folder} lacks {missing[0]} ({len(missing)} of its weights files are missing); fetch the model again",
            path=folder / missing[0],
        )
    return [folder / name for name in names]


def _check_safetensors(file: Path) -> None:
    """u64 header length, JSON header, then the tensors' bytes without gaps: the largest end must be the end of the file."""
    try:
        with file.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= header_bytes <= min(_MAX_HEADER_BYTES, size - 8):
                raise ModelError(f"{file} is not a safetensors file, or only its beginning; fetch the model again", path=file)
            header = json.loads(stream.read(header_bytes))
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", path=file, errno=error.errno) from error
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise ModelError(f"{file} has a damaged header; fetch the model again", path=file) from error
    want = 8 + header_bytes + max(ends, default=0)
    if size != want:
        raise ModelError(
            f"{file} is {size:,} bytes, its header says {want:,}; fetch the model again", path=file, got=size, want=want
        )


class _Remembered(msgspec.Struct, frozen=True):
    """A digest and the facts of the file that it was computed from."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int
    sample: bytes  # SHA-256 of the header, which names every tensor, and of blocks spread over the file
    sha256: bytes


def _digest_files(files: Sequence[Path], memory: Path | None, clock_ns: Callable[[], int]) -> list[bytes]:
    known = _recall(memory) if memory is not None else {}
    fresh: dict[str, _Remembered] = {}

    def digest(file: Path) -> bytes:
        path = os.path.realpath(file)
        old = known.get(path)
        with open(path, "rb") as stream:
            before = _facts(stream, b"" if old is None else old.sha256)
            if old is not None and old == before:
                return old.sha256
            stream.seek(0)
            sha256 = hashlib.file_digest(stream, "sha256").digest()
            after = _facts(stream, sha256)
        if after != msgspec.structs.replace(before, sha256=sha256):
            raise ModelError(f"{file} changed while it was read; start again when it is complete", path=file)
        if clock_ns() - after.ctime_ns > SETTLED_NS:
            fresh[path] = after
        return sha256

    try:
        with ThreadPoolExecutor(HASH_THREADS, thread_name_prefix="digest") as threads:
            digests = list(threads.map(digest, files))
    except OSError as error:
        raise ModelError(
            f"{error.filename} cannot be read: {error.strerror}", path=error.filename, errno=error.errno
        ) from error
    if memory is not None and fresh:
        _remember(memory, fresh)
    return digests


def _facts(stream: BinaryIO, sha256: bytes) -> _Remembered:
    stat = os.fstat(stream.fileno())
    return _Remembered(
        size=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        ctime_ns=stat.st_ctime_ns,
        inode=stat.st_ino,
        device=stat.st_dev,
        sample=_sample(stream, stat.st_size),
        sha256=sha256,
    )


def _sample(stream: BinaryIO, size: int) -> bytes:
    sha256 = hashlib.sha256()
    stream.seek(0)
    prefix = stream.read(8)
    # A GGUF says nowhere how long its header is; its tokenizer alone is some megabytes.
    header_bytes = _GGUF_SAMPLE_BYTES if prefix.startswith(b"GGUF") else int.from_bytes(prefix, "little")
    sha256.update(prefix + stream.read(min(header_bytes, _MAX_HEADER_BYTES)))
    for i in range(SAMPLES):
        stream.seek(max(size - SAMPLE_BYTES, 0) * i // (SAMPLES - 1))  # the first block and the last are among them
        sha256.update(stream.read(SAMPLE_BYTES))
    return sha256.digest()


def _recall(memory: Path) -> dict[str, _Remembered]:
    """Anything unreadable is forgotten: the cost is hashing again."""
    try:
        return msgspec.json.decode(memory.read_bytes(), type=dict[str, _Remembered])
    except (OSError, msgspec.DecodeError):
        return {}


def _remember(memory: Path, fresh: dict[str, _Remembered]) -> None:
    """Published by rename, so a reader sees the old file or the new. Two writers at once may lose an entry, never mix one."""
    kept = {path: entry for path, entry in _recall(memory).items() if os.path.exists(path)}
    try:
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=memory.parent, prefix=memory.name, delete=False) as stream:
            stream.write(msgspec.json.encode(kept | fresh))
        os.replace(stream.name, memory)
    except OSError:
        return  # a read-only place only means hashing again
