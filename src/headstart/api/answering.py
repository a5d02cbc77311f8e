"""How the answers to one request are read, and what they are held to: where tools, formats and the model's family meet.

tools, auto        read as the family writes calls; where one is strict, held to their schemas from a call's mark on
tools, required    held to that writing too; a family whose arguments are no JSON, or that is not known, to a plain JSON list
a format           held to its schema; beside tools, to either
nothing of these   reasoning alone is told from text
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from headstart.api.ask import Ask
from headstart.api.served import Served
from headstart.engine.base import Constraint
from headstart.errors import RequestError
from headstart.render.answers import PLAIN, AnswerReader
from headstart.render.constraints import Grammar, Held
from headstart.render.messages import normal_tools

_NAME = re.compile(r"[\w.:/-]{1,256}", re.ASCII)
_PROMPT_END = 24  # tokens, in which a template's marks before the answer lie


class Answering:
    """Made off the loop: a large schema takes a while. Raises RequestError for what cannot be held to."""

    def __init__(self, served: Served, ask: Ask, prompt: Sequence[int]) -> None:
        self.not_strict = False  # tools that ask for it are not held to their schemas
        self._prompt_end = ""
        self._held: Held | None = None
        self._family = served.answers if ask.messages is not None else None
        self._tools: list[dict[str, Any]] = []
        grammar: Grammar | None = None
        if ask.messages is None:
            return
        tools = normal_tools(ask.tools) or []
        choice = ask.tool_choice
        if choice.mode != "none":
            self._tools = [tool for tool in tools if choice.names is None or _name(tool) in choice.names]
        missing = [name for name in choice.names or () if name not in map(_name, tools)]
        if missing or (choice.mode == "required" and not self._tools):
            named = f"{missing[0]!r}, which is not among tools" if missing else "a call, but there are no tools"
            raise RequestError(f"tool_choice asks for {named}", param="tool_choice")
        strict = any(tool["function"].get("strict") is True for tool in self._tools)
        if choice.mode == "required" or ask.format is not None or strict:
            wrong = next((name for name in map(_name, self._tools) if not _NAME.fullmatch(name)), None)
            if wrong is not None:
                raise RequestError(
                    f"tools has a function named {wrong[:64]!r}; use letters, digits and _ . : / -", param="tools"
                )
        if choice.mode == "required":
            if self._family is None or self._family.writing is None:
                self._family = PLAIN
            grammar = served.constraints.calls(self._family, self._tools, parallel=ask.parallel_calls)
        elif ask.format is not None:
            calls = None
            if self._tools and self._family is not None and self._family.writing is not None:
                calls = served.constraints.calls(self._family, self._tools, parallel=ask.parallel_calls)
            grammar = served.constraints.json(ask.format.schema, strict=ask.format.strict, param=ask.format.param, unless=calls)
        elif strict:
            if self._family is not None and self._family.writing is not None and self._family.writing.trigger is not None:
                grammar = served.constraints.calls_in_text(self._family, self._tools, parallel=ask.parallel_calls)
            else:
                self.not_strict = True
        if self._family is not None:
            self._prompt_end = served.renderer.decode(prompt[-_PROMPT_END:], special=True)
        if grammar is not None:  # what cannot be held to is told now
            constraints = served.constraints
            self._held = constraints.constraint(grammar, self._family, prompt_end=self._prompt_end)

    @property
    def reads(self) -> bool:
        """Whether answers are read at all; if not, they are text."""
        return self._family is not None

    @property
    def held(self) -> bool:
        return self._held is not None

    def reader(self) -> AnswerReader | None:
        """Return what reads one answer."""
        if self._family is None:
            return None
        return AnswerReader(self._family, prompt_end=self._prompt_end, tools=self._tools or None)

    def constraint(self) -> Constraint | None:
        """Return what one answer is held to."""
        return None if self._held is None else self._held.again()


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])
