"""Errors as clients of the OpenAI API expect them: {"error": {message, type, param, code}}, `code` always a string."""

from __future__ import annotations

from typing import Any

from starlette.responses import JSONResponse

from headstart.errors import RequestError


class ModelNotFound(RequestError):
    """The path names a model that is not served here."""

    status = 404


class Forbidden(RequestError):
    """The request came under a foreign name or from a foreign page."""

    status = 403


class BodyTooLarge(RequestError):
    """The request's body is over the limit."""

    status = 413


class UnsupportedMediaType(RequestError):
    """The request's body does not say that it is JSON."""

    status = 415


class TooManyWaiting(RequestError):
    """The queue is full; the client should come back later."""

    status = 429


class NotReady(RequestError):
    """The model is loading, could not be loaded, or the server is going down."""

    status = 503


class GenerationFailed(RequestError):
    """The engine ended a request with an error after it had accepted it."""

    status = 500


def error_object(error: RequestError) -> dict[str, Any]:
    return {"error": _fields(error.message, error.status, code=error.code, param=error.param)}


def error_response(error: RequestError) -> JSONResponse:
    headers = {"retry-after": str(error.facts["retry_after_s"])} if "retry_after_s" in error.facts else None
    return JSONResponse(error_object(error), status_code=error.status, headers=headers)


def plain_response(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """Return the error that stands for an HTTP status alone, such as an unknown path."""
    return JSONResponse({"error": _fields(message, status, code=None, param=None)}, status_code=status, headers=headers)


def _fields(message: str, status: int, *, code: str | None, param: str | None) -> dict[str, Any]:
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(status)
    kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
    return {"message": message, "type": kind, "param": param, "code": code or kind}
