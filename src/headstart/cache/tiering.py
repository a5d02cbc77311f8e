"""The rules of a policy kept: what lies in faster tiers is moved, copied and dropped as they say, behind everything else.

    survey (columns) ─▶ decide (pure) ─▶ some extents after the others, the least recently used first ─▶ the next look

One thread of its own, begun with the first rule that needs it: a tier that hangs holds it and nobody else. A tier that takes
nothing is left alone for a while, longer each time; what was to go there stays where it is.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread

import numpy as np
import numpy.typing as npt

from headstart.block.representation import Representation
from headstart.cache.faults import counted
from headstart.cache.moving import AT_ONCE, Brought, bring, let_go, moving_out, next_batch
from headstart.cache.source import Source
from headstart.errors import HeadstartError, StoreError
from headstart.metrics import Counters
from headstart.policy.backing_off import BackingOff
from headstart.policy.tiering import Policy
from headstart.tier.base import ExtentId, ExtentInfo
from headstart.tier.surveying import CollectedTier, DescribingTier, surveyed

LOOK_S = 2.0  # between two looks, at least
_LOOKING_SHARE = 0.02  # of the time, at most: a look at a million extents takes tenths of a second
_WORKING_SHARE, _IDLE_SHARE = 0.5, 0.9  # of the time at most, for moving: reads and saves need the devices too
_TROUBLE_S, _LONGEST_TROUBLE_S = 5.0, 300.0  # how long a tier that took nothing is left alone
_AVOID_S = 60.0  # how long an extent that could not be moved is
_OF_TARGETS = ("full", "stopped", "error", "budget")  # reasons that say that the next extent would fare no better
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TieringStatus:
    """`rules`: how many hold. `refused`: why later ones do not, "" where all that were given hold."""

    rules: int
    refused: str = ""


@dataclass(slots=True)
class _Work:
    """What a look at one tier found to do, in columns: ids, use counters, and for each what: "move", "copy", "drop"."""

    target: str
    verb: str
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    last_used: list[npt.NDArray[np.int64]] = field(default_factory=list)

    def in_order(self) -> list[int]:
        """Return ids, the least recently used first: so the order of use is the same where they go, and tails come before what
        they run on from."""
        ids, used = np.concatenate(self.ids), np.concatenate(self.last_used)
        found: list[int] = ids[np.argsort(used, kind="stable")].tolist()
        return found


class Tiering:
    """`sources`: fastest first. `idle`: whether nothing is saved or read just now. Safe from many threads."""

    def __init__(
        self,
        sources: Sequence[Source],
        representation: Representation,
        counters: Counters,
        *,
        idle: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sources = sources
        self._tiers = tuple(source.tier.name for source in sources)
        self._representations = {representation.digest: representation}
        self._counters = counters
        self._idle = idle
        self._clock = clock
        self._condition = Condition()
        self._policy = Policy()
        self._refused = ""
        self._due = self._soonest = clock()
        self._closing = False
        self._pid = os.getpid()
        self._thread: Thread | None = None
        self._copied: dict[tuple[int, str], npt.NDArray[np.int64]] = {}  # source, target → ids of what is there, or was
        self._trouble: dict[tuple[str, str], BackingOff] = {}  # by target, and by the tenant that is at its quota there
        self._avoided: dict[tuple[int, int], float] = {}  # (source, id) → until when

    @property
    def policy(self) -> Policy:
        return self._policy

    @property
    def status(self) -> TieringStatus:
        return TieringStatus(len(self._policy.rules), self._refused)

    def apply(self, policy: Policy) -> None:
        """Have these rules hold from now on; what is being moved right now is finished by the old ones. Returns at once."""
        for number, why in policy.without_effect(self._tiers):
            _log.warning("rule %d of cache.tiering does nothing: %s", number + 1, why)
        with self._condition:
            self._refused = ""
            if policy is self._policy:
                return
            self._policy, self._due = policy, self._clock()
            if policy.moves and self._thread is None and not self._closing and os.getpid() == self._pid:
                self._thread = Thread(target=self._run, name="tiering", daemon=True)
                self._thread.start()
            self._condition.notify_all()

    def refuse(self, why: str) -> None:
        """Note that later rules were given and do not hold, since they are wrong."""
        self._refused = why

    def wake(self) -> None:
        """Look soon: something was saved that is to be elsewhere as well."""
        with self._condition:
            self._due = min(self._due, max(self._soonest, self._clock()))
            self._condition.notify_all()

    def close(self, timeout_s: float) -> None:
        """Begin nothing more. An extent that hangs in a tier is left behind."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._thread is not None and os.getpid() == self._pid:
            self._thread.join(max(0.0, timeout_s))

    # The thread.

    def _run(self) -> None:
        before = Policy()
        while True:
            with self._condition:
                while not self._closing and (not self._policy.moves or self._clock() < self._due):
                    self._condition.wait(self._due - self._clock() if self._policy.moves else None)
                if self._closing:
                    return
                policy = self._policy
                self._due = float("inf")
            if policy is not before:
                before, self._copied = policy, {}
            begun = self._clock()
            try:
                looked_s = self.step(policy)
            except Exception:  # noqa: BLE001 - the thread's outer edge: what fails here must not end all moving
                self._counters.add("tiering_errors")
                _log.exception("keeping the rules of cache.tiering failed unexpectedly")
                looked_s = self._clock() - begun
            with self._condition:
                self._soonest = self._clock() + looked_s / _LOOKING_SHARE
                if policy is self._policy:
                    self._due = min(self._due, self._clock() + max(LOOK_S, looked_s / _LOOKING_SHARE))

    def step(self, policy: Policy) -> float:
        """Look at every tier once and do what is to be done, as long as these rules hold; returns the seconds of looking."""
        looked_s = 0.0
        now = self._clock()
        self._avoided = {key: until for key, until in self._avoided.items() if until > now}
        self._trouble = {key: one for key, one in list(self._trouble.items()) if one.failures}  # few
        for number, source in enumerate(self._sources):
            begun = self._clock()
            works: list[_Work] = []
            mine = not isinstance(source.tier, CollectedTier) or source.tier.collects
            if mine and policy.concerns(source.tier.name, self._tiers):
                with counted(self._counters, source.tier, "survey"):
                    works = self._look(number, policy)
            looked_s += self._clock() - begun
            for work in works:
                self._do(number, work, policy)
        return looked_s

    def _look(self, number: int, policy: Policy) -> list[_Work]:
        tier = self._sources[number].tier
        found: dict[tuple[str, str], _Work] = {}
        seen: list[npt.NDArray[np.int64]] = []
        avoided = [extent for source, extent in self._avoided if source == number]

        def add(verb: str, target: str, which: npt.NDArray[np.bool_]) -> None:
            if which.any():
                work = found.setdefault((verb, target), _Work(target, verb))
                work.ids.append(part.ids[which])
                work.last_used.append(part.last_used[which])

        for part in surveyed(tier, now_ms=time.time_ns() // 1_000_000):
            if self._ends(policy):
                return []
            seen.append(part.ids)
            decided = policy.decide(part.facts, self._tiers)
            free = ~np.isin(part.ids, avoided)
            for copy in decided.copies:
                add("copy", copy.tier, copy.which & free & ~np.isin(part.ids, self._copied.get((number, copy.tier), [])))
            for rule in np.unique(decided.rule[decided.rule >= 0]).tolist():
                action = policy.rules[rule].action
                if action.verb != "keep":
                    target = tier.name if action.verb == "drop" else action.tier
                    add(action.verb, target, (decided.rule == rule) & free & ~part.stays)
        there = np.concatenate(seen) if seen else np.zeros(0, np.int64)
        for key in [key for key in self._copied if key[0] == number]:
            self._copied[key] = np.intersect1d(self._copied[key], there)
        return list(found.values())

    def _do(self, number: int, work: _Work, policy: Policy) -> None:
        """Work off what a look found, some extents at a time: they are brought together and let go together."""
        source, ids = self._sources[number], work.in_order()
        refuses = self._trouble_of(f"out of {source.tier.name}")
        while ids and not self._ends(policy):
            begun = self._clock()
            if work.verb == "drop":
                some, ids = ids[:AT_ONCE], ids[AT_ONCE:]
                gone: int | None = None
                with counted(self._counters, source.tier, "delete"):
                    gone = source.tier.delete([ExtentId(one) for one in some], reason="policy")
                if gone is None:
                    return
                self._counters.add("tiering_dropped_extents", gone)
            elif not (self._trouble_of(work.target).may(begun) and refuses.may(begun)):
                return
            else:
                try:
                    with moving_out(source.tier) as mine:
                        if not mine:
                            return  # another process is at it; the next look sees what it left
                        ids = ids[self._bring(number, ids, work) :]
                except (StoreError, OSError) as error:
                    refuses.failed(self._clock())
                    self._counters.add("tiering_failed_source")
                    _log.warning("nothing is moved out of the tier %r: %s", source.tier.name, error)
                    return
                refuses.came()
            self._rest(policy, self._clock() - begun)

    def _bring(self, number: int, ids: Sequence[int], work: _Work) -> int:
        """Bring the first ones of `ids` where they should be, and let go what moves; returns how many were dealt with."""
        source, target = self._sources[number], self._sources[self._tiers.index(work.target)]
        now = self._clock()
        done, infos = next_batch(ids, source.tier, may=lambda info: self._trouble_of(work.target, info.tenant).may(now))
        there = self._bring_some(number, infos, target) if infos else []
        if work.verb == "copy":
            self._counters.add("tiering_copied_extents", len(there))
            before = self._copied.get((number, work.target), np.zeros(0, np.int64))
            self._copied[number, work.target] = np.union1d(before, np.array([info.id for info in there], np.int64))
        elif there:
            with counted(self._counters, source.tier, "delete"):
                gone = set(let_go(there, source.tier, target.tier))
                self._counters.add("tiering_moved_extents", len(gone))
                left = [info.id for info in there if info.id not in gone]
                self._avoid(number, left)  # read, or pinned, just now
                if left:
                    self._counters.add("tiering_failed_left", len(left))
        return done

    def _bring_some(self, number: int, infos: Sequence[ExtentInfo], target: Source) -> list[ExtentInfo]:
        """Return those that are in the target now; note why others are not, as far as they were tried."""
        source, name = self._sources[number], target.tier.name
        representation = self._representation(source, infos[0].representation)
        if representation is None:
            self._avoid(number, [info.id for info in infos])
            self._counters.add("tiering_failed_unknown", len(infos))
            return []
        try:
            brought = bring(infos, source.tier, target.tier, representation, now_ms=time.time_ns() // 1_000_000)
        except (StoreError, OSError) as error:
            brought = [Brought(False, "error")]
            _log.warning("moving from the tier %r to %r failed: %s", source.tier.name, name, error)
        there = []
        for info, one in zip(infos, brought, strict=False):
            trouble, over_quota = self._trouble_of(name), self._trouble_of(name, info.tenant)
            self._counters.add("tiering_written_bytes", one.nbytes)
            if one.there:
                there.append(info)
                trouble.came()
                over_quota.came()
                continue
            self._counters.add(f"tiering_failed_{one.reason}")
            if one.reason in _OF_TARGETS:
                trouble.failed(self._clock())
            elif one.reason == "quota":
                over_quota.failed(self._clock())
            elif one.reason == "corrupt":
                source.quarantine.avoid(info.id, for_good=True)
                source.quarantine.delete_corrupt()
            else:
                self._avoid(number, [info.id])
        return there

    def _avoid(self, number: int, ids: Sequence[int]) -> None:
        self._avoided |= {(number, one): self._clock() + _AVOID_S for one in ids}

    def _trouble_of(self, target: str, tenant: str | None = None) -> BackingOff:
        key = target, "" if tenant is None else f"tenant {tenant}"
        return self._trouble.setdefault(key, BackingOff(1, _TROUBLE_S, _LONGEST_TROUBLE_S))

    def _representation(self, source: Source, digest: bytes) -> Representation | None:
        if digest not in self._representations and isinstance(source.tier, DescribingTier):
            try:
                found = source.tier.representation(digest)
            except HeadstartError:  # laid down in a way that this version refuses
                return None
            if found is not None:
                self._representations[digest] = found
        return self._representations.get(digest)

    def _ends(self, policy: Policy) -> bool:
        return self._closing or policy is not self._policy

    def _rest(self, policy: Policy, worked_s: float) -> None:
        """Leave the devices to others for a share of the time, which is larger while they have something to do."""
        share = _IDLE_SHARE if self._idle() else _WORKING_SHARE
        until = self._clock() + worked_s * (1 / share - 1)
        with self._condition:
            while not self._ends(policy) and self._clock() < until:
                self._condition.wait(until - self._clock())
