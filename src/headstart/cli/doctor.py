"""`headstart doctor`: whether a model's template keeps prefixes whole, what the cache's disk gives, and whether that pays.

Weights are needed only to measure how fast prompts are computed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import click

from headstart.cli.progress import OnProgress, shown_progress
from headstart.cli.settings import chosen_config
from headstart.config import Config, parse_size

if TYPE_CHECKING:
    from headstart.diagnose.template_check import Check

UNWELL = 10
SIGNS = {"good": "✔", "note": "⚠", "bad": "✘"}
_PROBE_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
_ROUNDS = 3
_SLOW_BYTES_S = 100e6


@click.command()
@click.argument("model", required=False)
@click.option("--template", "only_template", is_flag=True, help="look at the model's chat template alone")
@click.option("--compute", is_flag=True, help="measure also how fast prompts are computed; loads the model's weights")
@click.option("--json", "as_json", is_flag=True, help="print one JSON object")
@click.option("--config", "config_file", type=click.Path(dir_okay=False, path_type=Path), help="TOML file with settings")
@click.option("--models-directory", metavar="DIRECTORY", help="where fetched and converted models lie")
def doctor(
    model: str | None,
    only_template: bool,
    compute: bool,
    as_json: bool,
    config_file: Path | None,
    models_directory: str | None,
) -> int:
    """Look at the chat template of MODEL (its tokenizer's folder is enough, and a GGUF has one) and at the disk that the cache
    is on. Exit code 0: nothing is wrong; 10: something is."""
    from headstart.cli.rendering import renderer_of
    from headstart.diagnose.template_check import check_template

    config = chosen_config(config_file, {"models_directory": models_directory}, model=model)
    with shown_progress() as on_progress:
        renderer = renderer_of(config, on_progress=on_progress)
        on_progress("template", None)
        rooms = {"template": check_template(renderer)}
        if not only_template:
            on_progress("disk", None)
            disks = [_disk(directory, config) for directory in config.cache.directories]
            rooms["disk"] = [check for checks, _ in disks for check in checks]
            rates = [rate for _, rate in disks if rate is not None]
            rooms["computing"] = [_computing(config, sum(rates), on_progress) if compute else _not_computed()]
    if as_json:
        told = {
            room: [{"name": one.name, "status": one.status, "said": one.said, "fix": one.fix} for one in checks]
            for room, checks in rooms.items()
        }
        click.echo(json.dumps(told))
    else:
        for room, checks in rooms.items():
            click.echo(f"{room} ({config.model})" if room == "template" else room)
            for check in checks:
                for line in _lines(check):
                    click.echo(line)
    return UNWELL if any(check.status == "bad" for checks in rooms.values() for check in checks) else 0


def _lines(check: Check) -> Iterator[str]:
    yield f"  {SIGNS[check.status]} {check.name}: {check.said}"
    if check.fix and check.status != "good":
        yield f"      fix: {check.fix}"


def _not_computed() -> Check:
    from headstart.diagnose.template_check import Check

    said = "how fast prompts are computed was not measured, so whether a hit pays is not known: that needs the model's weights"
    return Check("computing", "note", said, "--compute measures it; a server does so by itself while it serves")


def _computing(config: Config, read_bytes_s: float, on_progress: OnProgress) -> Check:
    """Compute a prompt, and compare that with reading it from the cache's disks, which give `read_bytes_s`."""
    from headstart.cli.compute_rate import measure
    from headstart.diagnose.template_check import Check

    tokens, rate = measure(config, on_progress=on_progress)
    said = f"{rate:,.0f} tokens/s (a prompt of {tokens:,})"
    token = _token_bytes(config)
    if token is None or not read_bytes_s:
        return Check("computing", "good", said)
    faster = read_bytes_s / token / rate
    if faster < 1:
        return Check("computing", "note", f"{said}: faster than reading", "a faster disk; a server computes rather than waits")
    return Check("computing", "good", f"{said}; a hit is read {faster:,.3g} times as fast")


def _disk(directory: Path, config: Config) -> tuple[list[Check], float | None]:
    """Look at the file system that a cache directory is on, or would be, and at how many bytes a second it gives, as far as it
    does; leaves nothing behind."""
    from headstart.diagnose.template_check import Check

    checks = []
    there = next(folder for folder in (directory, *directory.parents) if folder.is_dir())
    name = str(directory)
    usage = shutil.disk_usage(there)
    kept = parse_size(config.cache.min_free, of_bytes=usage.total)
    room = f"{usage.free / 1e9:,.1f} GB free of {usage.total / 1e9:,.1f} GB on {_file_system(there)}"
    if usage.free <= kept:
        fix = f"free space, or lower cache.min_free ({config.cache.min_free}): until then nothing is stored"
        checks.append(Check(name, "bad", room, fix))
    else:
        checks.append(Check(name, "good", f"{room}, {(usage.free - kept) / 1e9:,.1f} GB of them for the cache"))
    size = min(_PROBE_BYTES, usage.free // 4) // _PIECE_BYTES * _PIECE_BYTES
    if not size:
        return checks, None
    try:
        direct, rate = _read_rate(there, size)
    except OSError as error:
        said = f"{there} cannot be written or read: {error.strerror}"
        return [*checks, Check("reading", "bad", said, "give another cache.directory")], None
    if direct:
        checks.append(Check("direct I/O", "good", "works: reads bypass the page cache"))
    else:
        fix = "put cache.directory on ext4, XFS or another file system that has it"
        said = "this file system refuses it: reads go through the page cache, for memory and CPU"
        checks.append(Check("direct I/O", "note", said, fix))
    said = f"{rate / 1e6:,.0f} MB/s ({size >> 20} MiB, {_PIECE_BYTES >> 20} MiB at a time, median of {_ROUNDS})"
    token = _token_bytes(config)
    if token is not None:
        said += (
            f"; a hit reads {rate / token:,.0f} tokens/s at {token:,} bytes a token, and pays where computing them is slower"
        )
    slow = rate < _SLOW_BYTES_S
    fix = "a faster disk: an SSD, or several (cache.directory takes a list)"
    return [*checks, Check("reading", "note" if slow else "good", said, fix)], rate


def _read_rate(folder: Path, size: int) -> tuple[bool, float]:
    """Return whether direct I/O works in a folder, and bytes a second that a file there is read with."""
    import mmap

    with tempfile.NamedTemporaryFile(dir=folder, prefix=".headstart-doctor-") as file, mmap.mmap(-1, _PIECE_BYTES) as piece:
        for _ in range(size // _PIECE_BYTES):
            file.write(os.urandom(_PIECE_BYTES))
        file.flush()
        os.fsync(file.fileno())
        flag = getattr(os, "O_DIRECT", 0)
        try:
            descriptor, direct = os.open(file.name, os.O_RDONLY | flag), bool(flag)
        except OSError:
            descriptor, direct = os.open(file.name, os.O_RDONLY), False
        try:
            rates = []
            for _ in range(_ROUNDS):
                if not direct and hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                begun, at = time.perf_counter(), 0
                while at < size:
                    got = os.preadv(descriptor, [piece], at)
                    if not got:
                        raise OSError(5, "it ends early")
                    at += got
                rates.append(size / (time.perf_counter() - begun))
        finally:
            os.close(descriptor)
    return direct, median(rates)


def _file_system(path: Path) -> str:
    """Return the kind of file system that a path is on, where the system tells."""
    best, kind = "", "an unknown file system"
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return kind
    for line in mounts:
        _, where, what, *_ = line.split(" ")
        where = where.replace("\\040", " ")
        if len(where) >= len(best) and path.resolve().is_relative_to(where):
            best, kind = where, what
    return kind


def _token_bytes(config: Config) -> int | None:
    """Return the KV of one token of plain attention in the model's own dtype; None where config.json does not tell."""
    from headstart.engine.models import resolve_tokenizer
    from headstart.errors import ModelError

    try:
        folder = resolve_tokenizer(config.model, config.models_directory, on_progress=lambda stage, fraction: None)
        told = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, ModelError):
        return None
    layers, heads = told.get("num_hidden_layers"), told.get("num_attention_heads")
    if not isinstance(layers, int) or not isinstance(heads, int) or told.get("kv_lora_rank") or told.get("layer_types"):
        return None
    kv_heads = told.get("num_key_value_heads") or heads
    width = told.get("head_dim") or (told.get("hidden_size") or 0) // heads
    dtype = {"float32": 4}.get(str(told.get("torch_dtype", told.get("dtype"))), 2)
    nbytes = 2 * layers * kv_heads * width * (4 if config.engine.dtype == "float32" else dtype)
    return nbytes or None
