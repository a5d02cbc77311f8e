"""HeadstartCache: keys and values of one prompt, the stored prefix first, which arrives layer by layer while the model runs.

    store.cache(ids): match, start reading ─▶ generate: only what is new is run; layer i waits for its part ─▶ close: save

Every layer keeps all tokens, sliding windows too (the model's mask cuts them), so that any prefix of it is one. What fails to
arrive is computed in the midst of the pass that wants it: of the layers before it what came was verified, and stays.

Which tokens it holds is what the model was given: a hook on the model's forward notes them while the cache is open. Several
answers to one prompt, and beams, are rows that have begun alike: what is kept of them is that beginning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer

from headstart.cache.prefix_cache import PrefixCache, Ticket
from headstart.engine.torch.facts import name_of_cache
from headstart.engine.torch.kv_memory import KVShape, LayerKV
from headstart.errors import LoadFailed

_log = logging.getLogger(__name__)
_ONE = "a HeadstartCache holds one prompt; give each prompt of a batch a cache and a generation of its own"


class HeadstartCache(Cache):  # type: ignore[misc]  # transformers tells no types
    """Use `Store.cache`, best with `with`; give it to one `generate`, or to forward passes one behind the other.

    `cached_tokens`: how many came from the store, verified. `ticket`: once closed, what became of the save, None where there
    was nothing to save."""

    def __init__(
        self,
        model: Any,
        shape: KVShape,
        cache: PrefixCache,
        tokens: Sequence[int],
        *,
        salt: str | None,
        retention: str,
        load_timeout_s: float,
        unchanged: Callable[[], bool],
    ) -> None:
        self.ticket: Ticket | None = None
        self._model = model
        self._shape = shape
        self._cache = cache
        self._salt = salt
        self._retention = retention
        self._unchanged = unchanged
        self._closed = False
        self._prefix = _Prefix(model, shape, cache, tokens, salt=salt, timeout_s=load_timeout_s)
        self._tokens = list(tokens[: self._prefix.tokens])
        self._whole = True  # every token is known whose keys and values are held, up to where rows part
        self._rows = 0  # not known yet
        self._parted = False
        super().__init__(layers=[_Layer(place, self._prefix) for place in range(len(shape.layers))])
        self._hook = model.register_forward_pre_hook(self._note, with_kwargs=True)

    @property
    def cached_tokens(self) -> int:
        return self._prefix.loaded_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens, as assisted generation does."""
        super().crop(tokens_to_remove)
        del self._tokens[self.get_seq_length() :]

    def reset(self) -> None:
        super().reset()
        self._tokens.clear()

    def batch_repeat_interleave(self, repeats: int) -> None:
        if repeats != 1:
            raise ValueError(_ONE)

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ValueError(_ONE)

    def close(self) -> None:
        """Save what was computed, behind the caller (`ticket`), and let go. Twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._hook.remove()
        try:
            held = [layer.get_seq_length() for layer in self.layers if layer.is_initialized]
            whole = self._whole and len(held) == len(self.layers) and len(set(held)) == 1
            whole = whole and (held[0] == len(self._tokens) or (self._parted and held[0] > len(self._tokens)))
            if whole and self._unchanged():
                source = _Source(self._shape, [(layer.keys, layer.values) for layer in self.layers])
                self.ticket = self._cache.save(self._tokens, source, salt=self._salt, retention=self._retention)
            elif held:
                _log.warning(
                    "nothing is saved of this sequence: %s", "its tokens are not known" if not whole else "weights changed"
                )
        finally:
            self._prefix.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._whole = False  # a pass that was broken off has left some layers longer than others, or a mask of unknown kind
        self.close()

    def __repr__(self) -> str:
        return f"<HeadstartCache of {self.get_seq_length()} tokens, {self._prefix.tokens} of them stored>"

    def _note(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the tokens of a pass that uses this cache. Raises ValueError for what would not be this prompt's plain KV."""
        if not any(value is self for value in (*args, *kwargs.values())):
            return
        ids = kwargs.get("input_ids", args[0] if args else None)
        if not isinstance(ids, Tensor):  # embeddings: what they are is not known
            self._whole = False
            return
        same = bool((ids == ids[:1]).all())
        if ids.shape[0] != (self._rows or ids.shape[0]) or not (same or self._rows):
            raise ValueError(_ONE)
        self._rows = ids.shape[0]
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
            raise ValueError(
                "a HeadstartCache takes no padding; leave padding tokens out, with a batch of one there is no need"
            )
        held = self.get_seq_length() if self._parted else len(self._tokens)
        if isinstance(positions, Tensor) and positions.shape[-1] == ids.shape[-1] and positions.dim() == 2:
            plain = torch.arange(held, held + ids.shape[-1], device=positions.device)
            if not bool((positions == plain).all()):
                raise ValueError(f"position_ids do not go on behind the {held} tokens of this cache; leave them out")
        if held != self.get_seq_length():
            self._whole = False
        self._parted = self._parted or not same
        if not self._parted:
            self._tokens += ids[0].tolist()


class _Layer(DynamicLayer):  # type: ignore[misc]
    """One layer: the stored prefix, taken when it is first wanted, and what was computed."""

    def __init__(self, place: int, prefix: _Prefix) -> None:
        super().__init__()
        self._place = place
        self._prefix: _Prefix | None = prefix

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if self._prefix is not None and self._prefix.tokens:
            keys, values = self._prefix.layer(self._place)
            self.keys, self.values = (one.to(key_states.device, key_states.dtype) for one in (keys, values))

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = key_states.shape[0]
        if self.keys.dim() == key_states.dim() and self.keys.shape[0] == 1 != rows:
            self.keys, self.values = (one.expand(rows, -1, -1, -1) for one in (self.keys, self.values))
        found: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
        return found

    def get_seq_length(self) -> int:
        if not self.is_initialized and self._prefix is not None:
            return self._prefix.tokens
        length: int = super().get_seq_length()
        return length

    def crop(self, tokens_to_remove: int) -> None:
        if not self.is_initialized and self._prefix is not None and self._prefix.tokens:
            keys, values = self._prefix.layer(self._place)
            self.lazy_initialization(keys, values)
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        self._prefix = None
        super().reset()


class _Prefix:
    """What matched of a prompt: read into `_planes`, or computed where reading failed."""

    def __init__(
        self, model: Any, shape: KVShape, cache: PrefixCache, prompt: Sequence[int], *, salt: str | None, timeout_s: float
    ) -> None:
        self._model = model
        self._shape = shape
        self._timeout_s = timeout_s
        self._computed: list[tuple[Tensor, Tensor]] | None = None
        self._lease = cache.match(prompt, salt=salt)
        self.tokens = self.loaded_tokens = self._lease.tokens
        self._prompt = prompt[: self.tokens]
        self._planes = [
            np.empty((layer.strips, self.tokens, layer.width * shape.dtype.itemsize), np.uint8) for layer in shape.layers
        ]
        self._load = self._lease.load(into=self) if self.tokens else None

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        """See KVView: u8 [pieces, strips, bytes of a piece of a strip]."""
        plane = self._planes[layer]
        pieces = plane.reshape(plane.shape[0], self.tokens // self._shape.piece_tokens, -1).transpose(1, 0, 2)
        return pieces[first : first + len(sizes)]

    def layer(self, place: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [1, heads, tokens, width], in host memory or where they were computed."""
        if self._computed is None:
            assert self._load is not None
            try:
                self._load.wait(place)
            except LoadFailed as error:
                _log.warning("a stored prefix could not be read, what is missing of it is computed: %s", error)
                self._computed = self._compute()
        return self._part(place, self.tokens) if self._computed is None else self._computed[place]

    def close(self) -> None:
        if self._load is not None:
            self._load.cancel()
        self._lease.release()

    def _part(self, place: int, tokens: int) -> tuple[Tensor, Tensor]:
        layer: LayerKV = self._shape.layers[place]
        plane = torch.from_numpy(self._planes[place]).view(self._shape.dtype)[:, :tokens]
        keys, values = layer.keys_and_values(plane)
        return keys[None], values[None]

    def _compute(self) -> list[tuple[Tensor, Tensor]]:
        """Compute what is not good in all layers, by a pass of its own through the same weights."""
        assert self._load is not None
        try:
            good = self._load.result(self._timeout_s)
        except LoadFailed:  # bytes may still land where they belong: nothing there is used
            good = 0
        self.loaded_tokens = good
        rest = DynamicCache()
        device, dtype = self._model.device, self._shape.dtype
        for place in range(len(self._shape.layers) if good else 0):
            keys, values = self._part(place, good)
            rest.update(keys.to(device, dtype), values.to(device, dtype), place)
        inner = self._model.base_model  # without the head: logits of a whole prompt may be gigabytes
        name = name_of_cache(inner)
        assert name is not None
        with torch.no_grad():
            inner(input_ids=torch.tensor([list(self._prompt[good:])], device=device), use_cache=True, **{name: rest})
        return [(layer.keys, layer.values) for layer in rest.layers]


class _Source:
    """Keys and values as pieces, for saving (see KVView). Copied when they are asked for, on the saver's thread."""

    def __init__(self, shape: KVShape, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
        self._shape = shape
        self._layers = layers

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> npt.NDArray[np.uint8]:
        step = self._shape.piece_tokens
        part = slice(first * step, (first + len(sizes)) * step)
        keys, values = (one[0, :, part].detach().cpu() for one in self._layers[layer])
        joined = self._shape.layers[layer].key_width is not None
        both = torch.cat((keys, values), dim=-1 if joined else 0)  # [strips, tokens, width]
        pieces = both.reshape(both.shape[0], len(sizes), step, both.shape[-1]).transpose(0, 1).contiguous()
        return pieces.view(torch.uint8).numpy().reshape(len(sizes), -1)
