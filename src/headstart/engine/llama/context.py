"""KV memory in libllama: sequences in one unified memory, passes over several of them, and ranges of them as bytes.

    sequence s  [0 … n) ── copy ──▶ SCRATCH [first … end) ──▶ bytes      out
    bytes ──▶ SCRATCH ── copy ──▶ sequence s                             in: the bytes carry their positions, which are checked

A copy between sequences moves nothing: both hold the same cells. Bytes are of one range, all layers at once, and read back only
by the same build with the same settings. Always through the same scratch sequence, whose number is in them.

Of a model with recurrent layers bytes of a range hold its attention layers alone. The state of the recurrent ones stands for
all tokens so far and is taken out and put in by itself.

Not safe between threads: all calls come from the engine's.
"""

from __future__ import annotations

import ctypes as c
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headstart.engine.llama.binding import KV_TYPES, PARTIAL_ONLY
from headstart.engine.llama.tiles import TILE_ROWS, Tiles
from headstart.engine.llama.weights import Weights
from headstart.errors import HeadstartError, ModelError

SCRATCH = 0
MOST_SEQUENCES = 256  # of libllama's
_TILED = ("f16", "f32")  # KV types; see `tiles`
_HEADER_BYTES = 8  # of every state: what it is, and of which sequence


class WrongState(HeadstartError):
    """Bytes of a range or a state that this context does not take."""


@dataclass(frozen=True, slots=True)
class Row:
    """Compute `tokens` of `sequence` at positions from `first` on; logits behind the last one where they are `wanted`."""

    sequence: int
    tokens: Sequence[int]
    first: int
    wanted: bool


class Context:
    """`cells`: tokens that all sequences hold together at most, besides those that fill a tile. `grain_rows`: rows of a prompt
    are best computed by so many. Raises ModelError where there is no memory for them."""

    def __init__(
        self,
        weights: Weights,
        *,
        cells: int,
        sequences: int,
        kv_type: str,
        batch: int,
        ubatch: int,
        threads: int,
        flash: bool | None,
    ) -> None:
        """`flash`: whether attention is fused; None: where it can be. Not "auto" of libllama's: what that comes to is not told,
        and the bytes depend on it."""
        self._lib = lib = weights.library
        self._vocabulary = weights.vocabulary.size
        self.recurrent = weights.recurrent
        params = lib.context_default_params()
        params.n_ctx, params.n_seq_max, params.kv_unified = cells + TILE_ROWS, sequences, True
        batch = max(batch, sequences)  # which libllama insists on, by aborting
        params.n_batch, params.n_ubatch = batch, max(sequences, min(batch, ubatch))
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = KV_TYPES[kv_type]
        params.swa_full = True  # or a prefix could be cut nowhere but at its end
        self.pointer: int | None = None
        for fused in (True, False) if flash is None else (flash,):
            self.flash_attention = fused
            params.flash_attn_type = int(fused)
            lib.errors()
            self.pointer = lib.init_from_model(weights.pointer, params)
            if self.pointer:
                break
        if not self.pointer:
            raise ModelError(
                f"libllama cannot make KV memory for {cells:,} tokens of {weights.file} in {kv_type}: "
                f"{lib.errors() or 'no reason given'}; set engine.context or engine.kv_memory lower",
                path=weights.file,
            )
        self._memory = lib.get_memory(self.pointer)
        self._window = weights.window
        self._tiles: Tiles | None = None
        if self.flash_attention and kv_type in _TILED and weights.on_cpu and batch >= TILE_ROWS:
            key_work = 2 * weights.layers * weights.width
            self._tiles = Tiles(max(1, weights.heads), threads, row_work=weights.parameters, key_work=key_work)
        self.grain_rows = TILE_ROWS if self._tiles is None else self._tiles.grain(min(batch, ubatch))
        self._batch = lib.batch_init(batch, 0, 1)
        self._tokens, self._positions, self._counts, self._wanted = (
            np.ctypeslib.as_array(part, shape=(batch,))
            for part in (self._batch.token, self._batch.pos, self._batch.n_seq_id, self._batch.logits)
        )
        self._counts[:] = 1
        # seq_id is an array of pointers to one number each: the numbers, so that they can be set at once where they lie.
        self._sequences = [self._batch.seq_id[i] for i in range(batch)]
        self._empty_state = self._state(SCRATCH, PARTIAL_ONLY)[_HEADER_BYTES:] if self.recurrent else memoryview(b"")

    def close(self) -> None:
        pointer, self.pointer = self.pointer, None
        if pointer:
            self._lib.batch_free(self._batch)
            self._lib.free(pointer)

    def compute(self, rows: Sequence[Row]) -> list[int]:
        """Run one pass and return, for each row that wanted logits, where they are. Raises HeadstartError; what was to be
        computed is then not there."""
        at, outputs = 0, []
        self._wanted[:] = 0
        missing = self._missing(rows)
        filling = [Row(SCRATCH, [0] * missing, 0, wanted=False)] if missing else []
        for row in (*rows, *filling):
            end = at + len(row.tokens)
            self._tokens[at:end] = row.tokens
            self._positions[at:end] = np.arange(row.first, row.first + len(row.tokens))
            for i in range(at, end):
                self._sequences[i][0] = row.sequence
            if row.wanted:
                self._wanted[end - 1] = 1
                outputs.append(end - 1)
            at = end
        self._batch.n_tokens = at
        code = self._lib.decode(self.pointer, self._batch)
        if filling:
            self.remove(SCRATCH)
        if code:
            raise HeadstartError(f"libllama could not compute a pass of {at} tokens ({code}): {self._lib.errors()}")
        return outputs

    def _missing(self, rows: Sequence[Row]) -> int:
        """Return how many rows of nothing are worth computing beside these."""
        if self._tiles is None or self.recurrent:
            return 0
        return self._tiles.missing([(len(row.tokens), min(row.first, self._window or row.first)) for row in rows])

    def logits(self, output: int) -> npt.NDArray[np.float32]:
        """Return float32 [vocabulary], libllama's own memory: good until the next pass."""
        address = self._lib.get_logits_ith(self.pointer, output)
        assert address
        return np.ctypeslib.as_array(c.cast(address, c.POINTER(c.c_float)), shape=(self._vocabulary,))

    def sample(self, chain: int, output: int) -> int:
        """Return the token that a sampler chain takes of the logits there, and have it remember that."""
        return int(self._lib.sampler_sample(chain, self.pointer, output))

    def share(self, giver: int, taker: int, tokens: int) -> None:
        """Let `taker`, which is empty, begin with the first tokens of `giver`."""
        self._lib.memory_seq_cp(self._memory, giver, taker, 0, tokens)

    def remove(self, sequence: int) -> None:
        self._lib.memory_seq_rm(self._memory, sequence, -1, -1)

    def end_of(self, sequence: int) -> int:
        """Return how many tokens a sequence holds."""
        return int(self._lib.memory_seq_pos_max(self._memory, sequence)) + 1

    def copy_out(self, sequence: int, first: int, end: int) -> memoryview:
        """Return positions first … end-1 of a sequence as bytes."""
        self._lib.memory_seq_cp(self._memory, sequence, SCRATCH, first, end)
        try:
            data = self._state(SCRATCH, 0)
            if self.recurrent:
                return data[: len(data) - (len(self._state(SCRATCH, PARTIAL_ONLY)) - _HEADER_BYTES)]
            return data
        finally:
            self.remove(SCRATCH)

    def put_in(self, sequence: int, data: memoryview, first: int, end: int) -> None:
        """Put bytes from `copy_out` back at the positions that they came from. Raises WrongState."""
        if self.recurrent:
            if data.nbytes == _HEADER_BYTES:
                return  # no layer has any attention
            data = memoryview(bytes(data) + self._empty_state)
        try:
            self._set(SCRATCH, data, 0)
            there = (int(self._lib.memory_seq_pos_min(self._memory, SCRATCH)), self.end_of(SCRATCH))
            if not self.recurrent and there != (first, end):
                raise WrongState(f"bytes of the tokens {first} to {end} brought those from {there[0]} to {there[1]}")
            self._lib.memory_seq_cp(self._memory, SCRATCH, sequence, first, end)
        finally:
            self.remove(SCRATCH)

    def state_out(self, sequence: int) -> memoryview:
        """Return the state of the recurrent layers behind all tokens of a sequence."""
        return self._state(sequence, PARTIAL_ONLY)

    def state_in(self, sequence: int, data: memoryview, tokens: int) -> None:
        """Have the recurrent layers of a sequence stand behind its first `tokens` tokens. Raises WrongState."""
        self._set(sequence, data, PARTIAL_ONLY)
        if self.end_of(sequence) != tokens:
            raise WrongState(f"a state that should stand behind {tokens} tokens stands behind {self.end_of(sequence)}")

    def _state(self, sequence: int, flags: int) -> memoryview:
        size = self._lib.state_seq_get_size_ext(self.pointer, sequence, flags)
        data = np.empty(size, np.uint8)  # a bytearray would be filled with zeros first
        written = self._lib.state_seq_get_data_ext(self.pointer, data.ctypes.data, size, sequence, flags)
        if written != size:
            raise WrongState(f"libllama gave {written} bytes of a state of {size}: {self._lib.errors()}")
        return data.data

    def _set(self, sequence: int, data: memoryview, flags: int) -> None:
        held = np.frombuffer(data, np.uint8)  # keeps the memory and gives its address, writable or not
        read = self._lib.state_seq_set_data_ext(self.pointer, held.ctypes.data, held.nbytes, sequence, flags)
        if read != held.nbytes:
            raise WrongState(f"libllama took {read} of {held.nbytes} bytes: {self._lib.errors()}")
