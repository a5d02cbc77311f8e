"""Answers back to what they mean: reasoning, text and tool calls, as each family of models writes them, while they arrive."""

from headstart.render.answers.families import FAMILIES, PLAIN, Family, family_named, family_of
from headstart.render.answers.json_text import finished
from headstart.render.answers.parts import Call, Part, Reasoning, Text, merged
from headstart.render.answers.reader import AnswerReader

__all__ = [
    "FAMILIES",
    "PLAIN",
    "AnswerReader",
    "Call",
    "Family",
    "Part",
    "Reasoning",
    "Text",
    "family_named",
    "family_of",
    "finished",
    "merged",
]
