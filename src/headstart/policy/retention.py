"""How long an extent is promised to stay, when it goes in any case, and how much of a tier a tenant may have. Pure.

    saved          promised until                created + ceiling
      │───── guaranteed ─────│──── while there is room ────│  goes
                             └ gives way, the least recently used first

A later save promises anew; of several promises the latest end holds, and of several classes the longest ceiling. Uses alone
prolong neither. Times are milliseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from headstart.config import RETENTION, parse_quotas, parse_retention, parse_size

FOREVER_MS = (1 << 62) - 1
DEFAULT_CLASS = "default"
EVERY_TENANT = "*"


class Span(NamedTuple):
    """What a class promises. `guaranteed_ms`: not evicted for so long after a save, while anything else may go. `ceiling_ms`:
    gone so long after it was first written, even where there is room; None: never for its age alone."""

    guaranteed_ms: int
    ceiling_ms: int | None


def _spans(text: str) -> dict[str, Span]:
    return {name: Span(*span) for name, span in parse_retention(text).items()}


@dataclass(frozen=True, slots=True)
class Retention:
    """Classes by name and quotas by tenant. A class that is not named behaves as "default". A quota is a size or a share of
    the capacity; "*" is that of each tenant that is not named; who has no name has no quota. Quotas alone may change.

    >>> retention = Retention.of("agent=1h..1d", "acme=1KiB, *=10%")
    >>> retention.span("agent"), retention.span("never heard of")
    (Span(guaranteed_ms=3600000, ceiling_ms=86400000), Span(guaranteed_ms=0, ceiling_ms=None))
    >>> [retention.quota_bytes(tenant, capacity_bytes=5000) for tenant in ("acme", "beta", "")]
    [1024, 500, None]
    """

    classes: Mapping[str, Span] = field(default_factory=lambda: _spans(RETENTION))
    quotas: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, retention: str, quotas: str = "") -> Retention:
        """Return what the settings `cache.retention` and `cache.quotas` say; a built-in class that is not named there keeps its
        own span. Raises ConfigError."""
        return cls(_spans(RETENTION) | _spans(retention), parse_quotas(quotas))

    def limit(self, quotas: Mapping[str, str]) -> None:
        """Have these quotas hold from now on, wherever this is gone by. Safe while others read."""
        self.quotas.update(quotas)
        for tenant in self.quotas.keys() - quotas.keys():
            del self.quotas[tenant]

    def span(self, name: str) -> Span:
        return self.classes.get(name) or self.classes[DEFAULT_CLASS]

    def firmer(self, one: str, other: str) -> str:
        """Return the class that guarantees longer. The same whichever is named first, so journals may be read in any order."""
        return max(one, other, key=lambda name: (self.span(name).guaranteed_ms, _ceiling(self.span(name)), name))

    def older(self, one: str, other: str) -> str:
        """Return the class whose extents may grow older; the same whichever is named first."""
        return max(one, other, key=lambda name: (_ceiling(self.span(name)), self.span(name).guaranteed_ms, name))

    def quota_bytes(self, tenant: str, *, capacity_bytes: int, whole_bytes: int | None = None) -> int | None:
        """Return how many bytes of a tier a tenant may have; None: as many as there are. `whole_bytes`: what the tier may hold
        that this one is a part of; the quota is then the part of it that the capacity is."""
        size = self.quotas.get(tenant, self.quotas.get(EVERY_TENANT)) if tenant else None
        if size is None:
            return None
        whole_bytes = capacity_bytes if whole_bytes is None else whole_bytes
        return parse_size(size, of_bytes=whole_bytes) * capacity_bytes // max(whole_bytes, 1)


def _ceiling(span: Span) -> int:
    return FOREVER_MS if span.ceiling_ms is None else span.ceiling_ms
