"""PrefixCache: `match` a prompt, `load` what matched, `save` what was computed. A failing tier is a miss and a counter.

    lease = cache.match(tokens)              # longest stored prefix, protected while held
    load = lease.load(into=kv)               # reading starts at once, layer 0 of everything first
    load.wait(layer)                         # … before attending that layer
    lease.release()
    ticket = cache.save(tokens, source=kv)   # returns at once; written behind

No call here raises because a medium failed. ValueError is for wrong use.

Threads do not survive a fork, and locks may be held for ever in the child: there every match is a miss, nothing is saved, and
leases and closing are left to the parent.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt

from headstart.block.checks import Buffer, flat
from headstart.block.identity import Identity
from headstart.block.keys import BLOCK_TOKENS, BlockKey, Content, block_extras, chain, chain_keys, require_salt, token_bytes
from headstart.block.layout import encode_retention
from headstart.block.representation import Representation
from headstart.cache.arriving import Arrival
from headstart.cache.explaining import Fate, fates_of
from headstart.cache.faults import counted
from headstart.cache.finding import Finder, Found
from headstart.cache.lease import Lease
from headstart.cache.promoting import Promoter
from headstart.cache.saver import Saver, SaveRequest
from headstart.cache.source import Source
from headstart.cache.telling import Telling
from headstart.cache.ticket import SaveResult, Ticket
from headstart.cache.tiering import Tiering, TieringStatus
from headstart.errors import StoreError
from headstart.events import Publisher
from headstart.metrics import Counters
from headstart.policy.tiering import Policy
from headstart.tier.base import DEFAULT_TERMS, LimitedTier, Problem, Terms, Tier, TierStatistics
from headstart.tier.lookup_thread import Patience
from headstart.tier.memory import MemoryTier
from headstart.transfer.load import KVView, Load
from headstart.transfer.plan import Prompt

__all__ = ["CacheStatistics", "Content", "KVView", "Lease", "Load", "PrefixCache", "SaveResult", "Ticket"]

MATCH_TIMEOUT_S = 0.2  # an engine's thread waits for it
_PROMOTED_SHARE = 4  # one in so many of the memory tier's bytes may be of what is only expected
_LAST_EVENTS_S = 2.0
_LAST_MOVE_S = 5.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    tiers: tuple[TierStatistics, ...]
    counters: dict[str, int]


class PrefixCache:
    """`tiers`: fastest first. One per process and representation; safe from many threads.

    `save_queue_bytes`: how much of the caller's KV memory saves that wait may keep alive, before one is dropped.
    `match_timeout_s`: how long a match waits for tiers on a medium; what faster tiers have counts, the rest is then a miss.
    `write_budget_bytes`: what may be written in 24 hours to each tier that is not memory, None for any amount; see
    `policy.admission` for what goes without when it runs short.
    `warnings`: one sentence for each tier that was asked for and could not be had. `publisher`: where what is stored is told as
    it changes; it is taken over. `moves`: whether rules that are applied (`apply_rules`) move what lies in the tiers; else they
    only say where saves go, as another cache over the same tiers moves it."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        *,
        identity: Identity,
        representation: Representation,
        save_queue_bytes: int = 4 << 30,
        load_timeout_s: float = 30.0,
        match_timeout_s: float = MATCH_TIMEOUT_S,
        write_budget_bytes: int | None = None,
        warnings: Sequence[str] = (),
        publisher: Publisher | None = None,
        moves: bool = True,
    ) -> None:
        self.identity = identity
        self.representation = representation
        self.warnings = tuple(warnings)
        self._counters = Counters()
        self._root = identity.root()
        self._digest = representation.digest
        self._load_timeout_s = load_timeout_s
        self._match_timeout_s = match_timeout_s
        self._closed = False
        self._policy = Policy()
        self._tier_names = tuple(tier.name for tier in tiers)
        self._pid = os.getpid()
        self._sources = tuple(Source(tier, counters=self._counters, patience_s=match_timeout_s) for tier in tiers)
        memory = self._sources[0].tier if len(self._sources) > 1 and self._sources[0].tier.in_memory else None
        memory = memory if representation.state == "none" else None  # blocks alone are then of no use
        self._promoter = None if memory is None else Promoter(memory.name, representation, self._counters)
        self._finder = Finder(self._sources, representation, longest_read_s=load_timeout_s, counters=self._counters)
        self._saver = Saver(
            self._sources,
            representation,
            queue_bytes=save_queue_bytes,
            counters=self._counters,
            write_budget_bytes=write_budget_bytes,
            route=self._route,
            on_saved=self._saved,
        )
        self._moves = moves
        self._tiering = Tiering(self._sources, representation, self._counters, idle=self._idle)
        self._telling = None
        self.events: tuple[str, str] | None = None if publisher is None else (publisher.endpoint, publisher.replay_endpoint)
        if publisher is not None:
            self._telling = Telling(
                tiers, identity=identity, representation=representation, publisher=publisher, counters=self._counters
            )

    def know(self, identity: Identity) -> None:
        """Note an identity that prompts will have, so that their first blocks are told as such."""
        if self._telling is not None:
            self._telling.know(identity)

    def match(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        leave: int = 1,
        contents: Sequence[Content] = (),
        ahead: bool = False,
    ) -> Lease:
        """Return a lease on the longest prefix of `tokens` that is stored now. Reads nothing and extends no block's life. Where
        the representation needs a boundary state, the prefix ends at the latest one that is stored.

        `leave`: tokens at the end that must not match, because the engine has to compute them; 0 where `tokens` is a prefix
        that others follow. `contents`: images or sounds that stand behind placeholder tokens, each by position and digest;
        `salt` and `shared_tokens` as in `chain_keys`. `ahead`: for a request whose turn has not come, which will match again
        then; counted apart, so that hits and misses stay those of requests.

        131,072 tokens are 1.7 ms of hashing and about 1 ms of looking up."""
        _require_shared(shared_tokens)
        if leave < 0:
            raise ValueError(f"leave is {leave}; it counts the tokens at the end that must not match")
        require_salt(salt)
        data = token_bytes(tokens)
        return self._match(data, salt, shared_tokens, identity, leave, contents, ahead=ahead)

    def _match(
        self,
        data: bytes,
        salt: str | bytes | None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        leave: int = 1,
        contents: Sequence[Content] = (),
        *,
        ahead: bool = False,
    ) -> Lease:
        """`data`: the tokens as u32."""
        prompt_tokens = np.frombuffer(data, dtype="<u4")
        pieces = max(0, len(prompt_tokens) - leave) // self.representation.piece_tokens
        root = self._root if identity is None else identity.root()
        # Without a salt straight from the bytes: the detour over an array would copy them once more.
        if salt or contents:
            keys = chain_keys(prompt_tokens, root=root, salt=salt, shared_tokens=shared_tokens, contents=contents)
        else:
            keys = chain(root, data)
        keys = keys[: pieces * self.representation.blocks_per_piece]
        prompt_tokens = prompt_tokens[: len(keys) * BLOCK_TOKENS]
        found = Found()
        if not self._forked:
            if not self._closed:
                found = self._finder.find(keys, Patience(self._match_timeout_s))
            if ahead:
                self._counters.add("match_ahead_calls")
            else:
                self._count_match(found, asked=len(prompt_tokens))
        return Lease(
            self._sources,
            found,
            Prompt(self.representation, self._digest, keys, prompt_tokens),
            timeout_s=self._load_timeout_s,
            counters=self._counters,
            note_use=self._saver.note_use,
        )

    def save(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        source: KVView,
        *,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        retention: str = "default",
        tenant: str = "",
        session: str = "",
        keep_s: float = 0.0,
        states: Mapping[int, Buffer] | None = None,
        contents: Sequence[Content] = (),
        own_tokens: int = 0,
        memory_only: bool = False,
    ) -> Ticket:
        """Keep every full piece of `tokens` that some tier lacks. The source must stay valid until the ticket is done
        (`ticket.add_done_callback(region.release)`). `tenant`: whose quota it counts towards; `session`: the conversation it
        belongs to, by any name (`Terms`); `keep_s`: what is promised at least, where the class promises less; `contents` as in
        `match`. `own_tokens`: so many of `tokens` were given by earlier saves of the same request, and that they were seen then
        says nothing about whether they will be used again. `memory_only`: the memory tier alone keeps it, and no other is told
        of it.

        `states`, where the representation needs boundary states and only there: by n the state behind the first n tokens
        (whole pieces). They must stay valid as the source does; what lies behind the last one is of no use and not kept.

        Raises ValueError for what can never be saved: a `retention` that is no name of 1 to 64 printable bytes, a tenant or
        session that is no text (of at most 255 bytes the tenant), a `keep_s` that is negative or endless, a salt that is
        neither text nor bytes, negative `shared_tokens`, states where none belong, or none where tokens would be kept that are
        of no use without."""
        encode_retention(retention)
        terms = Terms(retention, tenant, session, keep_s)
        require_salt(salt)
        _require_shared(shared_tokens)
        prompt_tokens = np.frombuffer(token_bytes(tokens), dtype="<u4")  # a copy that nobody else changes
        whole = len(prompt_tokens) // self.representation.piece_tokens * self.representation.piece_tokens
        by_piece = self._states_by_piece(states or {}, whole)
        whole = max(by_piece) * self.representation.piece_tokens if by_piece else whole
        if self._forked:
            ticket = Ticket()
            ticket.finish(SaveResult(stored_tokens=0, written_bytes=0, reason="forked"))
            return ticket
        self._counters.add("save_calls")
        if identity is not None:
            self.know(identity)
        if not self._sources or not whole:
            ticket = Ticket()
            ticket.finish(SaveResult(stored_tokens=0, written_bytes=0, reason=None if self._sources else "no-tier"))
        else:
            ticket = self._saver.submit(
                SaveRequest(
                    tokens=prompt_tokens[:whole],
                    source=source,
                    root=self._root if identity is None else identity.root(),
                    salt=salt,
                    shared_tokens=shared_tokens,
                    terms=terms,
                    own_tokens=own_tokens,
                    memory_only=memory_only,
                    states=by_piece,
                    contents=tuple(contents),
                )
            )
        ticket.add_done_callback(lambda _: self._counters.add("saves_done"))  # save_calls less this are under way
        return ticket

    @property
    def promoting(self) -> bool:
        """Whether a prefix is on its way to the memory tier."""
        return self._promoter is not None and self._promoter.busy

    def promote(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        most_bytes: int,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        contents: Sequence[Content] = (),
    ) -> bool:
        """Bring the longest stored prefix of `tokens` into the memory tier, for a request that is expected: behind all that
        others wait for, up to `most_bytes`, and no more than a quarter of that tier. False: another is on its way, there is
        nothing to bring, or no memory tier. Returns at once."""
        if self._closed or self._forked or self._promoter is None or self._promoter.busy:
            return False
        _require_shared(shared_tokens)
        require_salt(salt)
        data = token_bytes(tokens)
        prompt = np.frombuffer(data, dtype="<u4")
        root = self._root if identity is None else identity.root()
        room = self._sources[0].tier.statistics().capacity_bytes // _PROMOTED_SHARE

        def save(count: int, source: KVView) -> Ticket:
            request = SaveRequest(
                prompt[:count], source, root, salt, shared_tokens, DEFAULT_TERMS, memory_only=True, contents=tuple(contents)
            )
            return self._saver.submit(request)

        lease = self._match(data, salt, shared_tokens, identity, contents=contents, ahead=True)
        return self._promoter.start(lease, save, most_bytes=min(most_bytes, room))

    def expect(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        salt: str | bytes | None = None,
        shared_tokens: int = 0,
        identity: Identity | None = None,
        terms: Terms = DEFAULT_TERMS,
    ) -> Arrival | None:
        """Return where the blocks of a prompt go that another process sends, and hold what is stored of it already. None where
        there is nowhere to put them: without a memory tier of this process, or with states or pieces of no fixed size."""
        memory, representation = self._arriving_in, self.representation
        if self._closed or self._forked or memory is None:
            return None
        _require_shared(shared_tokens)
        require_salt(salt)
        data = token_bytes(tokens)
        root = self._root if identity is None else identity.root()
        prompt_tokens = np.frombuffer(data, dtype="<u4")
        keys = chain_keys(prompt_tokens, root=root, salt=salt, shared_tokens=shared_tokens)
        keys = keys[: max(0, len(prompt_tokens) - 1) // representation.piece_tokens * representation.blocks_per_piece]
        return Arrival(
            self._match(data, salt, shared_tokens, identity, ahead=True),
            memory,
            Prompt(representation, self._digest, keys, prompt_tokens[: len(keys) * BLOCK_TOKENS]),
            root=root,
            extras=partial(block_extras, salt=salt, shared_tokens=shared_tokens, contents=()),
            terms=terms,
        )

    @property
    def expects(self) -> bool:
        """Whether `expect` may give anything."""
        return self._arriving_in is not None

    @property
    def _arriving_in(self) -> MemoryTier | None:
        apart = self.representation.state == "none" and not self.representation.varies
        own = [source.tier for source in self._sources[:1] if isinstance(source.tier, MemoryTier)]
        return own[0] if own and apart else None

    def fates(self, keys: Sequence[BlockKey], *, at_s: float) -> list[Fate]:
        """Return for each key of a chain why nothing was found under it at `at_s` (seconds since 1970), as far as saves,
        journals and tiers remember. Takes milliseconds, and looks at media."""
        if self._closed or self._forked:
            return [Fate("unknown")] * len(keys)
        return fates_of(
            keys,
            at_s=at_s,
            representation=self._digest,
            tiers=[source.tier for source in self._sources],
            history=self._saver.history,
            counters=self._counters,
        )

    def limit_tenants(self, quotas: Mapping[str, str]) -> None:
        """Have these quotas hold from now on, by tenant, in the form of `cache.quotas`. Returns at once."""
        for source in () if self._forked else self._sources:
            if isinstance(source.tier, LimitedTier):
                source.tier.limit(quotas)

    def apply_rules(self, policy: Policy) -> None:
        """Have these rules of tiers hold from now on: where saves go, and what moves (`policy.tiering`). Returns at once; what
        is to move begins to within two seconds. Without rules, as at first, nothing moves and a save goes to every tier."""
        if not self._forked and not self._closed:
            self._policy = policy
            if self._moves:
                self._tiering.apply(policy)

    def refuse_rules(self, why: str) -> None:
        """Note that later rules were given and are wrong, so that those before go on to hold; `tiering` says it."""
        self._tiering.refuse(why)
        self._counters.add("tiering_rules_refused")

    @property
    def closed(self) -> bool:
        return self._closed or self._forked

    @property
    def tiering(self) -> TieringStatus:
        return self._tiering.status

    def warm(self) -> None:
        """Touch the memory that reads pass through, behind the caller, so that the first load is as fast as the next."""
        for source in self._sources:
            source.warm()

    def statistics(self) -> CacheStatistics:
        if self._forked:
            return CacheStatistics(tiers=(), counters={})
        tiers = []
        for source in self._sources:
            with counted(self._counters, source.tier, "statistics"):
                found = source.tier.statistics()
                tiers.append(replace(found, paused=found.paused or self._saver.why_not(source)))
        return CacheStatistics(tiers=tuple(tiers), counters=self._counters.snapshot())

    def check(self) -> list[Problem]:
        """Return what is wrong with the books of any tier. Empty when all is well."""
        problems: list[Problem] = []
        for source in () if self._forked else self._sources:
            try:
                problems += source.tier.check()
            except (StoreError, OSError) as error:
                problems.append(Problem(source.tier.name, str(error)))
        return problems

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish queued saves, join every thread, close the tiers. Twice is fine. A lease that is still held keeps its blocks.

        Returns within `timeout_s`: saves that three quarters of it do not suffice for are dropped, and a thread that hangs in a
        medium is left behind, its tier as it is."""
        if self._closed or self._forked:
            return
        self._closed = True
        if self._promoter is not None:
            self._promoter.close()
        deadline = time.monotonic() + timeout_s
        self._tiering.close(0.0)  # it begins nothing more while saves end
        saved = self._saver.close(timeout_s)
        self._tiering.close(min(_LAST_MOVE_S, deadline - time.monotonic()))
        if self._telling is not None:
            self._telling.close(min(_LAST_EVENTS_S, deadline - time.monotonic()))
        for source in self._sources:
            source.close(deadline, tier_too=saved)
        if not saved:
            _log.warning("a save did not end within %.0f s; the tiers are left as they are", timeout_s)

    def __enter__(self) -> PrefixCache:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PrefixCache over {', '.join(source.tier.name for source in self._sources) or 'no tier'}>"

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._pid

    def _route(self, terms: Terms) -> tuple[str, ...]:
        return self._policy.route(retention=terms.retention, tenant=terms.tenant, tiers=self._tier_names).through

    def _idle(self) -> bool:
        return self._saver.idle and not any(source.is_read for source in self._sources)

    def _saved(self) -> None:
        if self._policy.writes_behind:
            self._tiering.wake()

    def _states_by_piece(self, states: Mapping[int, Buffer], whole_tokens: int) -> dict[int, memoryview]:
        """Return flat states by how many pieces they stand behind, in the order of the prompt."""
        step = self.representation.piece_tokens
        if self.representation.state == "none":
            if states:
                raise ValueError("boundary states were given, but blocks of this representation are of use by themselves")
            return {}
        if whole_tokens and not states:
            raise ValueError("blocks of this representation are of no use without a boundary state; give one, or do not save")
        found = {tokens: flat(states[tokens]) for tokens in sorted(states)}
        for tokens, state in found.items():
            if tokens % step or not 0 < tokens <= whole_tokens or not state.nbytes:
                raise ValueError(
                    f"a boundary state of {state.nbytes} bytes behind {tokens} tokens cannot be kept; give at least a byte, "
                    f"behind whole pieces of {step} within the {whole_tokens} tokens that are saved"
                )
        return {tokens // step: state for tokens, state in found.items()}

    def _count_match(self, found: Found, *, asked: int) -> None:
        self._counters.add("match_calls")
        self._counters.add("match_asked_tokens", asked)
        pieces: dict[int, int] = {}
        for run in found.runs:
            pieces[run.tier] = pieces.get(run.tier, 0) + run.pieces
        for number, count in pieces.items():
            name = self._sources[number].tier.name
            self._counters.add(f"matched_tokens_{name}", count * self.representation.piece_tokens)
        if found.beyond:
            self._counters.add("match_beyond_state_tokens", found.beyond * self.representation.piece_tokens)
        if not found.runs:
            reason = "closed" if self._closed else "state" if found.beyond else "absent" if asked else "short"
            self._counters.add(f"match_missed_{reason}")


def _require_shared(shared_tokens: int) -> None:
    if shared_tokens < 0:  # checked here, not where keys are made: a save makes them in another thread
        raise ValueError(f"shared_tokens is {shared_tokens}; it counts tokens from the start of the prompt")
