"""API keys in a file of JSON lines, one a key, which `headstart keys` writes and an editor may.

    {"id":"k3f9c2a1","hash":"9b74…","tenant":"acme","class":"agent","requests_per_minute":60,"created":"2026-11-30T12:00:00Z"}

A key is hs-ID-SECRET. The secret has 256 random bits, so its SHA-256 is as far from it as any slower hash would be, and costs a
request nothing; the file never has the key. The id is no secret: logs and metrics say it.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from headstart.block.layout import encode_retention
from headstart.config import parse_size
from headstart.errors import ConfigError, KeysUnreadable

_SECRET_BYTES = 32
_ID_BYTES = 4
_Limit = Annotated[int, Meta(ge=1, le=10**12)]


class Key(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """`retention`: the class in which prompts of this key are kept unless a request says another. None: not limited.
    `priority`: the highest that its requests may ask for. `disk`: most of the disk tier its tenant may have, a size or a share.
    `operator`: may read /metrics, which tells of all."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-z]{4,32}$")]
    hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
    tenant: str
    retention: str = msgspec.field(default="default", name="class")
    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    in_flight: _Limit | None = None
    body_bytes: _Limit | None = None
    priority: Annotated[int, Meta(ge=-9999, le=9999)] = 0
    disk: str | None = None
    operator: bool = False
    note: str = ""
    created: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[^\s=,*]{1,63}", self.tenant) or not self.tenant.isprintable():
            raise ValueError(f"the tenant {self.tenant!r} is no name of 1 to 63 characters without spaces, commas, = and *")
        encode_retention(self.retention)
        if self.disk is not None:
            try:
                parse_size(self.disk, of_bytes=100)
            except ConfigError as error:
                raise ValueError(error.message) from error


@dataclass(frozen=True, slots=True)
class Made:
    """A key that was just made: the only time that `text` is known."""

    key: Key
    text: str


def make_key(key: Mapping[str, object]) -> Made:
    """Return a new key with these fields of `Key`. Raises ValueError for a field that is wrong."""
    id = secrets.token_hex(_ID_BYTES)
    text = f"hs-{id}-{secrets.token_urlsafe(_SECRET_BYTES)}"
    created = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    try:
        return Made(msgspec.convert({"id": id, "hash": digest(text), "created": created, **key}, Key), text)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


def digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def find(keys: Mapping[str, Key], text: str) -> Key | None:
    """Return the key that `text` is, in the same time whether its secret is wrong by one character or by all."""
    found = re.fullmatch(r"hs-([0-9a-z]{4,32})-.+", text)
    key = keys.get(found[1]) if found else None
    same = hmac.compare_digest(digest(text), key.hash if key is not None else "0" * 64)
    return key if same else None


def read_keys(file: Path) -> dict[str, Key]:
    """Return all keys by id. Raises KeysUnreadable naming the line."""
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise KeysUnreadable(
            f"the keys in {file} cannot be read: {error.strerror or error}; make one with headstart keys add", path=file
        ) from error
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith(b"#"):
            continue
        try:
            key = msgspec.json.decode(line, type=Key)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KeysUnreadable(f"{file}, line {number}: {error}; mend or remove it", path=file, line=number) from error
        if key.id in keys:
            raise KeysUnreadable(f"{file}, line {number}: there is a key {key.id} above; remove one", path=file, line=number)
        keys[key.id] = key
    return keys


def append_key(file: Path, key: Key) -> None:
    """Add a key to the file, which is made where it is missing. What else stands there stays as it is."""
    with _changing(file) as lines:
        if file.exists():
            read_keys(file)  # what is broken is not built upon
        lines.append(msgspec.json.encode(key))


def remove_keys(file: Path, ids: Sequence[str]) -> list[str]:
    """Remove keys by id; return those that were there."""
    with _changing(file) as lines:
        keys = read_keys(file)
        gone = [id for id in dict.fromkeys(ids) if id in keys]
        kept = [line for line in lines if _id_of(line) not in gone]
        lines[:] = kept
    return gone


def _id_of(line: bytes) -> str | None:
    with suppress(msgspec.DecodeError):
        content = msgspec.json.decode(line)
        return content.get("id") if isinstance(content, dict) else None
    return None


@contextmanager
def _changing(file: Path) -> Iterator[list[bytes]]:
    """Let the lines of `file` be changed by one process at a time; it is replaced as a whole, synced, or stays as it is."""
    try:
        file = file.resolve()  # what a link points to is replaced, not the link
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(file.with_name(file.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = file.stat() if file.exists() else None
            lines = file.read_bytes().splitlines() if before else []
            yield lines
            new = file.with_name(file.name + ".new")
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as stream:
                if before is not None:  # a server of another user reads it still
                    with suppress(PermissionError):
                        os.fchown(descriptor, before.st_uid, before.st_gid)
                    os.fchmod(descriptor, before.st_mode & 0o7777)
                stream.write(b"".join(line + b"\n" for line in lines))
                stream.flush()
                os.fsync(descriptor)
            new.replace(file)
        finally:
            os.close(lock)
    except OSError as error:
        raise KeysUnreadable(f"the keys in {file} cannot be changed: {error.strerror or error}", path=file) from error
