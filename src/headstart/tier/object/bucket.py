"""The door to a bucket: objects put whole, read whole or in part, listed and deleted, through obstore. Nothing else imports it.

Every request is counted, and so is every byte, since both are paid for. What fails is an OSError with a number, as a file
system's would be; its words hold no address and no secret. Retries (5xx, connections that break, reads that time out) are the
library's, with jitter and an end: no call here takes much longer than `answer_s` after its last byte.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

from headstart.errors import ConfigError, MissingExtra, StoreError
from headstart.metrics import Counters

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Objects

PART_BYTES = 8 << 20  # of an upload in parts; what is smaller goes in one request
_PARTS_AT_ONCE = 4
_READS_AT_ONCE = 8
_CHUNK_BYTES = 256 << 10  # of what comes, at least: each costs some 10 µs here
_AT_ONCE_BYTES = 4 << 20  # up to here it is taken when all of it is there, as the library has it
_LIST_PAGE = 1000  # what services give at once, and so what a request for more is counted by
_DELETE_PAGE = 1000
_CONNECT_S = 3.0
SLOWEST_BYTES_S = 1 << 20  # a part that goes slower than that has failed
_MOST_RETRIES = 4
_TRIED = "condition"  # an object that is put only to see whether a service lets nobody put it again
_STATUS = re.compile(r"status code: (\d{3})")
_BEHIND_END = "StartTooLarge"  # of the library's own stores, as 416 of a service
_TIMES_OUT = re.compile(r"timed ?out|deadline", re.IGNORECASE)


class Bucket:
    """`where`: its name for people. Safe from many threads. Everything raises OSError: ENOENT, EEXIST, EACCES, ETIMEDOUT,
    ENOTSUP where the service lacks what is asked, else EIO."""

    def __init__(self, objects: Objects, *, where: str, counters: Counters) -> None:
        self.where = where
        self._objects = objects
        self.counters = counters
        self._readers = ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="object-journals")
        self._minds_conditions: bool | None = None  # whether the service does; None: it was not tried

    @classmethod
    def open(cls, url: str, *, counters: Counters, answer_s: float) -> Bucket:
        """Return the bucket, or the part of one, that `url` names: s3://bucket/prefix, gs://…, az://…, file:///… Endpoint,
        region and credentials come from the services' usual environment variables. Asks nobody yet. Raises MissingExtra, and
        ConfigError for what cannot be understood."""
        library = _library()
        try:
            objects = library.store.from_url(url, **({} if url.startswith("file:") else _patience(answer_s)))
        except (library.exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(
                f"cache.object_store: {url} cannot be used ({_first_line(error)}); write s3://bucket/prefix, gs://… or az://…, "
                "and give endpoint, region and credentials in the service's environment variables",
                key="cache.object_store",
            ) from error
        return cls(objects, where=url.partition("://")[2].strip("/") or url, counters=counters)

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        """Put an object of all `parts`, or none: in one request where it is small, else in several that run side by side."""
        nbytes = sum(map(len, parts))
        if nbytes <= PART_BYTES:
            self._count("put", sent=nbytes)
            self._put(key, b"".join(parts))
            return
        self._count("put", times=2 + -(-nbytes // PART_BYTES), sent=nbytes)
        self._put(key, parts, chunk_size=PART_BYTES, max_concurrency=_PARTS_AT_ONCE, use_multipart=True)

    def create(self, key: str, data: bytes) -> None:
        """Put a small object where there is none: of all who try, one succeeds. Raises FileExistsError for the others, and
        ENOTSUP where all would succeed: some services pass over a condition that they do not know, so that is tried first."""
        if self._minds_conditions is None:
            self._minds_conditions = self._refuses_a_second(f"{key.rpartition('/')[0]}/{_TRIED}")
        if not self._minds_conditions:
            raise OSError(errno.ENOTSUP, "the service has no conditional puts", key)
        self._create(key, data)

    def _refuses_a_second(self, key: str) -> bool:
        for _ in range(2):  # of which at least the second one finds the first
            try:
                self._create(key, b"tried: only the first put may succeed")
            except FileExistsError:
                return True
        return False

    def _create(self, key: str, data: bytes) -> None:
        self._count("put", sent=len(data))
        self._put(key, data, mode="create")

    def get(self, key: str) -> memoryview:
        """Return a whole object."""
        self._count("get")
        try:
            data = memoryview(_library().get(self._objects, key).bytes())
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed(key, error)
        self.counters.add("object_bytes_received", len(data))
        return data

    def get_all(self, keys: Sequence[str]) -> list[memoryview]:
        """Return whole small objects, several at once."""
        if len(keys) < 2:
            return list(map(self.get, keys))
        return list(self._readers.map(self.get, keys))

    def read(self, key: str, buffers: Sequence[memoryview], offset: int) -> int:
        """Fill every buffer, in order, from byte `offset`; returns the bytes read. Raises StoreError("short-read") where the
        object ends before that."""
        wanted = sum(buffer.nbytes for buffer in buffers)
        if not wanted:
            return 0
        self._count("get")
        try:
            data = memoryview(_library().get_range(self._objects, key, start=offset, length=wanted))
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed(key, error)
        self.counters.add("object_bytes_received", len(data))
        scatter(data, buffers, key=key)
        return wanted

    def stream(self, key: str, offset: int, nbytes: int, *, at_once: bool) -> Iterator[bytes | memoryview]:
        """Ask for a part of an object and yield its bytes as they come, those of a small part, or with `at_once`, when all are
        there: what comes in chunks the library clears memory for and copies once more, with the interpreter's lock. Nothing is
        asked for before the first chunk, which is empty: the service has answered. Raises StoreError("short-read") where the
        object ends before that."""
        self._count("get")
        got = 0
        try:
            asked = _library().get(self._objects, key, options={"range": (offset, offset + nbytes)})
            yield b""
            at_once |= nbytes <= _AT_ONCE_BYTES
            for chunk in [memoryview(asked.bytes())] if at_once else asked.stream(min_chunk_size=_CHUNK_BYTES):
                got += len(chunk)
                yield chunk
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed(key, error)
        finally:
            self.counters.add("object_bytes_received", got)
        require_all(got, nbytes, key=key)

    def sizes(self, folder: str) -> Iterator[tuple[str, int]]:
        """Yield the keys below a folder and the sizes of their objects, in the order of the keys' bytes."""
        found = 0
        try:
            for page in _library().list(self._objects, folder, chunk_size=_LIST_PAGE):
                for one in page:
                    found += 1
                    yield one["path"], one["size"]
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed(folder, error)
        finally:
            self._count("list", times=1 + found // _LIST_PAGE)

    def names(self) -> tuple[list[str], list[str]]:
        """Return the names of folders and of objects at the top."""
        self._count("list")
        try:
            found = _library().list_with_delimiter(self._objects)
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed("", error)
        return list(found["common_prefixes"]), [one["path"] for one in found["objects"]]

    def size(self, key: str) -> int:
        self._count("head")
        try:
            return int(_library().head(self._objects, key)["size"])
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed(key, error)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; one that is not there is fine."""
        for first in range(0, len(keys), _DELETE_PAGE):
            some = list(keys[first : first + _DELETE_PAGE])
            self._count("delete")
            try:
                _library().delete(self._objects, some)
            except FileNotFoundError:
                self._delete_each(some)
            except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
                self._failed(some[0], error)

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _delete_each(self, keys: Sequence[str]) -> None:
        """Some services refuse a batch for one object that is gone already."""
        for key in keys if len(keys) > 1 else ():
            self.delete([key])

    def _put(self, key: str, data: bytes | Sequence[bytes | memoryview], **how: Any) -> None:
        try:
            _library().put(self._objects, key, data, **how)
        except Exception as error:  # noqa: BLE001 - whatever the library raises is named by `_failed`
            self._failed(key, error)

    def _count(self, kind: str, *, times: int = 1, sent: int = 0) -> None:
        self.counters.add(f"object_requests_{kind}", times)
        if sent:
            self.counters.add("object_bytes_sent", sent)

    def _failed(self, key: str, error: Exception) -> NoReturn:
        """Raise what the library raised as the error of a file system, or StoreError("short-read")."""
        names = _library().exceptions
        text, status = str(error), _STATUS.search(str(error))
        match error:
            case _ if isinstance(error, FileNotFoundError) or (status is not None and status[1] == "404"):
                what = "object" if key else "bucket"
                raise FileNotFoundError(errno.ENOENT, f"there is no such {what}", key) from error
            case _ if (status is not None and status[1] == "416") or _BEHIND_END in text:
                raise StoreError(f"object {key} ended before what its journal says", reason="short-read") from error
            case names.AlreadyExistsError() | names.PreconditionError():
                raise FileExistsError(errno.EEXIST, "there is such an object already", key) from error
            case names.PermissionDeniedError() | names.UnauthenticatedError():
                code, why = errno.EACCES, "the service refuses these credentials"
            case names.NotSupportedError() | NotImplementedError():
                code, why = errno.ENOTSUP, "the service cannot do that"
            case _ if status is not None and status[1] == "501":
                code, why = errno.ENOTSUP, "the service cannot do that"
            case _ if status is not None:
                code, why = errno.EIO, f"the service answers {status[1]}"
            case _ if _TIMES_OUT.search(text):
                code, why = errno.ETIMEDOUT, "the service does not answer in time"
            case names.BaseError() | OSError() | ValueError():
                code, why = errno.EIO, "the service cannot be reached, or answers what is no answer"
            case _:
                raise error
        self.counters.add("object_request_failed")
        raise OSError(code, why, key) from error


def scatter(data: memoryview, buffers: Sequence[memoryview], *, key: str) -> None:
    """Copy `data` into buffers, in order. Raises StoreError("short-read") where it does not fill them."""
    require_all(len(data), sum(buffer.nbytes for buffer in buffers), key=key)
    at = 0
    for buffer in buffers:
        buffer.cast("B")[:] = data[at : at + buffer.nbytes]
        at += buffer.nbytes


def require_all(nbytes: int, wanted: int, *, key: str) -> None:
    """Raise StoreError("short-read") where fewer bytes came than were wanted."""
    if nbytes != wanted:
        raise StoreError(f"object {key} ended after {nbytes} of {wanted} bytes that its journal says", reason="short-read")


def _library() -> Any:
    try:
        import obstore
        import obstore.exceptions
        import obstore.store
    except ImportError as error:
        raise MissingExtra(
            "an object store needs obstore; install it with: pip install 'headstart[object]'", extra="object"
        ) from error
    return obstore


def _patience(answer_s: float) -> dict[str, Any]:
    """Return how long requests take and are repeated."""
    return {
        "client_options": {
            "allow_http": True,  # where the operator's endpoint says so; services' own are https
            "connect_timeout": timedelta(seconds=_CONNECT_S),
            "read_timeout": timedelta(seconds=max(answer_s, PART_BYTES / SLOWEST_BYTES_S)),
            "timeout": timedelta(seconds=4 * answer_s),
            "user_agent": "headstart",
        },
        "retry_config": {
            "max_retries": _MOST_RETRIES,
            "retry_timeout": timedelta(seconds=answer_s),
            "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
        },
    }


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]
