"""The workers: asked every second how they are, followed by their events, taken out when they fail, back when they answer.

    add ─▶ starting ─▶ ready ◀─▶ draining ─▶ removed
              ▲          │  nothing listens there, or it does not answer in time, or it fails again and again
              └── down ◀─┘  what it held is forgotten; its requests are told

For the event loop's thread alone; what is known of blocks and queues is `policy.routing`'s.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Collection, Mapping
from random import Random

import msgspec

from headstart.block.keys import BLOCK_TOKENS
from headstart.errors import ConfigError, MissingExtra, RequestError
from headstart.gateway.asking import Unwell, ask
from headstart.gateway.connections import Connections, Lost
from headstart.gateway.following import Change, Follower, Following
from headstart.gateway.translating import Translator
from headstart.gateway.worker import Address, Report, Role, Worker
from headstart.policy.routing.holders import Keys
from headstart.policy.routing.router import Routing

log = logging.getLogger("headstart")
_NAMES_OF_A_BLOCK = 4  # other engines' blocks have 16 tokens, most of them
_LEAST_NAMES = 1 << 14  # of one worker
_TRIES: Mapping[str, Mapping[str, object]] = {
    "/v1/completions": {"prompt": "1"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "1"}]},
}
_NEW_S = 30.0  # in which one that was added and has not answered yet is on its way
_GOLDEN = 0.618  # of whose multiples the fractions lie evenly
_ALL_GONE_S = 0.2  # how soon one that was just lost is asked again, at first


class Fleet:
    """`headers`: that every request to a worker carries. `dead_after_s`: how long a worker may be silent; `stuck_after_s`: and
    how long it may have requests and get no further with any."""

    def __init__(
        self,
        *,
        max_workers: int,
        blocks: int,
        poll_s: float,
        dead_after_s: float,
        stuck_after_s: float = 300.0,
        headers: Mapping[str, str] | None = None,
        random: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.routing = Routing(block_tokens=BLOCK_TOKENS, random=random or Random(), workers=max_workers, blocks=blocks)
        self.workers: dict[str, Worker] = {}
        self.headers = dict(headers or {})
        self.changed = asyncio.Event()  # set, and replaced, whenever a worker may take what it could not before
        self.clock = clock
        self.connections = Connections(connect_s=max(1.0, dead_after_s / 2))
        self.follower: Follower | None = None
        self._max_workers = max_workers
        self._blocks = blocks
        self._poll_s = poll_s
        self._dead_after_s = dead_after_s
        self._stuck_after_s = stuck_after_s
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._no_events = False
        self._numbers = 0

    async def close(self) -> None:
        """Ask nobody any more. Twice is fine."""
        tasks = [*self._tasks.values(), *(one.trying for one in self.workers.values() if one.trying is not None)]
        self._tasks = {}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self.follower is not None:
            for worker in self.workers.values():
                self._leave(worker)
            await asyncio.to_thread(self.follower.close)
            self.follower = None
        await self.connections.close()

    # Who there is.

    def add(self, address: Address) -> Worker:
        """Begin to ask a worker; it gets requests once it is ready. One that is there already takes the new role. Raises
        ConfigError beyond the number of workers."""
        if (worker := self.workers.get(address.id)) is not None:
            self.set_role(worker, address.role)
            worker.wanted = address.role
            return worker
        if len(self.workers) >= self._max_workers:
            raise ConfigError(
                f"there are {self._max_workers} workers already, so {address.url} is not added; raise route.max_workers",
                key="route.max_workers",
            )
        self._numbers += 1
        worker = self.workers[address.id] = Worker(address, address.role, self._numbers)
        worker.wanted = None if address.role == "both" else address.role
        worker.added_s = self.clock()
        self._tasks[worker.id] = asyncio.get_running_loop().create_task(self._watch(worker))
        return worker

    def remove(self, worker: Worker) -> None:
        """Know it no more, at once. Its requests are told."""
        if self.workers.pop(worker.id, None) is None:
            return
        if (task := self._tasks.pop(worker.id, None)) is not None:
            task.cancel()
        worker.alive, worker.why_down = False, "it was removed"
        self._forget(worker)
        self._lose_flights(worker)
        log.info("worker %s removed", worker.id)

    async def drain(self, worker: Worker, timeout_s: float | None = None) -> None:
        """Give it nothing more and return when its requests have ended, or after `timeout_s`; then remove it."""
        worker.draining = True
        self.wake()
        until_s = None if timeout_s is None else self.clock() + timeout_s
        while worker.flights and (until_s is None or self.clock() < until_s) and worker.id in self.workers:
            await asyncio.sleep(0.05)
        if worker.draining and self.workers.get(worker.id) is worker:
            self.remove(worker)

    def set_role(self, worker: Worker, role: Role) -> None:
        """From the next request on."""
        if worker.role != role:
            log.info("worker %s: role %s, was %s", worker.id, role, worker.role)
            worker.role = role
            self.wake()

    async def change_role(self, worker: Worker, role: Role) -> None:
        """Change it here, and where the worker knows of roles there as well. Raises RequestError where it refuses."""
        if worker.report is not None and worker.report.handoff is not None:
            try:
                async with asyncio.timeout(self._dead_after_s):
                    url, told = f"{worker.address.url}/v1/headstart/role", {**self.headers, "content-type": "application/json"}
                    body = msgspec.json.encode({"role": role})
                    answer = await self.connections.ask("PATCH", url, headers=told, body=body)
            except (Lost, TimeoutError) as error:
                raise RequestError(
                    f"worker {worker.id} does not answer, so its role stays {worker.role}", param="role"
                ) from error
            if answer.status != 200:
                why = answer.content[:512].decode(errors="replace")
                raise RequestError(f"worker {worker.id} refuses the role {role}: {why}", param="role")
        self.set_role(worker, role)

    async def _have_role(self, worker: Worker, report: Report) -> None:
        """Go by the role that the worker says it has, so that all routers go by the same; after it was told the one that it was
        added with."""
        wanted, worker.wanted = worker.wanted, None
        if report.handoff is None or not report.ready:
            worker.wanted = wanted
            return
        if wanted is None or wanted == report.handoff.role:
            self.set_role(worker, report.handoff.role)
            return
        try:
            await self.change_role(worker, wanted)
        except RequestError as error:
            log.warning("%s", error.message)
            self.set_role(worker, report.handoff.role)

    def set_draining(self, worker: Worker, draining: bool) -> None:
        worker.draining = draining
        self.wake()

    def able(
        self, model: str | None, *, but: Collection[str] = (), role: Collection[Role] = ("both", "decode", "prefill")
    ) -> list[Worker]:
        """Return who could take a request for a model now; `but`: not these."""
        now_s = self.clock()
        found, named = [], []  # in one pass: with 64 workers this is done more than anything else
        for one in self.workers.values():
            if one.role in role and one.id not in but and one.state(now_s) == "ready":
                found.append(one)
                if one.report is not None and model in one.report.models:
                    named.append(one)
        return named or (found if found and self.one_model else [])

    @property
    def one_model(self) -> bool:
        """Whether all workers that are known serve the same, so that any name means it."""
        served = {one.report.models[:1] for one in list(self.workers.values()) if one.report is not None and one.report.models}
        return len(served) <= 1

    def serves(self, model: str | None) -> bool:
        """Whether it may be asked for by its own name, now or as soon as its worker has started."""
        now_s = self.clock()
        return any(
            one.report is not None and model in one.report.models and one.state(now_s) in ("ready", "draining", "starting")
            for one in self.workers.values()
        )

    def may_come(self, model: str | None) -> bool:
        """Whether a worker is starting that may have the model, for all that is known."""
        now_s = self.clock()
        return any(
            one.state(now_s) == "starting"
            and (one.alive or now_s - one.added_s < _NEW_S)
            and (one.report is None or not one.report.models or model in one.report.models)
            for one in self.workers.values()
        )

    def models(self) -> dict[str, Report]:
        """Return what may be asked for now, by name, with what one of its workers says."""
        now_s = self.clock()
        reports = [one.report for one in self.workers.values() if one.state(now_s) in ("ready", "draining")]
        return {name: report for report in reports if report is not None for name in report.models}

    def root_of(self, model: str | None) -> bytes:
        """Return what keys of a model's prompts begin with: as servers of ours say, or a name of the router's own. For any
        thread."""
        for worker in list(self.workers.values()):
            if worker.report is not None and worker.report.roots:
                roots = worker.report.roots
                if model in roots:
                    return roots[model or ""]
                if self.one_model or model in worker.report.models:
                    return next(iter(roots.values()))
        return hashlib.sha256(b"headstart.gateway\0" + (model or "").encode("utf-8", "surrogatepass")).digest()

    def wake(self) -> None:
        """Let whoever waits for a worker look again."""
        self.changed.set()
        self.changed = asyncio.Event()

    # What requests tell of workers.

    def presume(self, worker: Worker, lives: int, keys: Keys) -> None:
        """Take what it was sent as stored there, if it is still in the life in which it was sent that."""
        if worker.lives == lives:
            self.routing.presume(worker.id, keys)

    def failed(self, worker: Worker, why: str) -> None:
        """A request failed there by the worker's fault. After some in a row it is let alone for a while."""
        worker.failures += 1
        worker.resting.failed(self.clock())
        log.warning("worker %s failed: %s", worker.id, why)

    def worked(self, worker: Worker) -> None:
        worker.resting.came()

    def doubt(self, worker: Worker) -> None:
        """Ask the worker at once how it is."""
        task = self._tasks.get(worker.id)
        if task is not None and not task.done():
            worker.doubted.set()

    # Asking.

    async def _watch(self, worker: Worker) -> None:
        heard_s = self.clock()
        # Many were added at once. They are not all asked at once for ever: whoever asks for an answer then would wait for that.
        wait_s = self._poll_s * (worker.number * _GOLDEN % 1.0)
        while True:
            try:
                heard_s = await self._look(worker, heard_s)
            except Exception:  # the outer edge of one worker's watch, which must go on
                log.exception("asking worker %s failed unexpectedly", worker.id)
                worker.report = None  # what it says next is looked at as if it were the first
            worker.doubted.clear()
            try:
                async with asyncio.timeout(wait_s if worker.alive or not worker.seen_ready else min(_ALL_GONE_S, wait_s)):
                    await worker.doubted.wait()
            except TimeoutError:
                pass
            wait_s = self._poll_s

    async def _look(self, worker: Worker, heard_s: float) -> float:
        """Ask once; return when it was last heard. Who was silent for too long is lost."""
        own = self.routing.requests(worker.id)
        try:
            async with asyncio.timeout(self._dead_after_s):
                report = await ask(self.connections, worker.address, self.headers, worker.report if worker.alive else None)
        except (Unwell, TimeoutError) as error:
            why = str(error) or f"it has not answered for {self._dead_after_s:g} s"
            gone = isinstance(error, TimeoutError) or (isinstance(error, Unwell) and error.gone)
            if gone or self.clock() - heard_s >= self._dead_after_s:
                self._lose(worker, why)
            elif not worker.alive:
                worker.why_down = why
            return heard_s
        heard_s = self.clock()
        self._heard(worker, report, own)
        await self._have_role(worker, report)
        return heard_s

    def _heard(self, worker: Worker, report: Report, own: int) -> None:
        before, was_alive = worker.report, worker.alive
        worker.report, worker.alive = report, True
        if not report.ready:
            if was_alive and before is not None and before.ready:
                self._forget(worker)
            return
        speeds = worker.speeds()
        if not was_alive or before is None or not before.ready or before.instance != report.instance:
            if was_alive and before is not None and before.ready:
                log.info("worker %s has started anew", worker.id)
                self._lose_flights(worker)
            self._forget(worker)
            worker.resting.came()
            follows = self._follow(worker, report)
            self.routing.up(worker.id, speeds, now_s=self.clock(), kv_tokens=report.kv_tokens, events=follows and report.ours)
            worker.seen_ready = True
            log.info(
                "worker %s is ready: %s, %s", worker.id, ", ".join(report.models) or "?", "events" if follows else "no events"
            )
            self.wake()
        self.routing.measured(worker.id, speeds)
        self._look_for_progress(worker, report, before)
        if report.running is not None:
            self.routing.told(
                worker.id,
                requests=report.running + (report.waiting or 0),
                waiting_tokens=report.waiting_tokens or 0,
                kv_used=report.kv_used or 0,
                own=own,
            )

    def _look_for_progress(self, worker: Worker, report: Report, before: Report | None) -> None:
        """Take out who says that it is well and gets no further with anything. Nothing tells that of engines that say nothing
        of what they do."""
        now_s = self.clock()
        unseen = now_s - worker.looked_s > self._poll_s + 2 * self._dead_after_s  # this process was held still, maybe both were
        worker.looked_s = now_s
        if before is None or report.progress is None or _moved(before, report) or not worker.flights or unseen:
            worker.moved_s = now_s
        if not worker.stuck and now_s - worker.moved_s > self._stuck_after_s:
            worker.stuck = True
            worker.why_down = f"it got no further with {len(worker.flights)} requests for {self._stuck_after_s:g} s"
            worker.failures += 1
            log.warning("worker %s is taken out: %s", worker.id, worker.why_down)
            self._lose_flights(worker)
        if worker.stuck and worker.trying is None:
            worker.trying = asyncio.get_running_loop().create_task(self._try(worker, report))

    async def _try(self, worker: Worker, report: Report) -> None:
        """Ask one that is stuck for a token, and take it back when that comes."""
        try:
            async with asyncio.timeout(self._stuck_after_s):
                gave = await self._gives(worker, report)
                well = gave if gave is not None else await self._says_it_moves(worker)
        except (Lost, TimeoutError, ValueError):
            return
        else:
            if well:
                self._free(worker)
                log.info("worker %s is taken back: it answers again", worker.id)
                self.wake()
        finally:
            worker.trying = None

    async def _gives(self, worker: Worker, report: Report) -> bool | None:
        """Whether it gives a token, in whichever way it can be asked for one; None where it refuses all."""
        told = {**self.headers, "content-type": "application/json"}
        for path, asked in _TRIES.items():
            body = msgspec.json.encode({"model": next(iter(report.models), None), "max_tokens": 1, **asked})
            answer = await self.connections.ask("POST", worker.address.url + path, headers=told, body=body)
            if answer.status == 200 or answer.status >= 500:
                return answer.status == 200
        return None

    async def _says_it_moves(self, worker: Worker) -> bool:
        """Whether one that has not what it was asked says that it gets further, or has nothing to do: nothing more is known.
        What it says while it notices that its requests were given up is no progress."""
        await asyncio.sleep(2 * self._poll_s)
        before = worker.report
        await asyncio.sleep(2 * self._poll_s)
        return before is not None and worker.report is not None and _moved(before, worker.report)

    def _free(self, worker: Worker) -> None:
        """It is not stuck, or not known to be any more."""
        worker.stuck = False
        worker.moved_s = self.clock()

    def _lose(self, worker: Worker, why: str) -> None:
        if worker.alive:
            log.warning("worker %s is down: %s", worker.id, why)
        worker.alive, worker.why_down = False, why
        self._forget(worker)
        self._lose_flights(worker)

    def _lose_flights(self, worker: Worker) -> None:
        for lost in list(worker.flights.values()):
            lost()

    def _forget(self, worker: Worker) -> None:
        worker.lives += 1
        self._free(worker)
        if worker.trying is not None:
            worker.trying.cancel()
        worker.lacks.clear()
        self._leave(worker)
        self.routing.down(worker.id)

    # Events.

    def _follow(self, worker: Worker, report: Report) -> bool:
        """Follow the worker's events; return whether it has any that can be."""
        if report.events is None or self._no_events:
            return False
        if self.follower is None:
            try:
                self.follower = Follower(asyncio.get_running_loop())
            except MissingExtra as error:
                self._no_events = True
                log.warning("%s; what workers hold is guessed from what they are sent", error.message)
                return False
        endpoint, replay = report.events
        translator = None
        if not report.roots:
            model = next(iter(report.models), None)
            most = max(_LEAST_NAMES, _NAMES_OF_A_BLOCK * self._blocks // self._max_workers)
            translator = Translator(lambda adapter: self.root_of(adapter or model), most=most)
        following = Following(worker.id, endpoint, replay, translator, lambda change: self._took(worker, change))
        worker.following = following
        self.follower.follow(following)
        return True

    def _leave(self, worker: Worker) -> None:
        if isinstance(worker.following, Following) and self.follower is not None:
            self.follower.leave(worker.following)
        worker.following = None

    def _took(self, worker: Worker, change: Change) -> None:
        if change.forget:
            self.routing.forget(worker.id)
        for came, plane, keys in change.changes:
            if came:
                self.routing.stored(worker.id, keys, plane)
            else:
                self.routing.removed(worker.id, keys, plane)


def _moved(before: Report, report: Report) -> bool:
    """Whether a worker got further, or has nothing to do, as where a client reads slowly what it has long said. A queue that
    grows is no progress."""
    return (
        report.progress != before.progress
        or (report.waiting_tokens or 0) < (before.waiting_tokens or 0)
        or (report.running == 0 and not report.waiting)
    )
