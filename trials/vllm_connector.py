"""A rough vLLM connector over PrefixCache, to learn whether doors and format fit. Not what ships.

Scheduler and worker are separate processes. Each has its own PrefixCache over one directory: the scheduler's only
matches, the worker's matches again, loads and saves. The worker derives identity and representation and hands them to the
scheduler by vLLM's handshake; before that there are no hits. One vLLM page (its block, 128 tokens here, K and V packed
in the last dimension) is never cut: a piece is lcm(64, page) tokens of one layer. Loads are whole and asynchronous.

    python trials/vllm_roundtrip.py --model models/smollm2-135m        # runs this connector under the real vLLM
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.v1.metrics.stats import CacheHitSource

from headstart.block.identity import Identity, canonical_architecture
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import Lease, Load, PrefixCache
from headstart.tier.disk import DiskTier


@dataclasses.dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What only the worker knows for certain, as bytes: the scheduler's configuration is flattened and must not guess."""

    identity: tuple[bytes, bytes]
    representation: bytes


@dataclasses.dataclass
class PagesOf:
    """One request's pages: `tokens` whole pieces of it, `skip` tokens that vLLM has already, one block id a page."""

    request: str
    tokens: list[int]
    blocks: list[int]
    skip: int = 0


@dataclasses.dataclass
class Metadata(KVConnectorMetadata):
    loads: list[PagesOf]
    saves: list[PagesOf]


class HeadstartTrialConnector(KVConnectorBase_V1):
    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("the trial connector knows one KV cache group")
        self._config = vllm_config
        self._page_tokens: int = vllm_config.cache_config.block_size
        self._directory = Path(self._kv_transfer_config.get_from_extra_config("directory", ""))
        self._report_path = Path(self._kv_transfer_config.get_from_extra_config("report", ""))
        self._cache: PrefixCache | None = None
        # scheduler
        self._leases: dict[str, Lease] = {}
        self._loads: list[PagesOf] = []
        self._prompts: dict[str, list[int]] = {}
        self._blocks: dict[str, list[int]] = {}
        # worker
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._pages: list[npt.NDArray[np.uint8]] = []

    def _open(self, identity: Identity, representation: Representation) -> PrefixCache:
        tier = DiskTier.open(self._directory, capacity_bytes=2 << 30)
        return PrefixCache([tier], identity=identity, representation=representation)

    def _report(self, event: str, **facts: object) -> None:
        with self._report_path.open("a") as file:
            file.write(json.dumps({"event": event, "role": self.role.name, "at": time.time(), **facts}) + "\n")

    # ── worker ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._pages = [_as_pages(view) for view in kv_caches.values()]  # [layer][block, page bytes]
        spec = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec
        shape = next(iter(kv_caches.values())).shape  # [blocks, kv heads, block tokens, 2 · head dim]
        piece_tokens = math.lcm(64, self._page_tokens)
        per_piece = piece_tokens // self._page_tokens
        self._representation = Representation(
            kind="mla" if "MLA" in type(spec).__name__ else "gqa",
            layout=f"vllm-cpu/0.32/{'x'.join(map(str, shape[1:]))}/{torch.backends.cpu.get_cpu_capability()}",
            dtype=str(spec.dtype).removeprefix("torch."),
            layer_bytes=tuple(per_piece * pages.shape[1] for pages in self._pages),
            piece_tokens=piece_tokens,
        )
        folder = Path(self._config.model_config.model)
        weights = hashlib.sha256()
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb") as data:
                weights.update(hashlib.file_digest(data, "sha256").digest())
        architecture = canonical_architecture(json.loads((folder / "config.json").read_text()))
        self._identity = Identity(weights=weights.digest(), architecture=architecture)
        self._cache = self._open(self._identity, self._representation)

    def get_handshake_metadata(self) -> Handshake | None:
        return Handshake((self._identity.weights, self._identity.architecture), self._representation.encode())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._cache is not None
        for wanted in self._get_connector_metadata().loads:
            began = time.perf_counter()
            # One token more: a match always leaves one to compute, and these are whole pieces.
            lease = self._cache.match([*wanted.tokens, 0])
            view = _Pages(self._pages, wanted.blocks, self._representation, skip=wanted.skip // self._page_tokens)
            load = lease.load(into=view)
            load.add_done_callback(lambda load, w=wanted, le=lease, t=began: self._loaded(load, w, le, t))

    def _loaded(self, load: Load, wanted: PagesOf, lease: Lease, began: float) -> None:
        """On a thread of the cache: no read can touch the pages any more."""
        usable = load.usable_tokens
        lease.release()
        with self._lock:
            self._bad_blocks.update(wanted.blocks[max(usable, wanted.skip) // self._page_tokens :])
            self._received.add(wanted.request)
        self._report(
            "loaded",
            asked_tokens=len(wanted.tokens),
            usable_tokens=usable,
            bytes_read=load.bytes_read,
            seconds=round(time.perf_counter() - began, 4),
        )

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        """Copy the pages out before the step ends, so that freed or preempted blocks are never read."""
        assert self._cache is not None
        for wanted in self._get_connector_metadata().saves:
            copied = [pages[wanted.blocks] for pages in self._pages]
            view = _Pages(copied, range(len(wanted.blocks)), self._representation)
            ticket = self._cache.save(wanted.tokens, view)
            ticket.add_done_callback(self._saved)

    def _saved(self, ticket: Any) -> None:
        result = ticket.wait(0)
        self._report("saved", stored_tokens=result.stored_tokens, written_bytes=result.written_bytes, reason=result.reason)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        with self._lock:
            received, self._received = self._received, set()
        return None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        with self._lock:
            bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    # ── scheduler ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        handshake = metadata[0]
        assert isinstance(handshake, Handshake)
        weights, architecture = handshake.identity
        identity = Identity(weights=weights, architecture=architecture)
        self._cache = self._open(identity, Representation.decode(handshake.representation))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """May be asked many times for one request: the lease of the time before is let go."""
        if (old := self._leases.pop(request.request_id, None)) is not None:
            old.release()
        if self._cache is None:
            return 0, False
        lease = self._cache.match(request.all_token_ids)
        new = lease.tokens - num_computed_tokens
        self._report("matched", tokens=lease.tokens, computed=num_computed_tokens)
        if new <= 0:
            lease.release()
            return 0, False
        self._leases[request.request_id] = lease  # held over the process boundary until the worker has reported
        return new, True

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens == 0:
            return
        tokens = self._leases[request.request_id].tokens
        pages = blocks.get_block_ids()[0][: tokens // self._page_tokens]
        skip = tokens - num_external_tokens
        self._loads.append(PagesOf(request.request_id, list(request.all_token_ids[:tokens]), pages, skip))

    def build_connector_meta(self, scheduler_output: Any) -> Metadata:
        saves: list[PagesOf] = []
        for new in scheduler_output.scheduled_new_reqs:
            self._prompts[new.req_id] = list(new.prompt_token_ids)
            self._blocks[new.req_id] = list(new.block_ids[0])
            self._save_at_prompt_end(new.req_id, new.num_computed_tokens, scheduler_output, saves)
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            if (more := cached.new_block_ids[i]) is not None:
                if name in cached.resumed_req_ids:
                    self._blocks[name] = list(more[0])
                else:
                    self._blocks[name] += more[0]
            self._save_at_prompt_end(name, cached.num_computed_tokens[i], scheduler_output, saves)
        loads, self._loads = self._loads, []
        return Metadata(loads, saves)

    def _save_at_prompt_end(self, name: str, computed: int, scheduler_output: Any, saves: list[PagesOf]) -> None:
        prompt = self._prompts[name]
        if computed < len(prompt) <= computed + scheduler_output.num_scheduled_tokens[name]:
            pages = len(prompt) // self._page_tokens
            saves.append(PagesOf(name, prompt[: pages * self._page_tokens], self._blocks[name][:pages]))

    def update_connector_output(self, connector_output: Any) -> None:
        for name in connector_output.finished_recving or ():
            if (lease := self._leases.pop(name, None)) is not None:
                lease.release()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        if (lease := self._leases.pop(request.request_id, None)) is not None:
            lease.release()
        self._prompts.pop(request.request_id, None)
        self._blocks.pop(request.request_id, None)
        return False, None

    def shutdown(self) -> None:
        if self._cache is not None:
            self._cache.close()


class _Pages:
    """KVView over paged memory: piece p of a layer is pages p·n … p·n+n-1 of the request, wherever they lie. The first
    `skip` pages stand in vLLM's memory already and may be in use: what is read for them goes to waste paper."""

    def __init__(
        self,
        layers: Sequence[npt.NDArray[np.uint8]],
        blocks: Sequence[int],
        representation: Representation,
        *,
        skip: int = 0,
    ) -> None:
        self._layers = layers
        self._blocks = blocks
        self._page_bytes = [pages.shape[1] for pages in layers]
        self._per_piece = [nbytes // page for nbytes, page in zip(representation.layer_bytes, self._page_bytes, strict=True)]
        self._skip = skip

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        n = self._per_piece[layer]
        found = []
        for page in range(first * n, (first + len(sizes)) * n):
            wanted = page >= self._skip
            buffer = self._layers[layer][self._blocks[page]] if wanted else np.empty(self._page_bytes[layer], np.uint8)
            found.append(buffer.data)
        return found


def _as_pages(view: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a layer's KV memory as [blocks, page bytes], sharing it. Raises ValueError where a page lies in several parts."""
    if not view[0].is_contiguous():
        raise ValueError(f"a page of shape {tuple(view.shape[1:])} and strides {view.stride()} is not contiguous")
    as_bytes = view.view(torch.uint8)
    flat = torch.as_strided(as_bytes, (view.shape[0], as_bytes[0].numel()), (as_bytes.stride(0), 1))
    return flat.numpy()
