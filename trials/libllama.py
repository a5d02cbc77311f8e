"""Just enough of libllama's C interface for the trial: load, decode, and move ranges of one sequence as opaque states.

Written against the wheel `xllamacpp` 2026.10.11549, whose shared object exports the C interface. Structs are passed by
value, so a wrong layout is a crash or a wrong answer: `Library` compares the defaults that libllama returns with those it
must return under this layout and refuses any other build.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

SCRATCH = 1  # sequence 0 is the request; ranges go in and out through this one
KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8}


class ModelParams(c.Structure):
    _fields_ = (("words", c.c_uint64 * 16),)  # only defaults are used; larger than the struct, which is passed in memory


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
        ("rope_and_yarn", c.c_uint32 * 7),
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
        ("tail", c.c_uint64 * 3),
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


_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "llama_backend_init": (None, ()),
    "llama_log_set": (None, (c.c_void_p, c.c_void_p)),
    "llama_print_system_info": (c.c_char_p, ()),
    "llama_model_default_params": (ModelParams, ()),
    "llama_context_default_params": (ContextParams, ()),
    "llama_model_load_from_file": (c.c_void_p, (c.c_char_p, ModelParams)),
    "llama_model_free": (None, (c.c_void_p,)),
    "llama_model_get_vocab": (c.c_void_p, (c.c_void_p,)),
    "llama_vocab_n_tokens": (c.c_int32, (c.c_void_p,)),
    "llama_tokenize": (
        c.c_int32,
        (c.c_void_p, c.c_char_p, c.c_int32, c.POINTER(c.c_int32), c.c_int32, c.c_bool, c.c_bool),
    ),
    "llama_init_from_model": (c.c_void_p, (c.c_void_p, ContextParams)),
    "llama_free": (None, (c.c_void_p,)),
    "llama_get_memory": (c.c_void_p, (c.c_void_p,)),
    "llama_memory_clear": (None, (c.c_void_p, c.c_bool)),
    "llama_memory_seq_rm": (c.c_bool, (c.c_void_p, c.c_int32, c.c_int32, c.c_int32)),
    "llama_memory_seq_cp": (None, (c.c_void_p, c.c_int32, c.c_int32, c.c_int32, c.c_int32)),
    "llama_memory_seq_pos_min": (c.c_int32, (c.c_void_p, c.c_int32)),
    "llama_memory_seq_pos_max": (c.c_int32, (c.c_void_p, c.c_int32)),
    "llama_state_seq_get_size": (c.c_size_t, (c.c_void_p, c.c_int32)),
    "llama_state_seq_get_data": (c.c_size_t, (c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32)),
    "llama_state_seq_set_data": (c.c_size_t, (c.c_void_p, c.c_void_p, c.c_size_t, c.c_int32)),
    "llama_batch_init": (Batch, (c.c_int32, c.c_int32, c.c_int32)),
    "llama_batch_free": (None, (Batch,)),
    "llama_decode": (c.c_int32, (c.c_void_p, Batch)),
    "llama_get_logits_ith": (c.POINTER(c.c_float), (c.c_void_p, c.c_int32)),
}


class Library:
    """libllama, loaded and checked. `path` None means the shared object of the installed `xllamacpp`."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or _xllamacpp_object()
        self._dll = c.CDLL(str(self.path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._dll, name)
            function.restype, function.argtypes = result, arguments
        defaults = self._dll.llama_context_default_params()
        want = {"n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "n_threads": 4, "flash_attn_type": -1}
        want |= {"type_k": 1, "type_v": 1, "offload_kqv": True, "no_perf": True, "swa_full": True, "kv_unified": False}
        for field, value in want.items():
            if (found := getattr(defaults, field)) != value:
                raise SystemExit(f"{self.path}: default {field} is {found}, expected {value}: another build of libllama")
        self._quiet = c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)(lambda _level, _text, _data: None)
        self._dll.llama_log_set(c.cast(self._quiet, c.c_void_p), None)
        self._dll.llama_backend_init()

    def __getattr__(self, name: str) -> object:
        return getattr(self._dll, "llama_" + name)

    def system(self) -> str:
        return self._dll.llama_print_system_info().decode()


class Model:
    """A GGUF. One a process is enough; contexts are made from it."""

    def __init__(self, library: Library, gguf: Path) -> None:
        self.library = library
        self.pointer = library.model_load_from_file(str(gguf).encode(), library.model_default_params())
        if not self.pointer:
            raise SystemExit(f"{gguf}: libllama cannot load it")
        self.vocab = library.model_get_vocab(self.pointer)
        self.vocabulary = library.vocab_n_tokens(self.vocab)

    def tokenize(self, text: str) -> list[int]:
        data = text.encode()
        out = (c.c_int32 * (len(data) + 8))()
        n = self.library.tokenize(self.vocab, data, len(data), out, len(out), True, False)
        if n < 0:
            raise SystemExit(f"tokenize returned {n}")
        return list(out[:n])


class Context:
    """KV memory of sequence 0 with unified KV and flash attention. Not thread-safe: no call from two threads at once."""

    def __init__(self, model: Model, *, n_ctx: int, kv_type: str = "f16", threads: int = 2, batch: int = 256) -> None:
        self._lib = model.library
        self._vocabulary = model.vocabulary
        params = self._lib.context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, batch, batch, 4
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type, params.kv_unified = 1, True
        params.type_k = params.type_v = KV_TYPES[kv_type]
        self.pointer = self._lib.init_from_model(model.pointer, params)
        if not self.pointer:
            raise SystemExit("libllama cannot make a context")
        self._memory = self._lib.get_memory(self.pointer)
        self._batch_tokens = batch
        self._batch = self._lib.batch_init(batch, 0, 1)

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self._lib.batch_free(self._batch)
        self._lib.free(self.pointer)

    def decode(self, tokens: Sequence[int], *, start: int, sequence: int = 0) -> npt.NDArray[np.float32]:
        """Compute `tokens` at positions from `start`, in fixed batches; return the logits after the last one."""
        for at in range(0, len(tokens), self._batch_tokens):
            part = tokens[at : at + self._batch_tokens]
            self._batch.n_tokens = len(part)
            for i, token in enumerate(part):
                self._batch.token[i] = token
                self._batch.pos[i] = start + at + i
                self._batch.n_seq_id[i] = 1
                self._batch.seq_id[i][0] = sequence
                self._batch.logits[i] = i == len(part) - 1
            if code := self._lib.decode(self.pointer, self._batch):
                raise SystemExit(f"decode returned {code}")
        logits = self._lib.get_logits_ith(self.pointer, -1)
        return np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).copy()

    def greedy(self, logits: npt.NDArray[np.float32], *, start: int, tokens: int) -> list[int]:
        """Return `tokens` greedy tokens; the first is chosen from `logits`."""
        out: list[int] = []
        for i in range(tokens):
            out.append(int(logits.argmax()))
            logits = self.decode(out[-1:], start=start + i)
        return out

    def save_range(self, first: int, end: int, *, sequence: int = 0) -> bytearray:
        """Return positions first … end-1 of a sequence as one opaque state."""
        self._lib.memory_seq_cp(self._memory, sequence, SCRATCH, first, end)
        size = self._lib.state_seq_get_size(self.pointer, SCRATCH)
        state = bytearray(size)
        written = self._lib.state_seq_get_data(self.pointer, (c.c_char * size).from_buffer(state), size, SCRATCH)
        self._lib.memory_seq_rm(self._memory, SCRATCH, -1, -1)
        if written != size:
            raise SystemExit(f"get_data wrote {written} of {size} bytes")
        return state

    def restore_range(self, state: memoryview | bytearray, first: int, end: int, *, sequence: int = 0) -> None:
        """Put a state from `save_range` back at the positions it came from.

        The bytes carry the positions and libllama takes what they say, so they are compared with `first` and `end`."""
        size = len(state)
        read = self._lib.state_seq_set_data(self.pointer, (c.c_char * size).from_buffer(state), size, SCRATCH)
        if read != size:
            raise SystemExit(f"set_data took {read} of {size} bytes")
        there = (self.first_position(SCRATCH), self.last_position(SCRATCH))
        if there != (first, end - 1):
            raise SystemExit(f"a state for positions {first} to {end - 1} put KV at {there[0]} to {there[1]}")
        self._lib.memory_seq_cp(self._memory, SCRATCH, sequence, first, end)
        self._lib.memory_seq_rm(self._memory, SCRATCH, -1, -1)

    def clear(self) -> None:
        self._lib.memory_clear(self._memory, True)

    def first_position(self, sequence: int = 0) -> int:
        return int(self._lib.memory_seq_pos_min(self._memory, sequence))

    def last_position(self, sequence: int = 0) -> int:
        return int(self._lib.memory_seq_pos_max(self._memory, sequence))


def _xllamacpp_object() -> Path:
    spec = importlib.util.find_spec("xllamacpp")  # found, not imported: its Python side is not needed
    if spec is None or spec.origin is None:
        raise SystemExit("xllamacpp is not installed in this environment; see trials/README.md")
    return next(Path(spec.origin).parent.glob("xllamacpp*.so"))
