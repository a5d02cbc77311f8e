"""SGLang's own radix tree tells its KV events through its own publisher, as a program of its own; a router follows.

    python sglang_events.py SGLANG_FOLDER LIVE REPLAY    prints the number of batches, waits for a line, goes on, and again

The tree's nodes hold no KV here, and what its host pool would do is said by hand: written to the host, then let go on the GPU.
"""

from __future__ import annotations

import sys
from array import array
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

from sglang_controller import make_importable

PAGE = 32
PROMPT = list(range(1000, 1320))  # five of our blocks
OTHER = [*PROMPT[:192], *range(2000, 2064)]  # parts behind the third
SALTED = list(range(3000, 3128))


def main(folder: Path, live: str, replay: str) -> None:
    make_importable(folder)
    from sglang.srt.disaggregation.kv_events import KVEventBatch, StorageMedium, ZmqEventPublisher
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    tree = RadixCache.create_simulated(mock_allocator=MagicMock(), page_size=PAGE, enable_kv_cache_events=True)
    publisher = ZmqEventPublisher(0, endpoint=live, replay_endpoint=replay, bind=True)
    batches = 0

    def tell() -> None:
        nonlocal batches
        publisher.publish(KVEventBatch(ts=0.0, events=tree.take_events()))
        batches += 1
        print(batches, flush=True)
        sys.stdin.readline()

    def nodes(node: Any) -> Any:
        for child in node.children.values():
            yield child
            yield from nodes(child)

    for tokens in (PROMPT, OTHER):
        tree.insert(InsertParams(key=RadixKey(token_ids=array("q", tokens))))
    tree.insert(InsertParams(key=RadixKey(token_ids=array("q", SALTED), cache_salt="acme")))
    tell()
    held = list(nodes(tree.root_node))
    for node in held:
        tree.kv_events.record_store(node, medium=StorageMedium.CPU)
    tree.evict(EvictParams(num_tokens=1 << 20))
    tell()
    for node in reversed(held):
        tree.kv_events.record_remove(node, medium=StorageMedium.CPU)
    tell()
    publisher.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
