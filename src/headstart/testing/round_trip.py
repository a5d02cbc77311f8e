"""What an engine does with a cache, in two calls: save a whole prompt and wait; match, load and compare every byte."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headstart.block.checks import Buffer
from headstart.cache.prefix_cache import Lease, Load, PrefixCache, SaveResult
from headstart.testing.fake_kv import FakeDestination, FakeKV, WrongPiece

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """What one match and load gave. `usable_tokens` are what an engine would skip computing; `wrong` must be empty always."""

    matched_tokens: int
    usable_tokens: int
    wrong: list[WrongPiece]
    destination: FakeDestination
    load: Load


def save(
    cache: PrefixCache, kv: FakeKV, *, retention: str = "default", states: Mapping[int, Buffer] | None = None
) -> SaveResult:
    """Save every full piece of `kv` and wait for what became of it. Where a boundary state is needed and none is given, the one
    behind the last piece goes along."""
    if states is None and kv.representation.state == "required" and kv.pieces:
        states = kv.states()
    ticket = cache.save(
        kv.tokens.tolist(),
        kv,
        salt=kv.salt,
        shared_tokens=kv.shared_tokens,
        identity=kv.identity,
        retention=retention,
        states=states,
        contents=kv.contents,
    )
    return ticket.wait(TIMEOUT_S)


def match(cache: PrefixCache, kv: FakeKV) -> Lease:
    """Match `kv`'s prompt under its own identity and salt."""
    return cache.match(
        kv.tokens.tolist(), salt=kv.salt, shared_tokens=kv.shared_tokens, identity=kv.identity, contents=kv.contents
    )


def load(cache: PrefixCache, kv: FakeKV, *, shift: int = 0, cuts: int = 1) -> Loaded:
    """Match `kv`'s prompt, load all of it into poisoned memory, and compare what is called usable with what is right."""
    with match(cache, kv) as lease:
        return finish(lease, kv, shift=shift, cuts=cuts)


def finish(lease: Lease, kv: FakeKV, *, shift: int = 0, cuts: int = 1) -> Loaded:
    """Load what `lease` holds and compare it, its boundary state included; the lease stays held."""
    destination = FakeDestination(kv.representation, lease.tokens // kv.representation.piece_tokens, shift=shift, cuts=cuts)
    running = lease.load(into=destination)
    usable = running.result(TIMEOUT_S)
    pieces = usable // kv.representation.piece_tokens
    wrong = destination.wrong(kv, pieces=pieces)
    if pieces and kv.representation.state == "required":
        state = running.state(TIMEOUT_S)
        if bytes(state) != bytes(kv.state(pieces, nbytes=state.nbytes)):
            wrong.append(WrongPiece(kv.representation.layers, pieces - 1, 0, "state"))
    return Loaded(lease.tokens, usable, wrong, destination, running)


def hit_tokens(cache: PrefixCache, kv: FakeKV) -> int:
    """Return how many tokens match now, holding nothing."""
    with match(cache, kv) as lease:
        return lease.tokens
