"""Other writers' journals, followed by opening them anew: on a shared file system only that is sure to show what was appended.

The names in `journals/` are the registry of writers. A journal that vanished was renewed, or taken in by the collector, whose
own journal then says what it said.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headstart.errors import StoreError
from headstart.metrics import Counters
from headstart.tier.disk.bulk import Loaded
from headstart.tier.disk.directory import Directory
from headstart.tier.disk.door import Disk
from headstart.tier.disk.journal import JournalTail
from headstart.tier.disk.records import Left


class Writers:
    """All other writers. Not safe from many threads: the caller lets one in at a time."""

    def __init__(self, disk: Disk, directory: Directory, *, clock: Callable[[], float], counters: Counters) -> None:
        self.said_at: dict[bytes, float] = {}  # when each was last seen to say something, by the own clock
        self.looked_at = clock()  # up to then all were read
        self.left: set[bytes] = set()  # those that said that they have closed
        self.journals_bytes = 0  # of those that are followed
        self._disk = disk
        self._directory = directory
        self._clock = clock
        self._counters = counters
        self._tails: dict[bytes, JournalTail] = {}

    def look(self, *, own: bytes, loading: bool = False) -> list[tuple[bytes, Sequence[Loaded]]]:
        """Return what writers but `own` said since the last look. Raises Missed where that cannot be told of all of them (who
        removed something may be the one that could not be read), OSError where nothing can. A journal that is damaged costs
        what stands behind the damage."""
        begun = self._clock()
        newest = self._directory.list_journals()
        newest.pop(own, None)
        said: list[tuple[bytes, Sequence[Loaded]]] = []
        for writer in self._tails.keys() - newest.keys():
            self._tails.pop(writer).close()
            self.said_at.pop(writer, None)
            self.left.discard(writer)
        missed: OSError | None = None
        for writer, generation in newest.items():
            try:
                records = self._read_on(writer, generation, loading=loading)
            except StoreError:
                self._counters.add("journals_unreadable")
            except OSError as error:  # FileNotFoundError: it was renewed since it was listed, the next look finds it
                missed = error
            else:
                if records or writer not in self.said_at:
                    self.said_at[writer] = self._clock()
                if records:
                    said.append((writer, records))
                    if any(isinstance(record, Left) for record in records):
                        self.left.add(writer)
        self.journals_bytes = sum(tail.position for tail in self._tails.values())
        if missed is not None:
            raise Missed(said) from missed
        self.looked_at = begun
        return said

    def generation(self, writer: bytes) -> int | None:
        tail = self._tails.get(writer)
        return None if tail is None else tail.generation

    def silent_s(self, writer: bytes) -> float | None:
        """Return for how long a writer had said nothing when all were last read; None for one that this process does not know.
        Safe from any thread: whoever asks while nothing can be read takes nobody for silent."""
        said_at = self.said_at.get(writer)
        return None if said_at is None else max(0.0, self.looked_at - said_at)

    def writing(self, *, silent_s: float) -> int:
        """Return how many others write, as far as they have said something within `silent_s`."""
        since = self._clock() - silent_s
        return sum(said_at >= since for writer, said_at in list(self.said_at.items()) if writer not in self.left)

    def __contains__(self, writer: object) -> bool:
        return writer in self._tails

    def close(self) -> None:
        while self._tails:
            self._tails.popitem()[1].close()

    def _read_on(self, writer: bytes, generation: int, *, loading: bool) -> Sequence[Loaded]:
        tail = self._tails.get(writer)
        if tail is None or tail.generation != generation or not tail.reopen():
            new = JournalTail(self._disk, self._directory, writer=writer, generation=generation, mode="read")
            if tail is not None:
                tail.close()
            tail = self._tails[writer] = new
        return tail.load() if loading else tail.poll()


class Missed(OSError):
    """Some journals could not be read; `said` is what the others say."""

    def __init__(self, said: list[tuple[bytes, Sequence[Loaded]]]) -> None:
        super().__init__("not every writer's journal could be read")
        self.said = said
