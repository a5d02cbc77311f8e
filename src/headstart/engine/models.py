"""From the name a user gives to a folder with a whole checkpoint, fetching and converting it where that is needed.

A name is an alias (`smollm2-135m`), a GGUF file, one that another program has downloaded (`local_models`), a Hugging Face
directory, or a hub name "org/name". What is returned has been checked: `config.json` reads, every weights file is there and as
long as its header says. Nothing here loads weights.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headstart.config import model_places
from headstart.engine.checkpoint import check_folder
from headstart.engine.local_models import is_gguf, local_models, parts_of
from headstart.engine.smollm2 import ALIAS, GGUF_ALIAS, NOTE, Progress, fetch_smollm2_gguf, make_smollm2
from headstart.errors import MissingExtra, ModelError

ALIASES = (ALIAS, GGUF_ALIAS)

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
_HUB_TWICE = ["consolidated*", "original/*"]  # the same weights once more, in the form of the model's makers


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """`name` is what clients see, `note` a remark for people; `digests` is where `identity_of` remembers weights' digests."""

    path: Path
    name: str
    digests: Path
    note: str | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file and no folder."""
        return self.path.is_file()


def resolve_model(name: str, models_directory: Path, *, on_progress: Progress) -> ModelFolder:
    """Return the checked folder of model `name`, fetching it on first use; a hub model that is cached is taken as it is.

    Raises ModelError (unknown, incomplete, not reachable) or MissingExtra."""
    return _resolve(name, models_directory, on_progress, refresh=False)


def pull_model(name: str, models_directory: Path, *, on_progress: Progress) -> ModelFolder:
    """Like `resolve_model`, ahead of time: a hub model is brought to its newest revision, one that is damaged is mended."""
    return _resolve(name, models_directory, on_progress, refresh=True)


def resolve_tokenizer(name: str, models_directory: Path, *, on_progress: Progress) -> Path:
    """Return a folder with the tokenizer and chat template of model `name`, or the GGUF that has them; weights of a folder are
    neither needed nor fetched.

    Raises ModelError (unknown, not reachable) or MissingExtra."""
    path = Path(name).expanduser()
    if name in ALIASES:
        made = models_directory.expanduser() / name
        if (made / "tokenizer.json").exists():
            return made
        return resolve_model(name, models_directory, on_progress=on_progress).path
    if name and path.is_dir():
        return path
    if (gguf := _gguf(name, path)) is not None:
        return gguf
    if path.is_file():
        raise ModelError(f"{name} is a file and no GGUF; give the folder that holds tokenizer.json", name=name)
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name, on_progress, refresh=False, weights=False)
    raise ModelError(_unknown(name), name=name)


def _resolve(name: str, models_directory: Path, on_progress: Progress, *, refresh: bool) -> ModelFolder:
    models_directory = models_directory.expanduser()
    digests = models_directory / "digests.json"
    path = Path(name).expanduser()
    local = False
    if name == GGUF_ALIAS:
        file = fetch_smollm2_gguf(models_directory / name, on_progress)
        found = ModelFolder(path=file, name=name, digests=digests, note=NOTE)
    elif name in ALIASES:
        found = ModelFolder(path=models_directory / name, name=name, digests=digests, note=NOTE)
        make_smollm2(found.path, on_progress, whole=_is_whole if refresh else None)
    elif (gguf := _gguf(name, path)) is not None:
        found = ModelFolder(path=gguf, name=name if gguf != path else path.stem, digests=digests)
    elif name and path.is_dir():
        local = True
        found = ModelFolder(path=path.resolve(), name=path.resolve().name, digests=digests)
    elif path.is_file():
        raise ModelError(f"{name} is a file and no GGUF; give the folder that holds config.json and *.safetensors", name=name)
    elif _HUB_NAME.fullmatch(name):
        found = ModelFolder(path=_from_hub(name, on_progress, refresh=refresh), name=name, digests=digests)
    else:
        raise ModelError(_unknown(name), name=name)
    if found.is_gguf:
        _require_parts(found.path)
        on_progress("ready", 1.0)
        return found
    try:
        check_folder(found.path)
    except ModelError as error:
        if local or refresh or "fetch the model again" not in error.message:
            raise
        raise ModelError(f"{error.message}: headstart pull {name}", **error.facts) from error
    on_progress("ready", 1.0)
    return found


def _gguf(name: str, path: Path) -> Path | None:
    """Return the GGUF file that is meant: itself, or what another program has downloaded under that name."""
    if path.is_file():
        return path if path.suffix.lower() == ".gguf" or is_gguf(path) else None
    if path.is_dir():
        return None
    found = local_models(model_places())
    known = {model.name.removesuffix(":latest"): model.path for model in found} | {model.name: model.path for model in found}
    if name not in known and path.suffix.lower() == ".gguf":
        raise ModelError(f"there is no file {name}; `headstart models` lists those that are here", name=name)
    return known.get(name)


def _require_parts(path: Path) -> None:
    """Raise ModelError unless every file of a model that lies in several is there."""
    missing = [part.name for part in parts_of(path) if not part.exists()]
    if missing:
        raise ModelError(f"{path} lacks {missing[0]}, one of its {len(parts_of(path))} parts; fetch it again", path=path)


def _unknown(name: str) -> str:
    if name.startswith(("/", ".", "~")):
        return f"there is no folder {name}; give an existing model folder, org/name from the hub, or {' or '.join(ALIASES)}"
    near = difflib.get_close_matches(name.lower(), ALIASES, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known names: {', '.join(ALIASES)}."
    return f"unknown model {name!r}: {hint} A folder with config.json and *.safetensors, or org/name from the hub, works too"


def _from_hub(name: str, on_progress: Progress, *, refresh: bool, weights: bool = True) -> Path:
    """The cached snapshot if it is whole, else the hub's. The hub's own client keeps its cache and shows its own bars."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, HTTPError, RepositoryNotFoundError
    except ImportError as error:
        raise MissingExtra(
            f"fetching {name} needs huggingface_hub: pip install 'headstart[torch]'", extra="torch", name=name
        ) from error
    if not refresh:
        try:
            cached = Path(snapshot_download(name, local_files_only=True))
        except OSError:
            pass  # not cached
        else:
            if _is_whole(cached) if weights else (cached / "tokenizer.json").exists():
                return cached
    on_progress("downloading", None)
    unwanted = [] if weights else ["*.safetensors"]
    try:
        fetch = partial(snapshot_download, name, allow_patterns=_HUB_FILES, ignore_patterns=[*_HUB_TWICE, *unwanted])
        fetched = Path(fetch())
        if refresh and not _is_whole(fetched):
            fetched = Path(fetch(force_download=True))  # a file that is there is otherwise taken for good
        return fetched
    except GatedRepoError as error:
        raise ModelError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then `hf auth login`", name=name
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"the hub has no public model {name}; check the spelling, or `hf auth login` if it is private", name=name
        ) from error
    except (OSError, HTTPError, ValueError) as error:
        raise ModelError(
            f"{name} is no folder here and could not be fetched from the hub ({_first_line(error)}); "
            f"check the network, or copy the model's folder to this machine and give its path",
            name=name,
        ) from error


def _is_whole(folder: Path) -> bool:
    try:
        check_folder(folder)
    except ModelError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
