"""A request in flight: its answers, one or several, as text that comes piece by piece.

    engine's thread ─▶ event ─▶ queue ─▶ pieces() ─▶ whoever writes the answer

Several answers to one prompt are as many requests to the engine, which computes what they share once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from headstart.api.accounts import Account
from headstart.api.answering import Answering
from headstart.api.ask import Ask
from headstart.api.errors import Cancelled, DeadlinePassed, GenerationFailed, NotReady, ReaderTooSlow
from headstart.api.pieces import Piece, Told, joined
from headstart.api.served import Served
from headstart.api.usage import Usage
from headstart.engine.base import FinishReason, GenerationRequest, Receipt, TokenEvent
from headstart.errors import RequestError
from headstart.render import TextStream
from headstart.render.answers import Call, Part, Text

MOST_UNREAD = 4096  # tokens that a client may leave lying when it has taken none for STUCK_S; a burst may be larger
STUCK_S = 5.0
MOST_BURST = 16 * MOST_UNREAD
RECEIPT_WAIT_S = 10.0  # how long answers that ended on a stop text wait for the engine's last word


class Answer:
    """One answer. `finish` is known when its text has ended, `receipt` when the engine has done with it."""

    def __init__(self, index: int, request: GenerationRequest, served: Served, ask: Ask, answering: Answering) -> None:
        self.index = index
        self.request = request
        self.finish: FinishReason | None = None
        self.receipt: Receipt | None = None
        self.so_far: Receipt | None = None  # with its first token
        self.error: str | None = None
        self.completion_tokens = 0
        self.reasoning_tokens = 0  # of them
        self.read = False  # whether its text has been taken to its end, or nobody takes it any more
        self.reported = False
        self.complete = False  # it ended by itself, with all of its tokens told
        self._tokens: list[int] = []
        self._pieces: list[Piece] = []
        self._token_bytes = served.renderer.token_bytes
        self._text = TextStream(served.renderer, ask.stop, min_tokens=ask.min_tokens, special=answering.reads)
        self._reader = answering.reader()
        self._one_call = not ask.parallel_calls
        self._call: Call | None = None  # the latest piece of one
        self._enough = False  # the one call that may be is made
        self._told: list[Told] | None = None if ask.logprobs is None else []  # of tokens whose text is held

    def take(self, event: TokenEvent) -> Piece:
        """Return what `event` lets go, and `finish` if that is all."""
        if self.read:  # on its way when a stop text had ended the answer
            return Piece(self.index)
        if event.progress is not None:
            return Piece(self.index, progress=event.progress)
        text = ""
        self.so_far = self.so_far or event.so_far
        if event.token is not None:
            self._tokens.append(event.token)
            self.completion_tokens += 1
            if self._reader is not None and self._reader.reasoning:
                self.reasoning_tokens += 1
            self._tell(event)
            text = self._text.push(event.token)
        if event.finish is not None:
            text += self._text.finish()
        ended = self._text.stopped or event.finish is not None
        parts = self._parts(text, ended=ended, cut=event.finish == "length")
        if self._text.stopped or self._enough:
            self.finish = "stop"
        self.read = ended or self._enough
        self.complete = event.finish == "stop" and not self._text.stopped
        piece = Piece(self.index, tuple(parts), self._told_of(text), self.finish if self.read else None, self._text.met)
        self._pieces.append(piece)
        return piece

    def whole(self) -> Piece:
        """Return all that came of it, in one piece."""
        return joined(self._pieces)

    @property
    def tokens(self) -> list[int]:
        return self._tokens

    def said(self) -> tuple[list[int], dict[str, Any]]:
        """Return its tokens and what was read in them, as in `Generated`."""
        whole = self.whole()
        return self._tokens, {"content": whole.text, "reasoning": whole.reasoning, "calls": whole.calls}

    def _parts(self, text: str, *, ended: bool, cut: bool) -> list[Part]:
        if self._reader is None:
            return [Text(text)] if text else []
        parts = self._reader.push(text)
        if ended:
            parts += self._reader.finish(cut=cut)
        return list(self._first_call(parts)) if self._one_call else parts

    def _first_call(self, parts: Sequence[Part]) -> Iterator[Part]:
        """Yield parts up to the end of the first call, or, of one that is not whole, to the beginning of the next."""
        for part in parts:
            if isinstance(part, Call):
                if self._call is not None and self._call.id != part.id:
                    self._enough = True
                    return
                self._call = part
            yield part
            if isinstance(part, Call) and part.done:
                self._enough = True
                return

    def _tell(self, event: TokenEvent) -> None:
        if self._told is not None and event.token is not None and event.logprobs is not None:
            top = tuple((self._token_bytes(token), log) for token, log in event.logprobs.top)
            self._told.append(Told(self._token_bytes(event.token), self._text.characters, event.logprobs.token, top))

    def _told_of(self, text: str) -> tuple[Told, ...] | None:
        """Return what is told of the tokens whose text begins in what was handed out; at the end of the rest, too, unless a
        stop text has cut it off."""
        if self._told is None:
            return None
        ends = self.read and not self._text.stopped
        count = sum(ends or one.offset < self._text.sent for one in self._told)
        told, self._told = self._told[:count], self._told[count:]
        return tuple(told)


class Generation:
    """All answers to one request. Use as a context manager: leaving it before the end, for whatever reason, aborts what
    still runs in the engine.

    `on_heard` is called with the tokens of an answer that ended by itself and what was read in it, before its end is told;
    `on_whole` with the id and the first answer, before its end is told; `on_answer` once for each answer that is told and
    ended, `on_landed` when the engine has done with all."""

    def __init__(
        self,
        id: str,
        requests: Sequence[GenerationRequest],
        served: Served,
        ask: Ask,
        answering: Answering,
        *,
        account: Account,
        keepalive_s: float,
        on_heard: Callable[..., None],
        on_answer: Callable[[Answer], None],
        on_landed: Callable[[Generation], None],
        on_whole: Callable[[str, Piece], None] | None = None,
    ) -> None:
        self.id = id
        self.account = account
        self._on_whole = on_whole
        self.answers = [Answer(index, request, served, ask, answering) for index, request in enumerate(requests)]
        self._engine = served.engine
        self._keepalive_s = keepalive_s
        self._on_heard = on_heard
        self._on_answer = on_answer
        self.acted: frozenset[str] = frozenset()  # rules of canonical form that changed something in the request
        self._on_landed = on_landed
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[Answer, TokenEvent]] = asyncio.Queue()  # MOST_UNREAD and a last one each
        self._taken_s = self._loop.time()
        self._cancelled = False
        self._unread = False  # so many tokens lay there that the request was ended

    def submit(self) -> None:
        """Give all to the engine, or none."""
        try:
            for answer in self.answers:
                self._engine.submit(answer.request, partial(self._on_event, answer))
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        for answer in self.answers:
            if answer.receipt is None:
                self._engine.abort(answer.request.id)

    def cancel(self) -> None:
        """End it because its client says so."""
        self._cancelled = True
        self.abort()

    async def pieces(self) -> AsyncIterator[Piece | None]:
        """Yield text as it comes, and None whenever `keepalive_s` passed without any. Raises GenerationFailed, NotReady."""
        try:
            quiet_from = self._loop.time()  # tokens may come for long without anything to be told, such as in a call
            while not all(answer.read for answer in self.answers):
                try:
                    async with asyncio.timeout_at(quiet_from + self._keepalive_s):
                        answer, event = await self._events.get()
                    self._taken_s = self._loop.time()
                except TimeoutError:
                    yield None
                    quiet_from = self._loop.time()
                    continue
                piece = answer.take(event)
                if answer.complete:
                    tokens, said = answer.said()
                    self._on_heard(tokens, **said)  # before its end is told: it may come back at once
                if piece.parts or piece.told or piece.progress or piece.finish is not None:
                    if piece.finish is not None and event.finish is None:
                        self._engine.abort(answer.request.id)  # it need not go on, but its receipt says what was cached
                    if piece.finish in ("error", "abort"):
                        raise self._failure(event)
                    if self._on_whole is not None and piece.index == 0 and piece.finish is not None:
                        self._on_whole(self.id, answer.whole())
                    yield piece
                    quiet_from = self._loop.time()
            await self._receipts()
        finally:
            self._nobody_reads()

    def usage(self) -> Usage:
        """Return what all answers used: the prompt once, as the first one found it."""
        receipt = (
            self.answers[0].receipt
            or self.answers[0].so_far
            or Receipt(len(self.answers[0].request.prompt), 0, 0, 0, 0, 0.0, 0.0, 0.0, None, 0.0)
        )
        return Usage.of(
            receipt,
            output_tokens=sum(answer.completion_tokens for answer in self.answers),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
            kept_output_tokens=sum(answer.receipt.kept_output_tokens for answer in self.answers if answer.receipt is not None),
        )

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()
        self._nobody_reads()

    async def _receipts(self) -> None:
        """Wait, not for ever, until the engine has done with all answers."""
        by = self._loop.time() + RECEIPT_WAIT_S
        while any(answer.receipt is None for answer in self.answers) and (left := by - self._loop.time()) > 0:
            try:
                async with asyncio.timeout(left):
                    await self._events.get()
            except TimeoutError:
                return

    def _nobody_reads(self) -> None:
        for answer in self.answers:
            answer.read = True
            self._report(answer)

    def _report(self, answer: Answer) -> None:
        """Tell of an answer, once, when the engine has ended it and its text is out: only then is it known how it ended and
        how many tokens the client was told of, which may be fewer than the engine made behind a stop text."""
        if not answer.reported and answer.read and answer.receipt is not None and answer.finish is not None:
            answer.reported = True
            self._on_answer(answer)
            if all(one.reported for one in self.answers):
                self.account.ended(self)

    def _on_event(self, answer: Answer, event: TokenEvent) -> None:
        try:
            self._loop.call_soon_threadsafe(self._receive, answer, event)
        except RuntimeError:  # the loop is closed: nobody is left to tell, but the accounts
            if event.finish is not None:
                answer.read = True
                self._land(answer, event)

    def _receive(self, answer: Answer, event: TokenEvent) -> None:
        if event.finish is None and self._lie_unread():
            return
        self._events.put_nowait((answer, event))
        if event.finish is not None:
            self._land(answer, event)

    def _lie_unread(self) -> bool:
        """Whether more would be too much to hold for a client that does not read; its request is ended then."""
        lying = self._events.qsize()
        stuck = lying >= MOST_UNREAD and self._loop.time() - self._taken_s > STUCK_S
        if not self._unread and (stuck or lying >= MOST_BURST):
            self._unread = True
            self.abort()
        return self._unread

    def _land(self, answer: Answer, event: TokenEvent) -> None:
        answer.finish = answer.finish or event.finish
        answer.receipt = event.receipt
        answer.error = event.error
        if all(one.receipt is not None for one in self.answers):
            self._on_landed(self)
        self._report(answer)

    def _failure(self, event: TokenEvent) -> RequestError:
        """Return why an answer ended before its end, and note it for the accounts."""
        error = self._why(event)
        self.account.status = error.status
        return error

    def _why(self, event: TokenEvent) -> RequestError:
        deadline_s = self.answers[0].request.deadline_s
        if event.finish == "error":
            return GenerationFailed(event.error or "the engine failed", code="generation_failed")
        if self._cancelled:
            return Cancelled("the request was cancelled", code="cancelled")
        if self._unread:
            return ReaderTooSlow(
                f"{MOST_UNREAD} tokens lay unread, so the answer was ended; read faster, or ask without stream",
                code="reader_too_slow",
            )
        if deadline_s is not None and event.receipt is not None and event.receipt.total_s >= deadline_s:
            return DeadlinePassed("the answer was not done within its deadline", code="deadline_exceeded")
        return NotReady("the request was aborted because the server is shutting down", code="shutting_down", retry_after_s=5)
