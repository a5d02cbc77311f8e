"""The chain of keys in C, found and tried out; without it hashlib gives the same keys, in four times the time.

It was compiled when headstart was installed, if there was a compiler then; nothing is compiled later.
"""

from __future__ import annotations

import ctypes
import importlib.util
import logging
from collections.abc import Callable
from functools import cache
from hashlib import sha256

import numpy as np

_KEY_BYTES = 32
_BLOCK_BYTES = 256
_log = logging.getLogger(__name__)

Chain = Callable[[bytes, bytes | memoryview], bytes]  # root, whole blocks → the keys of all, one behind the other


@cache
def native_chain() -> Chain | None:
    """Return the chain over blocks that nothing else belongs to; None where there is none, or it is not what hashlib makes."""
    spec = importlib.util.find_spec("headstart.block._chain")
    if spec is None or spec.origin is None:
        return None
    try:
        function = ctypes.CDLL(spec.origin).headstart_chain
    except (OSError, AttributeError) as error:  # no such file, no such function
        _log.info("keys are made by hashlib: %s", error)
        return None
    function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p]

    def chain(root: bytes, data: bytes | memoryview) -> bytes:
        blocks = len(data) // _BLOCK_BYTES
        keys = np.zeros(blocks * _KEY_BYTES, np.uint8)  # not what an earlier call left, where nothing is hashed
        function(root, np.frombuffer(data, np.uint8).ctypes.data if blocks else None, blocks, keys.ctypes.data)
        return keys.tobytes()

    data = bytes(range(256)) * 2
    first = sha256(data[:_KEY_BYTES] + data[:_BLOCK_BYTES]).digest()
    return chain if chain(data[:_KEY_BYTES], data) == first + sha256(first + data[_BLOCK_BYTES:]).digest() else None
