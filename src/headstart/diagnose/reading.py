"""How the requests of a log are read as prompts: by which tokenizer, in which canonical form, and who may share. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from headstart.diagnose.entries import Entry
from headstart.diagnose.prints import TENANT, Print
from headstart.diagnose.requests import Conversation
from headstart.render import Renderer


@dataclass(frozen=True, slots=True)
class Reading:
    """`renderer`: None compares characters. `rules`: of canonical form, those that the server applies first. `tenants_apart`:
    whether tenants share nothing, as those of a server's keys do."""

    renderer: Renderer | None = None
    rules: frozenset[str] = frozenset()
    tenants_apart: bool = False

    @property
    def begin_id(self) -> int | None:
        return None if self.renderer is None else self.renderer.begin_id

    def conversation(self, entry: Entry) -> Conversation:
        """Return what an entry that has its text asks to be computed. Raises RequestError naming the place."""
        assert entry.source is not None
        conversation = entry.source.conversation(as_sent=self.renderer is None, rules=self.rules)
        if not self.tenants_apart or entry.tenant is None:
            return conversation
        return replace(conversation, namespace={**conversation.namespace, TENANT: entry.tenant})

    def kept(self, entry: Entry) -> Print:
        """Return what `record` kept of an entry that has nothing else."""
        assert entry.kept is not None
        return entry.kept if not self.tenants_apart or entry.tenant is None else entry.kept.of_tenant(entry.tenant)
