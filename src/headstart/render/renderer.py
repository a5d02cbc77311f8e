"""Prompts to token ids through the model's own tokenizer and chat template, and token ids back to text.

A renderer does not change after it was loaded, but for what it remembers of texts; any number of threads may use one.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headstart.errors import ContextLengthExceeded, MissingExtra, ModelError, RequestError
from headstart.render.generated import Generated
from headstart.render.messages import normal_messages, normal_tools
from headstart.render.parts import kinds
from headstart.render.plain import PlainTokenizer, load_plain, writer_of
from headstart.render.stretches import Stretches, Told
from headstart.render.token_bytes import TokenBytes
from headstart.render.tokenising import Tokeniser, tokeniser_of

# Not every model's generation_config.json lists all tokens that end an answer. A text's end counts wherever it is in the
# vocabulary, a turn's end only where the model's own template writes it.
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|eot|>", "</s>")
# What whoever applies a template is told beside arguments of the template; none of it is a caller's to say.
_NOT_ARGUMENTS = {"conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
_NOT_ARGUMENTS |= {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
_NOT_ARGUMENTS |= {"return_assistant_tokens_mask", "raise_exception", "strftime_now"}

Ids = TypeVar("Ids", list[int], "array[int]")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids of a text, and the character of it with which each begins. Special tokens that were put before begin at 0."""

    ids: list[int]
    begins: list[int]


class Renderer:
    """`stop_ids` end an answer: the end-of-sequence ids of tokenizer and configuration, and the template's end of turn.

    Tokenising costs some microsecond and hundreds of bytes of memory a character, so with `context_tokens` given a prompt
    that cannot fit is refused before, by ContextLengthExceeded."""

    def __init__(self, tokenizer: Any, *, stop_ids: frozenset[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A saved tokenizer may carry its trainer's truncation; a prompt is never cut silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._longest_token_bytes = _longest_token_bytes(self._backend)
        self._tokeniser: Tokeniser = tokeniser_of(self._backend)
        self._writer = writer_of(tokenizer)
        self._token_bytes = TokenBytes(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._special_tokens = {str(word.content): int(token) for token, word in added.items() if word.special}
        self.stop_ids = stop_ids
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, folder: Path, *, light: bool = False) -> Renderer:
        """Return the renderer of the model in `folder`. Raises ModelError naming the file, or MissingExtra.

        `light` leaves out transformers where that gives the same, which starts in a fraction of the time."""
        tokenizer = _load_tokenizer(folder, light=light)
        config = _json(folder / "config.json")
        generation = _json(folder / "generation_config.json")
        ids = {tokenizer.eos_token_id, *_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
        template = str(tokenizer.chat_template or "")
        added = tokenizer.get_added_vocab()
        ids |= {added[text] for text in _TEXT_ENDS if text in added}
        # Where an answer is written in several channels, each ends with <|end|>, and the answer goes on.
        turn_ends = [text for text in _TURN_ENDS if text != "<|end|>" or "<|channel|>" not in template]
        ids |= {added[text] for text in turn_ends if text in added and text in template}
        declared = config.get("vocab_size")
        return cls(
            tokenizer,
            stop_ids=frozenset(ids - {None}),
            # The embedding may have more rows than the tokenizer has words.
            vocabulary=max(len(tokenizer), declared if isinstance(declared, int) else 0),
        )

    def chat(
        self,
        messages: Sequence[object],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        arguments: Mapping[str, Any] | None = None,
        context_tokens: int | None = None,
        owner: str = "",
    ) -> list[int]:
        """Return the token ids of a conversation as the model's template writes it, which sees `arguments` too. `owner`: whose
        it is; of what was tokenised for the same owner before nothing is tokenised again. Raises RequestError naming the
        place."""
        text = self.write(messages, tools=tools, add_generation_prompt=add_generation_prompt, arguments=arguments)
        return self.written(text, context_tokens=context_tokens, owner=owner)

    def written(self, text: str, *, context_tokens: int | None = None, owner: str = "") -> list[int]:
        """Return the token ids of a text that holds its special tokens already, as a template has written them."""
        self._refuse_too_long(text_bytes(text, param="messages"), context_tokens, param="messages")
        return self._begun(self._tokeniser.ids(text, owner=owner))

    def told(self, text: str, answers: Iterable[Generated], *, context_tokens: int | None = None, owner: str = "") -> Told:
        """Return what `written` does, but for answers that stand in the text, whose tokens are those that were generated. Of a
        text that begins as one before, of the same owner, that beginning is known at once."""
        encode = partial(self._each, context_tokens=context_tokens, owner=owner)
        told = self._stretches.told(text, answers, encode, owner=owner)
        return replace(told, ids=self._begun(told.ids))

    def packed(self, text: str, *, owner: str = "") -> array[int]:
        """Return what `written` does, as u32, for whoever makes keys of them and nothing else."""
        text_bytes(text, param="messages")
        return self._begun(self._tokeniser.packed(text, owner=owner))

    @cached_property
    def ends(self) -> frozenset[str]:
        """The texts of special tokens that end an answer."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(added[token].content for token in self.stop_ids if token in added)

    def write(
        self,
        messages: Sequence[object],
        *,
        tools: Sequence[object] | None = None,
        add_generation_prompt: bool = True,
        template: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        join_parts: bool = True,
    ) -> str:
        """Return the text of a conversation as the model's template writes it, or another `template`, with what more it is to
        see in `arguments`; `join_parts` as in `normal_messages`. Raises RequestError naming the place."""
        taken = sorted(_NOT_ARGUMENTS & (arguments or {}).keys())
        if taken:
            raise RequestError(f"chat_template_kwargs.{taken[0]} is not for a request to say", param="chat_template_kwargs")
        normal = normal_messages(messages, join_parts=join_parts)
        if not isinstance(self._writer, PlainTokenizer):  # templates change nothing that they see; for others nobody knows
            normal = [dict(message) for message in normal]
        described = normal_tools(tools)
        if not (template or self._tokenizer.chat_template):
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        from jinja2 import TemplateError

        try:
            return str(
                self._writer.apply_chat_template(
                    normal,
                    tools=described,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    chat_template=template,
                    **(arguments or {}),
                )
            )
        except RecursionError:
            raise RequestError(
                "messages or tools are nested too deeply for the model's chat template", param="messages"
            ) from None  # its trace is thousands of lines
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error

    def tokenise(self, text: str, *, special_tokens: bool) -> Tokens:
        """Return the ids of `text` and where each begins in it. Raises RequestError for what is no text."""
        text_bytes(text, param="prompt")
        ids: list[int] = []
        begins: list[int] = []
        before = 0
        parts = [text] if special_tokens else list(self._tokeniser.parts(text))
        for part, encoded in zip(parts, self._backend.encode_batch(parts, add_special_tokens=special_tokens), strict=True):
            ids += encoded.ids
            begins += [before + begin for begin, _ in encoded.offsets]
            before += len(part)
        return Tokens(ids, begins)

    def ids(self, text: str, *, special_tokens: bool) -> list[int]:
        """Return the ids of `text` alone, which takes half the time. Raises RequestError for what is no text."""
        return self._encode(text, special_tokens=special_tokens, param="prompt", context_tokens=None)

    @property
    def begin_id(self) -> int | None:
        """The token that this tokenizer names as the beginning of a text."""
        token = self._tokenizer.bos_token_id
        return None if token is None else int(token)

    def warm_up(self) -> None:
        """Render and tokenise once, so that the first request does not pay for compiling the template."""
        with suppress(RequestError):  # a template may want other messages than these
            self.decode(self.chat([{"role": "system", "content": "."}, {"role": "user", "content": "."}]))

    def completion(self, prompt: str | Sequence[int], *, context_tokens: int | None = None) -> list[int]:
        """Return the token ids of a plain prompt, with whatever the tokenizer puts before every text; ids pass unchanged."""
        if isinstance(prompt, str):
            ids = self._encode(prompt, special_tokens=True, param="prompt", context_tokens=context_tokens)
        else:
            refuse_too_long(len(prompt), context_tokens, param="prompt", exact=True)
            ids = self._checked(prompt)
        if not ids:
            raise RequestError("prompt is empty; send at least one token", param="prompt")
        return ids

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of `tokens`, with special tokens if wanted; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(tokens, skip_special_tokens=not special))

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Tokens that no text is tokenised to by its letters, by name."""
        return self._special_tokens

    @property
    def template(self) -> str:
        """The chat template; empty where there is none."""
        return str(self._tokenizer.chat_template or "")

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """How answers are read, where the model says so itself."""
        told = getattr(self._tokenizer, "response_template", None)
        return told if isinstance(told, Mapping) else None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token, which may be a part of a character; of a special one those of its name."""
        return self._token_bytes[token]

    @cached_property
    def _stretches(self) -> Stretches:
        return Stretches(self._tokeniser, self.ends)

    def _each(
        self, parts: list[str | array[int]] | list[str], *, context_tokens: int | None, owner: str
    ) -> list[Sequence[int]]:
        """Return the token ids of texts that a template wrote, and tokens between them as they are."""
        texts = [part for part in parts if isinstance(part, str)]
        nbytes = sum(text_bytes(text, param="messages") for text in texts)
        self._refuse_too_long(nbytes, context_tokens, param="messages")
        made = iter(self._tokeniser.each(texts, owner=owner))
        return [next(made) if isinstance(part, str) else self._tokeniser.shared(part) for part in parts]

    def _begun(self, ids: Ids) -> Ids:
        """Return the token ids of a conversation with what this tokenizer wants before each, whatever its template wrote."""
        return ids

    def _encode(self, text: str, *, special_tokens: bool, param: str, context_tokens: int | None) -> list[int]:
        self._refuse_too_long(text_bytes(text, param=param), context_tokens, param=param)
        if not special_tokens:
            return self._tokeniser.ids(text)
        return list(self._backend.encode_batch_fast([text], add_special_tokens=True)[0].ids)

    def _refuse_too_long(self, nbytes: int, context_tokens: int | None, *, param: str) -> None:
        if self._longest_token_bytes is not None:
            refuse_too_long(nbytes // self._longest_token_bytes, context_tokens, param=param, exact=False)

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        ids = list(prompt)
        for i, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocabulary:
                raise RequestError(f"prompt[{i}] is {token!r}; a token id is 0 to {self.vocabulary - 1}", param=f"prompt[{i}]")
        return ids


def text_bytes(text: str, *, param: str) -> int:
    """Return how long a text is in UTF-8. Raises RequestError for what is no text."""
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:  # a lone surrogate: "\ud800" is valid JSON and no text
        raise RequestError(f"{param} holds {text[error.start]!a}, which is no character", param=param) from error


def refuse_too_long(tokens: int, context_tokens: int | None, *, param: str, exact: bool) -> None:
    """Raise ContextLengthExceeded for a prompt of more tokens than the context has; `exact`: of at least so many."""
    if context_tokens is not None and tokens > context_tokens:
        raise ContextLengthExceeded(
            f"the prompt has {'' if exact else 'at least '}{tokens} tokens, but the context is {context_tokens} tokens; "
            "shorten the prompt",
            prompt_tokens=tokens,
            context_tokens=context_tokens,
            param=param,
        )


def _longest_token_bytes(backend: Any) -> int | None:
    """Return how many bytes of text one token stands for at most; None where that has no bound that is known.

    A vocabulary writes a token's bytes in at least as many bytes of UTF-8. But text may vanish before it is looked up:
    in tokens that take the spaces beside them, in a normalizer, in one unknown token for many characters."""
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    if not getattr(backend.model, "byte_fallback", False) and "ByteLevel" not in kinds(backend.pre_tokenizer):
        return None
    normalizers = kinds(backend.normalizer)
    if not normalizers <= {"NFC", "Sequence"}:
        return None
    shrinks = 4 if "NFC" in normalizers else 1  # composing leaves at least a third of the bytes
    return max((len(token.encode()) for token in backend.get_vocab()), default=1) * shrinks


def _load_tokenizer(folder: Path, *, light: bool) -> Any:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{folder} has no tokenizer.json; fetch the model again, with its tokenizer", path=file)
    if "model" not in _json(file):
        raise ModelError(f"{file} describes no tokenizer; fetch the model again", path=file)
    settings = _json(folder / "tokenizer_config.json")
    try:
        if light and (plain := load_plain(folder, settings)) is not None:
            return plain
        from transformers import AutoTokenizer
    except ImportError as error:
        needed = "render" if light else "torch"
        raise MissingExtra(f"rendering prompts needs transformers: pip install 'headstart[{needed}]'", extra=needed) from error
    except Exception as error:  # as below
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}; fetch the model again", path=file) from error
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # tokenizers raises no narrower kind for a file that it cannot read
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}; fetch the model again", path=file) from error


def _json(file: Path) -> dict[str, Any]:
    """The object in `file`, empty where there is none. Damage is found here because libraries name neither file nor cause."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON ({error}); fetch the model again", path=file) from error
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}", path=file, errno=error.errno) from error


def _ids(value: object) -> list[int]:
    return value if isinstance(value, list) else [value] if isinstance(value, int) else []
