"""What the log says of requests: one line for each, and remarks that are made once."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from headstart.engine.base import FinishReason, Receipt

log = logging.getLogger("headstart")

_MOST = 64  # different remarks of a kind; clients choose the words of some


class Remarks:
    """Makes each remark once, and of each kind so many; that there are more is said once, too."""

    def __init__(self) -> None:
        self._made: dict[str, set[str]] = {}

    def once(self, line: str, *, kind: str = "") -> None:
        made = self._made.setdefault(kind, set())
        if line in made or len(made) > _MOST:
            return
        made.add(line)
        log.info("%s", line if len(made) <= _MOST else f"{kind}: there are more, which are not logged")

    def ignoring(self, what: str, names: Iterable[str]) -> None:
        for name in names:
            self.once(f"ignoring {what} {name[:64]!r}", kind=f"ignoring {what}s")


def request_line(request_id: str, finish: FinishReason, receipt: Receipt, error: str | None) -> str:
    """One line a request: what came from where, how soon, how fast."""
    new = receipt.prompt_tokens - receipt.cached_tokens
    ttft = "none" if receipt.first_token_s is None else f"{receipt.first_token_s:.3f} s"
    decode_s = receipt.total_s - (receipt.first_token_s or 0.0)
    answered = receipt.completion_tokens
    rate = f", {(answered - 1) / decode_s:.1f} tokens/s" if answered > 1 and decode_s > 0 else ""
    return (
        f"{request_id} prompt {receipt.prompt_tokens}, cached {receipt.cached_memory_tokens} from memory and "
        f"{receipt.cached_disk_tokens} from disk, new {new}; first token {ttft}; "
        f"{answered} token{'' if answered == 1 else 's'}{rate}; {finish}"
        + "".join(f"; {note}" for note in (error, *receipt.notes) if note)
    )
