"""What of a request of vLLM's has a part in the names of its blocks, and what becomes of them. Keeps none."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np

from headstart.block.keys import Content
from headstart.block.layout import encode_retention
from headstart.connect.vllm.identity import AdapterDigests
from headstart.connect.vllm.messages import Prompt

_MOST_BYTES = 255


def prompt_of(request: Any, tokens: int, *, adapters: AdapterDigests, media: bytes = b"") -> Prompt | None:
    """Return the first `tokens` tokens of a request and all that tells them from the same tokens elsewhere; None where not all
    of it can be told: embeddings instead of tokens, an adapter whose files are not here or were changed. `media`: how media are
    made tokens of."""
    if request.prompt_embeds is not None:
        return None
    digests: tuple[bytes, ...] = ()
    if request.lora_request is not None:
        digest = adapters.of(request.lora_request)
        if digest is None:
            return None
        digests = (digest,)
    # What users say goes no further than the names under which things are kept; what is no name is as if unsaid.
    params = request.kv_transfer_params
    said = params.get("headstart") if isinstance(params, Mapping) else None
    said = said if isinstance(said, Mapping) else {}
    return Prompt(
        tokens=np.array(request.all_token_ids[:tokens], dtype="<u4").tobytes(),
        salt=request.cache_salt or None,
        adapters=digests,
        contents=tuple(
            _content(feature, media)
            for feature in request.mm_features
            if feature.mm_position.offset < tokens and feature.mm_position.length
        ),
        retention=_retention(said.get("retention")),
        tenant=_text(said.get("tenant")),
        session=_text(said.get("session")) or _text(request.session_id),
        keep=said.get("keep") is not False,
    )


def _content(feature: Any, media: bytes) -> Content:
    """vLLM's identifier is a digest of the content, or the name that a user gave it; with an adapter that changes the encoder,
    of both."""
    named = media + f"\0{feature.modality}\0{feature.identifier}".encode()
    place = feature.mm_position
    return Content(place.offset, place.length, sha256(b"headstart vllm content 2\0" + named).digest())


def _retention(value: object) -> str:
    try:
        encode_retention(name := _text(value))
    except ValueError:
        return "default"
    return name


def _text(value: object) -> str:
    """Return a text that can be written down, "" for anything else."""
    try:
        return value if isinstance(value, str) and len(value.encode()) <= _MOST_BYTES else ""
    except UnicodeEncodeError:
        return ""
