"""The choice in C, found; without it NumPy comes to the same in several times the time.

It was compiled when headstart was installed, if there was a compiler then; nothing is compiled later.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from functools import cache
from typing import Any

_log = logging.getLogger(__name__)
_ADDRESS, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


@cache
def native_choice() -> Any:
    """Return the library of _choice.c, which says what its functions take; None where there is none."""
    spec = importlib.util.find_spec("headstart.policy.routing._choice")
    if spec is None or spec.origin is None:
        return None
    try:
        library = ctypes.CDLL(spec.origin)
        runs, estimates = library.headstart_runs, library.headstart_estimates
    except (OSError, AttributeError) as error:  # no such file, no such function
        _log.info("workers are chosen without C: %s", error)
        return None
    runs.argtypes = [_ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _COUNT, _COUNT, _COUNT, _ADDRESS, _ADDRESS]
    runs.restype = ctypes.c_int
    estimates.argtypes = [_ADDRESS, _COUNT, *[_ADDRESS] * 3, _COUNT, _COUNT, *[_NUMBER] * 4, _ADDRESS]
    estimates.restype = None
    return library
