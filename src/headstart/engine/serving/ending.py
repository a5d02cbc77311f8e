"""How a request ends, from any state: what is good is saved, everything is freed, the last event is sent. Each once."""

from __future__ import annotations

import logging
import time
from typing import Any, Generic

from headstart.engine.base import FinishReason, TokenEvent
from headstart.engine.serving.bridge import Bridge
from headstart.engine.serving.parts import Choice, Loads, Rooms
from headstart.engine.serving.roster import Roster
from headstart.engine.serving.sequence import S
from headstart.metrics import Counters

_log = logging.getLogger(__name__)


class Endings(Generic[S]):
    """For the engine's thread."""

    def __init__(
        self,
        roster: Roster[S],
        rooms: Rooms[S],
        loads: Loads[S],
        bridge: Bridge[Any] | None,
        counters: Counters,
        *,
        piece_tokens: int,
        save_every: int,
    ) -> None:
        """`save_every`: tokens of a long prompt after which what is computed so far is saved."""
        self._piece_tokens = piece_tokens
        self._roster = roster
        self._rooms = rooms
        self._loads = loads
        self._bridge = bridge
        self._counters = counters
        self._save_every = save_every

    def save_progress(self, sequence: S, *, before: int) -> None:
        """Save at the prompt's end, and every so often on the way there, so that of a long prompt that is aborted, or dies with
        the process, little is lost. `before`: tokens that were computed before the latest step."""
        if before < sequence.prompt_tokens <= sequence.computed:
            self.save(sequence)
            return
        under_way = sequence.saving is not None and not sequence.saving.done  # then the next one takes this along
        at_point = before // self._save_every < sequence.computed // self._save_every
        if sequence.computed < sequence.prompt_tokens and at_point and not under_way:
            self._counters.add("save_points")
            self.save(sequence)

    def save(self, sequence: S) -> None:
        """Give what is computed to the cache, if it is more whole pieces than were given before."""
        whole = sequence.savable // self._piece_tokens * self._piece_tokens
        if self._bridge is None or not sequence.use_cache or sequence.kv is None or whole <= sequence.saved:
            return
        own_tokens, sequence.saved = sequence.saved, whole
        states = {one: sequence.boundaries.pop(one) for one in sorted(sequence.boundaries) if one <= whole}
        try:
            asked = sequence.request
            sequence.saving = self._bridge.save(
                sequence.tokens[: sequence.kept],
                sequence.kv,
                salt=asked.salt,
                shared_tokens=asked.shared_tokens,
                identity=sequence.identity,
                retention=asked.retention,
                tenant=asked.tenant,
                session=asked.session,
                keep_s=asked.keep_s,
                own_tokens=own_tokens,
                memory_only=asked.memory_only,
                states=states,
            )
            sequence.note_saving(whole)
        except Exception:  # noqa: BLE001 - a request's outer edge: an answer is worth more than its cache entry
            self._counters.add("save_faults")
            _log.exception("saving request %s failed", sequence.request.id)

    def tell_progress(self, sequence: S, *, before: int) -> None:
        """Tell who asked for it how far the prompt is. `before`: tokens that were computed before the latest step."""
        if sequence.request.progress and before < sequence.prompt_tokens and not sequence.generated and not sequence.over:
            self.emit(sequence, TokenEvent(None, progress=sequence.progress(time.monotonic())))

    def deliver(self, sequence: S, choice: Choice | str) -> None:
        """Hand out a token, which may be the last, or end the request with the sentence on why there is none. A prompt that is
        only to be computed ends here without any."""
        if sequence.max_tokens == 0:
            self.end(sequence, "length")
            return
        if isinstance(choice, str):
            self._counters.add("choice_faults")
            self.end(sequence, "error", error=choice)
            return
        sequence.saw_token()
        if choice.token in sequence.request.stop_ids:
            self.end(sequence, "stop")
            return
        sequence.tokens.append(choice.token)
        self._counters.add("generated_tokens")
        if sequence.generated == sequence.max_tokens:
            self.end(sequence, "length", last=choice)
        else:
            so_far = sequence.receipt(time.monotonic()) if sequence.generated == 1 else None
            self.emit(sequence, TokenEvent(choice.token, logprobs=choice.logprobs, so_far=so_far))

    def end(self, sequence: S, finish: FinishReason, *, last: Choice | None = None, error: str | None = None) -> None:
        """Save what is good, free everything, send the last event, with the `last` token if any. Once, from any state."""
        if sequence.ended:
            return
        sequence.ended = True
        if finish == "abort" and not sequence.aborted and sequence.over:
            sequence.notes.append("its deadline passed")
            self._counters.add("deadlines_passed")
        self._roster.remove(sequence)
        try:
            if sequence.load is not None:  # not all of its KV is known to be good: nothing to save
                self._loads.drop(sequence)
            elif finish != "error":
                self.save(sequence)
            if finish in ("stop", "length"):
                self._loads.went_on(sequence)
            self._rooms.give_back(sequence)
            sequence.close()
        finally:
            self._roster.forget(sequence)
            self._counters.add(f"finished_{finish}")
            self._counters.add("written_tokens", sequence.written_tokens)
            self._counters.add("kept_output_tokens", sequence.kept_output_tokens)
            token, logprobs = (None, None) if last is None else (last.token, last.logprobs)
            self.emit(sequence, TokenEvent(token, finish, sequence.receipt(time.monotonic()), error, logprobs))

    def end_all(self, finish: FinishReason, error: str | None) -> None:
        """End every request, whoever fails at it."""
        for sequence in self._roster.all():
            try:
                self.end(sequence, finish, error=error)
            except Exception:  # noqa: BLE001 - a request's outer edge: the others are ended all the same
                self._counters.add("engine_faults")
                _log.exception("request %s could not give back what it held", sequence.request.id)

    def emit(self, sequence: S, event: TokenEvent) -> None:
        """Tell who asked; a receiver that fails ends its own request."""
        try:
            sequence.on_event(event)
        except Exception:  # noqa: BLE001 - the edge to whoever asked
            self._counters.add("callback_faults")
            _log.exception("the receiver of request %s failed; the request is ended", sequence.request.id)
            sequence.aborted = True
            self._roster.wake.set()
