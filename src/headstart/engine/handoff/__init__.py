"""A prompt computed by one worker and gone on with by another: its KV goes over layer by layer while it is computed.

`HandoffEngine` wraps an engine. A request that names a worker in `prefill_at` has its prompt computed there; whatever goes
wrong with that, it is computed here. See docs/prefill-decode.md.
"""

from headstart.engine.handoff.engine import HandoffEngine, opened

__all__ = ["HandoffEngine", "opened"]
