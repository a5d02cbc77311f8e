"""Errors as clients expect them: of OpenAI's API {"error": {message, type, param, code}}, `code` always a string; of
Anthropic's {"type": "error", "error": {type, message}, "request_id"}."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse
from starlette.types import Scope

from headstart.errors import RequestError


class ModelNotFound(RequestError):
    """The path names a model that is not served here."""

    status = 404


class WrongKey(RequestError):
    """The request has no API key, or one that is none."""

    status = 401


class Forbidden(RequestError):
    """The request came under a foreign name or from a foreign page, or asks for what is an operator's to see."""

    status = 403


class NoSuchReceipt(RequestError):
    """Nobody here remembers a request of this name, or it was another tenant's."""

    status = 404


class NoSuchResponse(RequestError):
    """The answer that a request goes on from is not kept here, or was another tenant's."""

    status = 404


class AlreadyEnded(RequestError):
    """What should be cancelled has ended."""


class Cancelled(RequestError):
    """The request was ended because its client asked for that."""

    status = 409


class BodyTooSlow(RequestError):
    """The request's body did not come in time."""

    status = 408


class BodyTooLarge(RequestError):
    """The request's body is over the limit."""

    status = 413


class UnsupportedMediaType(RequestError):
    """The request's body does not say that it is JSON."""

    status = 415


class TooManyWaiting(RequestError):
    """The queue is full; the client should come back later."""

    status = 429


class TooManyRequests(RequestError):
    """The key is over a limit of its own; the client should come back later."""

    status = 429


class ReaderTooSlow(RequestError):
    """The client does not take what it asked for, so its request is ended."""

    status = 408


class DeadlinePassed(RequestError):
    """The request was not done within its deadline."""

    status = 504


class NotReady(RequestError):
    """The model is loading, could not be loaded, or the server is going down."""

    status = 503


class NoWorker(RequestError):
    """The router knows no worker that could take a request now."""

    status = 503


class WorkerFailed(RequestError):
    """The workers that a router gave a request to failed on it."""

    status = 502


class GenerationFailed(RequestError):
    """The engine ended a request with an error after it had accepted it."""

    status = 500


def error_object(error: RequestError) -> dict[str, Any]:
    return {"error": _fields(error.message, error.status, code=error.code, param=error.param)}


def messages_error(error: RequestError, request_id: str | None = None) -> dict[str, Any]:
    """Return an error as clients of Anthropic's API expect it."""
    return _messages_error(error.message, error.status, request_id)


def error_response(error: RequestError, scope: Scope) -> JSONResponse:
    """Return an error in the dialect of the path that was asked."""
    content = messages_error(error, request_id_of(scope)) if _is_messages(scope) else error_object(error)
    return JSONResponse(content, status_code=error.status, headers=headers_of(error))


def request_id_of(scope: Scope) -> str | None:
    """Return the id that a request's answer carries."""
    found = scope.get("headstart.request_id")
    return found if isinstance(found, str) else None


def headers_of(error: RequestError) -> dict[str, str]:
    """Return what clients act upon: when to come again, if at all, and how to say who they are."""
    headers: dict[str, str] = {}
    if "retry_after_s" in error.facts:
        seconds = error.facts["retry_after_s"]
        headers |= {"retry-after": str(seconds), "retry-after-ms": str(1000 * seconds)}
    if error.status == WrongKey.status:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, DeadlinePassed | ReaderTooSlow | BodyTooSlow | Cancelled):
        headers["x-should-retry"] = "false"  # the same would happen again
    return headers


def plain_response(status: int, message: str, scope: Scope, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the error that stands for an HTTP status alone, such as an unknown path."""
    if _is_messages(scope):
        content = _messages_error(message, status, request_id_of(scope))
    else:
        content = {"error": _fields(message, status, code=None, param=None)}
    return JSONResponse(content, status_code=status, headers=headers)


def _is_messages(scope: Scope) -> bool:
    return str(scope.get("path", "")).startswith("/v1/messages")


def _messages_error(message: str, status: int, request_id: str | None) -> dict[str, Any]:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}
    kind = kinds.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _fields(message: str, status: int, *, code: str | None, param: str | None) -> dict[str, Any]:
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": code or kind}
