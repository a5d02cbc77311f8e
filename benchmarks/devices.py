"""Several devices as one tier: loop devices throttled to known rates, so that what they add up to can be told on any machine.

One device at 200 MB/s against two of them, and against one at 200 and one at 100. Each tier is an ordinary cache directory
per device, filled by `save` (which learns the rates from the first prompts) and read by `load`, every piece checked. Needs
root, loop devices and the blkio controller; without them it says so and measures nothing.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import benchmark_home, paired_ratio, where_it_ran
from benchmarks.stored import IDENTITY, SMOLLM2, Destination, Prefix, touched
from headstart.block.keys import BLOCK_TOKENS, chain_keys
from headstart.cache.prefix_cache import PrefixCache
from headstart.tier.devices import DeviceTier
from headstart.tier.disk import DiskTier

BLKIO = Path("/sys/fs/cgroup/blkio")
FAST, SLOW = 200_000_000, 100_000_000
TIERS = {"one": (FAST,), "two alike": (FAST, FAST), "one at half": (FAST, SLOW)}
TARGETS = {"two alike": 1.9, "one at half": 1.4}


def run(*, smoke: bool = False, rounds: int = 10, nbytes: int = 600 << 20) -> dict[str, Any]:
    """Return bytes a second of reading and writing for each tier, and their ratios to one device."""
    if smoke:
        rounds, nbytes = 1, 240 << 20
    if (reason := _cannot()) is not None:
        return {"skipped": reason}
    home = benchmark_home()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-", dir=home)))
        group = stack.enter_context(_group())
        rates = [rate for tier in TIERS.values() for rate in tier]
        mounted = _mounted(stack, folder, group, rates, image_bytes=4 * nbytes)
        # In a process of its own: whatever becomes of it, the devices are taken down by this one.
        pool = stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
        measured = pool.submit(_measure, group, mounted, rounds=rounds, nbytes=nbytes).result()
        return {"where": where_it_ran(folder), "rounds": rounds, "targets": TARGETS, **measured}


def _measure(group: Path, mounted: list[Path], *, rounds: int, nbytes: int) -> dict[str, Any]:
    (group / "cgroup.procs").write_text(str(os.getpid()))
    memory = touched(Prefix.of(SMOLLM2, 1, nbytes).nbytes, "benchmark")
    np.frombuffer(memory, np.uint8)[:] = np.random.default_rng(1).integers(0, 256, memory.nbytes, np.uint8)
    warm = [_prompt(nbytes // 2, seed=seed) for seed in range(1, 5)]
    measured = _prompt(nbytes, seed=5)
    written: dict[str, float] = {}
    read: dict[str, list[float]] = {name: [] for name in TIERS}
    with ExitStack() as stack:
        caches = {}
        for name, rates in TIERS.items():
            tier = _tier([mounted.pop(0) for _ in rates])
            caches[name] = stack.enter_context(PrefixCache([tier], identity=IDENTITY, representation=SMOLLM2))
        for name, cache in caches.items():
            for prompt in warm:
                _save(cache, prompt, memory)  # its rates are known from here on
            written[name] = _save(cache, measured, memory)
        for number in range(rounds + 1):
            for name, cache in caches.items():
                rate = _load(cache, measured, memory)
                if number:  # the first warms up
                    read[name].append(rate)
    return {
        "bytes": measured.nbytes,
        "rates": {name: list(rates) for name, rates in TIERS.items()},
        "written_bytes_per_s": written,
        "read_bytes_per_s": {name: statistics.median(rates) for name, rates in read.items()},
        "ratio": {name: asdict(paired_ratio(read[name], read["one"])) for name in TARGETS},
        "write_ratio": {name: written[name] / written["one"] for name in TARGETS},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    if "skipped" in result:
        return f"Not measured: {result['skipped']}."
    rows = [
        f"A prompt of {result['bytes'] / 1e6:,.0f} MB of KV, every piece checked; medians of {result['rounds']} interleaved "
        "rounds. The devices are throttled, so the ratios say how well they add up, not how fast a disk is.",
        "",
        "| devices (MB/s) | read | to one device | target | write | to one device |",
        "|---|---|---|---|---|---|",
    ]
    for name, rates in result["rates"].items():
        read, written = result["read_bytes_per_s"][name] / 1e6, result["written_bytes_per_s"][name] / 1e6
        ratio, goal, write_ratio = "", "", ""
        if name in result["ratio"]:
            one = result["ratio"][name]
            ratio = f"**{one['median']:.2f}** [{one['low']:.2f} … {one['high']:.2f}]"
            goal, write_ratio = f"≥ {result['targets'][name]}", f"{result['write_ratio'][name]:.2f}"
        devices = " + ".join(f"{rate / 1e6:.0f}" for rate in rates)
        rows.append(f"| {devices} | {read:,.0f} MB/s | {ratio} | {goal} | {written:,.0f} MB/s | {write_ratio} |")
    return "\n".join(rows)


def _tier(directories: Sequence[Path]) -> DeviceTier:
    return DeviceTier.open(
        directories,
        open_directory=lambda path, nbytes: DiskTier.open(path, capacity_bytes=nbytes),
        capacities=lambda rooms: [room.total_bytes * 9 // 10 for room in rooms],
    )


def _prompt(nbytes: int, *, seed: int) -> Prefix:
    count = max(1, nbytes // (SMOLLM2.bytes_per_token or 1) // BLOCK_TOKENS)
    tokens = np.arange(count * BLOCK_TOKENS + 1, dtype=np.uint32) + np.uint32(seed << 20)
    return Prefix(SMOLLM2, 1, tokens, chain_keys(tokens[:-1], root=IDENTITY.root()))


def _save(cache: PrefixCache, prompt: Prefix, memory: memoryview) -> float:
    started = time.monotonic()
    for _ in range(4):  # on a busy machine a write may be given up; what is there already is not written again
        result = cache.save(prompt.tokens, Destination(prompt, memory)).wait(300.0)
        if result.reason is None:
            break
        time.sleep(10.0)
    assert result.reason is None, result
    return prompt.nbytes / (time.monotonic() - started)


def _load(cache: PrefixCache, prompt: Prefix, memory: memoryview) -> float:
    into = Destination(prompt, memory)
    into.poison()
    with cache.match(prompt.tokens) as lease:
        load = lease.load(into)
        tokens = load.result()
    assert tokens == len(prompt.keys) * BLOCK_TOKENS, f"{tokens} tokens came, {load.faults}"
    return prompt.nbytes / load.seconds


# Throttled devices.


def _cannot() -> str | None:
    """Return why this machine cannot be measured, or None."""
    if os.geteuid() != 0:
        return "loop devices and their throttles need root"
    if not (BLKIO / "blkio.throttle.read_bps_device").exists():
        return f"there is no blkio controller (cgroup v1) at {BLKIO}"
    missing = [tool for tool in ("losetup", "mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    return f"{', '.join(missing)} is not installed" if missing else None


def _mounted(stack: ExitStack, folder: Path, group: Path, rates: Sequence[int], *, image_bytes: int) -> list[Path]:
    """Return a directory on a device of its own for each rate. Everything is undone with the stack, in the reverse order."""
    directories = []
    for number, rate in enumerate(rates):
        image, mount = folder / f"{number}.img", folder / f"{number}"
        with image.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, image_bytes)
        device = _run("losetup", "--find", "--show", "--direct-io=on", str(image))
        stack.callback(_run, "losetup", "--detach", device)
        _run("mkfs.ext4", "-q", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        mount.mkdir()
        _run("mount", device, str(mount))
        stack.callback(_run, "umount", "--lazy", str(mount))
        numbers = os.stat(device).st_rdev
        for direction in ("read", "write"):
            throttle = group / f"blkio.throttle.{direction}_bps_device"
            throttle.write_text(f"{os.major(numbers)}:{os.minor(numbers)} {rate}\n")
        directories.append(mount / "kv")
    return directories


@contextmanager
def _group() -> Iterator[Path]:
    """A control group for who measures."""
    group = BLKIO / f"headstart-bench-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        for _ in range(100):
            with suppress(OSError):
                group.rmdir()
                break
            time.sleep(0.05)  # the kernel lets go of a group some time after its last thread


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout.strip()
