"""From what a request says to token ids: canonical form, template, tokens that are known already, how much may be kept.

Ask ─▶ canonical ─▶ template ─▶ stretches: what came before, what this server generated ─▶ Prompt
                                  ▲
answers that ended ───────────────┘ heard
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headstart.api.ask import Ask
from headstart.api.caching import has_breakpoint
from headstart.api.served import Served
from headstart.render.canonical import RULES, Canonical, canonical, lacks_reasoning
from headstart.render.generated import Answers, Generated, standing

_OF_GENERATED = {"reasoning", "tool-arguments", "generated-tokens"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """`characters` and `digest` of the text as the template wrote it; none of a plain prompt. `acted`: the rules of canonical
    form that did something. `keep_tokens`: only so many from the start may be kept, None for all."""

    ids: tuple[int, ...]
    characters: int = 0
    digest: bytes = b""
    acted: frozenset[str] = frozenset()
    keep_tokens: int | None = None


class Prompting:
    """`rules`: of canonical form, those that are on. Any number of threads may use one."""

    def __init__(self, rules: Collection[str] = RULES) -> None:
        self._rules = frozenset(rules)
        self._answers = Answers()

    def prompt(self, served: Served, ask: Ask) -> Prompt:
        """Return the prompt. Takes a while for a long one. Raises RequestError naming the place."""
        context = served.engine.info.context_tokens
        if ask.messages is None:
            ids = tuple(served.renderer.completion(ask.prompt, context_tokens=context))
            return Prompt(ids, keep_tokens=0 if ask.caching.explicit else None)
        made, text, generated = self._written(served, ask)
        owner = _owner(ask)
        answers = [one for one in generated if one.rule in self._rules]
        told = served.renderer.told(text, answers, context_tokens=context, owner=owner)
        keep_tokens = self._keep_tokens(served, ask, text, told.ids, answers) if ask.caching.explicit else None
        return Prompt(tuple(told.ids), len(text), told.digest, made.acted | told.acted, keep_tokens)

    def as_rendered(self, ask: Ask) -> Ask:
        """Return what is asked for in canonical form, as far as that needs nothing that was generated."""
        if ask.messages is None:
            return ask
        made = canonical(ask.messages, ask.tools, self._rules)
        return replace(ask, messages=tuple(made.messages), tools=None if made.tools is None else tuple(made.tools))

    def heard(self, served: Served, ask: Ask, prompt: Prompt, tokens: Sequence[int], **said: Any) -> None:
        """Remember an answer that ended by itself. `said`: what was read in it, as in `Generated`."""
        if prompt.digest and self._rules & _OF_GENERATED:
            text = served.renderer.decode(tokens, special=True)
            answer = Generated(prompt.characters, prompt.digest, array("I", tokens), text, **said)
            self._answers.keep(answer, owner=_owner(ask))

    def _written(self, served: Served, ask: Ask, *, mark: str = "") -> tuple[Canonical, str, list[Generated]]:
        """Return messages and tools in canonical form, their text, and what may have been generated of it; with a `mark` behind
        the last breakpoint. Reasoning is put back only where the text goes on as it did when the reasoning was generated."""
        assert ask.messages is not None
        owner = _owner(ask)
        messages = _marked(ask.messages, mark) if mark else ask.messages
        made = canonical(messages, ask.tools, self._rules)
        known = self._answers.like(made.messages, owner=owner) if self._rules & _OF_GENERATED else {}
        generated = [one for some in known.values() for one in some]
        reasoning: dict[int, str] = {}
        if "reasoning" in self._rules:
            for at, some in known.items():
                said = next((one.reasoning for one in some if one.reasoning), None)
                if said is not None and lacks_reasoning(made.messages[at]):
                    reasoning[at] = said
        while True:
            whole = made.with_reasoning(reasoning)
            text = served.renderer.write(
                whole.messages, tools=whole.tools, arguments=ask.template, join_parts="text-parts" in self._rules
            )
            begins = standing(text, generated) if reasoning else frozenset()
            right = {at for at in reasoning if any(one.prompt_digest in begins for one in known[at])}
            if len(right) == len(reasoning):
                return whole, text, generated
            reasoning = {at: said for at, said in reasoning.items() if at in right}

    def _keep_tokens(self, served: Served, ask: Ask, text: str, ids: Sequence[int], answers: Sequence[Generated]) -> int:
        """Return how many tokens lie before the last breakpoint; none where there is none."""
        assert ask.messages is not None
        if not any(map(has_breakpoint, _holders(ask.messages))):
            return 0
        mark = secrets.token_hex(16)
        marked = self._written(served, ask, mark=mark)[1]
        end = marked.find(mark)
        before = text[: _alike(text, marked[:end])] if end >= 0 else ""
        begun = served.renderer.told(before, answers, owner=_owner(ask)).ids
        return _alike(begun, ids)  # the last ones may be others where text goes on


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how far two begin alike; halves are compared, each at once, as both may be long."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle - 1)
    return low


def _owner(ask: Ask) -> str:
    """Return whose prompts and answers are remembered together: of those who may share a stored prefix."""
    return repr(ask.caller.salt(ask.salt))


def _holders(messages: Sequence[Any]) -> list[Any]:
    """Return what can carry a breakpoint, in order: the parts of each message, then the message."""
    found: list[Any] = []
    for message in messages:
        if isinstance(message, Mapping):
            content = message.get("content")
            found += [*content, message] if isinstance(content, list | tuple) else [message]
    return found


def _marked(messages: Sequence[Any], mark: str) -> list[Any]:
    """Return messages with `mark` at the end of the text that carries the last breakpoint."""
    last = next(one for one in reversed(_holders(messages)) if has_breakpoint(one))

    def copied(message: Any) -> Any:
        if not isinstance(message, Mapping):
            return message
        content = message.get("content")
        if message is last and isinstance(content, str):
            return {**message, "content": content + mark}
        if isinstance(content, list | tuple) and content:
            at = content[-1] if message is last else last
            parts = [
                {**one, "text": str(one.get("text", "")) + mark} if one is at and isinstance(one, Mapping) else one
                for one in content
            ]
            return {**message, "content": parts}
        return message

    return [copied(message) for message in messages]
