"""vLLM's connector interface, hook by hook. A version that adds a hook or changes one fails here, and someone decides.

`HOOKS` holds every public member of `KVConnectorBase_V1` and `SupportsHMA` with its parameters, and what we do about it. Of
0.33, whose source `run.sh` unpacks and which is not run, the additions stand in `LATER`; with VLLM_SOURCE=FOLDER in the
environment another version's source is held against both.
"""

from __future__ import annotations

import ast
import inspect
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import worker_kit as kit
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched import output
from vllm.v1.request import Request

import vllm
from headstart.connect.vllm import HeadstartConnector

OURS = "answered"
DEFAULT = "the base's answer is right for a cache"

HOOKS = {
    "bind_connector_metadata": ("connector_metadata", DEFAULT),
    "bind_gpu_block_pool": ("gpu_block_pool", DEFAULT),
    "bind_kv_cache_manager": ("kv_cache_manager", DEFAULT),
    "build_connector_meta": ("scheduler_output", OURS),
    "build_connector_worker_meta": ("", OURS),
    "build_kv_connector_stats": ("data", OURS),
    "build_prom_metrics": ("vllm_config metric_types labelnames per_engine_labelvalues", OURS),
    "clear_connector_metadata": ("", DEFAULT),
    "finish_forward": ("", DEFAULT),
    "get_block_ids_with_load_errors": ("", OURS),
    "get_external_cache_hit_sources": ("request num_external_tokens", DEFAULT),  # all from DISK
    "get_finished": ("finished_req_ids", OURS),
    "get_finished_count": ("", DEFAULT),  # every rank reports
    "get_handshake_metadata": ("", OURS),
    "get_kv_connector_kv_cache_events": ("", DEFAULT),
    "get_kv_connector_stats": ("", OURS),
    "get_loaded_kv_cache_group_ids": ("request", DEFAULT),  # the groups that a hash-addressed store holds
    "get_mem_pool_context": ("", DEFAULT),
    "get_num_new_matched_tokens": ("request num_computed_tokens", OURS),
    "get_required_kvcache_layout": ("vllm_config", DEFAULT),  # any will do
    "get_transfer_results": ("finished_req_ids", OURS),
    "handle_preemptions": ("kv_connector_metadata", DEFAULT),  # no block is read after its step
    "has_connector_metadata": ("", DEFAULT),
    "has_pending_block_frees": ("", DEFAULT),
    "has_pending_push_work": ("", DEFAULT),
    "on_new_request": ("request", OURS),
    "register_finished_partial_tail": ("request block_ids partial_tail_offloads", DEFAULT),  # whole pieces only
    "register_kv_caches": ("kv_caches", OURS),
    "request_finished": ("request block_ids", OURS),
    "request_finished_all_groups": ("request block_ids", OURS),
    "requires_kv_delivery": ("", OURS),
    "requires_piecewise_for_cudagraph": ("extra_config", DEFAULT),  # nothing happens within a layer
    "reset_cache": ("", OURS),
    "reset_capture_state": ("", DEFAULT),
    "role": ("", DEFAULT),
    "save_kv_layer": ("layer_name kv_layer attn_metadata kwargs", OURS),
    "set_host_xfer_buffer_ops": ("copy_operation", DEFAULT),
    "set_xfer_handshake_metadata": ("metadata", OURS),
    "set_xfer_handshake_metadata_pp_aware": ("metadata", OURS),
    "shutdown": ("", OURS),
    "start_load_kv": ("forward_context kwargs", OURS),
    "supports_divergent_local_hybrid_hits": ("", DEFAULT),  # blocks without a state are no hit here
    "take_events": ("", OURS),
    "update_connector_output": ("connector_output", OURS),
    "update_state_after_alloc": ("request blocks num_external_tokens", OURS),
    "wait_for_layer_load": ("layer_name", OURS),
    "wait_for_save": ("", OURS),
}
LATER_SOURCE = Path(os.environ.get("VLLM_SOURCE", Path(__file__).parents[2] / "build" / "vllm-0.33.0")) / "vllm"
LATER = {  # since 0.33
    "restore_kv_caches": ("", DEFAULT),  # never called, because of the next but one
    "unregister_kv_caches": ("", DEFAULT),
    "supports_sleep_mode": ("kv_transfer_config", OURS),
}
REQUEST_FIELDS = (
    "request_id prompt_embeds lora_request kv_transfer_params all_token_ids cache_salt mm_features session_id num_tokens "
    "num_prompt_tokens num_computed_tokens num_in_flight_tokens num_nans_in_logits skip_reading_prefix_cache "
    "shared_prefix_boundary"
)
STEP_FIELDS = (
    "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens total_num_scheduled_tokens kv_connector_block_state"
)


def hooks_of(source: str) -> dict[str, str]:
    """Return the public methods and properties of the two classes, with their parameters."""
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name in ("KVConnectorBase_V1", "SupportsHMA"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    names = [arg.arg for arg in (*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs)]
                    names += [arg.arg for arg in (item.args.vararg, item.args.kwarg) if arg is not None]
                    found[item.name] = " ".join(name for name in names if name not in ("self", "cls"))
    return found


def difference(found: dict[str, str]) -> list[str]:
    """Return what is not as it was decided upon, a sentence a hook."""
    known = {name: parameters for name, (parameters, _) in {**HOOKS, **LATER}.items()}
    told = [f"{name}({found[name]}) is new: decide what we answer" for name in sorted(found.keys() - known.keys())]
    told += [f"{name} is gone" for name in sorted(HOOKS.keys() - found.keys())]
    changed = [name for name in sorted(found.keys() & known.keys()) if found[name] != known[name]]
    return told + [f"{name}({known[name]}) is now {name}({found[name]})" for name in changed]


def test_every_hook_of_the_installed_version_is_decided_upon() -> None:
    assert difference(hooks_of(inspect.getsource(base))) == []


@pytest.mark.skipif(not LATER_SOURCE.is_dir(), reason=f"no vLLM 0.33 at {LATER_SOURCE}: its interface was NOT looked at")
def test_every_hook_of_the_next_version_is_decided_upon_and_what_we_read_is_there() -> None:
    base_source = (LATER_SOURCE / "distributed" / "kv_transfer" / "kv_connector" / "v1" / "base.py").read_text()
    assert difference(hooks_of(base_source)) == []
    request = (LATER_SOURCE / "v1" / "request.py").read_text()
    for name in REQUEST_FIELDS.split():
        assert f"self.{name}" in request or f"def {name}(" in request, name
    step = (LATER_SOURCE / "v1" / "core" / "sched" / "output.py").read_text()
    for name in (*STEP_FIELDS.split(), "class KVConnectorBlockState", "def get_block_ids", "boundary_state_offloads"):
        assert name in step, name


def test_a_hook_that_is_added_or_changed_is_noticed() -> None:
    source = inspect.getsource(base)
    added = source.replace("    def shutdown(self)", "    def drain(self, step):\n        pass\n\n    def shutdown(self)")
    changed = source.replace("def wait_for_save(self)", "def wait_for_save(self, step)")
    gone = source.replace("def wait_for_save(self)", "def _wait_for_save(self)")
    assert difference(hooks_of(added)) == ["drain(step) is new: decide what we answer"]
    assert difference(hooks_of(changed)) == ["wait_for_save() is now wait_for_save(step)"]
    assert difference(hooks_of(gone)) == ["wait_for_save is gone"]


@pytest.mark.parametrize("name", sorted({**HOOKS, **LATER}))
def test_what_is_said_to_be_answered_is(name: str) -> None:
    parameters, answer = {**HOOKS, **LATER}[name]
    assert (name in vars(HeadstartConnector)) == (answer == OURS)
    if answer == OURS and name not in ("requires_kv_delivery",):
        ours = [one for one in inspect.signature(getattr(HeadstartConnector, name)).parameters if one != "self"]
        assert ours == parameters.split()


def test_the_base_has_no_abstract_hook_left() -> None:
    assert not inspect.isabstract(HeadstartConnector)


def test_what_we_read_of_requests_and_steps_is_there() -> None:
    source = inspect.getsource(Request)
    for name in REQUEST_FIELDS.split():
        assert f"self.{name}" in source or hasattr(Request, name), name
    fields = inspect.signature(output.SchedulerOutput).parameters
    assert set(STEP_FIELDS.split()) <= set(fields)
    assert hasattr(output.KVConnectorBlockState, "get_block_ids")
    assert "boundary_state_offloads" in inspect.signature(output.KVConnectorBlockState).parameters


@pytest.mark.parametrize(
    ("policy", "mode", "warned"), [("fail", "store", 1), ("recompute", "store", 0), ("fail", "observe", 0)]
)
def test_a_policy_by_which_a_failed_read_fails_its_request_is_warned_of_at_the_start(
    policy: str, mode: str, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="HeadstartConnector",
            kv_role="kv_both",
            kv_load_failure_policy=policy,
            kv_connector_extra_config={"mode": mode},
        ),
        model_config=SimpleNamespace(multimodal_config=None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )
    with caplog.at_level(logging.WARNING, logger="headstart"):
        connector = HeadstartConnector(config, base.KVConnectorRole.SCHEDULER, kit.kv_config((kit.gqa_spec(), ["a.0.attn"])))
    connector.shutdown()
    assert sum('"kv_load_failure_policy": "recompute"' in line for line in caplog.messages) == warned


def test_this_is_a_version_that_was_looked_at() -> None:
    assert vllm.__version__.startswith("0.32."), "read its changes to the connector, then name it here and in docs/vllm.md"
