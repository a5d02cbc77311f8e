"""What the connector counts, in the form in which vLLM gathers it from every process and shows it at its own /metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from headstart.metrics import Counters

COUNTERS = {
    "matched_tokens": "Tokens that were found stored when a request was scheduled, beyond what vLLM itself had",
    "outrun_tokens": "Tokens that were found stored and computed all the same, because that is sooner here",
    "loaded_tokens": "Tokens of hits that have arrived: read, verified and in vLLM's KV memory, on every rank's own count",
    "loaded_bytes": "Bytes of pieces that were read and verified",
    "loads": "Loads that ended, for better or worse",
    "load_milliseconds": "Time that loads took, from the order until the last byte was in vLLM's KV memory",
    "loads_failed": "Loads that brought less than was found, or came too late; the rest is computed",
    "loads_cancelled": "Loads given up because their request was aborted",
    "saved_bytes": "New bytes written",
    "saves": "Saves that ended, for better or worse",
    "saves_dropped": "Saves of which something was not kept: queues or the disk were full, or the disk failed",
    "uncacheable_requests": "Requests that are not for the cache: prompts given as embeddings, adapters that cannot be read",
    "observed_tokens": "In mode observe: tokens that a store would have brought, beyond what vLLM itself had",
    "observed_prompt_tokens": "In mode observe: tokens of all prompts seen",
    "observed_saved_milliseconds": "In mode observe: time that computing those tokens took, by the speed measured meanwhile",
}


class Statistics(KVConnectorStats):  # type: ignore[misc]  # vLLM has no types for us
    """What was counted since the last time; `data` maps names of COUNTERS to numbers."""

    def reset(self) -> None:
        self.data: dict[str, int] = {}

    def aggregate(self, other: Any) -> Statistics:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return what stands in vLLM's log line."""
        return {f"headstart {name.replace('_', ' ')}": amount for name, amount in sorted(self.data.items())}

    def is_empty(self) -> bool:
        return not self.data


class Taking:
    """Counters of one side, and what of them was told already."""

    def __init__(self) -> None:
        self.counters = Counters()
        self._told: dict[str, int] = {}

    def take(self) -> Statistics | None:
        """Return what was counted since the last call, None if nothing was."""
        now = self.counters.snapshot()
        new = {name: amount - self._told.get(name, 0) for name, amount in now.items() if amount != self._told.get(name, 0)}
        self._told = now
        return Statistics(data=new) if new else None


class PromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter `headstart_<name>` for each of COUNTERS, with vLLM's own labels."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._series = {}
        for name, about in COUNTERS.items():
            counter = self._counter_cls(name=f"headstart_{name}", documentation=about, labelnames=labelnames)
            self._series[name] = {engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            if name in self._series:
                self._series[name][engine_idx].inc(amount)
