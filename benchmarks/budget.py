"""What a write budget costs in hits, simulated: a prefix LRU over the conversation trace that writes only what is admitted.

Rules: `policy.admission`; first come, first written; and a second sight, which needs no budget and writes what it writes. As on
any day of a long life nothing of the budget is left over at the start, and over the trace as much accrues as the share says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from benchmarks.harness import where_it_ran
from benchmarks.trace import TOKENS, TRACE, Request, read_trace
from headstart.policy.admission import BURST, DAY_S, Admission

BLOCK_BYTES = 46_080 * TOKENS
CAPACITY_TOKENS = (5_100_000, 15_400_000, 51_000_000)
SHARES = (0.5, 0.3, 0.2)
Admit = Callable[[Request, int], int]  # a request and how many of its blocks are there → how many shall be, from the first on


def run(*, smoke: bool = False) -> dict[str, Any]:
    """Return hits and writes of each rule, of those of writing everything."""
    requests = read_trace()[: 500 if smoke else None]
    rows = []
    for capacity in CAPACITY_TOKENS[: 1 if smoke else None]:
        blocks = capacity // TOKENS
        hits, written = replay(requests, blocks, lambda request, _: len(request.blocks))
        for share in SHARES:
            total_bytes = written * BLOCK_BYTES * share
            found = {
                "rule": replay(requests, blocks, _rule(total_bytes, requests[-1].at_s)),
                "first come": replay(requests, blocks, _first_come(total_bytes, requests[-1].at_s)),
                "second sight": replay(requests, blocks, _second_sight()),
            }
            rows.append(
                {
                    "tokens": capacity,
                    "share": share,
                    **{name: {"hits": h / max(1, hits), "written": w / written} for name, (h, w) in found.items()},
                }
            )
    return {"where": where_it_ran(TRACE.parent), "requests": len(requests), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    lines = [
        "Hits (bytes written), of those of writing everything.",
        "",
        "| tier, tokens | budget | this rule | first come, first written | second sight |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [f"{row[name]['hits']:.2f} ({row[name]['written']:.2f})" for name in ("rule", "first come", "second sight")]
        lines.append(f"| {row['tokens']:,} | {row['share']:.0%} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def replay(requests: Sequence[Request], blocks: int, admit: Admit) -> tuple[int, int]:
    """Return (blocks hit, blocks written) of a prefix LRU of so many blocks."""
    held: OrderedDict[int, None] = OrderedDict()
    hits = written = 0
    for request in requests:
        present = next((n for n, block in enumerate(request.blocks) if block not in held), len(request.blocks))
        hits += present
        kept = request.blocks[: admit(request, present)]
        written += sum(block not in held for block in kept)
        for block in reversed(kept):
            held[block] = None
            held.move_to_end(block)
        while len(held) > blocks:
            held.popitem(last=False)
    return hits, written


def _rule(total_bytes: float, seconds: float) -> Admit:
    day_bytes = int(total_bytes * DAY_S / seconds / (1 - BURST))
    admission = Admission(budget_bytes=day_bytes, spent_bytes=day_bytes, now_s=0.0)
    names: dict[int, bytes] = {}

    def admit(request: Request, present: int) -> int:
        keys = [names.setdefault(block, sha256(b"%d" % block).digest()[:16]) for block in request.blocks]
        return admission.admit(keys, present=present, block_bytes=BLOCK_BYTES, session="", now_s=request.at_s)

    return admit


def _first_come(total_bytes: float, seconds: float) -> Admit:
    spent = 0.0

    def admit(request: Request, present: int) -> int:
        nonlocal spent
        allowed = total_bytes * request.at_s / seconds - spent
        count = max(0, min(len(request.blocks) - present, int(allowed // BLOCK_BYTES)))
        spent += count * BLOCK_BYTES
        return present + count

    return admit


def _second_sight() -> Admit:
    seen: set[int] = set()

    def admit(request: Request, present: int) -> int:
        known = next((n for n, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
        return max(present, known)

    return admit
