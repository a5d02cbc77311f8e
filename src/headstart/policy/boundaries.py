"""Behind which tokens of a prompt a recurrent state is kept, so that later prompts can go on from there. Pure.

    prompt   │░░░░░░░░░░░░░░░░░│░░░░░░░░░░░░░░░░░│░░░░░░░│░░░│░│
             0              every           2 · every    │   │ └ a token or more is always left to compute
                                                  diverges   the last whole block before the end

A state cannot be cut, so a forward pass ends at each of these. The one before the end serves whoever goes on with the same
prompt, those every so often serve prompts that begin alike, and where the cache holds blocks without a state behind them,
prompts have parted before and will again. So they do where another one that is waiting parts from this one.
"""

from __future__ import annotations

from collections.abc import Iterable


def next_boundary(
    computed: int,
    *,
    tokens: int,
    every: int,
    block_tokens: int,
    diverges: int | None = None,
    awaited: Iterable[int] = (),
) -> int | None:
    """Return the next boundary behind `computed` tokens of a prompt of `tokens`; None: there is none before its end.
    `every` is taken in whole blocks, at least one; `awaited` are whole blocks behind which others wait for the state."""
    last = _floored(tokens - 1, block_tokens)
    step = max(block_tokens, _floored(every, block_tokens))
    wanted = [last, (computed // step + 1) * step, *awaited]
    if diverges is not None:
        wanted.append(_floored(diverges, block_tokens))
    return min((one for one in wanted if computed < one <= last), default=None)


def _floored(tokens: int, block_tokens: int) -> int:
    return tokens // block_tokens * block_tokens
