"""Which form of latent attention takes less time. Pure.

A token keeps one latent of C numbers and R of RoPE (512 and 64 in DeepSeek's models); from it each head makes a key of N + R
and a value of V numbers (128 + 64, 128), by a matrix of C(N+V). A head multiplies and adds, where `pairs` counts rows times the
keys that each sees:

    expanded: every key and value is made first       keys · C(N+V) + pairs · 2(N+R)
    absorbed: a row's query is put into the latent's   rows · C(N+V) + pairs · 2(C+R)
              space instead, its result taken out of it

(A kernel that has one width for keys and values does N+R, or C+R, for both.) With one row and many keys the second is far
cheaper; with many new rows the first. For S rows over a long prefix of n tokens, pairs = S·n, and the counts are equal where
n·C(N+V) = S·n·2(C-N): at S = C(N+V) / 2(C-N), 171 rows in DeepSeek's shape, however long the prefix is.

Counting is not all: what is made goes through memory, and its attention reads it from there, so that each multiplication of the
expanded form takes some 1.4 times as long as one of the absorbed form (`MAKING`; measured on a CPU for two shapes, by
`python -m benchmarks latent`). That moves the border to 1.4·C(N+V) / (2(C+R) - 1.4·2(N+R)): 299 rows in DeepSeek's shape,
738 in GLM-4.7-Flash's (N = 192, V = 256).
"""

from __future__ import annotations

from dataclasses import dataclass

MAKING = 1.4


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
    >>> [absorbs(deepseek, rows=rows, keys=8000 + rows, pairs=8000 * rows) for rows in (1, 64, 300, 303, 1024)]
    [True, True, True, False, False]
    >>> absorbs(deepseek, rows=1024, keys=1024, pairs=1024 * 1025 // 2)
    False
    """
    head = shape.rank * (shape.nope + shape.value)
    absorbed = rows * head + pairs * 2 * (shape.rank + shape.rope)
    expanded = keys * head + pairs * 2 * (shape.nope + shape.rope)
    return absorbed < MAKING * expanded
