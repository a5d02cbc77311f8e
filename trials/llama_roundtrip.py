"""One GGUF prompt through PrefixCache and the disk tier: computed, saved as opaque states, killed, restored, compared.

    python trials/llama_roundtrip.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Child processes, so that nothing survives but the directory: `facts` (sizes, costs and equality of states in memory), `save`
(ended by SIGKILL once its tickets are done) and `restore`. Saved twice, once with the state's size fixed in the representation
and once with sizes that vary. Prints one JSON object; exits 1 on any mismatch.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.llama.binding import Library
from headstart.engine.llama.context import Context, Row
from headstart.engine.llama.weights import Weights
from headstart.tier.disk import DiskTier

PIECE = 64
PREFIX = 768  # tokens saved
SUFFIX = 64  # tokens computed after a restore
ANSWER = 16  # greedy tokens compared
SIZES = ("fixed", "varying")  # of a piece, in the representation
N_CTX = 4096
BATCH = 256
THREADS = 2
TIMEOUT_S = 120.0
PROMPT = Path(__file__).parent.parent / "LICENSE"


class Prompt:
    """One sequence of a context of the engine's, with fused attention."""

    def __init__(self, weights: Weights, *, kv_type: str = "f16") -> None:
        self._context = Context(
            weights, cells=N_CTX, sequences=2, kv_type=kv_type, batch=BATCH, ubatch=BATCH, threads=THREADS, flash=True
        )

    def __enter__(self) -> Prompt:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.close()

    def decode(self, tokens: Sequence[int], *, start: int) -> npt.NDArray[np.float32]:
        """Compute `tokens` at positions from `start`, in fixed batches; return the logits after the last one."""
        output = 0
        for at in range(0, len(tokens), BATCH):
            (output,) = self._context.compute([Row(1, tokens[at : at + BATCH], start + at, wanted=True)])
        return self._context.logits(output).copy()

    def greedy(self, logits: npt.NDArray[np.float32], *, start: int, tokens: int) -> list[int]:
        """Return `tokens` greedy tokens; the first is chosen from `logits`."""
        out: list[int] = []
        for i in range(tokens):
            out.append(int(logits.argmax()))
            logits = self.decode(out[-1:], start=start + i)
        return out

    def save_range(self, first: int, end: int) -> bytearray:
        return self._context.copy_out(1, first, end)

    def restore_range(self, state: memoryview | bytearray, first: int, end: int) -> None:
        self._context.put_in(1, memoryview(state), first, end)

    def clear(self) -> None:
        self._context.remove(1)


class SavedStates:
    """KVView for saving: states that were copied out on the thread that decodes, for the writer threads to take."""

    def __init__(self, states: Sequence[bytearray]) -> None:
        self._states = states

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        return [memoryview(state) for state in self._states[first : first + len(sizes)]]


class LoadedStates:
    """KVView for loading: host memory for the states, made when their sizes are known; set into the context afterwards."""

    def __init__(self) -> None:
        self.states: dict[int, memoryview] = {}

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        run = memoryview(bytearray(sum(sizes)))
        at = 0
        for piece, size in enumerate(sizes, start=first):
            self.states[piece] = run[at : at + size]
            at += size
        return [run]


def facts(library: Library, weights: Weights, tokens: list[int]) -> dict[str, object]:
    """Return sizes, milliseconds and logit differences of states of 64 and 256 tokens, moved in memory only."""
    out: dict[str, object] = {}
    for kv_type in ("f16", "q8_0"):
        with Prompt(weights, kv_type=kv_type) as context:
            context.decode(tokens[:PREFIX], start=0)
            never_saved = context.decode(tokens[PREFIX:], start=PREFIX)
            for piece in (64, 256):
                starts = range(0, PREFIX, piece)
                began = time.perf_counter()
                states = [context.save_range(at, at + piece) for at in starts]
                save_s = time.perf_counter() - began
                row: dict[str, object] = {"sizes": sorted({len(s) for s in states})}
                row["save_ms"] = round(save_s / len(states) * 1e3, 2)
                for name, count in (("all", len(states)), ("half", len(states) // 2)):
                    context.clear()
                    began = time.perf_counter()
                    for at, state in zip(starts, states[:count], strict=False):
                        context.restore_range(state, at, at + piece)
                    row["restore_ms"] = round((time.perf_counter() - began) / count * 1e3, 2)
                    if count < len(states):
                        context.decode(tokens[count * piece : PREFIX], start=count * piece)
                    logits = context.decode(tokens[PREFIX:], start=PREFIX)
                    row[f"difference_{name}"] = float(np.abs(logits - never_saved).max())
                context.clear()
                for at, state in reversed(list(zip(starts, states, strict=True))):
                    context.restore_range(state, at, at + piece)
                logits = context.decode(tokens[PREFIX:], start=PREFIX)
                row["difference_restored_backwards"] = float(np.abs(logits - never_saved).max())
                context.clear()
                for at, state in zip(starts, states, strict=True):
                    context.restore_range(state, at, at + piece)
                out[f"{kv_type}/{piece}"] = row
    out["ok"] = all(
        len(row["sizes"]) == 1 and row["difference_all"] == 0.0 and row["difference_half"] == 0.0
        for row in out.values()
        if isinstance(row, dict)
    )
    return out


def save(library: Library, weights: Weights, tokens: list[int], *, gguf: Path, directory: Path) -> dict[str, object]:
    """Compute the prefix and save it; return what the tickets say."""
    out: dict[str, object] = {}
    with Prompt(weights) as context:
        began = time.perf_counter()
        context.decode(tokens[:PREFIX], start=0)
        out["compute_s"] = round(time.perf_counter() - began, 3)
        # Copied out here: a context may not be asked from the saver's thread while this one decodes.
        states = [context.save_range(at, at + PIECE) for at in range(0, PREFIX, PIECE)]
    for sizes in SIZES:
        cache = _cache(library, gguf, directory, state_bytes=len(states[0]) if sizes == "fixed" else None)
        began = time.perf_counter()
        result = cache.save(tokens[:PREFIX], SavedStates(states)).wait(TIMEOUT_S)
        seconds = round(time.perf_counter() - began, 3)
        out[sizes] = dataclasses.asdict(result) | {"seconds": seconds, "overhead": _overhead(result.written_bytes, states)}
    out["ok"] = all(out[sizes]["stored_tokens"] == PREFIX for sizes in SIZES)
    return out


def restore(library: Library, weights: Weights, tokens: list[int], *, gguf: Path, directory: Path) -> dict[str, object]:
    """Restore what is on disk into new contexts; compare logits and greedy tokens with a context that never saw a cache."""
    with Prompt(weights) as context:
        context.decode(tokens[:PREFIX], start=0)
        state_bytes = len(context.save_range(0, PIECE))
        never_saved = context.decode(tokens[PREFIX:], start=PREFIX)
        want = context.greedy(never_saved, start=len(tokens), tokens=ANSWER)
    out: dict[str, object] = {}
    for sizes in SIZES:
        cache = _cache(library, gguf, directory, state_bytes=state_bytes if sizes == "fixed" else None)
        out[sizes] = _restore_one(weights, tokens, cache, never_saved=never_saved, want=want)
    out["ok"] = all(out[sizes]["ok"] for sizes in SIZES)
    return out


def _restore_one(
    weights: Weights, tokens: list[int], cache: PrefixCache, *, never_saved: npt.NDArray[np.float32], want: list[int]
) -> dict[str, object]:
    with Prompt(weights) as context:
        began = time.perf_counter()
        view = LoadedStates()
        with cache.match(tokens) as lease:
            matched = lease.tokens
            load = lease.load(into=view)
            usable = load.result(TIMEOUT_S)
        loaded_s = time.perf_counter() - began
        for piece in range(usable // PIECE):
            context.restore_range(view.states[piece], piece * PIECE, (piece + 1) * PIECE)
        restored_s = time.perf_counter() - began
        if usable < PREFIX:
            context.decode(tokens[usable:PREFIX], start=usable)
        logits = context.decode(tokens[PREFIX:], start=PREFIX)
        first_token_s = time.perf_counter() - began
        got = context.greedy(logits, start=len(tokens), tokens=ANSWER)
    difference = float(np.abs(logits - never_saved).max())
    problems = [str(problem) for problem in cache.check()]
    cache.close()
    return {
        "matched_tokens": matched,
        "usable_tokens": usable,
        "bytes_read": load.bytes_read,
        "load_s": round(loaded_s, 3),
        "restore_s": round(restored_s - loaded_s, 3),
        "first_token_s": round(first_token_s, 3),
        "difference": difference,
        "same_tokens": got == want,
        "problems": problems,
        "ok": matched == usable == PREFIX and difference == 0.0 and got == want and not problems,
    }


def _overhead(written_bytes: int, states: Sequence[bytearray]) -> float:
    """Return what the extents hold besides states, as a part of the states."""
    return round(written_bytes / sum(map(len, states)) - 1, 5)


def _cache(library: Library, gguf: Path, directory: Path, *, state_bytes: int | None) -> PrefixCache:
    with gguf.open("rb") as file:
        weights = hashlib.file_digest(file, "sha256").digest()
    build = hashlib.sha256(library.path.read_bytes()).hexdigest()[:16]
    representation = Representation(
        kind="opaque",
        layout=f"libllama-state/{build}/fa/unified",
        dtype="f16",
        layer_bytes=(state_bytes,),
        piece_tokens=PIECE,
    )
    identity = Identity(weights=weights, architecture=b"gguf")  # the GGUF holds its own configuration
    return PrefixCache([DiskTier.open(directory, capacity_bytes=1 << 30)], identity=identity, representation=representation)


def _child(phase: str, arguments: argparse.Namespace, directory: str) -> dict[str, object]:
    """Run one phase in its own process; return what it printed. `save` is ended by SIGKILL, as a power cut would."""
    command = [sys.executable, __file__, "--gguf", str(arguments.gguf), "--phase", phase, "--directory", directory]
    if arguments.libllama:
        command += ["--libllama", str(arguments.libllama)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if phase == "save":
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)
    return json.loads(line) if line else {"ok": False, "exit": process.returncode}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--libllama", type=Path, help="shared object; default: that of the installed xllamacpp")
    parser.add_argument("--directory", type=Path, help="cache directory; default: a temporary one")
    parser.add_argument("--phase", choices=("facts", "save", "restore"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.phase is None:
        with tempfile.TemporaryDirectory() as temporary:
            directory = str(arguments.directory or temporary)
            report = {phase: _child(phase, arguments, directory) for phase in ("facts", "save", "restore")}
        print(json.dumps(report, indent=2))
        return 0 if all(part["ok"] for part in report.values()) else 1

    library = Library(arguments.libllama)
    weights = Weights(library, arguments.gguf, gpu_layers=0)
    tokens = weights.vocabulary.tokenise(PROMPT.read_text(), special_tokens=True)[: PREFIX + SUFFIX]
    if arguments.phase == "facts":
        result = facts(library, weights, tokens)
    elif arguments.phase == "save":
        result = save(library, weights, tokens, gguf=arguments.gguf, directory=arguments.directory)
    else:
        result = restore(library, weights, tokens, gguf=arguments.gguf, directory=arguments.directory)
    print(json.dumps(result), flush=True)
    if arguments.phase == "save":
        sys.stdin.read()  # until killed
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
