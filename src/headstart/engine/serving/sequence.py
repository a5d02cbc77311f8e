"""One request on its way through an engine: what is known, what is computed, what it holds. Owned by the engine's thread.

waiting ─▶ loading ─▶ prefilling ─▶ decoding ─▶ ended        a miss goes from waiting to prefilling
   ▲          │           │            │
   ├──────────┘ the load was too slow: fresh KV, computed from the start, and met by reading from the end
   └──────────────────────┴────────────┘ preempted: its blocks went to the cache, its tokens and its sampler stay
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS
from headstart.cache.ticket import Ticket
from headstart.engine.base import GenerationRequest, LoadDecision, Progress, Receipt, TokenEvent
from headstart.engine.serving.parts import KV, StateCopy, UnderWay
from headstart.policy.fairness import Turn
from headstart.policy.preemption import Standing

S = TypeVar("S", bound="Sequence")


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    request: GenerationRequest
    on_event: Callable[[TokenEvent], None]
    submitted_s: float  # as all times here, on the monotonic clock
    max_tokens: int
    tokens: list[int]  # prompt and answer so far
    use_cache: bool
    identity: Identity | None = None  # of its blocks; None: the model's alone
    number: int = 0  # in order of arrival
    reload: bool = True  # False once a load was too slow: it is not tried again
    aborted: bool = False  # set by any thread, read by the engine's
    ended: bool = False

    waiting_s: float = 0.0  # since when it waits, or waited last
    running_s: float = 0.0  # since when it runs, or ran last
    preemptions: int = 0
    reached: int = 0  # tokens whose KV was there before it was preempted
    whole: bool = False  # room for a larger region beside its own will not be had: it asks for all of it at once
    stalled: bool = False  # there is no room for its next token now
    passed_over: int = 0  # turns that prompts of its tenant had since its own last one
    alike: dict[int, tuple[int, bool]] = field(default_factory=dict)  # by number of another: see `sharing`

    kv: KV | None = None
    load: UnderWay | None = None  # under way
    mix: bool = False  # its load was too slow: what is stored is read from the end while it is computed from the start
    computed: int = 0  # tokens whose KV is there
    saved: int = 0  # tokens given to the cache so far
    saving: Ticket | None = None  # the latest save
    accepted: int = 0  # tokens that are being written, or were, as far as the cache lacked them
    known: int = 0  # tokens of the prompt that were stored before any of that
    stored: int | None = None  # tokens of the prompt that the cache had when it was asked
    looked_ahead: bool = False  # while it waited, its stored prefix was seen to; it may hold KV for that
    boundary: int | None = None  # behind how many tokens its next pass must end, because the state there is kept
    boundaries: dict[int, StateCopy] = field(default_factory=dict)  # states not saved yet, by the tokens before them
    diverges: int | None = None  # behind how many tokens the cache has blocks and no state
    awaited: set[int] = field(default_factory=set)  # behind how many tokens others wait for its state

    admitted_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    longest_gap_s: float = 0.0
    match_s: float = 0.0
    load_s: float = 0.0
    bytes_read: int = 0
    cached_memory_tokens: int = 0
    cached_disk_tokens: int = 0
    hit_counted: bool = False  # these two are in the engine's counters
    decision: LoadDecision = field(default_factory=lambda: LoadDecision("miss"))
    notes: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def cached_tokens(self) -> int:
        return self.cached_memory_tokens + self.cached_disk_tokens

    @property
    def written_tokens(self) -> int:
        """Tokens of the prompt that were accepted for writing and were not known to be stored."""
        return max(0, min(self.accepted, self.prompt_tokens) - max(self.known, self.cached_tokens))

    @property
    def kept_output_tokens(self) -> int:
        return max(0, self.accepted - self.prompt_tokens)

    @property
    def over(self) -> bool:
        """Nobody wants its answer any more: it was aborted, or is past its deadline."""
        return self.aborted or (self.deadline_s is not None and time.monotonic() >= self.deadline_s)

    @property
    def deadline_s(self) -> float | None:
        return None if self.request.deadline_s is None else self.submitted_s + self.request.deadline_s

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def pending(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.tokens) - self.computed

    @property
    def room(self) -> int:
        """Tokens that can be computed now: none while its prefix is being read, some while that is met."""
        return self.pending if self.load is None else 0

    @property
    def joins_load(self) -> bool:
        """Whether a pass may begin with it though its prefix is still being read, and then waits for the reads."""
        return False

    @property
    def recurrent(self) -> bool:
        """Whether its KV has a state beside blocks, which are of no use to the cache without."""
        return False

    @property
    def kept(self) -> int:
        """Tokens whose KV is there and that whoever asked lets be kept."""
        limit = self.request.keep_tokens
        return self.computed if limit is None else min(limit, self.computed)

    @property
    def savable(self) -> int:
        """Tokens, in whole blocks, of use to the cache: with recurrent layers, those that a state stands behind."""
        if self.recurrent:
            return max((one for one in self.boundaries if one <= self.kept), default=0)
        return self.kept // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def decoding(self) -> bool:
        return self.generated > 0 and self.pending == 1

    @property
    def has_room(self) -> bool:
        """Its KV holds all tokens that are known."""
        return self.kv is not None and self.kv.capacity_tokens >= len(self.tokens)

    @property
    def standing(self) -> Standing:
        since_s = max(self.waiting_s, self.running_s)
        return Standing(self.number, self.request.priority, self.preemptions, since_s)

    @property
    def turn(self) -> Turn:
        return Turn(self.number, self.request.tenant, self.request.priority, self.room, self.passed_over)

    def note_known(self, tokens: int) -> None:
        """Note that so many tokens were found in the cache, unless they may be its own."""
        if not self.accepted:
            self.known = max(self.known, tokens)

    def note_saving(self, tokens: int) -> None:
        """Note that so many tokens were given to the cache, which may have refused them at once."""
        if self.saving is not None and not self.saving.refused:
            self.accepted = max(self.accepted, tokens)

    def saw_token(self) -> None:
        """Note when a token came."""
        now = time.monotonic()
        if self.first_token_s is None or self.last_token_s is None:
            self.first_token_s = now
        else:
            self.longest_gap_s = max(self.longest_gap_s, now - self.last_token_s)
        self.last_token_s = now

    @property
    def kv_tokens(self) -> int:
        """Tokens that its KV must hold in the end."""
        return self.prompt_tokens + self.max_tokens

    def release_kv(self) -> None:
        kv, self.kv = self.kv, None
        if kv is not None:
            kv.release()

    def release_states(self) -> None:
        for copy in self.boundaries.values():
            copy.release()
        self.boundaries = {}

    def close(self) -> None:
        """Free what it has beside KV: it has ended."""

    def progress(self, now: float) -> Progress:
        admitted = now if self.admitted_s is None else self.admitted_s
        processed = min(self.computed, self.prompt_tokens)
        return Progress(self.prompt_tokens, min(self.cached_tokens, processed), processed, now - admitted)

    def receipt(self, now: float) -> Receipt:
        admitted = now if self.admitted_s is None else self.admitted_s
        return Receipt(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generated,
            cached_memory_tokens=self.cached_memory_tokens,
            cached_disk_tokens=self.cached_disk_tokens,
            bytes_read=self.bytes_read,
            queue_s=admitted - self.submitted_s,
            match_s=self.match_s,
            load_s=self.load_s,
            first_token_s=None if self.first_token_s is None else self.first_token_s - self.submitted_s,
            total_s=now - self.submitted_s,
            notes=tuple(self.notes),
            decision=self.decision,
            preemptions=self.preemptions,
            longest_gap_s=self.longest_gap_s,
            written_tokens=self.written_tokens,
            kept_output_tokens=self.kept_output_tokens,
            taken=self.admitted_s is not None,
        )
