"""GGUF models that other programs have downloaded: Ollama's blobs by manifest, LM Studio's folders, the Hugging Face cache.

Each is found under the name that it has there: `llama3.2:3b`, `publisher/repository/file.gguf`. Reads manifests and names of
files; nothing is copied.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from headstart.config import ModelPlaces

_MODEL_LAYER = "application/vnd.ollama.image.model"
_REGISTRY, _LIBRARY = "registry.ollama.ai", "library"
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True, slots=True)
class LocalModel:
    name: str
    path: Path
    source: str  # "ollama", "lm-studio", "hugging-face"
    nbytes: int


def is_gguf(path: Path) -> bool:
    """Whether `path` is a file that begins as a GGUF does; Ollama's have no ending."""
    try:
        with path.open("rb") as stream:
            return stream.read(4) == b"GGUF"
    except OSError:
        return False


def parts_of(path: Path) -> list[Path]:
    """Return the files of a model of which `path` is the first, or the only one, in order; those that are missing too."""
    found = _PART.search(path.name)
    if found is None:
        return [path]
    stem, count = path.name[: found.start()], int(found[2])
    return [path.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]


def local_models(places: ModelPlaces) -> list[LocalModel]:
    """Return what is there, by name. What cannot be read is left out."""
    found: dict[str, LocalModel] = {}
    ollama = (model for folder in places.ollama for model in _ollama(folder))
    for model in [*ollama, *_lm_studio(places.lm_studio), *_hugging_face(places.hugging_face)]:
        found.setdefault(model.name, model)
    return sorted(found.values(), key=lambda model: model.name)


def _ollama(folder: Path) -> Iterator[LocalModel]:
    manifests = folder / "manifests"
    for manifest in sorted(manifests.glob("*/*/*/*")):
        host, space, model, tag = manifest.relative_to(manifests).parts
        try:
            layers = json.loads(manifest.read_bytes())["layers"]
            digest = next(str(layer["digest"]) for layer in layers if layer["mediaType"] == _MODEL_LAYER)
        except (OSError, ValueError, LookupError, TypeError, StopIteration):
            continue
        blob = folder / "blobs" / digest.replace(":", "-")
        before = [part for part, usual in ((host, _REGISTRY), (space, _LIBRARY)) if part != usual]
        if is_gguf(blob):
            yield LocalModel("/".join([*before, f"{model}:{tag}"]), blob, "ollama", _nbytes(blob))


def _lm_studio(folders: tuple[Path, ...]) -> Iterator[LocalModel]:
    for folder in folders:
        yield from _files(folder, sorted(folder.glob("*/*/*.gguf")), "lm-studio")


def _hugging_face(folder: Path) -> Iterator[LocalModel]:
    for repository in sorted(folder.glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        snapshots = sorted((repository / "snapshots").glob("*"), key=lambda one: one.stat().st_mtime, reverse=True)
        for snapshot in snapshots:
            for model in _files(snapshot, sorted(snapshot.rglob("*.gguf")), "hugging-face"):
                yield LocalModel(f"{name}/{model.name}", model.path, model.source, model.nbytes)


def _files(folder: Path, paths: list[Path], source: str) -> Iterator[LocalModel]:
    for path in paths:
        part = _PART.search(path.name)
        if (part is not None and int(part[1]) != 1) or path.name.startswith("mmproj"):  # a projector of images is no model
            continue
        if is_gguf(path):
            yield LocalModel(path.relative_to(folder).as_posix(), path, source, _nbytes(path))


def _nbytes(path: Path) -> int:
    return sum(part.stat().st_size for part in parts_of(path) if part.exists())
