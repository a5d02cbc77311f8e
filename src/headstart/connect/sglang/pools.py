"""A host pool of SGLang as pages of bytes: where each lies, and what its bytes mean.

Where a pool tells the addresses of its pages (`get_page_buffer_meta`), they are read and written in place; else they pass
through a flat page of the pool's own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from headstart.block.representation import KVKind, Representation
from headstart.connect.sglang.pages import PageStore, Parts

_SHARDED = {"mamba"}  # of models whose KV is on every rank the same


class HostPool:
    """`name`: SGLang's name of the pool. `config`: the HiCacheStorageConfig."""

    def __init__(self, name: str, pool: Any, config: Any) -> None:
        self.name = name
        self.page_tokens = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1) or 1)
        self._pool = pool
        self._config = config
        self.in_place = self._tells_addresses()

    @property
    def every_rank_writes(self) -> bool:
        return not self._config.is_mla_model or self.name in _SHARDED

    def representation(self, *, flat: bool | None = None) -> Representation:
        """How pages lie: one opaque piece each. `flat`: as SGLang flattens them, whatever the pool could do."""
        flat = not self.in_place if flat is None else flat
        config, pool = self._config, self._pool
        nbytes = (
            self._flat_page().nbytes if flat else sum(part.nbytes for part in self._parts(torch.arange(self.page_tokens))[0])
        )
        kind: KVKind = "opaque" if self.name != "kv" else "mla" if config.is_mla_model else "gqa"
        facts = {
            "layout": getattr(pool, "layout", "none"),
            "page": self.page_tokens,
            "layers": getattr(pool, "layer_num", 0),
            "heads": getattr(pool, "head_num", 0),
            "pp": config.pp_size,
            "cp": f"{config.attn_cp_rank}/{config.attn_cp_size}",
        }
        told = ",".join(f"{name}={value}" for name, value in facts.items())
        form = "flat" if flat else "parts"
        return Representation(
            kind=kind,
            layout=f"sglang/{self.name}/{type(pool).__name__}/{form}/1,{told}"[:255],
            dtype=str(getattr(pool, "dtype", "bytes")).removeprefix("torch."),
            layer_bytes=(nbytes,),
            layer_numbers=(config.pp_rank,),
            shard=self._shard(),
        )

    def load(self, store: PageStore, names: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if self.in_place:
            return store.load(names, self._parts(indices))
        pages = [self._flat_page() for _ in names]
        good = store.load(names, [[bytes_of(page)] for page in pages])
        for place, (page, ok) in enumerate(zip(pages, good, strict=True)):
            if ok:
                self._pool.set_from_flat_data_page(int(indices[place * self.page_tokens]), page)
        return good

    def save(self, store: PageStore, names: Sequence[str], indices: torch.Tensor) -> list[bool]:
        if self.in_place:
            return store.save(names, self._parts(indices))
        firsts = [int(indices[place * self.page_tokens]) for place in range(len(names))]
        pages = [self._pool.get_data_page(first, flat=True).contiguous() for first in firsts]
        return store.save(names, [[bytes_of(page)] for page in pages])

    def _shard(self) -> str:
        config = self._config
        if self.every_rank_writes:
            return f"{config.tp_rank}/{config.tp_size}"
        return f"{config.dcp_rank}/{config.dcp_size}" if config.dcp_size > 1 else "replicated"

    def _flat_page(self) -> torch.Tensor:
        page: torch.Tensor = self._pool.get_dummy_flat_data_page()
        return page

    def _tells_addresses(self) -> bool:
        try:
            return bool(self._parts(torch.arange(self.page_tokens)))
        except (AttributeError, NotImplementedError, ValueError, AssertionError):
            return False

    def _parts(self, indices: torch.Tensor) -> list[Parts]:
        """Return the parts of each page, in place. The pool's memory lives as long as the pool, which is held here."""
        addresses, sizes = self._pool.get_page_buffer_meta(indices)
        each = len(addresses) // (len(indices) // self.page_tokens)
        views = [_memory(int(address), int(size)) for address, size in zip(addresses, sizes, strict=True)]
        return [views[first : first + each] for first in range(0, len(views), each)]


def bytes_of(page: torch.Tensor) -> memoryview:
    """Return a contiguous tensor's memory. Raises ValueError for one that is not."""
    if not page.is_contiguous() or page.device.type != "cpu":
        raise ValueError("a page is not contiguous host memory")
    return _memory(page.data_ptr(), page.numel() * page.element_size())


def _memory(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
