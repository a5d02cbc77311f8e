"""A Hugging Face decoder, loaded from a folder and run over packed batches through our attention.

A model is run so only if a short probe gives the same logits through its own attention and through ours; so a kind of model
that nobody thought of is never served with wrong numbers. It is run as it is then, without the prefix cache (`stock`), and says
why; only what cannot be run even so is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.engine.torch import attention, kinds, mla, packing, recurrent, rope
from headstart.engine.torch.attention import Segment, Step
from headstart.engine.torch.facts import CANNOT_RUN, PROBE_CHUNKS, ModelFacts, context_of, first_line, probe_tokens, signature
from headstart.engine.torch.hardware import choose_device, choose_dtype
from headstart.engine.torch.kv_memory import KVShape, LayerKV, LayerViews, ScratchKV
from headstart.engine.torch.lora import Adapters
from headstart.engine.torch.stock import StockModel
from headstart.errors import ModelError

_log = logging.getLogger(__name__)

# Others hide from a short probe what they do beyond it (chunks, an index of the keys worth attending).
_LAYER_TYPES = frozenset(
    {
        "full_attention",
        "sliding_attention",
        "chunked_attention",
        "indexed_attention",
        "linear_attention",
        "conv",
        "hybrid",
        "hybrid_sliding",
        "moe",
        "mlp",
    }
)
_NOTHING = LayerKV(0, 2, 1)  # what stands for tokens of which no layer keeps anything, so that there are blocks to find


class TorchModel:
    """Weights and their forward pass. Safe for one thread at a time."""

    def __init__(self, module: Any, *, name: str) -> None:
        self.module = module
        self.name = name
        self.config: Any = module.config
        text = self.config.get_text_config()
        facts = ModelFacts.of(module)
        self.context_tokens, self.vocabulary = facts.context_tokens, facts.vocabulary
        self.device, self.dtype, self.layers = facts.device, facts.dtype, facts.layers
        self.heads: int = getattr(text, "num_attention_heads", None) or 1
        self.mixers: recurrent.Mixers | None = None
        self.adapters: Adapters | None = None
        self._step: Step | None = None  # under way, for modules that are told of it directly
        latents = mla.attach(module)
        kinds.attach(module)
        self.shape = self._found(latents) if recurrent.is_recurrent(self.config) else self._told()

    def _told(self) -> KVShape:
        """Return what the layers keep, as they tell in a run of two tokens."""
        self.config._attn_implementation = attention.NAME
        step = Step([], found=[])
        try:
            self._run([0, 0], [0, 1], step)
        except ModelError:
            if step.found:
                raise
            self._tell_directly()
            self._run([0, 0], [0, 1], step)
        if not step.found:
            raise ModelError("none of its layers calls our attention")
        return KVShape(tuple(step.found), self.dtype)

    def _tell_directly(self) -> None:
        """Tell attention modules of the step where the layers around them do not pass it on."""

        def told(_: Any, args: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, named if self._step is None else {**named, "headstart": self._step}

        for module in self.module.modules():
            takes_more = any(one.kind is one.VAR_KEYWORD for one in signature(module).parameters.values())
            if hasattr(module, "layer_idx") and takes_more:
                module.register_forward_pre_hook(told, with_kwargs=True)

    @torch.inference_mode()
    def _run(self, tokens: Sequence[int], positions: Sequence[int], step: Step, **more: Any) -> Any:
        self._step = step
        try:
            return self.module(
                input_ids=torch.tensor([tokens], dtype=torch.long, device=self.device),
                position_ids=torch.tensor([positions], dtype=torch.long, device=self.device),
                use_cache=False,  # attention then gets the new k and v as they are; our KV is in `step`
                headstart=step,
                **more,
            )
        finally:
            self._step = None

    def _found(self, latents: frozenset[int]) -> KVShape:
        """Take over the recurrent layers; return what the model keeps, as it showed itself in a short run."""
        self.config._attn_implementation = "eager"
        with torch.inference_mode():
            found = recurrent.find(self.module, probe_tokens(self.vocabulary))
        recurrent.follow_layer_numbers(self.module)
        self.mixers = recurrent.Mixers(found.mixers, found.state)
        layers = []
        for number, heads, key, value in found.kv:
            latent = number in latents  # its cache keeps it in two
            layers.append(LayerKV.of(number, heads, key + value if latent else key, value, latent=latent))
        return KVShape(tuple(layers) or (_NOTHING,), self.dtype, found.state)

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], step: Step, *, rows: Sequence[int]) -> Tensor:
        """Return float32 logits [len(rows), vocabulary] of the given rows of a packed batch, on the model's device.

        Writes the KV of every token at its position. Whatever `step.before_layer` raises passes through; running the same
        step again then writes the same bytes."""
        if len(rows) < len(tokens) and self.mixers is None:  # a recurrent layer needs every row of what is before it
            step.last = (self.shape.numbers[-1], frozenset(rows))
        with self._states(step), self._adapted(step, len(tokens)):
            output = self._run(
                tokens, step.positions(), step, logits_to_keep=torch.tensor(rows, dtype=torch.long, device=self.device)
            )
        logits: Tensor = output.logits[0]
        return (logits if len(logits) == len(rows) else logits[list(rows)]).float()

    def _states(self, step: Step) -> AbstractContextManager[None]:
        """Have recurrent layers go on from the states of the step's requests, which are undone if it is given up."""
        if self.mixers is None:
            return nullcontext()
        parts = []
        for one in step.segments:
            assert isinstance(one.kv, LayerViews)
            assert one.kv.state is not None
            if self.shape.layers == (_NOTHING,):
                one.kv.keys(0)[:, one.first : one.first + one.count] = 0
                one.kv.values(0)[:, one.first : one.first + one.count] = 0
            parts.append(recurrent.Part(one.rows, one.first, one.kv.state))
        return self.mixers.running(parts, keep=step.before_layer is not None)

    def _adapted(self, step: Step, count: int) -> AbstractContextManager[None]:
        return nullcontext() if self.adapters is None else self.adapters.working(step.adapted, count)

    def next_logits(self, tokens: Sequence[int], *, chunk_tokens: int = 1024) -> Tensor:
        """Return float32 logits [vocabulary] for the token after `tokens`, with KV outside the engine's memory."""
        kv = ScratchKV(self.shape, len(tokens), self.device)
        for first in range(0, len(tokens), chunk_tokens):
            chunk = tokens[first : first + chunk_tokens]
            logits = self.forward(chunk, Step([Segment(kv, 0, len(chunk), first)]), rows=[len(chunk) - 1])
        return logits[0]


Model = TorchModel | StockModel


def load_model(
    folder: Path, *, device: str, dtype: str, on_progress: Callable[[str, float], None], context: int | None = None
) -> Model:
    """Return the model in `folder`, probed. `context`: no text will be longer; None: as long as the model takes. Raises
    ModelError for what cannot be read or run."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder; name one that has", folder=folder
        )
    transformers.utils.logging.disable_progress_bar()  # progress is ours to show
    attention.register()
    place = choose_device(device)
    number = choose_dtype(dtype, place)
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        raise ModelError(f"{folder}/config.json cannot be read: {first_line(error)}", folder=folder) from error
    _refuse_unserved(config, folder)
    longest = context_of(config.get_text_config(decoder=True))
    longest = min(longest, context or longest)
    moving = rope.moves(config, longest)
    why = moving or _hides(config)
    if why is None:
        module = _weights(folder, place, number, on_progress)
        on_progress("checking the model", 0.0)
        try:
            model: Model = _probed(module, folder.name, context_tokens=longest)
        except ModelError as error:
            why = first_line(error)
            del module  # what was tried on it is gone with it
    if why is not None:
        _log.warning("%s is run as it is, without the prefix cache, because %s", folder.name, why)
        module = _weights(folder, place, number, on_progress)
        on_progress("checking the model", 0.0)
        model = StockModel(module, name=folder.name, why=why, at_once=moving is not None)
    _make_private(model.module)
    on_progress("checking the model", 1.0)
    return model


def _weights(folder: Path, place: torch.device, dtype: torch.dtype, on_progress: Callable[[str, float], None]) -> Any:
    import transformers

    on_progress("loading weights", 0.0)
    try:
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,  # other files have no part in the model's identity
            output_loading_info=True,
        )
    # safetensors and torch raise errors of their own kinds (SafetensorError, UnpicklingError …) for damaged files.
    except Exception as error:
        raise ModelError(f"the weights in {folder} cannot be loaded: {first_line(error)}", folder=folder) from error
    # transformers fills absent tensors with random numbers and a warning.
    if absent := sorted(set(report["missing_keys"]) | {str(entry) for entry in report["mismatched_keys"]}):
        raise ModelError(
            f"the checkpoint in {folder} lacks {len(absent)} tensors or has them in another shape (first: {absent[0]}); "
            "fetch it again",
            folder=folder,
        )
    on_progress("loading weights", 1.0)
    return module.eval().to(place).requires_grad_(False)


def _probed(module: Any, name: str, *, context_tokens: int) -> TorchModel:
    """Return the model if it gives its own logits through our attention, else raise ModelError."""
    try:
        held = rope.hold_still(module, context_tokens)
        model = TorchModel(module, name=name)
    except CANNOT_RUN as error:
        raise _not_run(error) from error
    probe(model)
    if held:
        model.shape = replace(model.shape, manner=held)
        _log.info("%s takes %s, by the longest text that engine.context allows", name, held)
    return model


def _make_private(module: Any) -> None:
    """Copy weights that still are a mapping of their file: whoever writes into it would change, or kill, the running model."""
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def probe(model: TorchModel) -> None:
    """Compare logits of a short text through stock attention and through ours, in chunks; switch the model to ours.

    Packed weights are tried first, and given up with a sentence where they give other logits than the plain ones."""
    with kinds.begun_early(model.module):
        _probe(model)


def _probe(model: TorchModel) -> None:
    tokens = probe_tokens(model.vocabulary)
    try:
        model.config._attn_implementation = "eager"
        with torch.inference_mode():
            want = model.module(
                torch.tensor([tokens], device=model.device),
                position_ids=torch.arange(len(tokens), device=model.device).unsqueeze(0),
                use_cache=False,
            ).logits[0]
    except CANNOT_RUN as error:
        raise _not_run(error) from error
    model.config._attn_implementation = attention.NAME
    why = None
    try:
        if packing.pack(model.module):
            _compare_each_way(model, tokens, want.float())
            packing.unpack(model.module, only_read=True)
            return
    except (ModelError, *CANNOT_RUN) as error:
        packing.unpack(model.module)
        why = first_line(error)
    _compare_each_way(model, tokens, want.float())
    if why is not None:
        _log.warning("%s runs with plain weights, because with packed ones: %s", model.name, why)


def _compare_each_way(model: TorchModel, tokens: Sequence[int], want: Tensor) -> None:
    """Compare; of recurrent layers, take the first way in which they go on from a state rightly."""
    ways = [None] if model.mixers is None else list(recurrent.Way)
    for way in ways:
        if model.mixers is not None and way is not None:
            model.mixers.way = way
        try:
            _compare(model, tokens, want)
        except ModelError:
            if way is ways[-1]:
                raise
        else:
            return


def _compare(model: TorchModel, tokens: Sequence[int], want: Tensor) -> None:
    """Raise ModelError unless our forward pass gives the logits `want`, of all rows at once, and of a chunk's last alone beside
    another request."""
    kv, twins = (
        ScratchKV(model.shape, len(tokens), model.device),
        [ScratchKV(model.shape, len(tokens), model.device) for _ in "ab"],
    )
    got, last, first = [], [], 0
    try:
        for chunk in PROBE_CHUNKS:
            some = tokens[first : first + chunk]
            step = Step([Segment(kv, 0, chunk, first)])
            got.append(model.forward(some, step, rows=range(chunk)))
            if step.attended and step.attended != model.shape.numbers:
                raise ModelError("it has layers that are not plain attention")
            both = Step([Segment(twin, place * chunk, chunk, first) for place, twin in enumerate(twins)])
            last.append(model.forward([*some, *some], both, rows=[chunk - 1, 2 * chunk - 1]))
            first += chunk
    except CANNOT_RUN as error:
        raise _not_run(error) from error
    ends = [sum(PROBE_CHUNKS[: index + 1]) - 1 for index in range(len(PROBE_CHUNKS))]
    apart = float(torch.cat([torch.cat(got) - want, torch.cat(last) - want[ends].repeat_interleave(2, dim=0)]).abs().max())
    allowed = (1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1) * max(1.0, float(want.abs().max()))
    if not apart <= allowed:  # also when either is NaN
        raise ModelError(
            f"it ({model.config.model_type}) gives other logits through our attention (apart by {apart:.3g}, "
            f"allowed {allowed:.3g})",
            apart=apart,
        )


def _not_run(error: Exception) -> ModelError:
    return ModelError(f"it cannot be run through our attention ({first_line(error)})")


def _refuse_unserved(config: Any, folder: Path) -> None:
    """Raise ModelError for what is no decoder of text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    why = None
    if getattr(config, "is_encoder_decoder", False):
        why = "an encoder-decoder"
    elif config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        why = f"of kind {config.model_type!r}, which transformers does not load for generating text alone"
    if why is not None:
        raise ModelError(
            f"{folder.name} is {why}; use a decoder, for example one of the Llama, Qwen, Mistral or Gemma kinds", folder=folder
        )


def _hides(config: Any) -> str | None:
    """Return what keeps a model from our attention and is known without the probe, or would not show in its short text."""
    text = config.get_text_config()
    if text.model_type == "bloom" or getattr(getattr(text, "attn_config", text), "alibi", False):
        return "its attention is biased by distance (ALiBi), which ours is not"
    types = set(getattr(text, "layer_types", None) or ())
    if others := types - _LAYER_TYPES:
        return f"it has layers of kind {', '.join(sorted(others))}"
    if not types and getattr(text, "attention_chunk_size", None):
        return "its attention is cut into chunks, and nothing says in which layers"
    return None
