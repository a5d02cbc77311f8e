"""A disk under the llama engine that is slow, hangs or fails: every request ends, nobody waits, and the tokens are right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_kit import WORDS, Made, opened, receipt_of, saved

from asking import Answer, ask, eventually, some_tokens
from headstart.block.identity import Identity
from headstart.block.representation import Representation
from headstart.cache.prefix_cache import PrefixCache
from headstart.config import CacheConfig
from headstart.engine.exactness import same_tokens
from headstart.engine.llama import engine as engine_module
from headstart.engine.llama import opening, reading
from headstart.engine.llama.engine import LlamaEngine
from headstart.engine.speeds import Speeds
from headstart.metrics import Counters
from headstart.testing.faults import Fault, FaultyTier
from headstart.testing.faulty_disk import DiskFault, FaultyDisk
from headstart.tier.disk import DiskTier
from headstart.tier.disk.door import RealDisk

PROMPT, MATCHED = some_tokens(650, 1, WORDS), 640


class Paced(Speeds):
    """Computing a block takes `block_s`, whatever is measured; the clock can be put forward."""

    block_s = 0.5

    def __init__(self, counters: Counters, *, chunk_tokens: int) -> None:
        self.ahead_s = 0.0
        super().__init__(counters, chunk_tokens=chunk_tokens, clock=lambda: time.monotonic() + self.ahead_s)
        super().passed(64, 0.0, self.block_s)

    def passed(self, *_: Any, **__: Any) -> None:
        return

    def teach(self, piece_bytes: int) -> None:
        """Reading a block takes as long as computing one."""
        for _ in range(3):
            self.asked("disk", piece_bytes)
            self.ahead_s += self.block_s
            self.came("disk", piece_bytes, asked_bytes=piece_bytes)


class Stand:
    """An engine over a disk that has PROMPT stored and may be broken, by `tier` or below it, by `disk`."""

    def __init__(self, engine: LlamaEngine, tier: FaultyTier, disk: FaultyDisk) -> None:
        self.engine, self.tier, self.disk = engine, tier, disk
        self.cold = ask(engine, PROMPT)
        self.cold.result()
        saved(engine)
        scale = float(np.abs(engine.next_logits(PROMPT)).max())
        self.tolerance = 1e-4 * scale
        assert isinstance(engine._speeds, Paced)
        self.speeds = engine._speeds

    def teach(self) -> None:
        assert self.engine.cache is not None
        self.speeds.teach(self.engine.cache.representation.layer_bytes[0] or 0)

    def asked(self) -> Answer:
        """PROMPT once more; the answer is checked."""
        answer = ask(self.engine, PROMPT)
        self.check(answer)
        return answer

    def check(self, answer: Answer) -> None:
        receipt_of(answer)
        assert same_tokens(self.engine.next_logits, PROMPT, self.cold.tokens, answer.tokens, tolerance=self.tolerance)


@pytest.fixture
def stand(request: pytest.FixtureRequest, gguf: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stand]:
    """Indirectly: how long computing a block is taken to last."""
    made: list[tuple[FaultyTier, FaultyDisk]] = []

    def open_told(_: CacheConfig, *, identity: Identity, representation: Representation) -> tuple[PrefixCache, str]:
        disk = FaultyDisk(RealDisk(), stall_s=120.0)
        tier = FaultyTier(DiskTier.open(tmp_path / "kv", capacity_bytes=64 << 20, disk=disk), stall_s=120.0)
        made.append((tier, disk))
        return PrefixCache([tier], identity=identity, representation=representation), "on a disk that fails"

    monkeypatch.setattr(opening, "_FUSED", False)  # with KV in 32 bits: answers then hardly ever part
    monkeypatch.setattr(opening, "open_told", open_told)
    monkeypatch.setattr(reading, "_RANGE_BYTES", 160 << 10)  # two blocks
    monkeypatch.setattr(engine_module, "Speeds", Paced)
    monkeypatch.setattr(Paced, "block_s", getattr(request, "param", 0.5))
    with opened(gguf("llama"), tmp_path, kv_type="f32", kv_memory="8MiB") as engine:
        ((tier, disk),) = made
        yield Stand(engine, tier, disk)
        tier.heal()
        disk.heal()
        eventually(lambda: engine.load().kv_used_bytes == 0)
        saved(engine)
        assert engine.cache is not None
        assert engine.cache.check() == []
        assert not {name for name in engine.load().counters if name.endswith("_faults")}


@pytest.mark.parametrize("met", [False, True], ids=["read from the front", "met from the end"])
@pytest.mark.parametrize(("kind", "start"), [("eio", 1), ("corrupt", 3), ("short", 3), ("flip", 3)])
def test_what_a_failing_disk_does_not_bring_is_computed(stand: Stand, kind: Any, start: int, met: bool) -> None:
    if met:
        stand.teach()
    stand.tier.inject(Fault("read", kind, start=start))
    assert receipt_of(stand.asked()).cached_tokens < MATCHED
    assert stand.tier.injected["read", kind] > 0


@pytest.mark.parametrize("met", [False, True], ids=["read from the front", "met from the end"])
def test_a_disk_that_hangs_amid_a_read_holds_up_nobody(stand: Stand, met: bool) -> None:
    if met:
        stand.teach()
    stand.tier.inject(Fault("read", "stall", start=2))
    together = [ask(stand.engine, PROMPT) for _ in range(3)]
    for answer in together:
        stand.check(answer)
    assert stand.tier.stalled.is_set()  # still
    assert receipt_of(together[0]).cached_tokens < MATCHED


@pytest.mark.parametrize("verb", ["locate", "lease", "write"])
def test_a_disk_that_hangs_elsewhere_holds_up_nobody(stand: Stand, verb: Any) -> None:
    stand.tier.inject(Fault(verb, "stall"))
    other = ask(stand.engine, some_tokens(300, 2, WORDS))
    stand.asked()
    assert receipt_of(other).cached_tokens == 0
    eventually(stand.tier.stalled.is_set)


@pytest.mark.parametrize("stand", [0.001], indirect=True)
def test_a_disk_that_is_slower_than_computing_is_turned_round_left_alone_and_tried_again(stand: Stand) -> None:
    stand.tier.slow_down(100_000)  # of 700 KB
    choices = []
    while "compute" not in choices:
        receipt = receipt_of(stand.asked())
        choices.append(receipt.decision.choice)
        if len(choices) == 1:
            assert "reading was slower than computing would be: its rest is computed meanwhile" in receipt.notes
        assert len(choices) <= 12, choices
    read = stand.tier.bytes_read
    assert receipt_of(stand.asked()).cached_tokens == 0
    assert stand.tier.bytes_read == read
    stand.tier.heal()
    stand.speeds.ahead_s = 61.0
    assert receipt_of(stand.asked()).decision.choice == "mixed"


@pytest.mark.parametrize("kind", ["eio", "short", "flip", "vanished"])
def test_a_device_that_fails_below_the_tier_costs_its_blocks_alone(stand: Stand, kind: Any) -> None:
    stand.disk.inject(DiskFault("read", kind))
    assert receipt_of(stand.asked()).cached_tokens == 0
    assert stand.disk.injected["read", kind] > 0
