"""What the backend needs of SGLang 0.5: the storage contract's names. Used where SGLang itself cannot be imported.

`host_pool` is a host pool of the kind that SGLang has (page first, K and V apart), for tests with either.
"""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from types import ModuleType
from typing import Any

import torch


def contract() -> Any:
    """Return `sglang.srt.mem_cache.hicache_storage`, the real one where there is one."""
    name = "sglang.srt.mem_cache.hicache_storage"
    try:
        return importlib.import_module(name)
    except ImportError:
        pass
    for part in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        sys.modules[part] = ModuleType(part)
    sys.modules[name] = module = ModuleType(name)
    for one in (HiCacheStorageConfig, HiCacheStorage, PoolHitPolicy, PoolTransfer, PoolTransferResult):
        setattr(module, one.__name__, one)
    return module


@dataclass
class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    is_page_first_layout: bool
    model_name: str | None
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0

    @property
    def is_storage_writer(self) -> bool:
        return not self.is_mla_model or self.tp_rank == self.dcp_rank


class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {**getattr(self, "registered_pools", {}), host_pool_name: host_pool}


class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"
    TRAILING_PAGES = "trailing_pages"
    BLOCK_GROUPS = "block_groups"


@dataclass
class PoolTransfer:
    name: Any
    host_indices: torch.Tensor | None = None
    device_indices: torch.Tensor | None = None
    keys: list[str] | None = None
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES


@dataclass
class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None = field(default=None)

    @classmethod
    def empty(cls) -> PoolTransferResult:
        return cls(0, {})


class HostPool:
    """`in_place=False`: it tells no addresses."""

    page_size, layer_num, head_num, head_dim, layout = 16, 3, 2, 8, "page_first"
    dtype = torch.bfloat16

    def __init__(self, pages: int, *, in_place: bool = True, heads: int = 2) -> None:
        self.head_num = heads
        self.in_place = in_place
        size = (2, pages * self.page_size, self.layer_num, self.head_num, self.head_dim)
        self.kv_buffer = torch.zeros(size, dtype=self.dtype)

    def fill(self, *, seed: int) -> None:
        self.kv_buffer.copy_(torch.randn(self.kv_buffer.shape, generator=torch.Generator().manual_seed(seed)))

    def indices(self, *pages: int) -> torch.Tensor:
        step = self.page_size
        return torch.cat([torch.arange(page * step, page * step + step) for page in pages])

    def page(self, number: int) -> torch.Tensor:
        return self.kv_buffer[:, number * self.page_size : (number + 1) * self.page_size]

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        if not self.in_place:
            raise ValueError("Unsupported layout: odd")
        token = self.layer_num * self.head_num * self.head_dim * self.dtype.itemsize
        values = self.kv_buffer[1].data_ptr() - self.kv_buffer.data_ptr()
        pointers = []
        for index in indices.tolist()[:: self.page_size]:
            key = self.kv_buffer.data_ptr() + index * token
            pointers += [key, key + values]
        return pointers, [token * self.page_size] * len(pointers)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self.page(0)).flatten()

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        return self.page(int(index) // self.page_size).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        page = self.page(int(index) // self.page_size)
        page.copy_(data_page.reshape(page.shape))
