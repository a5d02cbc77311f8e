"""The side that decides: one in vLLM's scheduler, which knows every request and no bytes.

    asked ──▶ looked up ──▶ leases held ──▶ blocks given: LoadOrder ──▶ arrived (or failed: then it counts as not stored)
      │                                                       │
      └ nothing stored, or computed sooner ───────────────────┴──▶ computed: SaveOrders of what no tier has ──▶ ended: the last

How KV lies is not known here but told by the workers; before that nothing is found. Every rank's part of the same tokens is
stored by itself, so a prefix is as long as the shortest of them.

What failed to load is not offered to others for a while (`lookups`), and after several failures in a row nothing is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS, BlockKey
from headstart.block.representation import Representation
from headstart.cache.open import open_caches
from headstart.cache.rule_follower import follow
from headstart.config import ANY_DISK_BYTES, parse_size
from headstart.connect.vllm.identity import AdapterDigests
from headstart.connect.vllm.loading import NULL_BLOCK
from headstart.connect.vllm.lookups import AVOID_S, LOOKUP_S, Finding, Lookups
from headstart.connect.vllm.messages import Handshake, LoadOrder, Orders, Prompt, Rank, SaveOrder, StateBlocks, Tables
from headstart.connect.vllm.observing import Observer
from headstart.connect.vllm.requests import prompt_of
from headstart.connect.vllm.settings import ConnectorSettings
from headstart.connect.vllm.statistics import Statistics, Taking
from headstart.engine.serving.bridge import stretches_of
from headstart.engine.speeds import ReadAccount, Speeds, within
from headstart.metrics import Counters
from headstart.policy.backing_off import BackingOff
from headstart.policy.loading import Plan, Stretch, plan_whole

_LEASE_S = 1.0  # for so long what was found stays found, for a request that waits for memory and is asked about at every step
_HANDSHAKE_S = 10.0  # a request waits so long for the workers to say how KV lies
_LEAST_WITHIN_S = 2.0  # a load is not given up for being slower than computing before that
_MOST_STEPS = 4  # under way at once
_MOST_QUEUED = 64  # that wait and whose prefixes may be brought to memory
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Request:
    """`stored`: tokens from the start that the tiers have, or that were given to be saved. `promised`: the blocks of a load
    under way, `account` how long it takes. `failed`: one did, so the request is computed and not offered another, which could
    fail for ever. `outrun`: tokens that are stored and computed sooner. `prompt_kept`: whether the end of the prompt, as it is
    now, was given to be saved."""

    request: Any
    found: Finding = field(default_factory=Finding)
    local: int = 0
    stored: int = 0
    stretches: Sequence[Stretch] = ()
    plan: Plan | None = None
    outrun: int = 0
    promised: frozenset[int] | None = None
    account: ReadAccount | None = None
    failed: bool = False
    prompt_kept: bool = False
    keys: Sequence[BlockKey] | None = None

    def read(self, nbytes: int, *, cancelled: bool = False) -> None:
        """Note that the load under way has ended with so many bytes."""
        account, self.account = self.account, None
        if account is not None:
            account.cancelled = cancelled
            account.ended(nbytes)


class Scheduler:
    """Called by vLLM's scheduler alone, from its one thread.

    `block_tokens`: by KV cache group. `recurrent`: those that hold states, not KV. `save_always`: pages may be gone by the end
    of a prompt, as before a sliding window. `chunk_tokens`: the most that a step computes. `media`: how media are made
    tokens of."""

    def __init__(
        self,
        settings: ConnectorSettings,
        *,
        ranks: int,
        block_tokens: Sequence[int],
        save_always: bool,
        chunk_tokens: int,
        recurrent: frozenset[int] = frozenset(),
        media: bytes = b"",
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._block_tokens = tuple(block_tokens)
        self._recurrent = sorted(recurrent)
        self._save_every = 1 if save_always else settings.config.cache.save_every
        self._taking = Taking()
        self._counters = self._taking.counters
        self._adapters = AdapterDigests(settings)
        self._media = media
        self._requests: dict[str, _Request] = {}
        self._queued: dict[str, Any] = {}  # that have come and were not asked for yet, in that order
        self._handshakes: dict[Rank, Handshake] = {}
        self._ready = False
        self._asked_at: float | None = None
        self._lookups: Lookups | None = None
        self._observer: Observer | None = None
        self._identity: Identity | None = None
        self._piece = BLOCK_TOKENS
        self._loads: list[LoadOrder] = []
        self._saves: list[SaveOrder] = []
        self._speeds = Speeds(Counters(), chunk_tokens=chunk_tokens)
        self._trying = BackingOff(patience=3, least_s=1.0, most_s=AVOID_S)
        self._steps: deque[tuple[int, float, float]] = deque()  # rows, rows × keys before them, and when it was given out
        self._stepped_s = 0.0

    # What the workers say.

    def shake_hands(self, handshakes: Mapping[Rank, Handshake]) -> None:
        """Take what ranks say of their KV; with the last of them the cache is opened."""
        self._handshakes.update(handshakes)
        if self._ready or len(self._handshakes) < self._ranks:
            return
        self._ready = True
        told = list(self._handshakes.values())
        if any(hand.representation is None for hand in told):
            return  # the worker has said why in its log
        if len({hand.identity for hand in told}) > 1 or len({hand.host for hand in told}) > 1:
            what = "run on several machines" if len({hand.host for hand in told}) > 1 else "have read different weights"
            _log.warning("headstart stores nothing and finds nothing: vLLM's ranks %s", what)
            return
        self._identity = told[0].identity
        assert self._identity is not None
        encoded = dict.fromkeys(hand.representation for hand in told if hand.representation is not None)
        representations = [Representation.decode(one) for one in encoded]
        self._piece = representations[0].piece_tokens
        config = self._settings.config.cache
        if self._settings.stores:
            config = replace(config, kv_events="")  # the workers tell of what they store
            caches = open_caches(config, identity=self._identity, representations=representations, match_timeout_s=LOOKUP_S)
            follow(self._settings.read, config.tiering.rules, *caches)
            self._lookups = Lookups(caches, identity=self._identity, piece_tokens=self._piece)
            return
        block_bytes = BLOCK_TOKENS * sum(one.bytes_per_token or 0 for one in representations)
        self._observer = Observer(
            capacity_blocks=parse_size(config.capacity, of_bytes=ANY_DISK_BYTES) // block_bytes,
            blocks_per_piece=representations[0].blocks_per_piece,
            counters=self._counters,
        )

    def stepped(self, output: Any, short: Mapping[str, int]) -> None:
        """Take what came back with a step. `short`: tokens of the prompt that are there, of requests whose load failed."""
        now = time.monotonic()
        if self._steps:  # the next may have been given out before this one came back
            rows, row_keys, began = self._steps.popleft()
            if rows:
                self._speeds.passed(rows, row_keys, now - max(began, self._stepped_s))
        self._stepped_s = now
        failed = output.failed_recving or ()
        for name, one in self._requests.items():
            if one.promised is not None and (name in failed or one.promised & output.invalid_block_ids):
                self._failed(one, short.get(name, one.local), now)
        for name in output.finished_recving or ():
            if (arrived := self._requests.get(name)) is not None:
                if not arrived.failed:
                    self._trying.came()
                    arrived.read(sum(part.nbytes for part in within(arrived.stretches, arrived.local, arrived.stored)))
                arrived.promised = None
                arrived.found.release()

    # What vLLM's scheduler asks, in its order.

    def queued(self, request: Any) -> None:
        """Note a request that has come. If a step goes by without vLLM asking for it, it waits: then what is stored of it is
        brought to the node's memory tier, where there is one."""
        if self._lookups is not None and self._settings.config.cache.has_node_memory:
            self._queued[request.request_id] = request
            while len(self._queued) > _MOST_QUEUED:
                del self._queued[next(iter(self._queued))]

    def find(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens behind the first `local_tokens` are stored, and whether they come between steps; None if that
        will be known soon."""
        if not self._ready:
            now = time.monotonic()
            self._asked_at = self._asked_at or now
            return (None if now - self._asked_at < _HANDSHAKE_S else 0), False
        if request.skip_reading_prefix_cache:
            return 0, False
        self._queued.pop(request.request_id, None)
        one = self._known(request)
        if one.local != local_tokens:
            one.local, one.plan = local_tokens, None
        one.prompt_kept = False
        if self._observer is not None:
            self._observe(one, self._observer)
        if self._lookups is None or one.failed:
            return 0, False
        if one.found.stale(request.num_tokens, time.monotonic()):
            prompt = self._prompt(request, request.num_tokens)
            self._lookups.begin(one.found, prompt, of=request.num_tokens)
            one.plan = None
        found = self._lookups.answer(one.found)
        if found is None:
            return None, False
        one.stored, one.outrun = found, 0
        if one.stored <= local_tokens or not self._trying.may(time.monotonic()):
            one.found.release()
            return 0, False
        if one.plan is None:
            one.stretches = stretches_of(one.found.leases[0])
            one.plan = plan_whole(
                list(within(one.stretches, local_tokens, one.stored)),
                first=local_tokens,
                computing=self._speeds.computing,
                reading=self._speeds.reading(),
            )
        if one.plan.choice == "compute":
            one.outrun = one.stored - local_tokens
            return 0, False
        return one.stored - local_tokens, True

    def allocated(self, request: Any, tables: Sequence[Sequence[int]], external_tokens: int) -> None:
        """Note that a request was given blocks; if `external_tokens` are to come from here, order the load."""
        one = self._known(request)
        if not external_tokens:
            self._counters.add("outrun_tokens", one.outrun)
            one.outrun = 0
            one.found.release()
            return
        tokens = one.local + external_tokens
        offered = one.found.prompt
        assert offered is not None, "vLLM expects tokens that were not offered"
        prompt = offered.first(tokens)
        self._counters.add("matched_tokens", external_tokens)
        self._trying.tries(time.monotonic())
        one.account = ReadAccount(self._speeds, one.stretches, one.local, tokens)
        within_s = None
        if one.plan is not None and one.plan.load_s is not None and one.plan.compute_s is not None:
            within_s = max(_LEAST_WITHIN_S, one.plan.load_s + one.plan.compute_s)
        states = tuple(tables[group][tokens // self._block_tokens[group] - 1] for group in self._recurrent)
        order = LoadOrder(request.request_id, prompt, self._cut(tables, 0, tokens), one.local, within_s, states)
        self._loads.append(order)
        one.stored = tokens
        one.promised = frozenset(block for table in (*order.tables, states) for block in table)

    def orders(self, scheduled: Any) -> Orders:
        """Return what the workers have to do with this step, and forget it here."""
        before = {data.req_id: data.num_computed_tokens for data in scheduled.scheduled_new_reqs}
        cached = scheduled.scheduled_cached_reqs
        before.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        blocks = scheduled.kv_connector_block_state
        row_keys = 0.0
        for name, count in scheduled.num_scheduled_tokens.items():
            one = self._requests.get(name)
            if one is None:
                continue
            row_keys += count * (before.get(name, one.request.num_computed_tokens) + count / 2)
            done = min(before.get(name, one.request.num_computed_tokens) + count, one.request.num_tokens)
            whole_prompt = done >= one.request.num_prompt_tokens and not one.prompt_kept
            if whole_prompt:
                one.prompt_kept = True
                if self._observer is not None and one.keys is not None:
                    self._observer.computed(one.keys)
            if self._lookups is None or blocks is None:
                continue
            if self._recurrent:
                self._keep_with_states(one, blocks.boundary_state_offloads.get(name, ()), blocks.get_block_ids(name))
            elif whole_prompt or done - one.stored >= self._save_every:
                tables = blocks.get_block_ids(name)
                if tables is not None:
                    self._keep(one, done, tables)
        self._steps.append((scheduled.total_num_scheduled_tokens, row_keys, time.monotonic()))
        while len(self._steps) > _MOST_STEPS:
            self._steps.popleft()
        self._bring_next()
        loads, self._loads = self._loads, []
        saves, self._saves = self._saves, []
        return Orders(loads, saves)

    def ended(self, request: Any, tables: Sequence[Sequence[int]]) -> bool:
        """Forget a request that is over; return whether its blocks must stay until the workers have copied its end."""
        self._queued.pop(request.request_id, None)
        one = self._requests.pop(request.request_id, None)
        if one is None:
            return False
        one.found.release()
        one.read(0, cancelled=True)
        if one.promised is not None or not self._lookups or request.num_nans_in_logits:
            return False  # what its blocks hold has not arrived, or is not worth keeping
        if self._recurrent:
            return (
                False  # there is no state behind its last token; what there were was kept with the steps that ended with them
            )
        done = min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens - 1)
        return self._keep(one, done, tables, last=True)

    def reset(self) -> bool:
        """Find and keep nothing more in this process: who resets a cache may have changed what its entries depend on."""
        if self._lookups or self._observer is not None:
            _log.warning("the cache was reset: headstart finds and stores nothing until vLLM is started again")
        self._observer = None
        for one in self._requests.values():
            one.found.release()
        self._queued.clear()
        lookups, self._lookups = self._lookups, None
        if lookups is not None:
            lookups.close()
        return True

    def statistics(self) -> Statistics | None:
        return self._taking.take()

    def close(self) -> None:
        for one in self._requests.values():
            one.found.release()
        if self._lookups is not None:
            self._lookups.close()

    def _bring_next(self) -> None:
        """Have what is stored of the first one that waits brought to memory, one at a time."""
        if not self._queued or self._lookups is None or self._lookups.bringing:
            return
        request = self._queued.pop(next(iter(self._queued)))
        prompt = None if request.skip_reading_prefix_cache else self._prompt(request, request.num_tokens)
        if prompt is not None:
            self._lookups.bring(prompt)

    def _prompt(self, request: Any, tokens: int) -> Prompt | None:
        return prompt_of(request, tokens, adapters=self._adapters, media=self._media)

    def _known(self, request: Any) -> _Request:
        return self._requests.setdefault(request.request_id, _Request(request))

    def _failed(self, one: _Request, arrived: int, now: float) -> None:
        """Note that a load has brought only the first `arrived` tokens."""
        self._trying.failed(now)
        if one.account is not None:
            one.account.late(1, of=1)  # if it was slow: not even all of it had come by now
        one.read(0, cancelled=True)
        prompt = self._prompt(one.request, one.stored)
        if prompt is not None and self._lookups is not None:
            self._lookups.avoid(prompt, arrived=arrived)
        one.stored, one.failed = 0, True  # what could not be read is saved again once it is computed

    def _keep_with_states(
        self, one: _Request, offered: Sequence[tuple[int, int, int]], tables: Sequence[Sequence[int]] | None
    ) -> None:
        """Order that a prefix is kept behind which this step leaves states, if that is worth it: at the end of the prompt,
        `cache.save_every` tokens behind the last one, where vLLM saw that prompts part, and at each that an answer comes by.

        `offered`: (group, block, tokens before it), as vLLM offers blocks with states that will not change any more."""
        at: dict[int, dict[int, int]] = {}
        for group, block, tokens in offered:
            at.setdefault(tokens, {})[group] = block
        whole = [tokens for tokens, states in at.items() if tokens % self._piece == 0 and sorted(states) == self._recurrent]
        end = max(whole, default=0)
        ends_prompt = end + self._piece >= one.request.num_prompt_tokens
        parts = end == one.request.shared_prefix_boundary
        if tables is not None and end > one.stored and (ends_prompt or parts or end - one.stored >= self._save_every):
            self._keep(one, end, tables, states=tuple(at[end][group] for group in self._recurrent))

    def _keep(
        self, one: _Request, done: int, tables: Sequence[Sequence[int]], *, last: bool = False, states: StateBlocks = ()
    ) -> bool:
        """Order that the whole pieces of the first `done` tokens are kept, as far as no tier has them, with the `states` behind
        them where there are such; return whether."""
        end = done // self._piece * self._piece
        first = one.stored // self._piece * self._piece
        for group, table in enumerate(tables):  # what slid out of a window cannot be kept, and what comes behind is of no use
            if group in self._recurrent:
                continue
            end = min(end, len(table) * self._block_tokens[group] // self._piece * self._piece)
            at = first // self._block_tokens[group]
            if NULL_BLOCK in table[at : end // self._block_tokens[group]]:
                end = (at + table[at:].index(NULL_BLOCK)) * self._block_tokens[group] // self._piece * self._piece
        if end <= first or (states and end < done):
            return False
        prompt = self._prompt(one.request, end)
        if prompt is None:
            self._counters.add("uncacheable_requests", int(last))
            return False
        if not prompt.keep:
            return False
        one.stored = end
        self._saves.append(SaveOrder(one.request.request_id, prompt, self._cut(tables, first, end), first, last, states))
        return True

    def _cut(self, tables: Sequence[Sequence[int]], first: int, end: int) -> Tables:
        return tuple(
            tuple(table[first // tokens : end // tokens])
            for group, (table, tokens) in enumerate(zip(tables, self._block_tokens, strict=True))
            if group not in self._recurrent
        )

    def _observe(self, one: _Request, observer: Observer) -> None:
        if one.keys is not None:
            return  # asked before
        prompt = self._prompt(one.request, one.request.num_tokens)
        assert self._identity is not None
        if prompt is None:
            return
        one.keys = prompt.keys(self._identity)
        may_hit = (one.request.num_tokens - 1) // BLOCK_TOKENS
        observer.asked(
            one.keys[:may_hit],
            prompt_tokens=one.request.num_tokens,
            block_tokens=BLOCK_TOKENS,
            computed_tokens=one.local,
            computing=self._speeds.computing,
        )
