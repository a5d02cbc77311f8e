"""The OpenAPI description of what is served, made from the forms that bodies are read into and answers are written in."""

from __future__ import annotations

from typing import Any

import msgspec

from headstart import __version__
from headstart.api import described as forms
from headstart.api.dialects import chat, completions, messages, responses
from headstart.api.roles import RoleAnswer, RoleChange
from headstart.api.tokens import Detokenise, Tokenise

# Path: the body, and the answer.
_POSTS: dict[str, tuple[type[msgspec.Struct], type[msgspec.Struct]]] = {
    "/v1/chat/completions": (chat.Request, forms.ChatCompletion),
    "/v1/chat/completions/render": (chat.Request, forms.Rendered),
    "/v1/completions": (completions.Request, forms.TextCompletion),
    "/v1/completions/render": (completions.Request, forms.Rendered),
    "/v1/responses": (responses.Request, forms.ResponseAnswer),
    "/v1/messages": (messages.Request, forms.MessageAnswer),
    "/v1/messages/count_tokens": (messages.Request, forms.CountAnswer),
    "/tokenize": (Tokenise, forms.Tokenised),
    "/detokenize": (Detokenise, forms.Detokenised),
}
_STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_GETS: dict[str, type[msgspec.Struct]] = {
    "/health": forms.Health,
    "/ready": forms.Ready,
    "/version": forms.Version,
    "/v1/models": forms.Models,
    "/v1/models/{name}": forms.Model,
    "/v1/responses/{id}": forms.ResponseAnswer,
    "/v1/headstart/role": RoleAnswer,
    "/v1/headstart/requests/{id}": forms.ReceiptAnswer,
    "/v1/headstart/requests/{id}/why": forms.WhyAnswer,
    "/v1/headstart/requests/{id}/tokens": forms.TokensAnswer,
}
_NOT_READY = ("/health", "/ready")  # that say the same with status 503


def description() -> dict[str, Any]:
    """Return the description, as `/openapi.json` gives it."""
    errors = [forms.ErrorAnswer, forms.MessagesErrorAnswer]
    both = [form for pair in _POSTS.values() for form in pair]
    every = list(dict.fromkeys([*both, *_GETS.values(), RoleChange, *errors]))
    found, components = msgspec.json.schema_components(every, ref_template="#/components/schemas/{name}")
    refs = dict(zip(every, found, strict=True))

    def answers(path: str, form: type[msgspec.Struct]) -> dict[str, Any]:
        json = {"application/json": {"schema": refs[form]}}
        error = {"application/json": {"schema": refs[errors[path.startswith("/v1/messages")]]}}
        streamed = {"text/event-stream": {"schema": {"type": "string"}}} if path in _STREAMED else {}
        told = {"200": {"description": "The answer.", "content": json | streamed}}
        if path in _NOT_READY:
            told["503"] = {"description": "Not ready.", "content": json}
        return told | {"default": {"description": "An error.", "content": error}}

    paths: dict[str, Any] = {}
    for path, form in _GETS.items():
        name = path[path.find("{") + 1 : path.find("}")] if "{" in path else None
        parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        paths[path] = {"get": {"responses": answers(path, form), **({"parameters": [parameter]} if name else {})}}
    for path, (asked, answered) in _POSTS.items():
        schema = refs[asked]
        if path == "/v1/messages":  # which has a form in common with what only counts
            schema = {"allOf": [schema, {"required": ["max_tokens"]}]}
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"requestBody": body, "responses": answers(path, answered)}}
    body = {"required": True, "content": {"application/json": {"schema": refs[RoleChange]}}}
    paths["/v1/headstart/role"]["patch"] = {"requestBody": body, "responses": answers("/v1/headstart/role", RoleAnswer)}
    paths["/metrics"] = {"get": {"responses": {"200": {"description": "Metrics.", "content": {"text/plain": {}}}}}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "headstart", "version": __version__},
        "paths": paths,
        "components": {"schemas": components},
    }
