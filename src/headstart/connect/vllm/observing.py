"""Mode observe: what a store would have brought, without one. Keys of prompts are remembered, no KV is read or written."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from headstart.block.keys import BlockKey
from headstart.metrics import Counters
from headstart.policy.loading import Computing

_MOST_KEYS = 1 << 20  # 64 million tokens; some 150 MB


class Observer:
    """Keeps the books of a cache of `capacity_blocks` blocks that forgets what was least recently used. For one thread."""

    def __init__(self, *, capacity_blocks: int, blocks_per_piece: int, counters: Counters) -> None:
        self._most = max(1, min(capacity_blocks, _MOST_KEYS))
        self._per_piece = blocks_per_piece
        self._counters = counters
        self._keys: OrderedDict[BlockKey, None] = OrderedDict()

    def asked(
        self,
        keys: Sequence[BlockKey],
        *,
        prompt_tokens: int,
        block_tokens: int,
        computed_tokens: int,
        computing: Computing | None,
    ) -> None:
        """Note a prompt: `keys` of the blocks that may be hit, of which vLLM itself has `computed_tokens` tokens. `computing`:
        how fast it computes others, None while that is not known."""
        stored = next((at for at, key in enumerate(keys) if key not in self._keys), len(keys))
        stored = stored // self._per_piece * self._per_piece
        gained = max(0, stored * block_tokens - computed_tokens)
        self._counters.add("observed_prompt_tokens", prompt_tokens)
        if gained:
            self._counters.add("observed_tokens", gained)
            if computing is not None:
                saved_s = computing.seconds(computed_tokens, computed_tokens + gained)
                self._counters.add("observed_saved_milliseconds", round(1000 * saved_s))
        for key in keys[:stored]:
            self._keys.move_to_end(key)

    def computed(self, keys: Sequence[BlockKey]) -> None:
        """Note that a prompt's blocks were computed, so that a store would have them from now on."""
        for key in keys:
            self._keys[key] = None
            self._keys.move_to_end(key)
        while len(self._keys) > self._most:
            self._keys.popitem(last=False)
