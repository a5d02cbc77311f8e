"""A load of a stored prefix, or of its beginning, straight into a request's KV, layer after layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from headstart.cache.prefix_cache import Lease, Load
from headstart.engine.serving.bridge import MEMORY
from headstart.engine.serving.loading import Outcome
from headstart.engine.speeds import ReadAccount
from headstart.engine.torch.kv_memory import DeviceKV, HostKV, KVShape
from headstart.errors import LoadFailed
from headstart.policy import loading
from headstart.policy.loading import Plan


class PrefixLoad:
    """A load under way into a request's KV, layer after layer: of the first `tokens` tokens of what matched. `failed`: it will
    not become all of them.

    Two references to host memory: one until no read can touch it any more, one until the engine calls `release`."""

    def __init__(
        self,
        lease: Lease,
        kv: HostKV | DeviceKV,
        host: HostKV,
        *,
        plan: Plan,
        shape: KVShape,
        timeout_s: float,
        least_s: float,
        account: ReadAccount,
    ) -> None:
        self.plan = plan
        self.tokens = plan.at_once_tokens
        self.failed = False
        self.done = False  # no read can touch the host memory any more
        self.started_s = time.monotonic()
        self.deadline_s = self.started_s + timeout_s
        self.arrived = 0  # layers that are there, …
        self._arrived_s = 0.0  # … and how long after the start they were
        self._least_s = least_s
        self._device_kv = kv if isinstance(kv, DeviceKV) else None
        self._state, self._state_taken = kv.state, False
        self._host = host
        self._shape = shape
        self._layers = len(shape.layers)
        self._copied = 0  # layers that are on the device
        self._account = account
        self._load: Load = lease.load(into=host, end_tokens=self.tokens)
        host.retain()
        self._load.add_done_callback(self._let_go)

    @property
    def overdue(self) -> bool:
        return time.monotonic() >= self.deadline_s

    @property
    def slow(self) -> bool:
        """Whether the prompt is sooner there in another way (`policy.loading.too_slow`)."""
        with suppress(LoadFailed):  # the next layer is not there yet, or none will be
            while self.arrived < self._layers:
                self._load.wait(self.arrived, timeout_s=0.0)
                self._note(self.arrived)
        return loading.too_slow(
            time.monotonic() - self.started_s,
            arrived=self.arrived,
            arrived_s=self._arrived_s,
            layers=self._layers,
            plan=self.plan,
            least_s=self._least_s,
        )

    def wait(self, layer: int, timeout_s: float) -> None:
        """Return when the model's layer `layer` may be attended. Raises LoadFailed."""
        layer = self._shape.place(layer)
        self._load.wait(layer, timeout_s=max(0.0, min(timeout_s, self.deadline_s - time.monotonic())))
        self._note(layer)
        self._to_device(layer + 1, self.tokens)

    def take_state(self, timeout_s: float) -> None:
        """Have recurrent layers, if there are any, stand behind the loaded prefix. Raises LoadFailed."""
        if self._state is None or self._state_taken:
            return
        data = self._load.state(timeout_s=max(0.0, min(timeout_s, self.deadline_s - time.monotonic())))
        try:
            self._state.take(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), self.tokens)
        except ValueError as error:  # another size: of another version of transformers, say
            raise LoadFailed(str(error), usable_tokens=0, timed_out=False, reason="state") from error
        self._state_taken = True

    def outcome(self) -> Outcome:
        """Return what came of it; only when `done`, or after `wait` returned for every layer."""
        usable = min(self._load.usable_tokens, self.tokens)
        if usable and self._state is not None:
            try:
                self.take_state(0.0)
            except LoadFailed:
                usable = 0
        self._to_device(self._layers, usable)
        return Outcome.of(
            usable,
            self._load.tokens_by_tier.get(MEMORY, 0),
            bytes_read=self._load.bytes_read,
            seconds=self._load.seconds or time.monotonic() - self.started_s,
        )

    def finish(self, timeout_s: float) -> Outcome:
        """Wait for every read to end and return what came of it. Raises LoadFailed when that takes too long."""
        self._load.result(timeout_s=timeout_s)
        return self.outcome()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back from some thread once no read can touch the host memory any more."""
        self._load.add_done_callback(lambda _: callback())

    def give_up(self) -> None:
        """Note that it is too slow, and start no further reads."""
        self._account.late(self.arrived + 1, of=self._layers)
        self.cancel()

    def cancel(self) -> None:
        self._account.cancelled = True
        self._load.cancel()

    def release(self) -> None:
        """The engine is through with it. Reads under way keep the memory that they touch."""
        self._host.release()

    def _let_go(self, load: Load) -> None:
        self._account.ended(load.bytes_read)
        self.done = True
        self._host.release()

    def _note(self, layer: int) -> None:
        if layer >= self.arrived:
            self.arrived = layer + 1
            self._arrived_s = time.monotonic() - self.started_s

    def _to_device(self, layers: int, tokens: int) -> None:
        if self._device_kv is not None and tokens:
            for layer in range(self._copied, layers):
                self._device_kv.copy_layer(layer, of=self._host, tokens=tokens)
            self._copied = max(self._copied, layers)
