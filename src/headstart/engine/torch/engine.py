"""The torch engine: one thread that takes requests in, runs steps over all of them, and hands tokens out (`serving.door`).

A load that fails is computed instead, and an exception in a step ends the requests of that step with finish="error".

This file puts the parts together. Whose turn it is: `serving.admission` and `serving.scheduler`; who gives way:
`serving.preempting`; KV that grows: `room`; what a step does: `stepping`; stored prefixes: `loading`; how a request ends:
`serving.ending`; where all of them stand: `serving.roster`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace

from torch import Tensor

from headstart.block.identity import Identity
from headstart.cache.prefix_cache import PrefixCache
from headstart.engine.base import EngineInfo, GenerationRequest, TokenEvent
from headstart.engine.serving.admission import Admission
from headstart.engine.serving.boundaries import Boundaries
from headstart.engine.serving.door import ServingEngine
from headstart.engine.serving.ending import Endings
from headstart.engine.serving.preempting import Preemption
from headstart.engine.serving.roster import Roster
from headstart.engine.speeds import Speeds
from headstart.engine.torch.branches import shareable_tokens
from headstart.engine.torch.deterministic import CHUNK_TOKENS
from headstart.engine.torch.floor import measure_floor, warm_up
from headstart.engine.torch.kv_memory import KVMemory
from headstart.engine.torch.loading import Loads
from headstart.engine.torch.model import Model, TorchModel
from headstart.engine.torch.prefix import PrefixBridge
from headstart.engine.torch.room import Rooms
from headstart.engine.torch.sampler import Sampler
from headstart.engine.torch.sequence import HeldStates, Sequence
from headstart.engine.torch.stepping import Stepper
from headstart.metrics import Counters

_TOUCH_TOKENS = 256  # KV memory that one idle moment backs with pages, …
_TOUCH_AFTER_S = 1.0  # … so long after the last work: the first request often comes as soon as the server is ready


class TorchEngine(ServingEngine[Sequence]):
    """See `engine.base.Engine`. Takes over `cache` and `memory` and closes them."""

    def __init__(
        self,
        model: Model,
        memory: KVMemory,
        *,
        info: EngineInfo,
        cache: PrefixCache | None = None,
        max_running: int = 8,
        chunk_tokens: int = 1024,
        load_timeout_s: float = 30.0,
        hedge_after_s: float = 0.25,
        speeds: Speeds | None = None,
        deterministic: bool = False,
        save_every: int = 2048,
        room_tokens: int = 128,
        patience_s: float = 30.0,
    ) -> None:
        """`hedge_after_s`: how late a layer of a stored prefix may be at least, before the prompt is computed meanwhile.
        `speeds`: what is known of computing and reading already. `deterministic`: for a model that was made so; see there.
        `save_every`: tokens of a long prompt after which it is saved so far; `room_tokens`: the least room for the answer that
        a request gets at a time; `patience_s`: how long a request waits before an equal one gives its place to it."""
        super().__init__(info, Counters(), Roster())
        self.model = model
        self.cache = cache
        self._memory = memory
        self._chunk_tokens = CHUNK_TOKENS if deterministic else chunk_tokens
        self._speeds = speeds or Speeds(self._counters, chunk_tokens=self._chunk_tokens)
        roster = self._roster
        self._bridge = None
        if cache is not None:
            self._bridge = PrefixBridge(
                cache,
                memory,
                speeds=self._speeds,
                timeout_s=load_timeout_s,
                hedge_after_s=hedge_after_s,
                wake=roster.wake.set,
            )
        rooms = Rooms(memory, self._counters, least_tokens=room_tokens, patience_s=load_timeout_s)
        self._loads = Loads(roster, rooms, self._bridge, self._speeds, self._counters)
        self._endings = Endings(
            roster,
            rooms,
            self._loads,
            self._bridge,
            self._counters,
            piece_tokens=memory.shape.piece_tokens,
            save_every=save_every,
        )
        self._stepper = Stepper(
            model,
            roster,
            self._loads,
            Boundaries(HeldStates(memory), self._counters, every=save_every),
            self._endings,
            self._counters,
            chunk_tokens=self._chunk_tokens,
            alone=deterministic,
            memory=memory,
        )
        self._preemption = Preemption(roster, rooms, self._loads, self._endings, self._counters, patience_s=patience_s)
        self._admission = Admission(
            roster,
            rooms,
            self._preemption,
            self._loads,
            self._endings,
            self._bridge,
            self._counters,
            max_running=max_running,
            patience_s=load_timeout_s,
            gives=None if deterministic else shareable_tokens,
        )
        self._worked_s = time.monotonic()  # when a step or the warm-up last ended
        self._start()

    # The door; any thread.

    def _sequence(self, request: GenerationRequest, on_event: Callable[[TokenEvent], None], max_tokens: int) -> Sequence:
        return Sequence(
            request=request,
            on_event=on_event,
            submitted_s=time.monotonic(),
            max_tokens=max_tokens,
            tokens=[*request.prompt, *request.continued],
            sampler=Sampler(
                request.sampling,
                prompt=request.prompt,
                logprobs=request.logprobs,
                min_tokens=request.min_tokens,
                stop_ids=request.stop_ids,
                constraint=request.constraint,
                continued=request.continued,
            ),
            use_cache=request.use_cache and self._bridge is not None,
            identity=self.identity(request.adapter),
        )

    @property
    def speeds(self) -> Speeds:
        """See `PacedEngine`."""
        return self._speeds

    def identity(self, adapter: str | None) -> Identity | None:
        """See `StoringEngine`."""
        if adapter is None or self.cache is None:
            return None
        assert isinstance(self.model, TorchModel)
        assert self.model.adapters is not None
        return replace(self.cache.identity, adapters=(self.model.adapters.digests[adapter],))

    def _kv_bytes(self) -> tuple[int, int]:
        return self._memory.used_bytes, self._memory.capacity_bytes

    def close(self) -> None:
        """See `Engine.close`. Returns within a bound even if the thread is stuck in the middle of a step."""
        self._stop()
        if self.cache is not None:
            self.cache.close()
        self._memory.close()

    def measure_floor(self, prompt: Several[int], cached_tokens: int, rounds: int) -> list[float]:
        """Return, for each round, the seconds from a prompt to its first token when the KV of the first `cached_tokens`
        already lies in the request's memory: what no cache can beat. For an engine that is otherwise idle."""
        return self._call(
            lambda: measure_floor(
                self.model,
                self._memory,
                self._bridge,
                prompt,
                cached_tokens=cached_tokens,
                rounds=rounds,
                chunk_tokens=self._chunk_tokens,
            )
        )

    def next_logits(self, tokens: Several[int]) -> Tensor:
        """Return float32 logits [vocabulary] for the token after `tokens`, computed without the cache: the reference."""
        return self._call(lambda: self.model.next_logits(tokens, chunk_tokens=self._chunk_tokens))

    def warm_up(self) -> None:
        """Run a short prefill and a decoding step, so that the first request does not pay for what is made on first use; and
        learn how fast prompts are computed, without and behind a prefix."""

        def run() -> None:
            for rows, row_keys, seconds in warm_up(self.model, self._memory, context_tokens=self.info.context_tokens):
                self._speeds.passed(rows, row_keys, seconds, first=True)
            self._worked_s = time.monotonic()

        self._call(run)

    # The engine's thread.

    def _round(self) -> bool:
        self._take_mail()
        self._loads.settle()
        self._preemption.make_room()
        self._admission.admit()
        work = self._stepper.plan()
        if work:
            self._stepper.step(work)
            self._worked_s = time.monotonic()
        return bool(work)

    def _use_idle_moment(self) -> bool:
        """Back KV memory for later requests, look ahead when that is done; a request that arrives waits some 10 ms at most."""
        if self._roster.wake.is_set():
            return True
        if time.monotonic() - self._worked_s >= _TOUCH_AFTER_S and self._memory.touch(_TOUCH_TOKENS):
            return True
        self._loads.look_ahead()
        return False
