"""A request's tokens and the keys of its blocks, as the workers will have them.

With the model's tokenizer here a prompt is rendered and tokenised once, in the canonical form that a server of ours gives it.
Without, a worker is asked for its tokens; and where none can say, keys are made of the text, so that what was sent somewhere is
found there again. What cannot be rendered is not refused here: the worker says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from random import sample
from typing import Any, Literal

import msgspec
import numpy as np

from headstart.api.ask import Ask
from headstart.api.shared import SharedPrefixes
from headstart.block.keys import chain, cut, packed_keys
from headstart.errors import RequestError, StoreError
from headstart.gateway.connections import Connections, Lost
from headstart.gateway.worker import Worker
from headstart.policy.routing.holders import Keys, keys_of, packed_keys_of
from headstart.render import Renderer
from headstart.render.canonical import RULES, canonical
from headstart.tier.base import Tier

_log = logging.getLogger("headstart")
_ASK_S = 5.0
_TEXT_BYTES = 4  # of a token, about
_MOST_MUTE = 1024
By = Literal["tokenizer", "worker", "text"]
_NO_KEYS: Keys = np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Known:
    """Of a prompt: how many tokens, the keys of its full blocks, and how many of these from the first on the pool has; None
    where nobody looked. `by`: what made its tokens, which took `made_s`."""

    tokens: int
    keys: Keys
    pool_blocks: int | None = None
    by: By = "text"
    made_s: float = 0.0


class Prompts:
    """`renderer`: the model's, None for none. `rules`: of canonical form. `pool`: what every worker can read; it is closed with
    this."""

    def __init__(
        self,
        client: Connections,
        *,
        renderer: Renderer | None = None,
        rules: Collection[str] = RULES,
        shared: SharedPrefixes | None = None,
        pool: Tier | None = None,
    ) -> None:
        self._client = client
        self._renderer = renderer
        self._rules = frozenset(rules)
        self._shared = shared or SharedPrefixes()
        self._pool = pool
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="headstart-render")
        self._mute: set[str] = set()  # processes of workers that cannot tokenise

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def of(
        self,
        ask: Ask,
        *,
        root: bytes,
        salt: str | bytes | None,
        among: Callable[[], Sequence[Worker]],
        headers: Mapping[str, str],
    ) -> Awaitable[Known]:
        """Return what is awaited for what is known of the prompt of `ask`; another thread begins at once. `root`: what its keys
        begin with; `among`: says who could be asked."""
        loop = asyncio.get_running_loop()
        representation = None if self._pool is None else _representation(among())
        of_text = partial(loop.run_in_executor, self._threads, self._of_text, ask, root, salt, representation)
        if self._renderer is not None:
            rendered = loop.run_in_executor(self._threads, self._rendered, ask, root, salt, representation)
            return _first_known(rendered, of_text)
        if isinstance(ask.prompt, tuple) and ask.messages is None:
            return of_text()
        return _first_known(self._of_a_worker(ask, root, salt, representation, among, headers), of_text)

    async def _of_a_worker(
        self,
        ask: Ask,
        root: bytes,
        salt: str | bytes | None,
        representation: bytes | None,
        among: Callable[[], Sequence[Worker]],
        headers: Mapping[str, str],
    ) -> Known | None:
        begun_s = time.monotonic()
        ids = await self._asked(ask, among(), headers)
        made_s = time.monotonic() - begun_s
        if ids is None:
            return None
        work = partial(self._known, ids, root, salt, representation, "worker", made_s)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _rendered(self, ask: Ask, root: bytes, salt: str | bytes | None, representation: bytes | None) -> Known | None:
        renderer = self._renderer
        assert renderer is not None
        begun_s = time.monotonic()
        try:
            ids: Sequence[int]
            if ask.messages is None:
                ids = renderer.completion(ask.prompt)
            else:
                made = canonical(ask.messages, ask.tools, self._rules)
                text = renderer.write(
                    made.messages, tools=made.tools, arguments=ask.template, join_parts="text-parts" in self._rules
                )
                ids = renderer.packed(text, owner=repr(salt))
        except RequestError:
            return None
        except Exception:  # noqa: BLE001 - whatever a template does: the worker says what is wrong
            _log.exception("rendering a prompt failed unexpectedly")
            return None
        return self._known(ids, root, salt, representation, "tokenizer", time.monotonic() - begun_s)

    def _known(
        self,
        ids: Sequence[int],
        root: bytes,
        salt: str | bytes | None,
        representation: bytes | None,
        by: By,
        made_s: float,
    ) -> Known:
        self._shared.look()
        try:
            packed = packed_keys(ids, root=root, salt=salt, shared_tokens=self._shared.tokens(ids))
        except ValueError:  # ids that are none, which the worker says
            return Known(len(ids), _NO_KEYS, by=by)
        return Known(len(ids), packed_keys_of(packed), self._in_pool(packed, representation), by, made_s)

    def _in_pool(self, packed: bytes, representation: bytes | None) -> int | None:
        if self._pool is None or representation is None or not packed:
            return None
        keys = cut(packed)
        try:
            there = self._pool.locate(representation, keys).extents >= 0
        except (StoreError, OSError) as error:
            _log.warning("the pool cannot be asked: %s", error)
            return None
        return len(keys) if there.all() else int(np.argmin(there))

    def _of_text(self, ask: Ask, root: bytes, salt: str | bytes | None, representation: bytes | None) -> Known:
        if ask.messages is None and isinstance(ask.prompt, tuple):
            return self._known(ask.prompt, root, salt, representation, "tokenizer", 0.0)
        said: Any = ask.prompt if ask.messages is None else [ask.tools, ask.template, ask.messages]
        try:
            data = msgspec.json.encode(said)
        except (ValueError, TypeError, RecursionError, msgspec.MsgspecError):
            return Known(1, _NO_KEYS)
        salted = hashlib.sha256(root + repr(salt).encode("utf-8", "surrogatepass")).digest()
        return Known(max(1, len(data) // _TEXT_BYTES), keys_of(chain(salted, data)))

    async def _asked(self, ask: Ask, among: Sequence[Worker], headers: Mapping[str, str]) -> list[int] | None:
        """Return the tokens as a worker says; None where none does."""
        loop = asyncio.get_running_loop()
        for worker in sample(among, min(2, len(among))):
            process = f"{worker.id} {worker.report.instance if worker.report else ''}"
            if process in self._mute:
                continue
            try:
                content = await loop.run_in_executor(self._threads, self._question, ask)
                told = {**headers, "content-type": "application/json"}
                async with asyncio.timeout(_ASK_S):
                    response = await self._client.ask("POST", f"{worker.address.url}/tokenize", headers=told, body=content)
                if response.status in (404, 405, 501):
                    if len(self._mute) >= _MOST_MUTE:
                        self._mute.clear()
                    self._mute.add(process)
                elif response.status == 200:
                    return await loop.run_in_executor(self._threads, _ids_of, response.content)
                return None
            except (Lost, TimeoutError, ValueError, TypeError, KeyError, msgspec.MsgspecError, RecursionError):
                continue
        return None

    def _question(self, ask: Ask) -> bytes:
        """Return what a worker is asked for the tokens of `ask`."""
        if ask.messages is None:
            body: dict[str, Any] = {"prompt": ask.prompt}
        else:
            made = canonical(ask.messages, ask.tools, self._rules)
            body = {"messages": made.messages, "tools": made.tools, "chat_template_kwargs": dict(ask.template) or None}
        body["model"] = ask.model
        return msgspec.json.encode({name: value for name, value in body.items() if value is not None})


def _ids_of(said: bytes) -> list[int]:
    """Return the tokens that a worker says. Raises ValueError, KeyError or MsgspecError for what is no list of them."""
    ids: list[int] = msgspec.convert(msgspec.json.decode(said)["tokens"], list[int])
    return ids


def _representation(among: Sequence[Worker]) -> bytes | None:
    return next((one.report.representation for one in among if one.report and one.report.representation), None)


async def _first_known(one: Awaitable[Known | None], other: Callable[[], Awaitable[Known]]) -> Known:
    known = await one
    return await other() if known is None else known
