"""Which form of latent attention takes fewer multiplications. Pure.

A token keeps one latent of C numbers and R of RoPE (512 and 64 in DeepSeek's models); from it each head makes a key of N + R
and a value of V numbers (128 + 64, 128), by a matrix of C·(N + V). Per head, one multiplication and addition counted as one:

    expanded: every key and value is made first       keys · C(N+V)      + pairs · 2(N+R)
    absorbed: a row's query is put into the latent's   rows · C(N+V)      + pairs · 2(C+R)
              space instead, its result taken out of it

`pairs` counts rows times the keys that each sees. A kernel for keys and values of one width does N+R, or C+R, for both, so
that is what is counted. With one row and many keys the second is far cheaper, when all rows are new the first. For a suffix of
S rows over a long prefix of n tokens (pairs = S·n) both cost the same where n·C(N+V) = S·n·2(C-N), that is at
S = C(N+V) / 2(C-N) rows: 171 for DeepSeek's shape, 358 for GLM-4.7-Flash's, however long the prefix is.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LatentShape:
    """`rank`: numbers of a latent without those of RoPE; `nope`, `rope` and `value`: of a head's key without RoPE, of the part
    with it, of a head's value."""

    rank: int
    nope: int
    rope: int
    value: int


def absorbs(shape: LatentShape, *, rows: int, keys: int, pairs: int) -> bool:
    """Return whether the absorbed form is the cheaper one.

    >>> deepseek = LatentShape(rank=512, nope=128, rope=64, value=128)
    >>> [absorbs(deepseek, rows=rows, keys=8000 + rows, pairs=8000 * rows) for rows in (1, 64, 170, 171, 1024)]
    [True, True, True, False, False]
    >>> absorbs(deepseek, rows=64, keys=64, pairs=64 * 65 // 2)
    False
    """
    head = shape.rank * (shape.nope + shape.value)
    absorbed = rows * head + pairs * 2 * (shape.rank + shape.rope)
    expanded = keys * head + pairs * 2 * (shape.nope + shape.rope)
    return absorbed < expanded
