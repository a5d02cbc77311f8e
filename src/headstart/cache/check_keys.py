"""The keys that checks in shared tiers are made with: a file of the operator's, read once when tiers are opened."""

from __future__ import annotations

import stat
from pathlib import Path

from headstart.block.checks import CHECK_KEY_BYTES, PLAIN, Sealing, keyed
from headstart.config import CacheConfig
from headstart.errors import ConfigError

_MOST_BYTES = 64 << 10
_KEY = "cache.check_key_file"


def sealing_of(config: CacheConfig) -> Sealing:
    """Return whose checks are believed of what other machines wrote to a pool or an object store. Raises ConfigError for a file
    that holds no keys or that others may read, MissingExtra without BLAKE3: never less is believed than was asked for."""
    if config.check_key_file is None:
        return PLAIN
    file = config.check_key_file.expanduser()
    return Sealing(tuple(map(keyed, _keys(file))))


def _keys(file: Path) -> list[bytes]:
    make = f"make one with: (umask 077; openssl rand -hex {CHECK_KEY_BYTES} > {file})"
    try:
        with file.open("rb") as opened:
            mode = stat.S_IMODE(file.stat().st_mode)
            lines = opened.read(_MOST_BYTES).decode("ascii").split("\n")
    except OSError as error:
        raise ConfigError(f"{_KEY}: {file} cannot be read ({error.strerror}); {make}", key=_KEY) from error
    except UnicodeDecodeError:
        lines, mode = ["?"], 0
    if mode & 0o077:
        raise ConfigError(f"{_KEY}: others may read or change {file}; chmod 600 it, or {make}", key=_KEY)
    found = []
    for line in filter(None, (line.partition("#")[0].strip() for line in lines)):
        try:
            found.append(bytes.fromhex(line))
        except ValueError:
            found.append(b"")
    if not found or any(len(secret) != CHECK_KEY_BYTES for secret in found):
        raise ConfigError(
            f"{_KEY}: {file} does not hold a key, {2 * CHECK_KEY_BYTES} hex digits, on each line; {make}",
            key=_KEY,
        )
    return found
