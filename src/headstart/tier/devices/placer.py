"""Which device takes the next extent: what `policy.placement` needs to know, kept from write to write."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from headstart.policy.placement import Candidate, order, rates
from headstart.tier.devices.device import Device
from headstart.tier.disk.records import PREFIX_BYTES

_MAX_CHAINS = 4096  # the least recently written is forgotten: what follows it is then placed as a new prompt


class Placer:
    """Safe from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ahead: dict[int, float] = {}  # serial → seconds of reading that it was given more than the others
        self._chains: OrderedDict[bytes, dict[int, int]] = OrderedDict()  # last block → bytes of the prompt by serial

    def choose(self, devices: Sequence[Device], nbytes: int, *, parent: bytes, last: bytes) -> list[Device]:
        """Return the devices that take writes, the best for an extent that follows block `parent` and ends with block `last`
        first, and count it there."""
        devices = [device for device in devices if device.takes_writes]
        if not devices:
            return []
        with self._lock:
            loads = self._chains.get(parent[:PREFIX_BYTES], {})
            candidates = [
                Candidate(
                    device.reading.estimate.bytes_per_s,
                    device.writing.estimate.bytes_per_s,
                    chain_bytes=loads.get(device.serial, 0),
                    ahead_s=self._ahead.get(device.serial, 0.0),
                    has_room=device.tier is not None and device.tier.room_bytes >= nbytes,
                )
                for device in devices
            ]
            chosen = order(candidates, nbytes)
            serial, own_s = devices[chosen[0]].serial, nbytes / rates(candidates)[chosen[0]]
            ahead = {device.serial: self._ahead.get(device.serial, 0.0) for device in devices}
            ahead[serial] += own_s
            least = min(ahead.values())
            self._ahead = {one: ahead_s - least for one, ahead_s in ahead.items()}
            self._chains[last[:PREFIX_BYTES]] = loads | {serial: loads.get(serial, 0) + nbytes}
            self._chains.move_to_end(last[:PREFIX_BYTES])
            if len(self._chains) > _MAX_CHAINS:
                self._chains.popitem(last=False)
        return [devices[i] for i in chosen]
