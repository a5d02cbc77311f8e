"""What is stored of a request, looked up beside vLLM's thread, which does not wait for it but is told to ask again.

What failed to load of late does not count: the workers read, and the tiers of the scheduler's side know nothing of what they
meet there.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS, BlockKey
from headstart.cache.prefix_cache import Lease, PrefixCache
from headstart.connect.vllm.messages import Prompt

LOOKUP_S = 2.0  # a tier that takes longer has nothing
AVOID_S = 60.0  # for so long what failed to load is not found; the workers avoid what they could not read as long
_WAIT_S = 0.02  # without anything else to do vLLM asks again at once
_KEPT_S = 1.0  # for so long what was found stays found, for a request that waits for memory and is asked about at every step
_MOST_AVOIDED = 4096
_MOST_BROUGHT = 1 << 30  # bytes of one prompt that waits, of each part


@dataclass(slots=True)
class Finding:
    """What was found of one request, by a look at `at` for its prompt of so many `of` tokens; `leases` are held on it."""

    leases: list[Lease] = field(default_factory=list)
    tokens: int = 0
    at: float = float("-inf")
    of: int = 0
    prompt: Prompt | None = None
    looking: Future[list[Lease]] | None = None

    def stale(self, of: int, now: float) -> bool:
        """Return whether it has to be looked for anew, for a prompt of so many tokens."""
        if self.of != of or self.looking is not None:
            return self.of != of
        return now - self.at > _KEPT_S or (self.tokens > 0 and not self.leases)

    def release(self) -> None:
        leases, self.leases = self.leases, []
        for lease in leases:
            lease.release()
        looking, self.looking = self.looking, None
        if looking is not None:
            looking.add_done_callback(_release_found)


class Lookups:
    """For one thread. `caches`: one for each part that is stored by itself; a prefix is as long as the shortest of them."""

    def __init__(self, caches: Sequence[PrefixCache], *, identity: Identity, piece_tokens: int) -> None:
        self._caches = list(caches)
        self._identity = identity
        self._piece = piece_tokens
        self._avoided: dict[BlockKey, float] = {}  # until when; in the order in which they failed
        self._bringing: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="connector-lookup")

    def begin(self, finding: Finding, prompt: Prompt | None, *, of: int) -> None:
        """Look for a prompt; None: there is nothing that could be found. What was found before is let go."""
        finding.release()
        finding.tokens, finding.at, finding.of, finding.prompt = 0, time.monotonic(), of, prompt
        if prompt is not None:
            finding.looking = self._thread.submit(_match_all, self._caches, prompt)

    def answer(self, finding: Finding) -> int | None:
        """Return how many tokens are found, None while that is looked for."""
        if finding.looking is not None and finding.prompt is not None:
            try:
                finding.leases = finding.looking.result(_WAIT_S)
            except TimeoutError:
                return None
            finding.looking, finding.at = None, time.monotonic()
            found = min(lease.tokens for lease in finding.leases)
            finding.tokens = self._before_trouble(finding.prompt, found)
            if finding.tokens < found and _with_states(self._caches):
                finding.tokens = 0  # it ends where a state stands, or there is none
        return finding.tokens

    @property
    def bringing(self) -> bool:
        """Whether a prompt is on its way to memory still."""
        return (self._bringing is not None and not self._bringing.done()) or any(cache.promoting for cache in self._caches)

    def bring(self, prompt: Prompt) -> None:
        """Have what slower tiers have of a prompt brought to the memory tier, behind all reads that somebody waits for."""
        self._bringing = self._thread.submit(_promote_all, self._caches, prompt)

    def avoid(self, prompt: Prompt, *, arrived: int) -> None:
        """Find no more than `arrived` tokens of what begins like a prompt, for a while."""
        keys = prompt.keys(self._identity)
        behind = (arrived // self._piece + 1) * self._piece // BLOCK_TOKENS
        self._avoided[keys[min(behind, len(keys)) - 1]] = time.monotonic() + AVOID_S
        while len(self._avoided) > _MOST_AVOIDED:
            del self._avoided[next(iter(self._avoided))]

    def close(self) -> None:
        """Begin nothing more, and close the caches."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for cache in self._caches:
            cache.close()

    def _before_trouble(self, prompt: Prompt, tokens: int) -> int:
        """Return how many of the first `tokens` tokens lie before the first piece that failed to load of late."""
        now = time.monotonic()
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        if self._avoided and tokens:
            blocks = self._piece // BLOCK_TOKENS
            keys = prompt.keys(self._identity)[blocks - 1 : tokens // BLOCK_TOKENS : blocks]
            return next((at * self._piece for at, key in enumerate(keys) if key in self._avoided), tokens)
        return tokens


def _match_all(caches: Sequence[PrefixCache], prompt: Prompt) -> list[Lease]:
    """Return leases on what each part has, up to the first that has nothing. Where prefixes end with a state, all end alike."""
    tokens = len(prompt.array) - 1
    while True:
        leases: list[Lease] = []
        for cache in caches:
            identity = prompt.identity(cache.identity)
            leases.append(
                cache.match(prompt.array[:tokens], salt=prompt.salt, identity=identity, leave=0, contents=prompt.contents)
            )
            if not leases[-1].tokens:
                return leases
        shortest = min(lease.tokens for lease in leases)
        if not _with_states(caches) or all(lease.tokens == shortest for lease in leases):
            return leases
        for lease in leases:
            lease.release()
        tokens = shortest


def _with_states(caches: Sequence[PrefixCache]) -> bool:
    return any(cache.representation.state == "required" for cache in caches)


def _promote_all(caches: Sequence[PrefixCache], prompt: Prompt) -> None:
    for cache in caches:
        identity = prompt.identity(cache.identity)
        cache.promote(prompt.array, most_bytes=_MOST_BROUGHT, salt=prompt.salt, identity=identity, contents=prompt.contents)


def _release_found(looking: Future[list[Lease]]) -> None:
    if not looking.cancelled() and looking.exception() is None:
        for lease in looking.result():
            lease.release()
