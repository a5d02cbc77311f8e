"""A request of the llama engine: its sequence in libllama, its read under way, its sampler chain; see `serving.sequence`."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.engine.llama.cells import SequenceKV
from headstart.engine.llama.context import Context
from headstart.engine.llama.reading import PrefixRead
from headstart.engine.llama.sampler import Sampler
from headstart.engine.serving import sequence as serving


@dataclass(slots=True, eq=False, kw_only=True)
class LlamaSequence(serving.Sequence):
    sampler: Sampler
    has_state: bool  # beside its KV, of recurrent layers
    kv: SequenceKV | None = None
    load: PrefixRead | None = None

    @property
    def room(self) -> int:
        return self.pending if self.load is None else self.load.room(self.computed)

    @property
    def recurrent(self) -> bool:
        return self.has_state

    def close(self) -> None:
        self.sampler.close()


class CopiedState:
    """A copy of a request's recurrent state."""

    def __init__(self, data: memoryview) -> None:
        self.data = data

    def release(self) -> None:
        """It goes with its last reader."""


class CopiedStates:
    """The states of recurrent layers, copied out of the context; see `serving.boundaries.States`."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def kept(self) -> bool:
        return self._context.recurrent

    def stands(self, sequence: serving.Sequence) -> bool:
        kv = sequence.kv
        return isinstance(kv, SequenceKV) and sequence.load is None and self._context.end_of(kv.number) == sequence.computed

    def copy(self, sequence: serving.Sequence) -> CopiedState | None:
        kv = sequence.kv
        return CopiedState(self._context.state_out(kv.number)) if isinstance(kv, SequenceKV) else None
