"""Of which steps a tokenizer's normalizer, pre-tokenizer or decoder is made."""

from __future__ import annotations

from typing import Any

import msgspec


def kinds(part: Any) -> set[str]:
    """Return the names of all steps in `part`; none where there is no such part."""
    found: set[str] = set()
    steps = [] if part is None else [msgspec.json.decode(part.__getstate__())]  # its form in tokenizer.json
    while steps:
        step = steps.pop()
        found.add(step["type"])
        steps += step.get("normalizers") or step.get("pretokenizers") or step.get("decoders") or []
    return found
