"""From a GGUF and a configuration to a running engine: library, weights, a memory plan, cache, warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import numpy.typing as npt

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import Representation
from headstart.cache.open import memory_to_come
from headstart.config import Config, parse_size
from headstart.engine.base import EngineInfo
from headstart.engine.caching import open_told
from headstart.engine.checkpoint import file_digests
from headstart.engine.host import free_bytes, physical_cores
from headstart.engine.llama.binding import Library
from headstart.engine.llama.context import MOST_SEQUENCES, Context, Row, WrongState
from headstart.engine.llama.engine import LlamaEngine
from headstart.engine.llama.weights import Weights
from headstart.engine.local_models import parts_of
from headstart.errors import ModelError
from headstart.tier.arena import Arena

_log = logging.getLogger(__name__)

_UBATCH = 512  # tokens that libllama computes at once; more win nothing on CPUs
_LEAST_CONTEXT = 128
_OFF = 0.02  # of the largest logit, that what comes back may give; on CPUs nothing
_FUSED: bool | None = None  # attention: where it can be
_COMPUTE_BYTES = 512 << 20  # that libllama and this process take beside weights and KV
_PASSAGE_BYTES = 256 << 20  # that reads pass through
_PASSAGE_PIECES = 16  # that must fit there at least
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Bytes that a token's KV takes in a state and in memory, that a piece has beside, and of a recurrent state."""

    token_bytes: int
    piece_bytes: int
    state_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """`fused`: attention. `no_use`: why what would be stored of this model cannot be used; "" where it can."""

    kv_type: str
    fused: bool
    sizes: StateSizes
    no_use: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`cells`: tokens that all requests hold together; `sequences`: of libllama's; `memory_tier_bytes`: before the disk."""

    context_tokens: int
    cells: int
    sequences: int
    max_running: int
    memory_tier_bytes: int
    passage_bytes: int


def open_engine(file: Path, config: Config, *, on_progress: Callable[[str, float | None], None]) -> LlamaEngine:
    """See `headstart.engine.llama.open_engine`."""
    library = Library(Path(config.engine.libllama).expanduser() if config.engine.libllama else None)
    gpu = bool(library.supports_gpu_offload()) and config.engine.device != "cpu"
    free = free_bytes()
    _require_room(file, free, gpu=gpu)  # before it is read for the first time
    digest = None
    if config.cache.enabled:
        on_progress("reading the weights' identity", None)
        digest = _digest(parts_of(file), config.models_directory.expanduser() / "digests.json")
    on_progress("loading the weights", 0.0)
    weights = Weights(
        library,
        file,
        gpu_layers=None if gpu else 0,
        on_progress=lambda fraction: on_progress("loading the weights", fraction),
    )
    try:
        return _open_over(weights, digest, config, free=free - (0 if gpu else weights.nbytes), gpu=gpu, on_progress=on_progress)
    except BaseException:
        weights.close()
        raise


def _open_over(
    weights: Weights,
    digest: bytes | None,
    config: Config,
    *,
    free: int,
    gpu: bool,
    on_progress: Callable[[str, float | None], None],
) -> LlamaEngine:
    on_progress("preparing memory", None)
    threads = physical_cores()
    measured = measure(weights, kv_type=config.engine.kv_type, threads=threads)
    kv_type, sizes = measured.kv_type, measured.sizes
    plan = plan_memory(weights, sizes, config, free=free)
    batch = max(1, min(config.engine.prefill_chunk, plan.context_tokens))
    context = Context(
        weights,
        cells=plan.cells,
        sequences=plan.sequences + 1,
        kv_type=kv_type,
        batch=batch + plan.max_running,  # answers beside a whole chunk
        ubatch=_UBATCH,
        threads=threads,
        flash=measured.fused,
    )
    with ExitStack() as stack:  # what is open where something after it fails
        stack.callback(context.close)
        device = "gpu" if gpu else "cpu"
        cache, said = None, "off by configuration"
        passage = None
        if measured.no_use:
            said = f"off: {measured.no_use}"
            _log.warning("no prefixes are kept: %s", measured.no_use)
        elif digest is not None:
            representation = Representation(
                kind="opaque",
                layout=_layout(weights, flash=measured.fused, gpu=gpu),
                dtype=kv_type,
                layer_bytes=(sizes.piece_bytes,),
                piece_tokens=BLOCK_TOKENS,
                state="required" if weights.recurrent else "none",
            )
            # The file is the whole of it: weights, RoPE settings, everything that changes the numbers.
            identity = Identity(weights=digest, architecture=b"gguf")
            settings = replace(config.cache, memory=str(plan.memory_tier_bytes))
            cache, said = open_told(settings, identity=identity, representation=representation)
            if cache is not None:
                stack.callback(cache.close)
                passage = Arena(plan.passage_bytes, name="passage")
                stack.callback(passage.close)
                cache.warm()
        name = weights.metadata("general.name") or weights.file.stem
        _log.info("%s", _told(name, weights, plan, sizes, kv_type=kv_type, threads=threads))
        engine = LlamaEngine(
            weights,
            context,
            info=EngineInfo(
                model=name,
                context_tokens=plan.context_tokens,
                vocabulary=weights.vocabulary.size,
                device=device,
                dtype=f"{weights.description}, {kv_type} KV",
                layers=weights.layers,
                kv_bytes_per_token=sizes.token_bytes,
                cache=said,
            ),
            cells=plan.cells,
            sequences=plan.sequences,
            piece_bytes=sizes.piece_bytes,
            cache=cache,
            passage=passage,
            max_running=plan.max_running,
            chunk_tokens=batch,
            load_timeout_s=config.cache.load_timeout_s,
            save_every=config.cache.save_every,
        )
        stack.pop_all()  # all of it is the engine's now
    try:
        on_progress("warming up", None)
        engine.warm_up()
    except BaseException:
        engine.close()
        raise
    on_progress("ready", 1.0)
    return engine


def measure(weights: Weights, *, kv_type: str, threads: int) -> Measured:
    """Compute a block, because architectures differ and libllama does not say. A `kv_type` of "auto" is f16."""
    kv_type = "f16" if kv_type == "auto" else kv_type
    block = [token % weights.vocabulary.size for token in range(BLOCK_TOKENS)]
    most = len(block)
    context = Context(weights, cells=256, sequences=2, kv_type=kv_type, batch=most, ubatch=most, threads=threads, flash=_FUSED)
    try:
        context.compute([Row(1, block, 0, wanted=False)])
        one, two, piece = (len(context.copy_out(1, 0, end)) for end in (1, 2, BLOCK_TOKENS))
        state = len(context.state_out(1)) if weights.recurrent else 0
        return Measured(kv_type, context.flash_attention, StateSizes(two - one, piece, state), _why_of_no_use(context))
    finally:
        context.close()


def _why_of_no_use(context: Context) -> str:
    """Return why bytes that were copied out of a sequence of one block do not give it back; "" where they do."""

    def next_logits() -> npt.NDArray[np.float32]:
        (output,) = context.compute([Row(1, [0], BLOCK_TOKENS, wanted=True)])
        return context.logits(output).copy()

    try:
        piece = context.copy_out(1, 0, BLOCK_TOKENS)
        state = context.state_out(1) if context.recurrent else None
        wanted = next_logits()
        context.remove(1)
        context.put_in(1, memoryview(piece), 0, BLOCK_TOKENS)
        if state is not None:
            context.state_in(1, memoryview(state), BLOCK_TOKENS)
        off = float(np.abs(next_logits() - wanted).max() / np.abs(wanted).max())
    except WrongState as error:
        return f"libllama does not give back what it keeps of this architecture: {error.message}"
    if not off <= _OFF:
        return f"what libllama gives back of this architecture is not what was computed: logits are {off:.0%} off"
    return ""


def plan_memory(weights: Weights, sizes: StateSizes, config: Config, *, free: int) -> MemoryPlan:
    """Return what is to be held where, of `free` bytes beside the weights. One full context always fits: it is cut to what
    there is. Raises ModelError."""
    wanted = min(weights.context_tokens or 1 << 31, config.engine.context or 1 << 31)
    if not weights.context_tokens and config.engine.context is None:
        wanted = 8192  # a recurrent model that names none
    free -= _COMPUTE_BYTES
    memory_tier = min(memory_to_come(config.cache), max(0, free // 4))
    passage = max(_PASSAGE_PIECES * sizes.piece_bytes, min(_PASSAGE_BYTES, max(0, free // 16)))
    max_running = min(config.engine.max_running, MOST_SEQUENCES // 2 - 2)
    # Who has ended is held until it is saved; a recurrent model has a state for each.
    sequences = max_running + (4 if weights.recurrent else max_running)
    states = (sequences + 1) * sizes.state_bytes
    each = max(1, sizes.token_bytes)
    if config.engine.kv_memory == "auto":
        budget = max(0, free - memory_tier - passage - states) // 2
    else:
        budget = parse_size(config.engine.kv_memory)
    context = min(wanted, budget // each // BLOCK_TOKENS * BLOCK_TOKENS)
    if context < min(_LEAST_CONTEXT, wanted):
        raise ModelError(
            f"{max(0, budget) / _MIB:,.4g} MiB of KV memory are too little for {weights.file.name}, of which a token takes "
            f"{each:,} bytes; set engine.kv_memory higher, or take a smaller model or engine.kv_type",
            path=weights.file,
        )
    if context < wanted:
        _log.warning(
            "KV memory of %d bytes holds %d tokens of %s: the context is cut from %d to that",
            budget,
            context,
            weights.file.name,
            wanted,
        )
    cells = min(max_running * context, max(context, budget // each))
    cells = max(256, -(-cells // 256) * 256)  # libllama's own grain
    return MemoryPlan(context, cells, sequences, max_running, memory_tier, passage)


def _digest(parts: Sequence[Path], digests: Path) -> bytes:
    """Return the SHA-256 of a file, or one of those of the files that a model lies in."""
    found = file_digests(parts, digests=digests)
    return found[0] if len(found) == 1 else sha256(b"".join(found)).digest()


def _require_room(file: Path, free: int, *, gpu: bool) -> None:
    """Raise ModelError for a file that is not there, or larger than what is free: that would be read again for each token."""
    nbytes = 0
    for part in parts_of(file):
        try:
            nbytes += part.stat().st_size
        except OSError as error:
            raise ModelError(f"{part} cannot be read: {error.strerror}", path=part, errno=error.errno) from error
    if nbytes > free and not gpu:
        raise ModelError(
            f"{file} is {nbytes / _MIB:,.0f} MiB and {free / _MIB:,.0f} MiB of memory are free; take a smaller one",
            path=file,
            nbytes=nbytes,
            free_bytes=free,
        )


def _layout(weights: Weights, *, flash: bool, gpu: bool) -> str:
    """Name what the bytes of a state depend on: the build, the backend and how values are laid."""
    build = sha256(weights.library.build.encode()).hexdigest()[:16]
    return f"libllama-state/1/{build}/{'gpu' if gpu else 'cpu'}/{'fused' if flash else 'plain'}/unified"


def _told(name: str, weights: Weights, plan: MemoryPlan, sizes: StateSizes, *, kv_type: str, threads: int) -> str:
    kv = (plan.cells * sizes.token_bytes + (plan.sequences + 1) * sizes.state_bytes) / _MIB
    return (
        f"memory plan: weights {weights.nbytes / _MIB:,.0f} MiB; KV {kv:,.0f} MiB ({plan.cells:,} tokens in {kv_type}, up to "
        f"{plan.max_running} requests of {plan.context_tokens:,}); memory tier {plan.memory_tier_bytes / _MIB:,.0f} MiB; "
        f"{threads} threads (change with --context, --max-running, --kv-memory, --kv-type, --cache-memory)"
    )
