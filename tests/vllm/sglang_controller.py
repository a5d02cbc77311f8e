"""SGLang's own HiCacheController, host pools and storage factory over our backend, on a CPU, as a program of its own.

    python sglang_controller.py SGLANG_FOLDER MODEL STORE write|read KIND    prints one JSON object

SGLang's packages are imported as they are, but for the `__init__` of the outermost ones, which start a whole server; what the
wheel alone does not bring and this does not need (image libraries, GGUF, IPython, a JSON library) are empty stand-ins.
The engine's side of the controller is here: it gives pages to be written, asks for a prompt, takes what was fetched.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import sys
import types
import warnings
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

STAND_INS = {"orjson", "torchvision", "IPython", "gguf"}
LAYERS, HEADS, HEAD, PAGE, PAGES = 3, 2, 16, 64, 12
WAIT_S = 120.0


class StandIn(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=f"{self.__name__}.{name}")


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        own = name.split(".")[0] in STAND_INS
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if own else None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        module.__path__ = []


def make_importable(folder: Path) -> None:
    """Let SGLang's rooms be imported from an unpacked wheel."""
    from transformers.utils import is_torchvision_available

    is_torchvision_available()  # remembered before there is a stand-in
    sys.meta_path.append(StandIns())
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache", "sglang.srt.managers"):
        module = types.ModuleType(name)
        module.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = module
    warnings.simplefilter("ignore")


def pools(kind: str) -> tuple[Any, Any]:
    """Return a device's pool, which is in host memory here, and SGLang's host pool for it."""
    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    common: dict[str, Any] = {"size": PAGE * PAGES, "page_size": PAGE, "layer_num": LAYERS, "device": "cpu"}
    host: dict[str, Any] = {"host_to_device_ratio": 1.0, "host_size": 0, "page_size": PAGE, "pin_memory": False}
    host |= {"device_capacity_tokens": PAGE * PAGES, "start_layer": 0, "end_layer": LAYERS}
    host |= {"layout": "layer_first" if kind == "mha-v0" else "page_first"}
    if kind == "mla":
        device = MLATokenToKVPool(
            dtype=torch.bfloat16, kv_lora_rank=512, qk_rope_head_dim=64, enable_memory_saver=False, **common
        )
        return device, MLATokenToKVPoolHost(device._mla_buffer_info(), target_layer_num=LAYERS, **host)
    device = MHATokenToKVPool(dtype=torch.bfloat16, head_num=HEADS, head_dim=HEAD, enable_memory_saver=False, **common)
    return device, MHATokenToKVPoolHost(device._mha_buffer_info(), **host)


def attached(room: Any, kind: str, model: str, store: str) -> Any:
    """Return a controller to whose storage our backend is attached by SGLang's own factory."""
    device, host = pools(kind)
    alone = {f"{name}_{what}": value for name in ("tp", "pp", "attn_tp", "attn_dp", "attn_dcp") for what, value in
             (("rank", 0), ("size", 1))}  # fmt: skip
    room.get_parallel = lambda: SimpleNamespace(**alone)
    room.is_dp_attention_enabled = lambda: False
    settings = {"cache.directory": store, "cache.capacity": "256MiB", "cache.min_free": "0", "cache.write_budget": "unlimited"}
    return room.HiCacheController(
        SimpleNamespace(get_kvcache=lambda: device),
        host,
        PAGE,
        tp_group=None,
        load_cache_event=MagicMock(),
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name=model,
        storage_backend_extra_config={
            "backend_name": "headstart",
            "module_path": "headstart.connect.sglang",
            "class_name": "HeadstartHiCache",
            "interface_v1": int(kind != "mha-v0"),
            "headstart": settings | {"models_directory": str(Path(store).parent)},
        },
    )


def filling(host: Any, pages: int) -> Any:
    """Fill the first pages of a host pool with what only they hold; return their bytes, page by page."""
    import torch

    buffer = host.kv_buffer
    buffer.copy_(torch.randn(buffer.shape, generator=torch.Generator().manual_seed(3)))
    return [host.get_data_page(page * PAGE, flat=True).clone() for page in range(pages)]


def main(folder: Path, model: str, store: str, act: str, kind: str) -> dict[str, Any]:
    import torch

    make_importable(folder)
    import sglang.srt.managers.cache_controller as room

    controller = attached(room, kind, model, store)
    host = controller.mem_pool_host
    tokens = torch.randint(5, 500, (8 * PAGE,), generator=torch.Generator().manual_seed(1)).tolist()
    names = room.get_storage_hash_str(tokens, None, page_size=PAGE)
    told: dict[str, Any] = {"backend": type(controller.storage_backend).__name__, "pool": type(host).__name__}
    pages = filling(host, 8)
    if act == "write":
        controller.write_storage(torch.arange(8 * PAGE), tokens, hash_value=names)
        told["written"] = controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
    else:
        host.kv_buffer.zero_()
        other = [*tokens[: 6 * PAGE], *tokens[: 2 * PAGE]]  # what begins like it, and parts
        operation = controller.prefetch("request", other)
        found = controller.prefetch_hit_queue.get(timeout=WAIT_S)
        told["hit"] = found.storage_hit_count
        count = found.storage_hit_count
        operation.host_indices = torch.arange(2 * PAGE, 2 * PAGE + count)
        operation.host_indices = operation.host_indices.flip(0).view(-1, PAGE).flip(1).flatten()  # pages, last one first
        controller.prefetch_buffer.put(operation)
        told["fetched"] = 0
        while told["fetched"] < count:
            try:
                ack = controller.ack_prefetch_queue.get(timeout=WAIT_S)
            except Empty:
                break
            told["fetched"] = max(told["fetched"], ack.completed_tokens)
        starts = operation.host_indices[::PAGE].tolist()
        told["same"] = [torch.equal(host.get_data_page(start, flat=True), pages[place]) for place, start in enumerate(starts)]
    controller.detach_storage_backend()
    return told


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
