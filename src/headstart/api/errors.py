"""Errors as clients of the OpenAI API expect them: {"error": {message, type, param, code}}, `code` always a string."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

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


class GenerationFailed(RequestError):
    """The engine ended a request with an error after it had accepted it."""

    status = 500


def error_object(error: RequestError) -> dict[str, Any]:
    return {"error": _fields(error.message, error.status, code=error.code, param=error.param)}


def error_response(error: RequestError) -> JSONResponse:
    return JSONResponse(error_object(error), status_code=error.status, headers=headers_of(error))


def headers_of(error: RequestError) -> dict[str, str]:
    """Return what clients act upon: when to come again, if at all, and how to say who they are."""
    headers: dict[str, str] = {}
    if "retry_after_s" in error.facts:
        seconds = error.facts["retry_after_s"]
        headers |= {"retry-after": str(seconds), "retry-after-ms": str(1000 * seconds)}
    if error.status == WrongKey.status:
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, DeadlinePassed | ReaderTooSlow | BodyTooSlow):
        headers["x-should-retry"] = "false"  # the same would happen again
    return headers


def plain_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the error that stands for an HTTP status alone, such as an unknown path."""
    return JSONResponse({"error": _fields(message, status, code=None, param=None)}, status_code=status, headers=headers)


def _fields(message: str, status: int, *, code: str | None, param: str | None) -> dict[str, Any]:
    kind = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": code or kind}
