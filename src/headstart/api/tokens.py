"""What needs no engine: tokens of a text or a conversation, the text of tokens, and prompts as they are rendered."""

from __future__ import annotations

from typing import Any

import msgspec

from headstart.api.ask import Ask
from headstart.api.dialects.fields import decoded_as, wrong
from headstart.api.served import Served
from headstart.errors import RequestError


class Tokenise(msgspec.Struct):
    model: str | None = None
    prompt: str | None = None
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Detokenise(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


def tokenise(served: Served, body: bytes) -> dict[str, Any]:
    """Return the token ids of a text or of a conversation. Raises RequestError naming the parameter."""
    asked = decoded_as(body, Tokenise)
    context = served.engine.info.context_tokens
    if (asked.prompt is None) == (asked.messages is None):
        raise wrong("prompt", "or messages must be there, one of them")
    if asked.messages is not None:
        text = served.renderer.write(
            asked.messages,
            tools=asked.tools,
            add_generation_prompt=asked.add_generation_prompt is not False,
            arguments=asked.chat_template_kwargs,
        )
        ids = served.renderer.tokenise(text, special_tokens=bool(asked.add_special_tokens)).ids
    else:
        ids = served.renderer.tokenise(asked.prompt or "", special_tokens=asked.add_special_tokens is not False).ids
    strings = [served.renderer.token_bytes(token).decode("utf-8", "backslashreplace") for token in ids]
    return {
        "count": len(ids),
        "max_model_len": context,
        "tokens": ids,
        "token_strs": strings if asked.return_token_strs else None,
    }


def detokenise(served: Served, body: bytes) -> dict[str, Any]:
    """Return the text of token ids, with special tokens. Raises RequestError naming the place."""
    asked = decoded_as(body, Detokenise)
    most = served.renderer.vocabulary
    for i, token in enumerate(asked.tokens):
        if not 0 <= token < most:
            raise RequestError(f"tokens[{i}] is {token}; a token id is 0 to {most - 1}", param=f"tokens[{i}]")
    return {"prompt": served.renderer.decode(asked.tokens, special=True)}


def rendered(served: Served, ask: Ask) -> dict[str, Any]:
    """Return the prompt that `ask` comes to, as text and as tokens with where each begins, and generate nothing."""
    renderer = served.renderer
    offsets: list[int] | None = None
    if ask.messages is not None:
        text = renderer.write(ask.messages, tools=ask.tools, arguments=ask.template)
        tokens = renderer.tokenise(text, special_tokens=False)
        ids, offsets = tokens.ids, tokens.begins
    elif isinstance(ask.prompt, str):
        text = ask.prompt
        tokens = renderer.tokenise(text, special_tokens=True)
        ids, offsets = tokens.ids, tokens.begins
    else:
        ids = renderer.completion(ask.prompt)
        text = renderer.decode(ids, special=True)
    return {
        "object": "render",
        "model": served.name,
        "prompt": text,
        "prompt_token_ids": ids,
        "offsets": offsets,
        "count": len(ids),
        "max_model_len": served.engine.info.context_tokens,
    }
