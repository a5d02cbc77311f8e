"""A Hugging Face decoder, loaded from a folder and run over packed batches through our attention. Refuses what it cannot serve.

A model is taken only if a short probe gives the same logits through its own attention and through ours; so a kind of model
that nobody thought of is refused with a sentence, never served with wrong numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.engine.torch import attention, mla, packing
from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.hardware import choose_device, choose_dtype
from headstart.engine.torch.kv_memory import KVShape, ScratchKV
from headstart.errors import ModelError

_log = logging.getLogger(__name__)

_SERVED = "Llama, Qwen, Mistral, Gemma, Mixtral, Phi, OLMo, gpt-oss and like kinds of model are"
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# Frequencies that depend on the longest sequence of the batch: KV would depend on a request's neighbours.
_MOVING_ROPE = frozenset({"dynamic", "longrope"})
_PROBE_CHUNKS = (33, 7, 1)  # prefill, prefill behind a prefix, decode
_CANNOT_RUN = (RuntimeError, ValueError, TypeError, AttributeError, IndexError, KeyError, NotImplementedError)


class TorchModel:
    """Weights and their forward pass. Safe for one thread at a time."""

    def __init__(self, module: Any, *, name: str) -> None:
        self.module = module
        self.name = name
        self.config: Any = module.config
        text = self.config.get_text_config()
        self.heads: int = text.num_attention_heads
        self.context_tokens: int = text.max_position_embeddings
        self.vocabulary: int = text.vocab_size
        self.device: torch.device = next(module.parameters()).device
        self.dtype: torch.dtype = next(module.parameters()).dtype
        mla.attach(module)
        self.shape = self._found()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], step: Step, *, rows: Sequence[int]) -> Tensor:
        """Return float32 logits [len(rows), vocabulary] of the given rows of a packed batch, on the model's device.

        Writes the KV of every token at its position. Whatever `step.before_layer` raises passes through; running the same
        step again then writes the same bytes."""
        if len(rows) < len(tokens):
            step.last = (self.shape.numbers[-1], frozenset(rows))
        positions = [position for segment in step.segments for position in range(segment.first, segment.first + segment.count)]
        output = self.module(
            input_ids=torch.tensor([tokens], dtype=torch.long, device=self.device),
            position_ids=torch.tensor([positions], dtype=torch.long, device=self.device),
            use_cache=False,  # attention then gets the new k and v as they are; our KV is in `step`
            logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self.device),
            headstart=step,
        )
        logits: Tensor = output.logits[0]
        return logits.float()

    @torch.inference_mode()
    def _found(self) -> KVShape:
        """Return what the layers keep, as they tell in a run of two tokens."""
        self.config._attn_implementation = attention.NAME
        step = Step([], found=[])
        try:
            self.module(torch.tensor([[0, 0]], device=self.device), use_cache=False, headstart=step)
        except _CANNOT_RUN as error:
            raise _not_run(self, error) from error
        if not step.found:
            raise ModelError(f"{self.name} ({self.config.model_type}) has no attention that calls ours; {_SERVED} served")
        return KVShape(tuple(step.found), self.dtype)

    def next_logits(self, tokens: Sequence[int], *, chunk_tokens: int = 1024) -> Tensor:
        """Return float32 logits [vocabulary] for the token after `tokens`, with KV outside the engine's memory."""
        kv = ScratchKV(self.shape, len(tokens), self.device)
        for first in range(0, len(tokens), chunk_tokens):
            chunk = tokens[first : first + chunk_tokens]
            logits = self.forward(chunk, Step([Segment(kv, 0, len(chunk), first)]), rows=[len(chunk) - 1])
        return logits[0]


def load_model(folder: Path, *, device: str, dtype: str, on_progress: Callable[[str, float], None]) -> TorchModel:
    """Return the model in `folder`, probed. Raises ModelError for what cannot be read or served."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder; name one that has", folder=folder
        )
    on_progress("loading weights", 0.0)
    transformers.utils.logging.disable_progress_bar()  # progress is ours to show
    attention.register()
    place = choose_device(device)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {_first_line(error)}", folder=folder) from error
    _refuse_unserved(config, folder)
    try:
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=choose_dtype(dtype, place),
            local_files_only=True,
            use_safetensors=True,  # other files have no part in the model's identity
            output_loading_info=True,
        )
    # safetensors and torch raise errors of their own kinds (SafetensorError, UnpicklingError …) for damaged files.
    except Exception as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {_first_line(error)}", folder=folder) from error
    # transformers fills absent tensors with random numbers and a warning.
    if absent := sorted(set(report["missing_keys"]) | {str(entry) for entry in report["mismatched_keys"]}):
        raise ModelError(
            f"the checkpoint in {folder} lacks {len(absent)} tensors or has them in another shape (first: {absent[0]}); "
            "fetch it again",
            folder=folder,
        )
    model = TorchModel(module.eval().to(place).requires_grad_(False), name=folder.name)
    on_progress("loading weights", 1.0)
    on_progress("checking the model", 0.0)
    probe(model)
    _make_private(module)
    on_progress("checking the model", 1.0)
    return model


def _make_private(module: Any) -> None:
    """Copy weights that still are a mapping of their file: whoever writes into it would change, or kill, the running model."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def probe(model: TorchModel) -> None:
    """Compare logits of a short text through stock attention and through ours, in chunks; switch the model to ours.

    Packed weights are tried first, and given up with a sentence where they give other logits than the plain ones."""
    tokens = [(7919 * (index + 1)) % model.vocabulary for index in range(sum(_PROBE_CHUNKS))]
    try:
        model.config._attn_implementation = "eager"
        with torch.inference_mode():
            want = model.module(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()
    except _CANNOT_RUN as error:
        raise _not_run(model, error) from error
    model.config._attn_implementation = attention.NAME
    why = None
    try:
        if packing.pack(model.module):
            _compare(model, tokens, want)
            return
    except (ModelError, *_CANNOT_RUN) as error:
        packing.unpack(model.module)
        why = _first_line(error)
    _compare(model, tokens, want)
    if why is not None:
        _log.warning("%s runs with plain weights, because with packed ones: %s", model.name, why)


def _compare(model: TorchModel, tokens: Sequence[int], want: Tensor) -> None:
    """Raise ModelError unless our forward pass gives the logits `want`, of all rows at once and of a chunk's last alone."""
    kv = ScratchKV(model.shape, len(tokens), model.device)
    got, last, first = [], [], 0
    try:
        for chunk in _PROBE_CHUNKS:
            step = Step([Segment(kv, 0, chunk, first)])
            got.append(model.forward(tokens[first : first + chunk], step, rows=range(chunk)))
            if step.attended != model.shape.numbers:
                raise ModelError(
                    f"{model.name} ({model.config.model_type}) has layers that are not plain attention; {_SERVED} served"
                )
            last.append(model.forward(tokens[first : first + chunk], Step([Segment(kv, 0, chunk, first)]), rows=[chunk - 1]))
            first += chunk
    except _CANNOT_RUN as error:
        raise _not_run(model, error) from error
    ends = [sum(_PROBE_CHUNKS[: index + 1]) - 1 for index in range(len(_PROBE_CHUNKS))]
    apart = float(torch.cat([torch.cat(got) - want, torch.cat(last) - want[ends]]).abs().max())
    allowed = (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1) * max(1.0, float(want.abs().max()))
    if not apart <= allowed:  # also when either is NaN
        raise ModelError(
            f"{model.name} ({model.config.model_type}) gives other logits through our attention (apart by {apart:.3g}, "
            f"allowed {allowed:.3g}), so this version does not serve it; {_SERVED} served",
            apart=apart,
        )


def _not_run(model: TorchModel, error: Exception) -> ModelError:
    return ModelError(
        f"{model.name} ({model.config.model_type}) cannot be run by this version ({_first_line(error)}); {_SERVED} served"
    )


def _refuse_unserved(config: Any, folder: Path) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    ropes = {str(part.get("rope_type")) for part in (rope, *rope.values()) if isinstance(part, dict)}
    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    elif text is not config or any(hasattr(config, part) for part in ("vision_config", "audio_config")):
        why = "a multimodal model"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        why = f"of kind {config.model_type!r}, which generates no text"
    elif not set(getattr(text, "layer_types", None) or ()) <= _LAYER_TYPES:
        why = "a model with recurrent or other layers beside attention"
    elif getattr(text, "num_kv_shared_layers", None):
        why = "a model whose layers share KV"
    elif ropes & _MOVING_ROPE:
        why = (
            f"a model with {', '.join(sorted(ropes & _MOVING_ROPE))} RoPE, whose KV depends on the length of the whole sequence"
        )
    elif not all(hasattr(text, name) for name in ("num_attention_heads", "hidden_size", "max_position_embeddings")):
        why = f"of kind {config.model_type!r}, whose configuration does not tell heads, width and context"
    if why is not None:
        raise ModelError(f"{folder.name} is {why}, which is not served yet by this version; {_SERVED} served", folder=folder)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
