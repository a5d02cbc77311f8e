"""libllama's C interface by ctypes: structs, signatures, and a library that is the build they were written for.

Structs are passed by value, so a wrong layout is a crash or a wrong answer. `Library` therefore compares the version that the
library names, the defaults that it returns, byte for byte, and what one sampler does, before anything else is called; every
other build is refused with a sentence. A build of the same llama.cpp for another device (CUDA, Metal, ROCm, Vulkan) is the same
interface.

What libllama takes for impossible, such as a file with no layers or more experts in use than there are, it does not refuse: it
ends the process. That cannot be prevented from here, so the process at least ends with a sentence and the exit code of a model
that cannot be run.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any

from headstart.errors import MissingExtra, ModelError

_log = logging.getLogger(__name__)

PACKAGE = "xllamacpp"
RELEASE = "2026.10.11549"  # of the package, whose shared object this was written for
VERSIONS = ("0.6.0-dev",)  # what that llama.cpp calls itself

PARTIAL_ONLY = 1  # of a state: what is not KV of all tokens
KV_TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "bf16": 30}

_ERROR = 4  # of ggml's levels


class ModelParams(c.Structure):
    _fields_ = (
        ("devices", c.c_void_p),
        ("tensor_buft_overrides", c.c_void_p),
        ("n_gpu_layers", c.c_int32),
        ("split_mode", c.c_int32),
        ("load_mode", c.c_int32),
        ("lazy_mode", c.c_int32),
        ("main_gpu", c.c_int32),
        ("tensor_split", c.c_void_p),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
        ("kv_overrides", c.c_void_p),
        ("vocab_only", c.c_bool),
        ("check_tensors", c.c_bool),
        ("use_extra_bufts", c.c_bool),
        ("no_host", c.c_bool),
        ("no_alloc", c.c_bool),
        ("load_mtp", c.c_bool),
    )


class ContextParams(c.Structure):
    _fields_ = (
        ("n_ctx", c.c_uint32),
        ("n_batch", c.c_uint32),
        ("n_ubatch", c.c_uint32),
        ("n_seq_max", c.c_uint32),
        ("n_rs_seq", c.c_uint32),
        ("n_outputs_max", c.c_uint32),
        ("n_outputs_max_per_seq", c.c_uint32),
        ("n_threads", c.c_int32),
        ("n_threads_batch", c.c_int32),
        ("ctx_type", c.c_int32),
        ("rope_scaling_type", c.c_int32),
        ("pooling_type", c.c_int32),
        ("attention_type", c.c_int32),
        ("flash_attn_type", c.c_int32),  # -1 auto, 0 off, 1 on
        ("rope_freq_base", c.c_float),
        ("rope_freq_scale", c.c_float),
        ("yarn_ext_factor", c.c_float),
        ("yarn_attn_factor", c.c_float),
        ("yarn_beta_fast", c.c_float),
        ("yarn_beta_slow", c.c_float),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("type_k", c.c_int32),
        ("type_v", c.c_int32),
        ("abort_callback", c.c_void_p),
        ("abort_callback_data", c.c_void_p),
        ("reserved", c.c_uint64),
        ("embeddings", c.c_bool),
        ("offload_kqv", c.c_bool),
        ("no_perf", c.c_bool),
        ("op_offload", c.c_bool),
        ("swa_full", c.c_bool),
        ("kv_unified", c.c_bool),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.c_void_p),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


class TokenData(c.Structure):
    _fields_ = (("id", c.c_int32), ("logit", c.c_float), ("p", c.c_float))


class TokenDataArray(c.Structure):
    _fields_ = (("data", c.POINTER(TokenData)), ("size", c.c_size_t), ("selected", c.c_int64), ("sorted", c.c_bool))


class LogitBias(c.Structure):
    _fields_ = (("token", c.c_int32), ("bias", c.c_float))


class SamplerChainParams(c.Structure):
    _fields_ = (("no_perf", c.c_bool),)


_P, _I32, _U32, _SIZE, _F32, _BOOL = c.c_void_p, c.c_int32, c.c_uint32, c.c_size_t, c.c_float, c.c_bool

_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "version": (c.c_char_p, ()),
    "backend_init": (None, ()),
    "log_set": (None, (_P, _P)),
    "print_system_info": (c.c_char_p, ()),
    "supports_gpu_offload": (_BOOL, ()),
    "model_default_params": (ModelParams, ()),
    "context_default_params": (ContextParams, ()),
    "sampler_chain_default_params": (SamplerChainParams, ()),
    "model_load_from_file": (_P, (c.c_char_p, ModelParams)),
    "model_free": (None, (_P,)),
    "model_get_vocab": (_P, (_P,)),
    "model_desc": (_I32, (_P, c.c_char_p, _SIZE)),
    "model_size": (c.c_uint64, (_P,)),
    "model_n_params": (c.c_uint64, (_P,)),
    "model_n_embd": (_I32, (_P,)),
    "model_n_head": (_I32, (_P,)),
    "model_n_layer": (_I32, (_P,)),
    "model_n_ctx_train": (_I32, (_P,)),
    "model_n_swa": (_I32, (_P,)),
    "model_has_encoder": (_BOOL, (_P,)),
    "model_has_decoder": (_BOOL, (_P,)),
    "model_is_recurrent": (_BOOL, (_P,)),
    "model_is_hybrid": (_BOOL, (_P,)),
    "model_is_diffusion": (_BOOL, (_P,)),
    "model_chat_template": (c.c_char_p, (_P, c.c_char_p)),
    "model_meta_val_str": (_I32, (_P, c.c_char_p, c.c_char_p, _SIZE)),
    "vocab_n_tokens": (_I32, (_P,)),
    "vocab_bos": (_I32, (_P,)),
    "vocab_eos": (_I32, (_P,)),
    "vocab_get_add_bos": (_BOOL, (_P,)),
    "vocab_is_eog": (_BOOL, (_P, _I32)),
    "vocab_is_control": (_BOOL, (_P, _I32)),
    "vocab_get_attr": (_I32, (_P, _I32)),
    "vocab_get_text": (c.c_char_p, (_P, _I32)),
    "tokenize": (_I32, (_P, c.c_char_p, _I32, _P, _I32, _BOOL, _BOOL)),
    "detokenize": (_I32, (_P, _P, _I32, c.c_char_p, _I32, _BOOL, _BOOL)),
    "token_to_piece": (_I32, (_P, _I32, c.c_char_p, _I32, _I32, _BOOL)),
    "init_from_model": (_P, (_P, ContextParams)),
    "free": (None, (_P,)),
    "n_ctx": (_U32, (_P,)),
    "n_ctx_seq": (_U32, (_P,)),
    "n_seq_max": (_U32, (_P,)),
    "get_memory": (_P, (_P,)),
    "memory_clear": (None, (_P, _BOOL)),
    "memory_seq_rm": (_BOOL, (_P, _I32, _I32, _I32)),
    "memory_seq_cp": (None, (_P, _I32, _I32, _I32, _I32)),
    "memory_seq_pos_min": (_I32, (_P, _I32)),
    "memory_seq_pos_max": (_I32, (_P, _I32)),
    "state_seq_get_size_ext": (_SIZE, (_P, _I32, _U32)),
    "state_seq_get_data_ext": (_SIZE, (_P, _P, _SIZE, _I32, _U32)),
    "state_seq_set_data_ext": (_SIZE, (_P, _P, _SIZE, _I32, _U32)),
    "batch_init": (Batch, (_I32, _I32, _I32)),
    "batch_free": (None, (Batch,)),
    "decode": (_I32, (_P, Batch)),
    "synchronize": (None, (_P,)),
    "get_logits_ith": (_P, (_P, _I32)),
    "sampler_chain_init": (_P, (SamplerChainParams,)),
    "sampler_chain_add": (None, (_P, _P)),
    "sampler_chain_remove": (_P, (_P, _I32)),
    "sampler_free": (None, (_P,)),
    "sampler_accept": (None, (_P, _I32)),
    "sampler_apply": (None, (_P, c.POINTER(TokenDataArray))),
    "sampler_sample": (_I32, (_P, _P, _I32)),
    "sampler_init_greedy": (_P, ()),
    "sampler_init_dist": (_P, (_U32,)),
    "sampler_init_temp": (_P, (_F32,)),
    "sampler_init_top_k": (_P, (_I32,)),
    "sampler_init_top_p": (_P, (_F32, _SIZE)),
    "sampler_init_min_p": (_P, (_F32, _SIZE)),
    "sampler_init_penalties": (_P, (_I32, _I32, _F32, _F32, _F32)),
    "sampler_init_logit_bias": (_P, (_I32, _I32, c.POINTER(LogitBias))),
}

# What the default parameters must be under this layout, as far as they are not zero.
_MODEL_DEFAULTS = {"n_gpu_layers": -1, "split_mode": 1, "load_mode": -1, "lazy_mode": 1, "use_extra_bufts": True}
_CONTEXT_DEFAULTS: dict[str, float | bool] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "defrag_thold": -1.0,
    "type_k": 1,
    "type_v": 1,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
}

_LOG = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
_LAST_WORDS = c.CFUNCTYPE(None, c.c_char_p)


class _Said:
    """What libllama says. It has one log in a process and keeps the address of whom it tells, who therefore never goes.
    `file`: the model that was loaded last."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._errors: list[str] = []
        self.file: Path | None = None
        self.callback = _LOG(self._told)
        self.ended = _LAST_WORDS(self._ended)

    def errors(self) -> str:
        with self._lock:
            said, self._errors = self._errors, []
        return "; ".join(dict.fromkeys(filter(None, (re.sub(r"^\w+: |(?<= ) +", "", line).strip() for line in said))))

    def _told(self, level: int, text: bytes, _: object) -> None:
        line = text.decode(errors="replace").rstrip()
        if level == _ERROR and line:
            with self._lock:
                self._errors = [*self._errors[-7:], line]
        if line:
            _log.debug("%s", line)

    def _ended(self, text: bytes) -> None:
        """Called where libllama gives up; once this returned it would abort, with a trace of its C."""
        where, _, why = text.decode(errors="replace").partition(": ")
        said = (
            f"headstart: libllama ended this process over {self.file}: {why.strip()} ({os.path.basename(where)}); "
            "fetch the file again or give another\n"
        )
        os.write(2, said.encode(errors="replace"))
        os._exit(ModelError.exit_code)


_SAID = _Said()


class Library:
    """libllama, loaded and checked. Its functions are methods here, without their `llama_`. `path` None: the shared object of
    the installed package. Raises MissingExtra or ModelError."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = _packaged() if path is None else path
        try:
            self._dll = c.CDLL(str(self.path))
        except OSError as error:
            raise ModelError(f"libllama cannot be loaded: {error}; give the path of libllama.so", path=self.path) from error
        for name, (result, arguments) in _SIGNATURES.items():
            try:
                function = getattr(self._dll, "llama_" + name)
            except AttributeError:
                raise self._refusal(f"it has no llama_{name}") from None
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)
        self.log_set(c.cast(_SAID.callback, c.c_void_p), None)
        self._check()
        if (on_abort := getattr(self._dll, "ggml_set_abort_callback", None)) is not None:
            on_abort.restype, on_abort.argtypes = c.c_void_p, (c.c_void_p,)
            on_abort(c.cast(_SAID.ended, c.c_void_p))
        if path is not None:
            self._load_backends()
        self.backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """For the type checker: every function of `_SIGNATURES` was set in `__init__`."""
        raise AttributeError(name)

    @property
    def build(self) -> str:
        """Name what the bytes of a state depend on: the version and the processor features or device it computes with."""
        features = str(self.print_system_info().decode(errors="replace"))
        return f"{self.version().decode(errors='replace')} {features}"

    def about(self, file: Path) -> None:
        """What the library says from now on is of that file."""
        _SAID.file = file
        _SAID.errors()

    def errors(self) -> str:
        """Return what the library said was wrong since this was last asked, in one line; "" for nothing."""
        return _SAID.errors()

    def _load_backends(self) -> None:
        """Builds for several devices keep the code of each in a library of its own, beside libllama."""
        load = getattr(self._dll, "ggml_backend_load_all_from_path", None)
        if load is not None:
            load.restype, load.argtypes = None, (c.c_char_p,)
            load(os.fsencode(self.path.resolve().parent))

    def _check(self) -> None:
        version = self.version().decode(errors="replace")
        if version not in VERSIONS:
            raise self._refusal(f"it is llama.cpp {version}")
        for params, defaults in (
            (self.model_default_params(), _MODEL_DEFAULTS),
            (self.context_default_params(), _CONTEXT_DEFAULTS),
        ):
            for name, *_ in params._fields_:
                want, found = defaults.get(name, 0), getattr(params, name) or 0
                if found != want:
                    raise self._refusal(f"its default {name} is {found}, not {want}")
        if (halved := self._halved(2.0)) != 1.0:
            raise self._refusal(f"its repetition penalty makes {halved} of 2.0")

    def _halved(self, logit: float) -> float:
        """Have the sampler whose arguments changed last in llama.cpp halve the logit of a token that it has seen."""
        data = (TokenData * 2)(TokenData(0, logit, 0.0), TokenData(1, logit, 0.0))
        array = TokenDataArray(data, 2, -1, False)
        sampler = self.sampler_init_penalties(2, 8, 2.0, 0.0, 0.0)
        self.sampler_accept(sampler, 0)
        self.sampler_apply(sampler, c.byref(array))
        self.sampler_free(sampler)
        return float(next(one.logit for one in data if one.id == 0))

    def _refusal(self, why: str) -> ModelError:
        return ModelError(
            f"{self.path} is not the libllama that this headstart speaks to: {why}; use a build of llama.cpp "
            f"{' or '.join(VERSIONS)} as in {PACKAGE} {RELEASE}",
            path=self.path,
        )


def _packaged() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # found, not imported: its Python side is not needed
    folder = None if spec is None or spec.origin is None else Path(spec.origin).parent
    found = None if folder is None else next(iter(sorted(folder.glob(f"{PACKAGE}*.so"))), None)
    if found is None:
        raise MissingExtra("GGUF models need libllama; install it with: pip install 'headstart[llama]'", extra="llama")
    return found
