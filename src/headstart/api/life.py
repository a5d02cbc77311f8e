"""The served model through its life: loading, ready, failed, closing; and what /health says of it.

`progress`, `ready` and `failed` are called by the loading thread, the rest on the event loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headstart.api.errors import NotReady
from headstart.api.served import Served
from headstart.cache.prefix_cache import CacheStatistics
from headstart.cache.tiering import TieringStatus
from headstart.errors import HeadstartError

_NOT_LOADED = "the model could not be loaded; the server's log says why"


@dataclass(frozen=True, slots=True)
class Loading:
    stage: str
    progress: float | None  # 0 … 1, None where it cannot be known


class Life:
    def __init__(self) -> None:
        self._state: Loading | Served | HeadstartError = Loading("starting", None)
        self._closing = False

    def progress(self, stage: str, fraction: float | None = None) -> None:
        self._state = Loading(stage, fraction)

    def ready(self, served: Served) -> None:
        self._state = served

    def failed(self, error: HeadstartError) -> None:
        self._state = error

    @property
    def served(self) -> Served | None:
        return self._state if isinstance(self._state, Served) else None

    def health(self) -> tuple[int, dict[str, Any]]:
        """Return an HTTP status and what /health says. Paths are for the log: whoever reaches the port reads this."""
        state = self._state
        if isinstance(state, Loading):
            return 503, {"status": "loading", "stage": state.stage, "progress": state.progress}
        if isinstance(state, HeadstartError):
            return 503, {"status": "failed", "error": _NOT_LOADED}
        if failure := state.engine.failed:
            return 503, {"status": "failed", "error": failure}
        info = state.engine.info
        status = {"status": "closing" if self._closing else "ok", "model": state.name, "note": state.note}
        said, *why = info.cache.split("; ")
        told = [
            part for part in why if part.startswith("cache.")
        ]  # of a setting; what went wrong with a tier names its directory
        cache = "; ".join([said, *told, *(["the server's log says why"] if len(told) < len(why) else [])])
        paused = [] if state.cache is None else paused_tiers(state.cache.statistics())
        cache = "; ".join([cache, *paused])
        facts = {"device": info.device, "dtype": info.dtype, "context_tokens": info.context_tokens, "cache": cache}
        if state.cache is not None and (rules := _tiering(state.cache.tiering)):
            facts["tiering"] = rules
        return 503 if self._closing else 200, status | facts

    def require_served(self) -> Served:
        """Return the model. Raises NotReady while it loads, when it could not be loaded, and when the server goes down."""
        state = self._state
        self.require_open()
        if isinstance(state, Loading):
            done = "" if state.progress is None else f" ({state.progress:.0%})"
            raise NotReady(f"the model is still loading: {state.stage}{done}", code="model_loading", retry_after_s=2)
        if isinstance(state, HeadstartError):
            raise NotReady(_NOT_LOADED, code="model_failed")
        if failure := state.engine.failed:
            raise NotReady(failure, code="engine_failed")
        return state

    def require_open(self) -> None:
        """Raise NotReady when the server goes down."""
        if self._closing:
            raise NotReady("the server is shutting down", code="shutting_down", retry_after_s=5)


def _tiering(status: TieringStatus) -> str:
    """Return what /health says of the rules of tiers; "" where there are none."""
    said = f"{status.rules} rule{'' if status.rules == 1 else 's'}" if status.rules or status.refused else ""
    return f"{said}; later ones are wrong and do not hold, the server's log says why" if status.refused else said


def paused_tiers(statistics: CacheStatistics) -> list[str]:
    """Return a sentence for every tier that stores nothing now, and for every device of one that does not take part."""
    said = []
    for tier in statistics.tiers:
        if tier.paused:
            read = ", what is there is still read" if tier.blocks else ""
            said.append(f"nothing is stored in the tier {tier.name!r} for now{read}: {tier.paused}")
    return said + [
        f"device {device.name} of the tier {tier.name!r} takes nothing for now: {device.paused}"
        for tier in statistics.tiers
        for device in tier.devices
        if device.paused
    ]
