"""From what vLLM registered to a representation: which layers there are, how large their pages, whose shard they are.

Nothing is guessed. What is not known to be right is refused with a sentence, and then nothing is stored or found: KV whose
scales are computed while serving, positions that are split over ranks, a drafter's layers, states that vLLM does not keep.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from headstart.block.keys import BLOCK_TOKENS
from headstart.block.representation import KVKind, Representation
from headstart.connect.vllm.memory import Memory, UnknownLayout, memory_of

# What a page holds is in these a plain function of the tokens before it. Others may be so too, but nobody has looked.
_KNOWN_SPECS = frozenset({"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_RECURRENT = "MambaSpec"  # of all recurrent layers: Mamba, gated delta nets, short convolutions
_OWN_DRAFTER = frozenset({"ngram", "ngram_gpu", "suffix"})  # ways to speculate that have no KV


class NotStored(Exception):
    """This model, or the way in which it is served, is not stored; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Group:
    """A KV cache group: `layers` (by number in the representation) share one table of blocks of `block_tokens` tokens."""

    layers: tuple[int, ...]
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`groups`: in vLLM's order, those that hold KV. `states`: those of recurrent layers, each by the numbers that its layers
    have in the memory, behind all that hold KV; `state_bytes`: of one block of all of these, a request's whole state, 0 where
    there is none. `writes`: whether this rank saves, or another one that has the same."""

    representation: Representation
    groups: tuple[Group, ...]
    writes: bool
    states: tuple[tuple[int, ...], ...] = ()
    state_bytes: int = 0

    def pages(self, group: Group) -> int:
        """Return how many blocks of a group make a piece."""
        return self.representation.piece_tokens // group.block_tokens


def piece_tokens(kv_cache_config: Any) -> int:
    """Return lcm(64, every group's block): the least that is stored and hit. Raises NotStored."""
    return math.lcm(BLOCK_TOKENS, *(group.kv_cache_spec.block_size for group in stored_groups(kv_cache_config)))


def stored_groups(kv_cache_config: Any) -> Sequence[Any]:
    """Return the groups that are stored, all or none. Raises NotStored."""
    groups = list(kv_cache_config.kv_cache_groups)
    if not groups:
        raise NotStored("this model has no KV cache")
    for number, group in enumerate(groups):
        names = {type(spec).__name__ for spec in _specs(group)}
        if is_recurrent(group):
            modes = {spec.mamba_cache_mode for spec in _specs(group)}
            if modes - {"align"}:
                raise NotStored(
                    "this model has recurrent layers, and vLLM keeps no states of them by which a prefix could be found again: "
                    f"mamba_cache_mode is {', '.join(sorted(modes))}, which needs to be align (--enable-prefix-caching)"
                )
            continue
        if names - _KNOWN_SPECS:
            unknown = ", ".join(sorted(names - _KNOWN_SPECS))
            raise NotStored(f"this model keeps {unknown} beside plain KV, and one is of no use without the other")
        if group.is_eagle_group:
            raise NotStored("a drafter's KV depends on weights that have no part in what blocks are called")
        if number not in kv_cache_config.prefix_cacheable_group_ids:
            raise NotStored(f"vLLM says that KV cache group {number} is not for prefix caching")
    if all(is_recurrent(group) or not group.layer_names for group in groups):
        raise NotStored("a rank has recurrent layers alone; states are stored behind KV, and there is none")
    return groups


def is_recurrent(group: Any) -> bool:
    """Return whether a KV cache group holds states that run through the prompt, one block each, instead of KV."""
    specs = _specs(group) or [group.kv_cache_spec]  # a rank may have none of a group's layers
    return all(type(spec).__name__ == _RECURRENT for spec in specs)


def require_plain(vllm_config: Any) -> None:
    """Raise NotStored for a way of serving in which a page is more, or less, than KV of known tokens."""
    parallel = vllm_config.parallel_config
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        raise NotStored("with context parallelism every rank holds other tokens of a page")
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise NotStored("calculate_kv_scales makes the scales of KV depend on what was served first")
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in _OWN_DRAFTER:
        raise NotStored(f"speculative decoding by {speculative.method!r} keeps KV of a second model")


def require_steady_states(vllm_config: Any, groups: Sequence[Any]) -> None:
    """Raise NotStored where states of recurrent layers are not those behind a step's last token."""
    if vllm_config.speculative_config is not None and any(map(is_recurrent, groups)):
        raise NotStored("with speculative decoding the states of recurrent layers run ahead of the tokens that are accepted")


def layout_of(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], *, tensor_rank: int
) -> tuple[Layout, Memory]:
    """Return how this rank's KV lies, and its memory. Raises NotStored."""
    require_plain(vllm_config)
    groups = stored_groups(kv_cache_config)
    require_steady_states(vllm_config, groups)
    piece = piece_tokens(kv_cache_config)
    specs = {name: spec for group in groups for name, spec in _specs_by_layer(group)}
    group_of = {name: number for number, group in enumerate(groups) for name in group.layer_names}
    # Layers of a group that read another's KV are registered too; layers of several groups share memory, not blocks.
    seen: set[tuple[int, int]] = set()
    names: list[str] = []
    recurrent: list[str] = []
    for name in sorted(specs, key=_place):
        if name not in kv_caches:
            raise NotStored(f"layer {name} has no KV that was registered")
        where = (group_of[name], kv_caches[name].data_ptr())
        if where not in seen:
            seen.add(where)
            (recurrent if is_recurrent(groups[group_of[name]]) else names).append(name)
    try:
        memory = memory_of([kv_caches[name] for name in names + recurrent], blocks=kv_cache_config.num_blocks)
    except UnknownLayout as error:
        raise NotStored(str(error)) from error
    numbers = {name: number for number, name in enumerate(names + recurrent)}

    def numbers_in(group: Any) -> tuple[int, ...]:
        return tuple(numbers[name] for name in group.layer_names if name in numbers)

    found = tuple(Group(numbers_in(group), group.kv_cache_spec.block_size) for group in groups if not is_recurrent(group))
    states = tuple(numbers_in(group) for group in groups if is_recurrent(group))
    layer_bytes = [0] * len(names)
    for group in found:
        for layer in group.layers:
            layer_bytes[layer] = piece // group.block_tokens * memory.page_bytes[layer]
    shard, writes = _shard(vllm_config, kv_cache_config, tensor_rank)
    if recurrent:  # each rank has states of its own, whatever its KV is
        shard, writes = f"{tensor_rank}/{vllm_config.parallel_config.tensor_parallel_size}", True
    representation = Representation(
        kind=_kind(vllm_config, specs.values()),
        layout=_layout_name(vllm_config, [(name, specs[name], kv_caches[name]) for name in names + recurrent]),
        dtype="+".join(sorted({str(specs[name].dtype).removeprefix("torch.") for name in names})),
        layer_bytes=tuple(layer_bytes),
        piece_tokens=piece,
        quantisation=f"kv {vllm_config.cache_config.cache_dtype}, weights {vllm_config.model_config.quantization or 'plain'}",
        shard=shard,
        state="required" if recurrent else "none",
        layer_numbers=_layer_numbers(names),
    )
    state_bytes = sum(memory.page_bytes[number] for group in states for number in group)
    return Layout(representation, found, writes, states, state_bytes), memory


def _specs(group: Any) -> list[Any]:
    return [spec for _, spec in _specs_by_layer(group)]


def _specs_by_layer(group: Any) -> list[tuple[str, Any]]:
    several = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [(name, several[name] if several else group.kv_cache_spec) for name in group.layer_names]


def _kind(vllm_config: Any, specs: Any) -> KVKind:
    if any(type(spec).__name__ == "MLAAttentionSpec" for spec in specs):
        return "mla"
    model = vllm_config.model_config
    attention = model.get_num_attention_heads(vllm_config.parallel_config)
    return "mha" if model.get_num_kv_heads(vllm_config.parallel_config) == attention else "gqa"


def _shard(vllm_config: Any, kv_cache_config: Any, rank: int) -> tuple[str, bool]:
    """Return whose part of each page this is, and whether it is this rank that writes it: of ranks that hold the same, the
    first does."""
    ranks, replicas = vllm_config.parallel_config.tensor_parallel_size, kv_cache_config.kv_tp_replicas
    if ranks == replicas:
        return "replicated", rank == 0
    return f"{rank // replicas}/{ranks // replicas}", rank % replicas == 0


def _layout_name(vllm_config: Any, layers: Sequence[tuple[str, Any, torch.Tensor]]) -> str:
    """Return a name that differs whenever bytes may: the engine and its version in words, all else by digest."""
    import vllm

    device = layers[0][2].device.type
    facts = {
        "device": device,
        "instructions": torch.backends.cpu.get_cpu_capability() if device == "cpu" else "",
        "backend": str(getattr(vllm_config.attention_config, "backend", None)),
        "computed in": str(vllm_config.model_config.dtype),
        "layers": [
            [name, type(spec).__name__, spec.block_size, *_content(spec), list(view.shape[1:]), _order(view)]
            for name, spec, view in layers
        ],
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    return f"vllm/{vllm.__version__}/{device}/{digest}"


def _content(spec: Any) -> list[Any]:
    """Return what the bytes of a page are: numbers of one type, or a state's parts one behind the other."""
    if type(spec).__name__ == _RECURRENT:
        return [
            spec.mamba_type.name,
            *([list(shape), str(dtype)] for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)),
        ]
    return [str(spec.dtype)]


def _order(view: torch.Tensor) -> list[int]:
    """Return the axes of a page, outermost in memory first."""
    strides = view.stride()
    return sorted(range(1, view.ndim), key=lambda axis: (-strides[axis], axis))


def _place(name: str) -> tuple[list[int], str]:
    return [int(number) for number in re.findall(r"\d+", name)], name


def _layer_numbers(names: Sequence[str]) -> tuple[int, ...]:
    """Return which of the model's layers each is; several of one layer are told apart by a number behind it."""
    indices = [int(numbers[0]) if (numbers := re.findall(r"(?<![\w])\d+(?![\w])", name)) else 0 for name in names]
    if len(set(indices)) == len(indices):
        return tuple(indices)
    return tuple(index * 64 + indices[:at].count(index) for at, index in enumerate(indices))
