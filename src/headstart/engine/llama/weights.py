"""A GGUF in memory: its weights, what it says of itself, and its vocabulary. Safe from several threads, but for `close`."""

from __future__ import annotations

import ctypes as c
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from headstart.engine.llama.binding import Library
from headstart.errors import ModelError

_PROGRESS = c.CFUNCTYPE(c.c_bool, c.c_float, c.c_void_p)
_FETCH = "fetch the file again"
_LOOKED_FOR = 1 << 0 | 1 << 3 | 1 << 4  # of a token's attributes: unknown, control, user-defined
_TAKES_SPACES = 1 << 7 | 1 << 8  # on its left, on its right


class Weights:
    """`vocabulary_only` reads no tensor. Raises ModelError with one sentence for a file that cannot be served."""

    def __init__(
        self,
        library: Library,
        file: Path,
        *,
        vocabulary_only: bool = False,
        gpu_layers: int | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.library = library
        self.file = file
        self.on_cpu = gpu_layers == 0
        _look_at(file)
        params = library.model_default_params()
        params.vocab_only = vocabulary_only
        if gpu_layers is not None:
            params.n_gpu_layers = gpu_layers
        stopped: list[BaseException] = []

        def told(fraction: float, _: object) -> bool:
            try:
                if on_progress is not None:
                    on_progress(fraction)
            except BaseException as error:  # noqa: BLE001 - it is raised below; a callback of C cannot raise
                stopped.append(error)
            return not stopped

        callback = _PROGRESS(told)
        params.progress_callback = c.cast(callback, c.c_void_p)
        library.about(file)
        pointer = library.model_load_from_file(os.fsencode(file), params)
        self._loaded: _Loaded | None = _Loaded(library, pointer) if pointer else None
        if stopped:
            raise stopped[0]
        if self._loaded is None:
            raise _refused(file, library.errors())
        self.vocabulary = Vocabulary(self._loaded)
        try:
            self._require_decoder()
        except ModelError:
            self.close()
            raise

    @property
    def description(self) -> str:
        """The architecture, size and quantisation, e.g. "llama 135M Q4_1"."""
        buffer = c.create_string_buffer(256)
        self.library.model_desc(self.pointer, buffer, len(buffer))
        return buffer.value.decode(errors="replace")

    @property
    def nbytes(self) -> int:
        return int(self.library.model_size(self.pointer))

    @property
    def layers(self) -> int:
        return int(self.library.model_n_layer(self.pointer))

    @property
    def width(self) -> int:
        """Numbers that stand for a token between layers."""
        return int(self.library.model_n_embd(self.pointer))

    @property
    def heads(self) -> int:
        """Of queries, in a layer; 0 without attention."""
        return max(0, int(self.library.model_n_head(self.pointer)))

    @property
    def parameters(self) -> int:
        return int(self.library.model_n_params(self.pointer))

    @property
    def context_tokens(self) -> int:
        """That it was trained for; 0 where the file names none."""
        return max(0, int(self.library.model_n_ctx_train(self.pointer)))

    @property
    def window(self) -> int:
        """Tokens that layers with a sliding window see; 0 without such layers."""
        return max(0, int(self.library.model_n_swa(self.pointer)))

    @property
    def recurrent(self) -> bool:
        """Whether some layer keeps a state that cannot be taken back to an earlier token."""
        return bool(self.library.model_is_recurrent(self.pointer) or self.library.model_is_hybrid(self.pointer))

    @property
    def chat_template(self) -> str | None:
        template = self.library.model_chat_template(self.pointer, None)
        return None if template is None else template.decode(errors="replace")

    def metadata(self, key: str) -> str | None:
        """Return what the file says under `key`; None where it says nothing."""
        buffer = c.create_string_buffer(1024)
        found = self.library.model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return None if found < 0 else buffer.value.decode(errors="replace")

    @property
    def pointer(self) -> int:
        """Libllama's model. Not after `close`."""
        assert self._loaded is not None, "these weights are closed"
        return self._loaded.pointer

    def close(self) -> None:
        """Free the model, or leave that to whoever still has its vocabulary. Twice is fine."""
        self._loaded = None

    def _require_decoder(self) -> None:
        model, library = self.pointer, self.library
        if library.model_has_encoder(model) or not library.model_has_decoder(model) or library.model_is_diffusion(model):
            raise ModelError(f"{self.file} is no decoder that writes text token by token; give another model", path=self.file)
        if not self.vocabulary.size:
            raise ModelError(f"{self.file} has no vocabulary; give a file that has its tokenizer", path=self.file)
        rotated = f"{self.metadata('general.architecture')}.rope.dimension_count"
        if self.metadata(rotated) == "0" and not library.model_is_recurrent(model):  # libllama would compute for ever
            raise ModelError(f"{self.file} cannot be loaded: its {rotated} is 0; {_FETCH} or give another", path=self.file)


class _Loaded:
    """A model of libllama's, freed with the last reference: a request may still be tokenised while an engine closes."""

    def __init__(self, library: Library, pointer: int) -> None:
        self.library = library
        self.pointer = pointer

    def __del__(self) -> None:
        self.library.model_free(self.pointer)


class Vocabulary:
    """The tokenizer that a GGUF describes, as libllama reads it."""

    def __init__(self, loaded: _Loaded) -> None:
        self._loaded = loaded  # kept alive
        self._library = loaded.library
        self._pointer = loaded.library.model_get_vocab(loaded.pointer)
        self.size = int(self._library.vocab_n_tokens(self._pointer))

    @property
    def begin_id(self) -> int | None:
        return self._id(self._library.vocab_bos(self._pointer))

    @property
    def end_id(self) -> int | None:
        return self._id(self._library.vocab_eos(self._pointer))

    @property
    def begins(self) -> bool:
        """Whether the file says that every text begins with `begin_id`."""
        return self.begin_id is not None and bool(self._library.vocab_get_add_bos(self._pointer))

    def stop_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        is_end, pointer = self._library.vocab_is_eog, self._pointer
        return frozenset(token for token in range(self.size) if is_end(pointer, token))

    def is_control(self, token: int) -> bool:
        return bool(self._library.vocab_is_control(self._pointer, token))

    def name(self, token: int) -> str:
        """Return how the vocabulary writes a token; "" for what is none."""
        if not 0 <= token < self.size:
            return ""  # libllama would end the process
        return str(self._library.vocab_get_text(self._pointer, token).decode(errors="replace"))

    def tokenise(self, text: str, *, special_tokens: bool) -> list[int]:
        """Return the ids of `text`, names of special tokens in it read as these. `special_tokens`: with those that the file
        says stand before and behind every text."""
        data = text.encode()
        room = len(data) + 8
        while True:
            out = (c.c_int32 * room)()
            found = self._library.tokenize(self._pointer, data, len(data), out, room, special_tokens, True)
            if found >= 0:
                return out[:found]
            room = -found

    def token_bytes(self, token: int, *, special: bool = True) -> bytes:
        """Return the bytes that a token stands for; of a special one its name, or nothing without `special`."""
        if not 0 <= token < self.size:
            return b""
        room = 64
        while True:
            buffer = c.create_string_buffer(room)
            found = self._library.token_to_piece(self._pointer, token, buffer, room, 0, special)
            if found >= 0:
                return buffer.raw[:found]
            room = -found

    def special_tokens(self) -> dict[str, int]:
        """Return control tokens by name."""
        return {self.name(token): token for token in range(self.size) if self.is_control(token)}

    def looked_for(self) -> dict[str, bool]:
        """Return the names of tokens that are looked for in a text before all else; whether they take spaces beside them."""
        attributes = {token: int(self._library.vocab_get_attr(self._pointer, token)) for token in range(self.size)}
        return {self.name(token): bool(one & _TAKES_SPACES) for token, one in attributes.items() if one & _LOOKED_FOR}

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `tokens`, with the names of special ones if wanted; bytes that are not UTF-8 become U+FFFD. What
        is no token is nothing."""
        known = [token for token in tokens if 0 <= token < self.size]  # for another libllama would end the process
        ids = (c.c_int32 * len(known))(*known)
        room = 8 * len(known) + 64
        while True:
            buffer = c.create_string_buffer(room)
            found = self._library.detokenize(self._pointer, ids, len(known), buffer, room, False, special)
            if found >= 0:
                return buffer.raw[:found].decode(errors="replace")
            room = -found

    @staticmethod
    def _id(token: int) -> int | None:
        return None if token < 0 else int(token)


def _look_at(file: Path) -> None:
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", path=file, errno=error.errno) from error
    if magic != b"GGUF":
        raise ModelError(f"{file} is not a GGUF file; {_FETCH} or give another", path=file)


def _refused(file: Path, said: str) -> ModelError:
    if "unknown model architecture" in said:
        name = said.partition("unknown model architecture:")[2].partition(";")[0].strip() or "?"
        return ModelError(f"{file} has the architecture {name}, which this libllama does not know; use a newer one", path=file)
    if any(word in said for word in ("not within the file bounds", "failed to read", "corrupted", "incomplete")):
        return ModelError(f"{file} is not a whole GGUF file: it is truncated or damaged; {_FETCH}", path=file, said=said)
    if any(word in said for word in ("unable to allocate", "failed to allocate", "out of memory")):
        return ModelError(f"{file} does not fit into memory; take a smaller quantisation", path=file, said=said)
    why = (
        re.sub(r"error loading model(?: \w+)?: |\bcheck_tensor_dims: |; failed to load model$", "", said)
        or "libllama gives no reason"
    )
    return ModelError(f"{file} cannot be loaded: {why}; {_FETCH} or give another", path=file, said=said)
