"""On what terms each extent is kept: promised until when, of which class and tenant, pinned. Columns beside those of `books`.

What journals say is merged so that their order does not matter: the latest end of all promises, the class that guarantees most,
the one that may grow oldest, and of pins the one with the highest counter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headstart.policy.retention import FOREVER_MS, Retention
from headstart.policy.tiering import Words
from headstart.tier.disk.records import ClassRaised, ExtentName, Pin, Pinned, Raise, Record
from headstart.tier.growing import Maps

_Rows = npt.NDArray[np.int64]


class Kept:
    """Rows are the books'. `said` tells what a journal says beyond the record that added the extent: 1 another's, 2 the own."""

    def __init__(self, retention: Retention) -> None:
        self.retention = retention
        self._maps = Maps()  # of the columns
        self.promised_ms = np.zeros(64, np.int64)
        self.tenants = np.zeros(64, np.int32)
        self.said = np.zeros(64, np.uint8)
        self._classes = np.zeros(64, np.int32)  # the one that guarantees most of those it was given
        self._oldest = np.zeros(64, np.int32)  # the one that may grow oldest
        self._class_names = _Names()
        self._tenant_names = _Names()
        self._class_bytes: list[int] = []
        self._tenant_bytes: list[int] = []
        self._ceilings_ms = np.zeros(0, np.int64)  # by class
        self._begun: dict[
            tuple[str, str], tuple[int, int, int]
        ] = {}  # class and tenant → their numbers, and what is guaranteed
        self._pins: dict[int, tuple[int, int]] = {}  # row → counter, deadline

    def grow(self, rows: int) -> None:
        """Make room for so many rows."""
        self._maps.resize(self, _COLUMNS, rows)

    def enter(self, row: int, *, created_ms: int, nbytes: int, retention: str, tenant: str) -> None:
        """Begin with what an extent was written on: it is promised its class's time from then on."""
        known = self._begun.get((retention, tenant))
        if known is None:
            guaranteed_ms = self.retention.span(retention).guaranteed_ms
            known = self._begun[retention, tenant] = self._class(retention), self.tenant_number(tenant), guaranteed_ms
        number, owner, guaranteed_ms = known
        self.promised_ms[row] = created_ms + guaranteed_ms
        self._classes[row] = self._oldest[row] = number
        self.tenants[row] = owner
        self._class_bytes[number] += nbytes
        self._tenant_bytes[owner] += nbytes

    def enter_all(
        self,
        rows: _Rows,
        *,
        created_ms: _Rows,
        nbytes: _Rows,
        terms: Sequence[tuple[str, str]],
        terms_of: npt.NDArray[np.intp],
    ) -> None:
        """As `enter` for each row. `terms`: pairs of class and tenant, of which row i has number `terms_of[i]`."""
        spans = [self.retention.span(retention).guaranteed_ms for retention, _ in terms]
        classes = np.array([self._class(retention) for retention, _ in terms])[terms_of]
        owners = np.array([self.tenant_number(tenant) for _, tenant in terms])[terms_of]
        self.promised_ms[rows] = created_ms + np.array(spans, np.int64)[terms_of]
        self._classes[rows] = self._oldest[rows] = classes
        self.tenants[rows] = owners
        for number in set(classes.tolist()):
            self._class_bytes[number] += int(nbytes[classes == number].sum())
        for number in set(owners.tolist()):
            self._tenant_bytes[number] += int(nbytes[owners == number].sum())

    def leave(self, row: int, *, nbytes: int) -> None:
        self._class_bytes[self._classes[row]] -= nbytes
        self._tenant_bytes[self.tenants[row]] -= nbytes
        self.said[row] = 0
        self._pins.pop(row, None)

    def promise(self, row: int, until_ms: int, retention: str, *, nbytes: int) -> bool:
        """Raise a promise; False where it says nothing new."""
        number, before = self._class(retention), int(self._classes[row])
        names = self._class_names
        firmer = names.number(self.retention.firmer(names[before], retention))
        older = names.number(self.retention.older(names[int(self._oldest[row])], retention))
        if until_ms <= self.promised_ms[row] and firmer == before and older == self._oldest[row]:
            return False
        self.promised_ms[row] = max(int(self.promised_ms[row]), until_ms)
        self._oldest[row] = older
        if firmer != before:
            self._classes[row] = number
            self._class_bytes[before] -= nbytes
            self._class_bytes[number] += nbytes
        return True

    def pin(self, row: int, until_ms: int, counter: int) -> None:
        """Take over a pin, or with 0 that there is none, if it is the latest; of two at once the longer one."""
        self._pins[row] = max(self._pins.get(row, (0, 0)), (counter, until_ms))

    def pinned_ms(self, row: int) -> int:
        """Return the deadline of a row's pin, 0 where there is none."""
        return self._pins.get(row, (0, 0))[1]

    def pinned(self, now_ms: int) -> _Rows:
        """Return the rows that are pinned."""
        return np.array([row for row, (_, until_ms) in self._pins.items() if until_ms > now_ms], np.int64)

    def retention_of(self, row: int) -> str:
        return self._class_names[int(self._classes[row])]

    def tenant_of(self, row: int) -> str:
        return self._tenant_names[int(self.tenants[row])]

    def words(self, rows: _Rows) -> tuple[Words, Words]:
        """Return the classes and the tenants of rows."""
        return (
            Words(self._classes[rows].astype(np.int64), self._class_names.names()),
            Words(self.tenants[rows].astype(np.int64), self._tenant_names.names()),
        )

    def tenant_number(self, tenant: str) -> int:
        number = self._tenant_names.number(tenant)
        self._tenant_bytes.extend([0] * (number + 1 - len(self._tenant_bytes)))
        return number

    def expires_ms(self, rows: _Rows, created_ms: _Rows) -> _Rows:
        """Return when rows are as old as they may grow; FOREVER_MS: never for their age."""
        expires_ms: _Rows = np.minimum(created_ms + self._ceilings_ms[self._oldest[rows]], FOREVER_MS)
        return expires_ms

    def bytes_by_class(self) -> dict[str, int]:
        return {self._class_names[n]: nbytes for n, nbytes in enumerate(self._class_bytes) if nbytes}

    def bytes_by_tenant(self) -> dict[str, int]:
        return {self._tenant_names[n]: nbytes for n, nbytes in enumerate(self._tenant_bytes) if nbytes}

    def records(self, rows: Iterable[tuple[int, ExtentName, int | None]], *, now_ms: int) -> list[Record]:
        """Return what must be journalled of rows: (row, its name, when it was created where the same journal says that it was
        added, else None)."""
        raises: list[Raise] = []
        pins: list[Pin] = []
        for row, name, created_ms in rows:
            number, oldest, until_ms = int(self._classes[row]), int(self._oldest[row]), int(self.promised_ms[row])
            retention = self._class_names[number]
            implied_ms = -1 if created_ms is None else max(now_ms, created_ms + self.retention.span(retention).guaranteed_ms)
            if until_ms > implied_ms:
                raises.append(Raise(name, until_ms, retention))
            if oldest != number:
                raises.append(Raise(name, until_ms, self._class_names[oldest]))
            if row in self._pins:
                counter, deadline_ms = self._pins[row]
                pins.append(Pin(name, deadline_ms, counter))
        found: list[Record] = [ClassRaised(now_ms, tuple(raises))] if raises else []
        return [*found, Pinned(tuple(pins))] if pins else found

    def _class(self, retention: str) -> int:
        number = self._class_names.number(retention)
        if number == len(self._class_bytes):
            self._class_bytes.append(0)
            ceiling_ms = self.retention.span(retention).ceiling_ms
            self._ceilings_ms = np.append(self._ceilings_ms, FOREVER_MS if ceiling_ms is None else ceiling_ms)
        return number


class _Names:
    """Names as small numbers."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []

    def number(self, name: str) -> int:
        number = self._numbers.setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append(name)
        return number

    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __getitem__(self, number: int) -> str:
        return self._names[number]


_COLUMNS = ("promised_ms", "tenants", "said", "_classes", "_oldest")
