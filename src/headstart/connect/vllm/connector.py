"""HeadstartConnector: vLLM's hooks, each in a line or two. `scheduler` decides, `worker` moves the bytes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from headstart.connect.vllm.identity import media_digest
from headstart.connect.vllm.layout import NotStored, is_recurrent, stored_groups
from headstart.connect.vllm.messages import Handshake, Orders, Rank, Report
from headstart.connect.vllm.scheduler import Scheduler
from headstart.connect.vllm.settings import read_settings
from headstart.connect.vllm.statistics import PromMetrics, Statistics
from headstart.connect.vllm.worker import Worker

_SLIDING = ("SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_log = logging.getLogger(__name__)


class HeadstartConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM has no types for us
    """headstart's prefix store under vLLM:

    --kv-transfer-config '{"kv_connector": "HeadstartConnector", "kv_connector_module_path": "headstart.connect.vllm",
        "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"cache.directory": "/mnt/kv"}}'
    """

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        _register()
        settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        self._reported = False
        self._bad_blocks: set[int] = set()
        if role is KVConnectorRole.WORKER:
            self._worker = Worker(settings, vllm_config, kv_cache_config)
            return
        if self._kv_transfer_config.kv_load_failure_policy == "fail" and settings.stores:
            _log.warning(
                "kv_load_failure_policy is 'fail', vLLM's default: a read that fails will fail its request; write "
                '"kv_load_failure_policy": "recompute" into --kv-transfer-config'
            )
        parallel = vllm_config.parallel_config
        groups = kv_cache_config.kv_cache_groups
        self._scheduler = Scheduler(
            settings,
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            block_tokens=[group.kv_cache_spec.block_size for group in groups],
            recurrent=frozenset(number for number, group in enumerate(groups) if is_recurrent(group)),
            save_always=_slides(kv_cache_config),
            chunk_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
            media=media_digest(vllm_config.model_config),
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """A save that is lost is a miss."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """Pages are used where they were registered, and weights may be others after the sleep."""
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Statistics:
        _register()
        return Statistics(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PromMetrics:
        _register()
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def get_kv_connector_stats(self) -> Statistics | None:
        return self._scheduler.statistics() if self._scheduler is not None else self._the_worker.statistics()

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    # The worker's side.

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._the_worker.register(kv_caches)

    def get_handshake_metadata(self) -> Handshake | None:
        return None if _beside_others() else self._the_worker.handshake

    def build_connector_worker_meta(self) -> Report | None:
        """MultiConnector hands one connector's handshake to all of them: beside others ours goes with a step's result."""
        handshake, short = self._the_worker.handshake, self._the_worker.short()
        if self._reported or handshake is None or not _beside_others():
            return Report(short=short) if short else None
        self._reported = True
        return Report({handshake.rank: handshake}, short)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._the_worker.obey(self._orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are whole: a request is scheduled when all of its load has arrived."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saves are whole: pages are copied when the step is computed."""

    def wait_for_save(self) -> None:
        self._the_worker.save(self._orders.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed, self._bad_blocks = self._the_worker.finished(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # The scheduler's side.

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[Rank, KVConnectorHandshakeMetadata]) -> None:
        self._the_scheduler.shake_hands({rank: one for rank, one in metadata.items() if isinstance(one, Handshake)})

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    def on_new_request(self, request: Any) -> None:
        self._the_scheduler.queued(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._the_scheduler.find(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._the_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Orders:
        return self._the_scheduler.orders(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        short: Mapping[str, int] = {}
        if isinstance(report := connector_output.kv_connector_worker_meta, Report):
            self._the_scheduler.shake_hands(report.handshakes)
            short = report.short
        self._the_scheduler.stepped(connector_output, short)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._the_scheduler.ended(request, block_ids), None

    def take_events(self) -> Iterable[Any]:
        return ()

    def reset_cache(self) -> bool:
        return self._the_scheduler.reset()

    @property
    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    @property
    def _the_worker(self) -> Worker:
        assert self._worker is not None, "vLLM called a hook of its workers in its scheduler"
        return self._worker

    @property
    def _the_scheduler(self) -> Scheduler:
        assert self._scheduler is not None, "vLLM called a hook of its scheduler in a worker"
        return self._scheduler


def _slides(kv_cache_config: Any) -> bool:
    try:
        groups = stored_groups(kv_cache_config)
    except NotStored:
        return False
    return any(type(group.kv_cache_spec).__name__ in _SLIDING for group in groups)


def _beside_others() -> bool:
    """Whether this connector is one of several in a MultiConnector."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return has_kv_transfer_group() and not isinstance(get_kv_transfer_group(), HeadstartConnector)


def _register() -> None:
    """Let vLLM find the class by name alone, as MultiConnector does when it shows its connectors' metrics."""
    name = HeadstartConnector.__name__
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, "headstart.connect.vllm", name)
