"""KV memory of running requests, counted: which sequence of libllama's is whose, and how many cells are left.

A request holds whole blocks of 64 cells; where in memory they lie is libllama's business. Blocks at the beginning may be held
by several requests at once. Who holds a request's KV counts as a reference; with the last one its sequence comes free, on the
engine's thread, which alone may touch it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from threading import Lock

from headstart.block.keys import BLOCK_TOKENS
from headstart.engine.llama.context import SCRATCH, Context


class SequenceKV:
    """KV of one request, with one reference: sequence `number` of the context. A `KVView` for saving, through `copies`."""

    def __init__(self, cells: Cells, number: int, blocks: list[int], *, shared_tokens: int = 0) -> None:
        self.number = number
        self.blocks = blocks
        self.shared_tokens = shared_tokens
        self._cells = cells
        self._references = 1
        self._lock = Lock()

    @property
    def capacity_tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS

    def buffers(self, layer: int, first: int, sizes: Sequence[int]) -> list[memoryview]:
        """See `KVView`: copies, made by the engine's thread between two steps."""
        return self._cells.copy_out(self, first, len(sizes))

    def retain(self) -> None:
        with self._lock:
            self._references += 1

    def release(self) -> None:
        with self._lock:
            self._references -= 1
            last = not self._references
            assert self._references >= 0
        if last:
            self._cells.let_go(self)


class Cells:
    """`capacity_tokens` in whole blocks, `sequences` besides the scratch one. `copy_out(kv, first piece, pieces)` as of
    `copying.Copies`; `wake` is called from other threads when there is something to take back."""

    def __init__(
        self,
        context: Context,
        *,
        capacity_tokens: int,
        sequences: int,
        copy_out: Callable[[SequenceKV, int, int], list[memoryview]],
        wake: Callable[[], None],
    ) -> None:
        self.context = context
        self.copy_out = copy_out
        self.capacity_tokens = capacity_tokens
        self._wake = wake
        self._numbers = deque(number for number in range(sequences + 1) if number != SCRATCH)
        self._free = deque(range(capacity_tokens // BLOCK_TOKENS))
        self._held: Counter[int] = Counter()  # by block: how many requests hold it
        self._left: deque[SequenceKV] = deque()  # whose last reference is gone

    @property
    def used_tokens(self) -> int:
        return self.capacity_tokens - len(self._free) * BLOCK_TOKENS

    def allocate(self, tokens: int) -> SequenceKV | None:
        """Return an empty sequence with room for `tokens`; None where there is none now."""
        self.take_back()
        blocks = self._take(_blocks(tokens)) if self._numbers else None
        return None if blocks is None else SequenceKV(self, self._numbers.popleft(), blocks)

    def share(self, giver: SequenceKV, shared_tokens: int, tokens: int) -> SequenceKV | None:
        """Return a sequence that begins with whole blocks of another's, and has room for `tokens`."""
        self.take_back()
        begin = giver.blocks[: shared_tokens // BLOCK_TOKENS]
        own = self._take(_blocks(tokens) - len(begin)) if self._numbers else None
        if own is None:
            return None
        self._held.update(begin)
        kv = SequenceKV(self, self._numbers.popleft(), begin + own, shared_tokens=shared_tokens)
        self.context.share(giver.number, kv.number, shared_tokens)
        return kv

    def grow(self, kv: SequenceKV, tokens: int) -> bool:
        """Give a sequence room for `tokens` in all; False, and nothing changed, where there is none now."""
        self.take_back()
        more = self._take(max(0, _blocks(tokens) - len(kv.blocks)))
        if more is None:
            return False
        kv.blocks += more
        return True

    def let_go(self, kv: SequenceKV) -> None:
        """From any thread: nobody holds it any more."""
        self._left.append(kv)
        self._wake()

    def take_back(self) -> None:
        """Empty the sequences that nobody holds any more."""
        while self._left:
            kv = self._left.popleft()
            self.context.remove(kv.number)
            self._numbers.append(kv.number)
            self._held.subtract(kv.blocks)
            for block in kv.blocks:
                if not self._held[block]:
                    del self._held[block]
                    self._free.append(block)

    def _take(self, blocks: int) -> list[int] | None:
        if blocks > len(self._free):
            return None
        taken = [self._free.popleft() for _ in range(blocks)]
        self._held.update(taken)
        return taken


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
