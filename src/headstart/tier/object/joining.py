"""Runs that follow each other become one object before they go to a bucket, where every object costs requests. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headstart.block.extent import ExtentHeader
from headstart.block.joining import finish, join_headers, verify_part
from headstart.block.representation import Representation
from headstart.block.whole import aligned
from headstart.policy.joining import Run, chains
from headstart.tier.base import Terms


def groups_of(
    images: Sequence[memoryview], headers: Sequence[ExtentHeader], terms: Sequence[Terms], *, most_bytes: int
) -> Iterator[list[int]]:
    """Yield which images become one: those that continue each other, of one tenant and class, up to `most_bytes`."""
    runs = [
        Run(
            number,
            header.parent,
            header.keys[-1],
            images[number].nbytes,
            family=(header.algorithm, terms[number].retention, terms[number].tenant),
            ends=header.state_bytes > 0,
        )
        for number, header in enumerate(headers)
    ]
    for chain in chains(runs):
        group: list[int] = []
        nbytes = 0
        for run in chain:
            if group and nbytes + run.nbytes > most_bytes:
                yield group
                group, nbytes = [], 0
            group.append(run.name)
            nbytes += run.nbytes
        yield group


def joined(images: Sequence[memoryview], headers: Sequence[ExtentHeader], representation: Representation) -> memoryview:
    """Return the image of one extent that holds all of these. Raises ExtentCorrupt where one is not what was written."""
    whole = join_headers(headers, representation)
    image = aligned(whole.layout.extent_bytes)
    for part, source in enumerate(images):
        for move in whole.moves(part):
            image[move.target : move.target + move.nbytes] = source[move.source : move.source + move.nbytes]
        verify_part(image, whole, part)
    finish(image, whole)
    return image


def firmest(terms: Sequence[Terms]) -> Terms:
    """Return the terms that promise the longest time."""
    return max(terms, key=lambda one: one.keep_s)
