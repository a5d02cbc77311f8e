"""How long things take in a pool, and so how long others wait for them. Pure.

    visible_s  <  look at journals  …  lease_s  <  grace_s          every span is measured on one machine's own clock

A reader knows that an extent was not removed up to `visible_s` before its last look. From then it reads for `lease_s`; the
bytes go `grace_s` after whoever removes them noted that, which is longer by twice what a change takes to be seen.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """`visible_s`: after which every machine sees what one wrote (the attribute cache of the mount). `look_s`: how often
    journals are read on. `silent_s`: a look that is older counts no more, nothing is found then. `lease_s`: how long a lease
    protects. `grace_s`: how long bytes stay after their removal was written down. `beat_s`: a writer says something at least
    so often. `term_s`: a collector that has said nothing for so long is replaced. `dead_s`: so any other writer is taken for
    dead. `collect_s`: how often the collector looks after the pool. `answer_s`: a mount that takes longer hangs.
    `list_s`: how often everything that is there is listed. `verify_s`: how often a writer reads its own journal back."""

    visible_s: float = 1.0
    look_s: float = 0.2
    silent_s: float = 10.0
    lease_s: float = 60.0
    grace_s: float = 180.0
    beat_s: float = 5.0
    term_s: float = 30.0
    dead_s: float = 600.0
    collect_s: float = 1.0
    answer_s: float = 15.0
    list_s: float = 30.0
    verify_s: float = 60.0

    def __post_init__(self) -> None:
        if self.grace_s and self.lease_s + 2 * self.visible_s > self.grace_s:
            raise ValueError(
                f"a lease of {self.lease_s} s may outlive a grace of {self.grace_s} s where changes are seen after "
                f"{self.visible_s} s; make the grace longer"
            )

    @classmethod
    def where_seen_after(cls, visible_s: float) -> Timing:
        """Return what suits a mount whose attribute cache holds for `visible_s`."""
        return cls(
            visible_s=visible_s,
            silent_s=max(10.0, 2 * visible_s),
            grace_s=180.0 + 2 * visible_s,
            term_s=30.0 + 2 * visible_s,
            dead_s=600.0 + 2 * visible_s,
        )
