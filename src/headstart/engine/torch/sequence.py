"""A request of the torch engine: what it holds in its KV memory, and its rows in a pass; see `serving.sequence`."""

from __future__ import annotations

from dataclasses import dataclass
from weakref import ReferenceType, ref

from headstart.engine.serving import sequence as serving
from headstart.engine.torch.attention import Prefix, Segment
from headstart.engine.torch.branches import Beyond, BranchKV
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVMemory, StateCopy
from headstart.engine.torch.meeting import Meeting
from headstart.engine.torch.prefix_load import PrefixLoad
from headstart.engine.torch.recurrent import RecurrentState
from headstart.engine.torch.sampler import Sampler


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(serving.Sequence):
    sampler: Sampler
    kv: HostKV | DeviceKV | BranchKV | None = None
    load: PrefixLoad | Meeting | None = None  # a PrefixLoad's tokens count as computed unless it fails
    _shared: ReferenceType[Prefix] | None = None

    @property
    def room(self) -> int:
        if self.load is None:
            return self.pending
        return self.load.room(self.computed) if isinstance(self.load, Meeting) else 0

    @property
    def joins_load(self) -> bool:
        return isinstance(self.load, PrefixLoad) and not self.load.failed

    @property
    def recurrent(self) -> bool:
        return self.kv is not None and self.kv.state is not None

    @property
    def shared(self) -> Prefix | None:
        """The beginning of its KV that other requests read now."""
        return None if self._shared is None else self._shared()

    def share(self, prefix: Prefix) -> None:
        self._shared = ref(prefix)

    def segment(self, start: int, count: int) -> Segment:
        """Return its next `count` tokens as rows start … of a batch."""
        kv, shared = self.kv, self.shared
        assert kv is not None
        if isinstance(kv, BranchKV):
            return Segment(kv.own, start, count, self.computed, kv.prefix)
        if shared is not None:
            return Segment(Beyond(kv, shared.tokens), start, count, self.computed, shared)
        return Segment(kv, start, count, self.computed)

    def release_kv(self) -> None:
        self._shared = None
        serving.Sequence.release_kv(self)


class HeldStates:
    """The states of recurrent layers that requests hold in `memory`; see `serving.boundaries.States`."""

    def __init__(self, memory: KVMemory) -> None:
        self._memory = memory

    @property
    def kept(self) -> bool:
        return self._memory.shape.state is not None

    def stands(self, sequence: serving.Sequence) -> bool:
        state = _state_of(sequence)
        return state is not None and state.tokens == sequence.computed

    def copy(self, sequence: serving.Sequence) -> StateCopy | None:
        state = _state_of(sequence)
        return None if state is None else self._memory.copy_state(state)


def _state_of(sequence: serving.Sequence) -> RecurrentState | None:
    kv = sequence.kv
    return kv.state if isinstance(kv, HostKV | DeviceKV) else None
