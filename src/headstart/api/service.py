"""The served model's requests in flight.

The bridge between two worlds: the engine calls back on its own thread, the server lives on an event loop. Everything here
runs on the loop, except templates and tokenisers, which run in a small pool so that a long prompt does not hold up other
streams.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from headstart.api.accounts import Account, Accounts
from headstart.api.answering import Answering
from headstart.api.ask import Ask
from headstart.api.asked import AskedPrompts
from headstart.api.conversations import Conversations
from headstart.api.errors import AlreadyEnded, DeadlinePassed, ModelNotFound
from headstart.api.generation import Answer, Generation
from headstart.api.life import Life
from headstart.api.metrics import Metrics
from headstart.api.pieces import Piece
from headstart.api.plumbing import Bodies
from headstart.api.prompting import Prompt, Prompting
from headstart.api.remarks import Remarks, request_line
from headstart.api.requests import requests_of
from headstart.api.served import Served
from headstart.api.usage import Usage
from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.why import Asked, Diagnosis, diagnose, explain
from headstart.diagnose.why_json import why_json
from headstart.errors import RequestError
from headstart.render.answers import finished
from headstart.render.canonical import RULES

log = logging.getLogger("headstart")
T = TypeVar("T")

KEEPALIVE_S = 10.0
_LANDING_S = 2.0  # that aborted requests may take to end


class Service(Life):
    """`max_waiting` bounds the requests that wait for the engine, those being tokenised included. `aliases`: names that mean
    another; a name that is none gets the served model, unless `strict_models`. `canonical`: the rules of canonical form that
    are on; `longest_promise_s`: what a caller can have promised at most of what is kept.
    `keep_prompts`: token ids of the latest prompts are remembered, so that what is said of them is exact."""

    def __init__(
        self,
        *,
        max_waiting: int = 256,
        keepalive_s: float = KEEPALIVE_S,
        accounts: Accounts | None = None,
        aliases: Mapping[str, str] | None = None,
        strict_models: bool = False,
        canonical: Collection[str] = RULES,
        longest_promise_s: float = 0.0,
        keep_prompts: bool = False,
    ) -> None:
        super().__init__()
        self.keepalive_s = keepalive_s
        self.accounts = accounts or Accounts()
        self.metrics = Metrics(self)
        self.created = int(time.time())
        self.instance = uuid.uuid4().hex  # of this process: a router sees by it that all is forgotten
        self._max_waiting = max_waiting
        self.prompting = Prompting(canonical)
        self._longest_promise_s = longest_promise_s
        self._preparing = 0
        self._flights: dict[str, Generation] = {}
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="headstart-render")
        self._remarks = Remarks()
        self.bodies = Bodies()
        self._told_of_tools = False
        self.conversations = Conversations()
        self.asked = AskedPrompts(keep_ids=keep_prompts)
        self._aliases = dict(aliases or {})
        self._strict_models = strict_models

    def model_object(self, name: str | None = None) -> dict[str, Any]:
        """Return what /v1/models says of the served model. Raises ModelNotFound for another `name`."""
        served = self.require_served()
        if name is not None and name not in self.names:
            raise self._no_model(name)
        return {
            "id": name or served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headstart",
            "max_model_len": served.engine.info.context_tokens,
        }

    @property
    def names(self) -> tuple[str, ...]:
        """What may be asked for: the model's name, those of its adapters, and aliases."""
        return (*self.require_served().names, *self._aliases)

    def _no_model(self, name: str) -> ModelNotFound:
        has, near = ", ".join(map(repr, self.names)), _nearest(name, self.names)
        meant = f"; did you mean {near!r}?" if near else ""
        return ModelNotFound(
            f"there is no model {name[:64]!r} here; this server has {has}{meant}", code="model_not_found", param="model"
        )

    def _model_of(self, served: Served, name: str | None) -> str:
        """Return the name of what is served for `name`. Raises ModelNotFound where models are strict, and for what may be meant
        for an adapter: the model alone would answer otherwise than was asked for."""
        meant = self._aliases.get(name or "", name or served.name)
        if meant in served.names:
            return meant
        if self._strict_models or _nearest(meant, served.engine.info.adapters):
            raise self._no_model(name or meant)
        self._remarks.ignoring("unknown model name", [meant])
        return served.name

    async def start(self, ask: Ask, account: Account | None = None) -> Generation:
        """Tokenise and submit. Raises RequestError for whatever can be known before the first token."""
        served = self.require_served()
        account = account or self.accounts.open(ask.caller, endpoint="", id="", headers={})
        ask = replace(ask, model=self._model_of(served, ask.model))
        account.model = served.adapter_of(ask.model) or served.name
        self._remarks.ignoring("unknown field", ask.ignored)
        if ask.previous is not None:
            before = self.conversations.find(ask.previous, ask.caller.tenant)
            asked = ask.messages or ()
            ask = replace(ask, messages=(*asked[: ask.instructions], *before, *asked[ask.instructions :]))
        answers = min(ask.n, self._max_waiting)
        if served.engine.load().waiting + self._preparing + answers > self._max_waiting:
            raise self.accounts.pace.too_many(self._max_waiting)
        self._preparing += answers
        try:
            prompt, answering = await self.off_loop(self._prepared, served, ask)
            if ask.tools and not self._told_of_tools:
                self._told_of_tools = True
                if said := await self.off_loop(_about_tools, self.prompting, served, ask, prompt.ids):
                    self._remarks.once(said)
            if answering.not_strict:
                self._remarks.once(
                    "tools are asked to be strict, which holds here where a call is forced (tool_choice): as this model writes "
                    "calls, no mark begins one, or no JSON is in it"
                )
            account.id = id = f"{ask.id_prefix}{uuid.uuid4().hex}"
            account.tokenised(len(prompt.ids))
            requests = requests_of(
                ask,
                served,
                prompt,
                answering,
                id=id,
                deadline_s=self._deadline_s(ask, account),
                longest_promise_s=self._longest_promise_s,
            )
            named = None
            with self.accounts.guarded():
                named = await self.off_loop(self.asked.of, served, ask, requests[0])
            account.session, account.retention = ask.handling.session or ask.caching.session, requests[0].retention
            account.max_tokens = requests[0].max_tokens
            generation = Generation(
                id,
                requests,
                served,
                ask,
                answering,
                account=account,
                keepalive_s=self.keepalive_s,
                on_heard=partial(self.prompting.heard, served, ask, prompt),
                on_answer=partial(self._ended, id),
                on_landed=self._landed,
                on_whole=partial(self._keep, ask) if ask.keep else None,
            )
            generation.acted = prompt.acted
            self.require_served()  # the server may have begun to go down meanwhile; from here on nothing waits
            self._flights[id] = generation
            self.metrics.asked(answers=len(requests), max_tokens=requests[0].max_tokens)
            try:
                generation.submit()
            except BaseException:
                self._landed(generation)
                raise
            if named is not None:
                self.asked.begin(named, id, ask.caller.tenant)
        finally:
            self._preparing -= answers
        return generation

    def _deadline_s(self, ask: Ask, account: Account) -> float | None:
        """Return how many seconds a request has left, None for any number. Raises DeadlinePassed."""
        asked = [one for one in (ask.handling.deadline_s, self.accounts.deadline_s) if one is not None]
        if not asked:
            return None
        left_s = min(asked) - account.tokenise_s
        if left_s <= 0:
            raise DeadlinePassed("the prompt was not tokenised within the deadline", code="deadline_exceeded")
        return left_s

    def count(self, served: Served, ask: Ask) -> int:
        """Return how many tokens the prompt of `ask` has. Takes a while for a long one; for `off_loop`."""
        return len(self.prompting.prompt(served, ask).ids)

    async def off_loop(self, work: Callable[..., T], *arguments: object) -> T:
        """Return what `work` returns, run beside the loop, a few at a time. Raises NotReady when the server goes down."""
        try:
            running = asyncio.get_running_loop().run_in_executor(self._pool, work, *arguments)
        except RuntimeError:  # the pool is closed
            self.require_open()
            raise
        return await running

    async def drain(self, timeout_s: float) -> None:
        """Take no more requests, let those in flight end, abort what is left after `timeout_s`.

        Requests that are being tokenised are told that they came too late, but they are told."""
        self._closing = True
        if self._flights:
            running = (
                "1 request still runs, it has"
                if len(self._flights) == 1
                else f"{len(self._flights)} requests still run, they have"
            )
            log.info("shutting down: %s %g seconds; Ctrl-C again ends at once", running, timeout_s)
        ends = time.monotonic() + timeout_s
        while (self._flights or self._preparing) and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        for generation in list(self._flights.values()):
            generation.abort()
        ends = time.monotonic() + _LANDING_S
        while self._flights and time.monotonic() < ends:  # so that who asked is told
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self._closing = True
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.accounts.close()

    def _keep(self, ask: Ask, id: str, answer: Piece) -> None:
        """Keep the conversation up to `answer`, for requests that go on from it."""
        said: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.reasoning:
            said["reasoning_content"] = answer.reasoning
        if answer.calls:
            said["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": finished(call.arguments)}}
                for call in answer.calls
            ]
        self.conversations.keep(id, ask.caller.tenant, [*(ask.messages or ())[ask.instructions :], said])

    def cancel(self, id: str, tenant: str) -> None:
        """End a request that runs. Raises NoSuchResponse for what is not known, or is another tenant's, and AlreadyEnded."""
        generation = self._flights.get(id)
        if generation is None or generation.account.caller.tenant != tenant:
            self.conversations.require(id, tenant)
            raise AlreadyEnded(f"response {id[:64]!r} has ended; there is nothing to cancel", code="already_ended")
        generation.cancel()

    def _landed(self, generation: Generation) -> None:
        self._flights.pop(generation.id, None)

    async def why(self, id: str, tenant: str) -> dict[str, Any] | None:
        """Return why of a request that has ended no more was reused, as `why_json` tells it; None where it is not remembered,
        or runs."""
        served = self.require_served()
        found = self.asked.find(id, tenant)
        if found is None or found[0].outcome is None:
            return None
        return await asyncio.to_thread(_why, served, *found)

    def diagnosis(self, id: str, ask: Ask, usage: Usage) -> Diagnosis | None:
        """Return how request `id` compares with the one that its client named; None where it named none. Takes no time."""
        named, tenant = ask.caching.compare_with, ask.caller.tenant
        if named is None:
            return None
        with self.accounts.guarded():
            if (asked := self.asked.get(id, tenant)) is not None:
                cache = None if self.served is None else self.served.cache
                piece_tokens = BLOCK_TOKENS if cache is None else cache.representation.piece_tokens
                other = self.asked.get(named, tenant)
                return diagnose(asked, other, cached_tokens=usage.cached_tokens, piece_tokens=piece_tokens)
        return Diagnosis(found=False)

    def _ended(self, id: str, answer: Answer) -> None:
        """Count and log an answer; `id` is its request's."""
        assert answer.receipt is not None
        assert answer.finish is not None
        receipt = answer.receipt
        if answer.finish != "abort":  # of an answer that was cut off nobody was told
            receipt = replace(receipt, completion_tokens=answer.completion_tokens)
        with self.accounts.guarded():
            self.metrics.observe(answer.finish, receipt)
        if answer.index == 0:
            with self.accounts.guarded():
                self.asked.end(id, answer.request.tenant, receipt, answer.tokens)
        log.info("%s", request_line(answer.request.id, answer.finish, receipt, answer.error))

    def _prepared(self, served: Served, ask: Ask) -> tuple[Prompt, Answering]:
        served.shared.look()
        prompt = self.prompting.prompt(served, ask)
        return prompt, Answering(served, ask, prompt.ids)


def _why(served: Served, asked: Asked, before: Sequence[Asked]) -> dict[str, Any]:
    cache = served.cache
    fates = None if cache is None else lambda keys, at_s: cache.fates(keys, at_s=at_s)
    piece_tokens = BLOCK_TOKENS if cache is None else cache.representation.piece_tokens
    store = served.engine.info.cache.partition("; ")[0] if cache is None else ""
    why = explain(
        asked, before, fates=fates, store=store, piece_tokens=piece_tokens, renderer=served.renderer, now_s=time.time()
    )
    return why_json(why)


def _about_tools(prompting: Prompting, served: Served, ask: Ask, prompt: tuple[int, ...]) -> str | None:
    """Return what does not become of the tools in `prompt`: a template without a place for them says nothing."""
    try:
        ignored = prompting.prompt(served, replace(ask, tools=None)).ids == prompt
    except RequestError:  # the template takes these messages with their tools alone
        ignored = False
    if ignored:
        return f"the chat template of {served.name} has no place for tools; they are ignored"
    if served.answers is None:
        return (
            f"how {served.name} writes calls of tools is not known, so they are given as text; name its family with --answers"
        )
    return None


def _nearest(name: str, names: Sequence[str]) -> str | None:
    """Return which of `names` somebody may have meant by `name`."""
    lower = {one.lower(): one for one in names}
    return next((lower[one] for one in difflib.get_close_matches(name.lower(), lower, n=1, cutoff=0.7)), None)
