"""Prefixes that the operator declared shared: all tenants may find them stored by others, and nothing behind them.

The file has a JSON object a line: {"messages": […], "tools": […]} as in a chat, or {"prompt": "…"}. What a request has in
common with one of them, in whole blocks from the first token on, is shared: such a block has only what the operator wrote.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from threading import Lock

import msgspec

from headstart.api.keyring import LOOK_S
from headstart.block.keys import BLOCK_TOKENS, KEY_BYTES, chain, token_bytes
from headstart.config import state_of
from headstart.errors import ConfigError, RequestError
from headstart.render import Renderer

_ROOT = bytes(KEY_BYTES)
_MOST_BLOCKS = 1 << 20
_log = logging.getLogger("headstart")


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    messages: list[object] | None = None
    tools: list[object] | None = None
    prompt: str | None = None


class SharedPrefixes:
    """Knows the blocks of what is shared by their chained digests.

    >>> shared = SharedPrefixes([range(200)])
    >>> shared.tokens([*range(130), 7, 7]), shared.tokens(range(500)), shared.tokens([7] * 100)
    (128, 192, 0)
    """

    def __init__(self, prefixes: Sequence[Sequence[int]] = ()) -> None:
        self._blocks = _blocks(prefixes)

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def look(self) -> None:
        """Nothing here changes."""

    def tokens(self, prompt: Sequence[int]) -> int:
        """Return how many tokens of `prompt` are shared, from the first one on."""
        key, at, blocks = _ROOT, 0, self._blocks
        while blocks and at + BLOCK_TOKENS <= len(prompt):
            key = chain(key, token_bytes(prompt[at : at + BLOCK_TOKENS]))[0]
            if key not in blocks:
                break
            at += BLOCK_TOKENS
        return at


class SharedFile(SharedPrefixes):
    """What a file declares, read again when it changes. Raises ConfigError where it is wrong at the start; later what was read
    last holds until it is right."""

    def __init__(self, file: Path, renderer: Renderer) -> None:
        super().__init__(read_shared(file, renderer))
        self._file = file
        self._renderer = renderer
        self._seen = state_of(file)
        self._look_due_s = time.monotonic() + LOOK_S
        self._looking = Lock()

    def look(self) -> None:
        """Take over what has changed. Any thread may; it takes as long as the prefixes are to be tokenised."""
        if time.monotonic() < self._look_due_s or not self._looking.acquire(blocking=False):
            return
        try:
            self._look_due_s = time.monotonic() + LOOK_S
            if (state := state_of(self._file)) == self._seen:
                return
            self._seen = state
            self._blocks = _blocks(read_shared(self._file, self._renderer))
            _log.info("the shared prefixes were read again: %d blocks", len(self._blocks))
        except ConfigError as error:
            _log.error("%s; until then those hold that were read before", error.message)
        finally:
            self._looking.release()


def read_shared(file: Path, renderer: Renderer) -> list[list[int]]:
    """Return the prefixes that `file` declares, as `renderer` makes tokens of them. Raises ConfigError naming the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"server.shared_prefixes: {file} cannot be read: {error.strerror or error}", path=file) from error
    prefixes, blocks = [], 0
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            one = msgspec.json.decode(line, type=_Line)
            if (one.messages is None) == (one.prompt is None):
                raise ConfigError("it has neither messages nor prompt, or both")
            if one.messages is not None:
                tokens = renderer.chat(one.messages, tools=one.tools)
            else:
                tokens = renderer.completion(one.prompt or "")
        except (msgspec.DecodeError, UnicodeDecodeError, ConfigError, RequestError) as error:
            raise ConfigError(f"server.shared_prefixes: {file}, line {number}: {error}; mend it", path=file) from error
        prefixes.append(tokens)
        blocks += len(tokens) // BLOCK_TOKENS
        if blocks > _MOST_BLOCKS:
            raise ConfigError(f"server.shared_prefixes: {file} declares more than {_MOST_BLOCKS} blocks; share less", path=file)
    return prefixes


def _blocks(prefixes: Sequence[Sequence[int]]) -> frozenset[bytes]:
    return frozenset(key for prefix in prefixes for key in chain(_ROOT, token_bytes(prefix)))
