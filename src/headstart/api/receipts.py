"""Where the time and the tokens of a request went: kept a while for its sender, and told in a header. For the event loop."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from headstart.engine.base import Receipt

MOST = 4096
KEEP_S = 3600.0


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds. `tokenise`: from a request's arrival until its tokens were known. `queue`: until it had its turn. `compute`: of
    its prompt, reading what was stored included, until the first token. `load`: overlaps `compute`. `first_token` and `total`:
    from the arrival. None: not reached."""

    tokenise: float
    queue: float
    match: float
    load: float
    compute: float | None
    first_token: float | None
    decode: float | None
    total: float

    @classmethod
    def of(cls, receipt: Receipt, *, tokenise_s: float) -> Times:
        first = receipt.first_token_s
        return cls(
            tokenise=tokenise_s,
            queue=receipt.queue_s,
            match=receipt.match_s,
            load=receipt.load_s,
            compute=None if first is None else max(0.0, first - receipt.queue_s - receipt.match_s),
            first_token=None if first is None else tokenise_s + first,
            decode=None if first is None else max(0.0, receipt.total_s - first),
            total=tokenise_s + receipt.total_s,
        )

    @property
    def header(self) -> str:
        """The value of server-timing, in milliseconds."""
        known = {name: seconds for name, seconds in asdict(self).items() if seconds is not None}
        return ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in known.items())


def facts_of(receipt: Receipt) -> dict[str, Any]:
    """Return what a receipt says beside times and tokens."""
    decision = receipt.decision
    return {
        "load_decision": {
            "choice": decision.choice,
            "matched_tokens": decision.matched_tokens,
            "estimated_load_s": decision.load_s,
            "estimated_compute_s": decision.compute_s,
        },
        "bytes_read": receipt.bytes_read,
        "preemptions": receipt.preemptions,
        "longest_gap_s": receipt.longest_gap_s,
        "notes": list(receipt.notes),
    }


class Receipts:
    """The latest ones, at most `most` and not older than `keep_s`; each is told to its own tenant alone."""

    def __init__(self, *, most: int = MOST, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._keep_s = keep_s
        self._clock = clock
        self._kept: OrderedDict[str, tuple[float, str, dict[str, Any]]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, id: str, tenant: str, told: dict[str, Any]) -> None:
        self._kept[id] = self._clock(), tenant, told
        while len(self._kept) > self._most or self._old(next(iter(self._kept.values()))[0]):
            self._kept.popitem(last=False)

    def find(self, id: str, tenant: str) -> dict[str, Any] | None:
        """Return a tenant's own receipt; another's is as unknown as one that never was."""
        kept_s, whose, told = self._kept.get(id, (0.0, "", None))
        return told if told is not None and whose == tenant and not self._old(kept_s) else None

    def _old(self, kept_s: float) -> bool:
        return self._clock() - kept_s > self._keep_s
