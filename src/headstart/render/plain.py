"""A tokenizer and its chat template out of `tokenizer.json` and its neighbours, without transformers and so without torch.

`transformers` takes seconds to import, and torch with it. Where it would take `tokenizer.json` as it stands, which a folder's
configuration says, this gives the same text and the same token ids; `load_plain` says None where it might not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

_AS_IT_STANDS = {None, "PreTrainedTokenizerFast", "TokenizersBackend"}
_CHANGES = ("add_bos_token", "add_eos_token", "add_prefix_space")  # what transformers would change in it
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_REASONINGS = frozenset(_REASONING)
_OF_DICTS = frozenset(dir(dict))  # attributes go before keys
_OF_LOOPS = {"first", "index", "index0", "last", "length", "nextitem", "previtem"}  # all of them safe


class PlainTokenizer:
    """The part of a transformers tokenizer that `Renderer` asks for. `special` are the named tokens, as templates see them."""

    def __init__(self, backend: Any, *, template: str | None, special: Mapping[str, str]) -> None:
        self.backend_tokenizer = backend
        self.chat_template = template
        self._special = dict(special)

    def __len__(self) -> int:
        return int(self.backend_tokenizer.get_vocab_size())

    @property
    def bos_token_id(self) -> int | None:
        return self._id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id("eos_token")

    def get_added_vocab(self) -> dict[str, int]:
        return {added.content: token for token, added in self.backend_tokenizer.get_added_tokens_decoder().items()}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        tokenize: bool,
        chat_template: str | None = None,
        **arguments: Any,
    ) -> str:
        """Return the conversation's text. Raises jinja2's TemplateError, TypeError or ValueError as the template does."""
        assert not tokenize, "the text is tokenised by the renderer"
        template = _compiled(chat_template or self.chat_template or "")
        return str(
            template.render(
                **{
                    **self._special,
                    **arguments,
                    "messages": [_seen(message) for message in messages],
                    "tools": tools,
                    "documents": arguments.get("documents"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        )

    def _id(self, name: str) -> int | None:
        text = self._special.get(name)
        token = None if text is None else self.backend_tokenizer.token_to_id(text)
        return None if token is None else int(token)


def load_plain(folder: Path, settings: Mapping[str, Any]) -> PlainTokenizer | None:
    """Return the tokenizer in `folder`, whose tokenizer_config.json holds `settings`; None where transformers would make
    another one of it than its file says. Raises what `tokenizers` raises for a file that it cannot read."""
    try:
        from tokenizers import Tokenizer

        import_ok = bool(_compiled("."))
    except ImportError:
        return None
    template = settings.get("chat_template")
    file = folder / "chat_template.jinja"
    if file.exists():
        template = file.read_text(encoding="utf-8")
    special = _special(folder, settings)
    if (
        not import_ok
        or settings.get("tokenizer_class") not in _AS_IT_STANDS
        or any(settings.get(name) is not None for name in _CHANGES)
        or not isinstance(template, str | None)
        or (folder / "chat_template.json").exists()
        or (folder / "additional_chat_templates").exists()
        or "auto_map" in settings
        or special is None
    ):
        return None
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    declared = settings.get("added_tokens_decoder") or {}
    texts = (
        [one.get("content") for one in declared.values() if isinstance(one, Mapping)] if isinstance(declared, Mapping) else []
    )
    if any(not isinstance(text, str) or backend.token_to_id(text) is None for text in [*texts, *special.values()]):
        return None  # transformers would add them
    return PlainTokenizer(backend, template=template, special=special)


def writer_of(tokenizer: Any) -> Any:
    """Return what writes conversations as `tokenizer` does, in a fraction of the time: transformers takes most of its own for
    copying messages. That is `tokenizer` itself where it may write in a way of its own."""
    if isinstance(tokenizer, PlainTokenizer) or not isinstance(tokenizer.chat_template, str | None):
        return tokenizer
    from transformers import PreTrainedTokenizerBase

    if type(tokenizer).apply_chat_template is not PreTrainedTokenizerBase.apply_chat_template:
        return tokenizer
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items() if isinstance(text, str)}
    return PlainTokenizer(tokenizer.backend_tokenizer, template=tokenizer.chat_template, special=special)


def _special(folder: Path, settings: Mapping[str, Any]) -> dict[str, str] | None:
    """Return the texts of named special tokens; None where they are told in a way that is not known here."""
    try:
        told = {**json.loads((folder / "special_tokens_map.json").read_bytes()), **settings}
    except FileNotFoundError:
        told = dict(settings)
    except ValueError:
        return None
    found: dict[str, str] = {}
    for name in _NAMES:
        value = told.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if text is not None and not isinstance(text, str):
            return None
        if text is not None:
            found[name] = text
    return found


def _seen(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a template sees of a message: nothing that is null, and reasoning under each name that templates read."""
    if len(message) == 2 or (_REASONINGS.isdisjoint(message) and None not in message.values()):
        return message  # where there are two, they are role and content
    seen = {key: value for key, value in message.items() if value is not None}
    reasoning = next((seen[name] for name in _REASONING if name in seen), None)
    return seen if reasoning is None else {"thinking": reasoning, **seen, "reasoning_content": reasoning}


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what a model wrote, for training; here it is only what stands in it."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Environment(ImmutableSandboxedEnvironment):
        """The sandbox, which finds what templates ask for a thousand times without going through an exception."""

        def getattr(self, obj: Any, attribute: str) -> Any:
            if type(obj) is dict and attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
            if type(obj) is LoopContext and attribute in _OF_LOOPS:
                return getattr(obj, attribute)
            return super().getattr(obj, attribute)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson  # jinja's own writes for HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)
