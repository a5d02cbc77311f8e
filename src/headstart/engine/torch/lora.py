"""LoRA adapters beside a model: each request's rows get what its own adapter adds, in the same pass as everybody else's.

    rows of the batch │ A: adapter "sql" │ B: none │ C: adapter "chat" │
    q = W·x           │  + up·(down·x)   │         │  + up·(down·x)    │      down [rank, in], up [out, rank], scaled

An adapter is a folder in peft's format, read from its two files alone. What its configuration asks for and is not computed here
is refused with a sentence: an answer without it would be another adapter's. Its content has a part in the identity of blocks.
Each adapter is tried at opening, beside a text without one (`Adapters.probe`).
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.facts import CANNOT_RUN, first_line, probe_tokens
from headstart.engine.torch.kv_memory import ScratchKV
from headstart.engine.torch.packing import PackedLinear
from headstart.errors import ModelError

if TYPE_CHECKING:
    from headstart.engine.torch.model import TorchModel

# Fields of adapter_config.json that change no number, or are read here. Any other must be empty, false or null.
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "bias", "init_lora_weights"})
_HARMLESS = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "target_modules",
        "task_type",
    }
)
# Ways to begin a training that leave the base model as it is. Others (PiSSA, OLoRA, LoftQ …) move a part of it to the adapter.
_BEGINNINGS = frozenset({"eva", "gaussian", "orthogonal"})
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")


@dataclass(frozen=True, slots=True)
class Adapter:
    """`digest`: of all that its numbers depend on. `parts`: by name of a linear layer, down [rank, in] and up [out, rank]."""

    digest: bytes
    parts: Mapping[str, tuple[Tensor, Tensor]]


def read_adapter(folder: Path) -> Adapter:
    """Return the adapter in `folder`, in float32. Raises ModelError, naming the file, for what cannot be read or served."""
    file, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    try:
        config = json.loads(file.read_bytes())
        content = weights.read_bytes()
    except OSError as error:
        raise ModelError(
            f"{error.filename} cannot be read: {error.strerror}; name a folder with an adapter in peft's format",
            path=folder,
        ) from error
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}; write the adapter anew", path=file) from error
    if not isinstance(config, dict) or (why := _unserved(config)) is not None:
        raise ModelError(f"{file}: {why}; merge the adapter into its base model, and serve that", path=file)
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
    except SafetensorError as error:
        raise ModelError(f"{weights} cannot be read: {error}", path=weights) from error
    rank, alpha, rooted = int(config["r"]), float(config["lora_alpha"]), bool(config.get("use_rslora"))
    scale = alpha / (rank**0.5 if rooted else rank)
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        if found is None:
            raise ModelError(f"{weights} has a tensor {name!r}, which is no part of plain LoRA", path=weights)
        sides.setdefault(found[1], {})[found[2]] = tensor.float()
    parts = {}
    for name, side in sides.items():
        if side.keys() != {"A", "B"} or side["A"].shape[0] != rank or side["B"].shape[1] != rank:
            raise ModelError(f"{weights}: the two matrices of {name} are not both there with rank {rank}", path=weights)
        parts[name] = (side["A"], side["B"] * scale)
    said = struct.pack("<qd?", rank, alpha, rooted)
    return Adapter(sha256(b"headstart adapter 1\0" + said + sha256(content).digest()).digest(), parts)


def _unserved(config: Mapping[str, Any]) -> str | None:
    """Return what keeps an adapter with this configuration from being served, or None."""
    if config.get("peft_type") != "LORA":
        return f"its peft_type is {config.get('peft_type')!r}, and only LORA is served"
    if config.get("bias", "none") != "none":
        return f"it trains biases (bias is {config['bias']!r}), which is not served"
    if not isinstance(config.get("r"), int) or config["r"] < 1 or not isinstance(config.get("lora_alpha"), int | float):
        return "it names no rank r and lora_alpha"
    begun = config.get("init_lora_weights", True)
    if not isinstance(begun, bool) and begun not in _BEGINNINGS:
        return f"it was begun with {begun!r}, which changes the base model, too"
    others = sorted(name for name, value in config.items() if value and name not in _READ | _HARMLESS)
    return None if not others else f"it asks for {others[0]}, which is not served"


class Adapters:
    """The adapters of a model, by name. For one thread at a time."""

    def __init__(self, module: nn.Module, adapters: Mapping[str, Adapter]) -> None:
        """Put the adapters beside the linear layers of `module`. Raises ModelError for one that does not fit."""
        self.digests = {name: adapter.digest for name, adapter in adapters.items()}
        self._now = _Now()
        self._layers: dict[str, dict[str, AdaptedLinear]] = {name: {} for name in adapters}  # by adapter and name
        for name, adapter in adapters.items():
            for layer, (down, up) in adapter.parts.items():
                beside = self._layers[name][layer] = self._beside(module, layer, name)
                beside.add(name, down, up)

    @contextmanager
    def working(self, rows: Sequence[tuple[slice, str]], count: int) -> Iterator[None]:
        """Let adapters work on the given rows of a batch of `count` rows."""
        self._now.rows, self._now.count = tuple(rows), count
        try:
            yield
        finally:
            self._now.rows = ()

    def probe(self, model: TorchModel) -> None:
        """Run a short text with each adapter beside the same one without. Raises ModelError for an adapter that the model
        cannot be run with, that it never comes to in part, or that reaches others' rows."""
        tokens = probe_tokens(model.vocabulary)
        relative = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
        for name, layers in self._layers.items():
            try:
                alone = _last_logits(model, tokens, [None])[0]
                plain, adapted = _last_logits(model, tokens, [None, name])
            except (ModelError, *CANNOT_RUN) as error:
                why = f"cannot be run with this model ({first_line(error)})"
            else:
                idle = next((layer for layer, one in layers.items() if name not in one.worked), None)
                if idle is not None:
                    why = f"is for {idle}, whose weights the model reads in a way of its own"
                elif not bool(adapted.isfinite().all()):
                    why = "makes numbers that are not finite"
                elif not float((plain - alone).abs().max()) <= relative * max(1.0, float(alone.abs().max())):
                    why = "changes what the model says without it"
                else:
                    continue
            raise ModelError(f"adapter {name!r} {why}; leave it out of engine.adapters, or merge it into the model")

    def _beside(self, module: nn.Module, layer: str, name: str) -> AdaptedLinear:
        above, _, last = layer.rpartition(".")
        try:
            parent = module.get_submodule(above)
            plain = parent.get_submodule(last)
        except AttributeError:
            plain = None
        if isinstance(plain, AdaptedLinear):
            return plain
        if type(plain) not in (nn.Linear, PackedLinear) or last == "lm_head":
            raise ModelError(f"adapter {name!r} is for {layer}, which is no linear layer of this model that can be adapted")
        assert plain is not None
        adapted = AdaptedLinear(plain, self._now)
        setattr(parent, last, adapted)
        return adapted


def _last_logits(model: TorchModel, tokens: Sequence[int], adapters: Sequence[str | None]) -> Tensor:
    """Return logits [adapters, vocabulary] behind the same text with each of the adapters, all in one pass."""
    count = len(tokens)
    segments = [Segment(ScratchKV(model.shape, count, model.device), place * count, count, 0) for place in range(len(adapters))]
    adapted = [(one.rows, name) for one, name in zip(segments, adapters, strict=True) if name is not None]
    rows = [one.start + count - 1 for one in segments]
    return model.forward([*tokens] * len(adapters), Step(segments, adapted=adapted), rows=rows)


class _Now:
    """The rows of the batch under way on which adapters work."""

    rows: tuple[tuple[slice, str], ...] = ()
    count: int = 0


class AdaptedLinear(nn.Module):
    """A linear layer, and what adapters add to it for the rows of their requests."""

    def __init__(self, plain: nn.Module, now: _Now) -> None:
        super().__init__()
        self.plain = plain
        self.in_features, self.out_features = int(plain.in_features), int(plain.out_features)  # type: ignore[arg-type]
        self.worked: set[str] = set()  # adapters that have added something
        self._now = now
        self._parts: dict[str, tuple[Tensor, Tensor]] = {}

    def add(self, name: str, down: Tensor, up: Tensor) -> None:
        if down.shape[1] != self.in_features or up.shape[0] != self.out_features:
            have = f"{up.shape[0]} × {down.shape[1]}"
            raise ModelError(
                f"adapter {name!r} is for layers of {have}, the model has {self.out_features} × {self.in_features}"
            )
        like = next((one for one in self.plain.parameters()), None)
        kind = {} if like is None else {"dtype": like.dtype, "device": like.device}  # packed weights are float32 on the CPU
        self._parts[name] = (down.to(**kind), up.to(**kind))  # type: ignore[call-overload]

    def forward(self, rows: Tensor) -> Tensor:
        out: Tensor = self.plain(rows)
        for where, name in self._now.rows:
            part = self._parts.get(name)
            if part is None:
                continue
            if rows.shape[-2] != self._now.count:
                raise ModelError("the model does not pass all rows through a layer that has an adapter, which is not served")
            self.worked.add(name)
            out[..., where, :] += functional.linear(functional.linear(rows[..., where, :], part[0]), part[1])
        return out
