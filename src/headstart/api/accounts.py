"""What becomes of a request beside its answer: who may send it, how much, what it used, where its time went.

    caller ─▶ open: within its limits? ─▶ Account ─▶ charged ─▶ told: refused, or ended ─▶ usage log · receipt · metrics · trace

Whatever fails in keeping accounts is counted and logged, and fails no request. For the event loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from headstart.api.behalf import routed
from headstart.api.errors import WrongKey
from headstart.api.keyring import ANYBODY, Caller, Keyring
from headstart.api.limits import Limits, Pace, Pass, Refusals
from headstart.api.receipts import Receipts, Times, facts_of
from headstart.engine.base import Receipt
from headstart.errors import RequestError
from headstart.ledger.entry import EngineCounts, Entry, Finish
from headstart.ledger.log import UsageLog
from headstart.metrics import Counters

if TYPE_CHECKING:
    from headstart.api.generation import Generation

_log = logging.getLogger("headstart")
_MOST_TENANTS = 100  # that metrics name; others are "*" together
_SUMMED = ("prompt", "cached_memory", "cached_disk", "written", "output")
GONE = 499  # the status of whoever went away before the answer


class Ended(Protocol):
    """Is told of every request that has ended, beside the usage log."""

    def __call__(self, account: Account, entry: Entry, times: Times | None) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class Account:
    """One request's. `refused` or `ended` closes it; what comes later counts for nothing."""

    accounts: Accounts
    caller: Caller
    endpoint: str
    headers: Mapping[str, str]
    leave: Pass
    id: str
    arrived_s: float = field(default_factory=time.monotonic)
    arrived: float = field(default_factory=time.time)  # seconds since 1970
    tokenised_s: float | None = None
    model: str = ""
    session: str = ""
    retention: str = "default"
    max_tokens: int | None = None
    status: int = 200
    closed: bool = False

    def tokenised(self, prompt_tokens: int) -> None:
        """Note that the prompt's tokens are known, and charge them."""
        self.tokenised_s = time.monotonic()
        self.leave.used(prompt_tokens)

    @property
    def tokenise_s(self) -> float:
        return (self.tokenised_s or time.monotonic()) - self.arrived_s

    def refused(self, error: RequestError) -> None:
        """The request ends before the engine had it."""
        self.status = error.status
        self._close(self._entry("refused"), None, [])

    def left(self) -> None:
        """The client went away before the engine had its request."""
        self.status = GONE
        self._close(self._entry("abort"), None, [])

    def failed(self) -> None:
        """The server failed on it before the engine had it."""
        self.status = 500
        self._close(self._entry("error"), None, [])

    def settled(self, finish: Finish, *, first_token_s: float | None = None, answers: int = 1, **used: int) -> None:
        """A worker is through with it, which said what was `used`, by the names of `Entry`; no engine here was asked."""
        self.accounts.pace.landed()
        self.leave.used(used.get("prompt", 0) + used.get("output", 0))
        if finish == "abort" and self.status == 200:
            self.status = GONE
        total_s = time.monotonic() - self.arrived_s
        self._close(self._entry(finish, answers=answers, first_token_s=first_token_s, total_s=total_s, **used), None, [])

    def ended(self, generation: Generation) -> None:
        """The engine is through with all answers and nobody reads them any more."""
        with self.accounts.guarded():
            self._ended(generation)
        self.leave.end()

    def _ended(self, generation: Generation) -> None:
        self.accounts.pace.landed()
        receipts = [answer.receipt for answer in generation.answers if answer.receipt is not None]
        usage = generation.usage()
        taken = bool(receipts) and receipts[0].taken
        self.leave.used(usage.prompt_tokens + usage.output_tokens)
        finish = _finish_of(generation)
        if finish == "abort" and self.status == 200:
            self.status = GONE
        entry = self._entry(
            finish,
            answers=len(generation.answers),
            prompt=usage.prompt_tokens if taken else 0,
            cached_memory=usage.cached_memory_tokens if taken else 0,
            cached_disk=usage.cached_disk_tokens if taken else 0,
            written=usage.written_tokens,
            output=usage.output_tokens,
            kept_output=usage.kept_output_tokens,
            first_token_s=receipts[0].first_token_s if receipts else None,
            total_s=time.monotonic() - self.arrived_s,
            engine=_counts_of(receipts),
        )
        times = Times.of(receipts[0], tokenise_s=self.tokenise_s) if receipts else None
        self._close(entry, times, receipts)
        if usage.clamped:
            self.accounts.counters.add("usage_clamped")

    def _entry(self, finish: Finish, **more: Any) -> Entry:
        return Entry(
            id=self.id,
            time=time.time(),
            tenant=self.caller.tenant,
            key=self.caller.key_id,
            model=self.model,
            endpoint=self.endpoint,
            session=self.session,
            retention=self.retention,
            finish=finish,
            status=self.status,
            **more,
        )

    def _close(self, entry: Entry, times: Times | None, receipts: list[Receipt]) -> None:
        if self.closed:
            return
        self.closed = True
        self.leave.end()
        with self.accounts.guarded():
            self.accounts.keep(self, entry, times, receipts)


class Accounts:
    """`keyring`: None lets everybody in. `router_key`: whoever has it is a router, and says whose its requests are; where there
    is one and no keyring, nobody else is let in. `log`: None keeps no usage log; what came by a router is in the router's.
    `deadline_s`: the longest that a request may take. `on_ended`: told of every request, for traces. `clock`: that limits go
    by."""

    def __init__(
        self,
        *,
        keyring: Keyring | None = None,
        router_key: str | None = None,
        log: UsageLog | None = None,
        deadline_s: float | None = None,
        on_ended: Ended | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.keyring = keyring
        self.router_key = router_key
        self.log = log
        self.deadline_s = deadline_s
        self.pace = Pace()
        self.receipts = Receipts()
        self.counters = Counters()
        self.by_tenant: dict[str, dict[str, int]] = {}
        self._limits = Limits(clock)
        self._refusals = Refusals(clock)
        self._on_ended = on_ended

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Return who sent these headers. Raises WrongKey."""
        if self.router_key is not None and (caller := routed(headers, self.router_key)) is not None:
            return caller
        if self.keyring is None:
            if self.router_key is not None:
                raise WrongKey("this server answers to its router alone; ask there", code="invalid_api_key")
            return ANYBODY
        return self.keyring.caller(headers.get("authorization", ""), headers.get("x-api-key", ""))

    def open(self, caller: Caller, *, endpoint: str, id: str, headers: Mapping[str, str]) -> Account:
        """Return the account of one more request. Raises TooManyRequests, which is in the log, too."""
        account = Account(self, caller, endpoint, headers, Pass(None, time.monotonic), id)
        try:
            account.leave = self._limits.enter(caller)
        except RequestError as error:
            account.refused(error)
            raise
        return account

    @contextmanager
    def admitted(self, caller: Caller) -> Iterator[None]:
        """Let a caller do what needs no engine, and so has no line, within the limits of its key. Raises TooManyRequests."""
        leave = self._limits.enter(caller)
        try:
            yield
        finally:
            leave.end()

    def keep(self, account: Account, entry: Entry, times: Times | None, receipts: list[Receipt]) -> None:
        """Log, count and tell."""
        self._count(entry)
        line = self._refusals.line(entry) if entry.finish == "refused" else entry
        if self.log is not None and line is not None and not account.caller.routed:
            self.log.add(line)
        if receipts:
            self.receipts.keep(entry.id, entry.tenant, _told(entry, times, receipts))
        if self._on_ended is not None:
            self._on_ended(account, entry, times)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Let nothing that fails inside reach a request: it is counted and logged."""
        try:
            yield
        except Exception:  # noqa: BLE001 - the accounts' outer edge: an answer is worth more than its line
            self.counters.add("account_faults")
            _log.exception("keeping the account of a request failed")

    def close(self) -> None:
        if self.log is not None:
            for line in self._refusals.rest():
                self.log.add(line)
            self.log.close()
        if self._on_ended is not None:
            self._on_ended.close()

    def _count(self, entry: Entry) -> None:
        name = entry.tenant
        if name not in self.by_tenant and len(self.by_tenant) >= _MOST_TENANTS:
            name = "*"
        sums = self.by_tenant.setdefault(name, dict.fromkeys(("requests", *_SUMMED), 0))
        sums["requests"] += 1
        for column in _SUMMED:
            sums[column] += getattr(entry, column)


def _finish_of(generation: Generation) -> Finish:
    """Return how a request ended: badly if any answer did."""
    finishes = [answer.finish or "abort" for answer in generation.answers]
    return next((bad for bad in ("error", "abort") if bad in finishes), finishes[0])


def _counts_of(receipts: list[Receipt]) -> EngineCounts:
    """Return what the engine's counters were raised by."""
    taken = [receipt for receipt in receipts if receipt.taken]
    return EngineCounts(
        prompt=sum(receipt.prompt_tokens for receipt in taken),
        cached_memory=sum(receipt.cached_memory_tokens for receipt in taken),
        cached_disk=sum(receipt.cached_disk_tokens for receipt in taken),
        generated=sum(receipt.completion_tokens for receipt in taken),
        written=sum(receipt.written_tokens for receipt in taken),
        kept_output=sum(receipt.kept_output_tokens for receipt in taken),
    )


def _told(entry: Entry, times: Times | None, receipts: list[Receipt]) -> dict[str, Any]:
    """Return what is told of a request to whoever sent it."""
    return {
        "id": entry.id,
        "object": "headstart.request",
        "ended": entry.time,
        "model": entry.model,
        "endpoint": entry.endpoint,
        "session": entry.session,
        "class": entry.retention,
        "finish": entry.finish,
        "status": entry.status,
        "usage": {
            "prompt": entry.prompt,
            "cached_memory": entry.cached_memory,
            "cached_disk": entry.cached_disk,
            "computed": entry.computed,
            "written": entry.written,
            "output": entry.output,
            "kept_output": entry.kept_output,
        },
        "seconds": times,
        **facts_of(receipts[0]),
        "answers": entry.answers,
    }
