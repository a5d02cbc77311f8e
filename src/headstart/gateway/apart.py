"""A prompt computed by one worker, and answered by another that asks it for the KV.

    choose who answers ─▶ is the prompt worth the way? ─no─▶ sent as it is
                                  │ yes
                                  ▼
           sent with a header that says where the prompt is computed; who answers asks there, and computes it itself where
           that fails

One request goes out and one answer comes back, both of the worker that answers (docs/prefill-decode.md).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from urllib.parse import urlsplit

from headstart.gateway.decisions import Attempt
from headstart.gateway.sending import Direct, Order, Sent
from headstart.gateway.worker import Report, Role, Worker
from headstart.policy.routing.disaggregation import Parting, Wire, part
from headstart.policy.routing.router import Decision
from headstart.policy.speed import Speed

HEADER = "x-headstart-prefill-at"
_GUESSED_RATE = 1e9  # bytes a second, of who has taken none yet
_START_S = 5e-3
_COMPUTES: tuple[Role, ...] = ("prefill",)


class Apart(Direct):
    """As `Direct`; and a prompt is computed by a worker whose role is `prefill` where that is sooner for all."""

    @asynccontextmanager
    async def send(self, order: Order, *, but: Collection[str]) -> AsyncIterator[Sent]:
        if not any(one.role in _COMPUTES for one in self.fleet.workers.values()):
            async with super().send(order, but=but) as sent:
                yield sent
            return
        routing, clock, known = self.fleet.routing, self.fleet.clock, order.known
        id = f"{order.asked.request}#prompt{next(self._numbers)}"  # a client may use one name twice
        expected: asyncio.TimerHandle | None = None

        def computed() -> None:
            routing.finished(id, answer=None, now_s=clock())

        def headers_for(worker: Worker) -> dict[str, str]:
            attempt = order.asked.attempts[-1]
            headers = dict(order.headers_for(worker))
            if attempt.parted is None:
                return headers
            routing.sent(id, attempt.parted, tokens=known.tokens, now_s=clock())
            routing.presume(attempt.parted.worker, known.keys)
            return headers | {HEADER: attempt.prefill_at}

        try:
            async with super().send(replace(order, headers_for=headers_for), but=but) as sent:
                first = sent.on_first_token

                def first_token() -> None:
                    computed()
                    first()

                sent.on_first_token = first_token
                if not order.stream and sent.attempt.parted is not None:  # nobody sees when its first token comes
                    first_s = sent.attempt.parted.estimate.first_token_s
                    expected = asyncio.get_running_loop().call_later(first_s, computed)
                yield sent
        finally:
            if expected is not None:
                expected.cancel()
            computed()

    def _chosen(self, order: Order, but: Collection[str]) -> tuple[Worker, Attempt]:
        worker, attempt = super()._chosen(order, but)
        found = self._parting(order, worker, but)
        if found is not None:
            parting, attempt.parted, attempt.prefill_at = found
            attempt.decision = _lighter(attempt.decision, parting)
        return worker, attempt

    def _parting(self, order: Order, worker: Worker, but: Collection[str]) -> tuple[Parting, Decision, str] | None:
        """Return who computes the prompt that `worker` answers, and where that one is asked; None where `worker` does it."""
        own, known = worker.report, order.known
        if own is None or own.handoff is None or not own.handoff.takes:
            return None
        able = {
            one.id: at
            for one in self.fleet.able(order.model, but=but, role=_COMPUTES)
            if one is not worker and (at := _addresses(one, worker))
        }
        if not able:
            return None
        views, key = self.fleet.routing.views(known.keys, now_s=self.fleet.clock(), among={worker.id, *able})
        if worker.id not in views:
            return None
        by_number = {view.worker: name for name, view in views.items() if name in able}
        parting = part(
            views[worker.id], [view for name, view in views.items() if name in able], tokens=known.tokens, wire=_wire(own)
        )
        if parting is None:
            return None
        name = by_number[parting.worker]
        return parting, self.fleet.routing.decided(name, views, key, tokens=known.tokens), able[name]


def _addresses(prefill: Worker, decode: Worker) -> str:
    """Return where `decode` asks `prefill`; "" where it cannot, or would get the KV of another model."""
    one, other = prefill.report, decode.report
    if (
        one is None
        or other is None
        or one.handoff is None
        or (one.representation, one.roots) != (other.representation, other.roots)
    ):
        return ""
    near = urlsplit(prefill.address.url).hostname == urlsplit(decode.address.url).hostname
    return ", ".join(at for at in one.handoff.addresses if near or not at.startswith("ipc:"))


def _wire(decode: Report) -> Wire:
    rate = None if decode.handoff is None else decode.handoff.bytes_per_s
    return Wire(Speed((decode.token_bytes / (rate or _GUESSED_RATE), _START_S)))


def _lighter(decision: Decision, parting: Parting) -> Decision:
    """Return the decision of who answers with what is left for it: the prompt comes, like something that is read."""
    own = decision.estimate
    light = replace(
        own, read_s=parting.first_token_s, compute_s=parting.next_token_s, work_s=max(0.0, own.work_s - own.compute_s)
    )
    return replace(decision, estimate=light, others=lambda: {**decision.estimates, decision.worker: light})
