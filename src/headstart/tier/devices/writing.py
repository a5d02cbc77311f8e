"""Writing to a tier of several devices: each extent to one of them, the next best where that does not take it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Condition

from headstart.block.extent import ExtentHeader, decode_header
from headstart.block.representation import Representation
from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.base import ExtentId, Terms, WriteOutcome
from headstart.tier.devices.asking import Asking
from headstart.tier.devices.device import CHANGE_PATIENCE_S, Device
from headstart.tier.devices.placer import Placer
from headstart.tier.disk import DiskTier
from headstart.tier.index import PREFIX_BYTES

PRESENT_PATIENCE_S = 2.0  # whoever writes waits longer for a lookup: what is missed here is stored twice
_ELSEWHERE = ("full", "stopped", "error")  # reasons for which another device may still take it


class Writing:
    """Safe from many threads."""

    def __init__(self, asking: Asking, counters: Counters) -> None:
        self._asking = asking
        self._counters = counters
        self._placer = Placer()
        self._condition = Condition()
        self._under_way: set[tuple[bytes, bytes, bytes]] = set()

    def write(
        self, image: memoryview, representation: Representation, terms: Terms, *, limit_of: Callable[..., int]
    ) -> WriteOutcome:
        """`limit_of(state_bytes=…)`: how large an image may be."""
        header = decode_header(image, representation)
        if image.nbytes > limit_of(state_bytes=header.state_bytes):
            return self._refused("too-large")
        return self._write(image, representation, header, terms, present_on=self._asking.devices)

    def carry_over(self, image: memoryview, representation: Representation, terms: Terms) -> list[ExtentId]:
        """Write an extent to a device that stays, unless its blocks are on such; return where they are, nothing if nobody
        takes it. It may be longer than what is written otherwise: it was written when there were other devices."""
        header = decode_header(image, representation)
        staying = [device for device in self._asking.devices if device.state == "active"]
        if not self._write(image, representation, header, terms, present_on=staying).stored:
            return []
        found = self._asking.locate(representation.digest, header.keys, staying)
        return found.ids() if found.holds(state=header.state_bytes > 0) else []

    def _write(
        self,
        image: memoryview,
        representation: Representation,
        header: ExtentHeader,
        terms: Terms,
        *,
        present_on: Sequence[Device],
    ) -> WriteOutcome:
        with self._alone((representation.digest, header.keys[0], header.keys[-1])) as alone:
            if not alone:
                return self._refused("stopped")
            there = self._asking.locate(representation.digest, header.keys, present_on, patience_s=PRESENT_PATIENCE_S)
            if there.holds(state=header.state_bytes > 0):
                return WriteOutcome(stored=True, reason="present")
            outcome = WriteOutcome(stored=False, reason="stopped")
            for device in self._placer.choose(self._asking.devices, image.nbytes, parent=header.parent, last=header.keys[-1]):
                outcome = self._write_to(device, image, representation, header, terms)
                if outcome.stored or outcome.reason not in _ELSEWHERE:
                    break
            return outcome

    def _write_to(
        self, device: Device, image: memoryview, representation: Representation, header: ExtentHeader, terms: Terms
    ) -> WriteOutcome:
        uses = self._asking.uses()

        def write(tier: DiskTier) -> WriteOutcome:
            tier.count_uses_from(uses)
            with device.writing.busy() as done:
                outcome = tier.write(image, representation, terms=terms)
                done(image.nbytes if outcome.reason == "written" else 0)
            return outcome

        def undo(outcome: WriteOutcome) -> None:
            # Its image was given to somebody else meanwhile, so what lies there may be anything (the checks would tell).
            if outcome.reason == "written" and device.tier is not None:
                with suppress(StoreError, OSError):
                    device.tier.delete(_alike(device.tier, representation, header), reason="corrupt")

        try:
            outcome = device.change(write, patience_s=CHANGE_PATIENCE_S, undo=undo)
        except (StoreError, OSError) as error:
            if isinstance(error, StoreError) and error.facts.get("reason") not in ("hangs", "gone", "closed"):
                raise
            self._counters.add("device_failed_write")
            outcome = WriteOutcome(stored=False, reason="error")
        if not outcome.stored and outcome.reason in ("stopped", "error"):
            device.refuse()
        return outcome

    @contextmanager
    def _alone(self, what: tuple[bytes, bytes, bytes]) -> Iterator[bool]:
        """Be the only thread that writes this run: each device alone would store it once, but two could both."""
        with self._condition:
            alone = self._condition.wait_for(lambda: what not in self._under_way, CHANGE_PATIENCE_S)
            if alone:
                self._under_way.add(what)
        try:
            yield alone
        finally:
            if alone:
                with self._condition:
                    self._under_way.discard(what)
                    self._condition.notify_all()

    def _refused(self, reason: str) -> WriteOutcome:
        self._counters.add(f"write_failed_{reason}")
        return WriteOutcome(stored=False, reason=reason)


def _alike(tier: DiskTier, representation: Representation, header: ExtentHeader) -> list[ExtentId]:
    """Return the extents that are what `header` says. Blocks of it may lie in others as well, rightly."""
    keys, state = tuple(key[:PREFIX_BYTES] for key in header.keys), header.state_bytes > 0
    found = ((one, tier.info(one)) for one in tier.locate(representation.digest, header.keys).ids())
    return [one for one, info in found if info is not None and (info.keys, info.state) == (keys, state)]
