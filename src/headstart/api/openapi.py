"""The OpenAPI description of what is served, made from the forms that bodies are read into."""

from __future__ import annotations

from typing import Any

import msgspec

from headstart import __version__
from headstart.api.dialects import chat, completions, messages, responses
from headstart.api.tokens import Detokenise, Tokenise

_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": chat.Request,
    "/v1/chat/completions/render": chat.Request,
    "/v1/completions": completions.Request,
    "/v1/completions/render": completions.Request,
    "/v1/responses": responses.Request,
    "/v1/messages": messages.Request,
    "/v1/messages/count_tokens": messages.Request,
    "/tokenize": Tokenise,
    "/detokenize": Detokenise,
}
_READ = ("/health", "/ready", "/version", "/v1/models")


def description() -> dict[str, Any]:
    """Return the description, as `/openapi.json` gives it."""
    forms = list(dict.fromkeys(_BODIES.values()))
    found, components = msgspec.json.schema_components(forms, ref_template="#/components/schemas/{name}")
    refs = dict(zip(forms, found, strict=True))
    said = {"description": "The answer, or an error in the dialect's own shape.", "content": {"application/json": {}}}
    paths: dict[str, Any] = {path: {"get": {"responses": {"default": said}}} for path in _READ}
    for path, form in _BODIES.items():
        body = {"required": True, "content": {"application/json": {"schema": refs[form]}}}
        paths[path] = {"post": {"requestBody": body, "responses": {"default": said}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "headstart", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
