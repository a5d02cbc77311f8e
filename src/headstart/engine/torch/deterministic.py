"""Deterministic mode: a token's logits are the same to the bit, whether what stands before it was computed or read, in whatever
portions it once was computed, and whatever else runs.

The last bits of a float depend on the shapes of the matrices from which it came. So here a request's passes have shapes that
follow from the tokens and from where the prompt ends, and from nothing else:

    prompt ├──────── 256 ────────┼──────── 256 ────────┼─ the rest ─┤1│1│1│1│1│  one token of the answer at a time
                                                       ├──────── 256 ────────┤  and, when the chunk is full, all of it anew

    · a request is alone in its pass, and shares no KV memory with another
    · only whole chunks are stored, each computed in one pass of 256 rows: a cold prompt computes the very bits that a hit reads
    · a hit is floored to whole chunks, which are the pieces of the representation
    · the KV of an answer's tokens, computed one by one, is replaced when their chunk is full, before anything can be stored

The same shapes give the same bits for one build of torch on one kind of processor with one number of threads. `manner` tells
these apart, as a part of the representation: no other process reads what would not be its own bits.
"""

from __future__ import annotations

import platform
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch
import transformers

from headstart import __version__
from headstart.engine.torch.kernel import kernel
from headstart.engine.torch.model import Model
from headstart.engine.torch.packing import PackedLinear
from headstart.engine.torch.stock import StockModel
from headstart.errors import ConfigError

CHUNK_TOKENS = 256


def next_count(*, computed: int, prompt_tokens: int, known_tokens: int) -> int:
    """Return how many tokens a request's next pass computes: a whole chunk, the rest of the prompt, or one token.

    A chunk that ends in the answer is computed as a whole only once the token behind it is known: that one is chosen from
    logits of a single row, also when a request begins again in the middle of its answer."""
    if computed % CHUNK_TOKENS == 0:
        end = computed + CHUNK_TOKENS
        if end <= prompt_tokens or end < known_tokens:
            return CHUNK_TOKENS
        if computed < prompt_tokens:
            return prompt_tokens - computed
    return 1


def reached(*, computed: int, count: int) -> int:
    """Return how many tokens count as computed after a pass over `count` more: a chunk that is full, and was not computed in
    one pass, is to be computed anew."""
    end = computed + count
    return end - CHUNK_TOKENS if end % CHUNK_TOKENS == 0 and count < CHUNK_TOKENS else end


def make_deterministic(model: Model) -> str:
    """Let the model's KV be stored in whole chunks, apart from all that is computed otherwise, and return on what its bits
    depend. Raises ConfigError for a model whose bits would depend on more."""
    why = None
    if model.device.type != "cpu":
        why = f"holds on CPUs only, and the model is on {model.device.type}; set engine.device to cpu"
    elif isinstance(model, StockModel):
        why = f"is not possible with {model.name}, which runs as it is; take another model, or leave it out"
    elif model.shape.state is not None:  # a chunk cannot be computed anew: the state has gone on
        why = f"is not possible with {model.name}, whose recurrent layers keep a state; take another model, or leave it out"
    if why is not None:
        raise ConfigError(f"engine.deterministic {why}", key="engine.deterministic")
    depends = _circumstances(model)
    digest = sha256(depends.encode()).hexdigest()[:16]
    manners = filter(None, (model.shape.manner, f"deterministic/1 {digest}"))
    model.shape = replace(model.shape, piece_tokens=CHUNK_TOKENS, manner=", ".join(manners))
    return depends


def _circumstances(model: Model) -> str:
    """Return, in one line, on what the bits depend beside weights and tokens."""
    native = kernel()
    packed = any(isinstance(one, PackedLinear) for one in model.module.modules())
    return ", ".join(
        (
            f"headstart {__version__}",
            f"torch {torch.__version__}",
            f"transformers {transformers.__version__}",
            f"{torch.get_num_threads()} threads",
            torch.backends.cpu.get_cpu_capability(),
            _processor(),
            f"{'packed' if packed else 'plain'} weights",
            "attention by torch" if native is None else f"attention in C, {native.lanes} lanes",
            f"chunks of {CHUNK_TOKENS}",
        )
    )


def _processor() -> str:
    """Return the processor's name: matrix libraries choose their kernels, and how they cut a product, by it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []  # not Linux
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
