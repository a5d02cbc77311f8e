"""One tree of errors. Each is one sentence that says what, where and the next step; the facts are attributes.

`HeadstartError` carries `exit_code`, which the command line returns: 2 for wrong use, 3 for something missing on this
machine, 4 for a medium or network that failed, 1 for anything else.
"""

from __future__ import annotations

import copyreg
from typing import Any


class HeadstartError(Exception):
    """Base of every error that headstart raises on purpose. Facts given as keywords become attributes."""

    exit_code = 1

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # `facts` itself may be missing while an instance is being unpickled or copied.
        facts = self.__dict__.get("facts", {})
        if name in facts:
            return facts[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        # Exception's own would call the class with its message alone, which not every class here can be made from.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigError(HeadstartError):
    """A configuration key, flag or environment variable is unknown or has a wrong value."""

    exit_code = 2


class ModelError(HeadstartError):
    """A model cannot be found, read or run."""

    exit_code = 3


class MissingExtra(HeadstartError):
    """An optional dependency is not installed; `extra` names the extra that brings it."""

    exit_code = 3


class NotThere(HeadstartError):
    """A cache directory, a stored prefix or a file that a command names does not exist."""

    exit_code = 3


class WrongRepresentation(HeadstartError):
    """Prefixes are laid down in another way than those of the cache that they should go to, so nobody there could read them."""

    exit_code = 2


class AddressInUse(HeadstartError):
    """The port that the server should listen on is taken."""

    exit_code = 4


class NoServer(HeadstartError):
    """No server answers where one was expected."""

    exit_code = 4


class UsageLogFailed(HeadstartError):
    """The usage log cannot be kept where it should be."""

    exit_code = 4


class KeysUnreadable(HeadstartError):
    """The file of API keys cannot be read or written, or a line of it is wrong."""

    exit_code = 2


class RequestError(HeadstartError):
    """A request that cannot be served as asked; `param` and `code` go to the client with HTTP status `status`."""

    exit_code = 2
    status = 400

    def __init__(self, message: str, *, code: str = "invalid_request_error", param: str | None = None, **facts: Any) -> None:
        super().__init__(message, code=code, param=param, **facts)


class ContextLengthExceeded(RequestError):
    """The prompt does not fit; `prompt_tokens`, or fewer, and `context_tokens` are given."""

    def __init__(self, message: str, *, prompt_tokens: int, context_tokens: int, param: str = "messages") -> None:
        super().__init__(
            message,
            code="context_length_exceeded",
            param=param,
            prompt_tokens=prompt_tokens,
            context_tokens=context_tokens,
        )


class StoreError(HeadstartError):
    """Something about stored bytes. Below the cache's door these are ordinary events: each becomes a miss and a counter."""

    exit_code = 4


class ExtentCorrupt(StoreError):
    """Bytes on a medium are not what was written there; `reason` is a short stable word used as a metric label."""


class TierUnavailable(StoreError):
    """A tier cannot be opened or used at all (read-only, full, not a directory, another format version)."""


class FormatMismatch(TierUnavailable):
    """A cache directory was written by an incompatible format version; `found` and `supported` say which."""


class WireError(StoreError):
    """Another worker did not send what was asked of it; `reason` is a short stable word used as a metric label."""


class LoadFailed(StoreError):
    """A load stopped before everything was there; `usable_tokens` counts what is certain to be good in every layer."""
