"""Prompts to token ids through the model's own tokenizer and chat template, and token ids back to text.

A renderer does not change after it was loaded; any number of threads may use one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from headstart.errors import MissingExtra, ModelError, RequestError
from headstart.render.messages import normal_messages, normal_tools

# Not every model's generation_config.json lists all tokens that end an answer. A text's end counts wherever it is in the
# vocabulary, a turn's end only where the model's own template writes it.
_TEXT_ENDS = ("<|endoftext|>", "<|end_of_text|>")
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "<|eot|>", "</s>")


class Renderer:
    """`stop_ids` end an answer: the end-of-sequence ids of tokenizer and configuration, and the template's end of turn."""

    def __init__(self, tokenizer: Any, *, stop_ids: frozenset[int], vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        # A saved tokenizer may carry its trainer's truncation; a prompt is never cut silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.stop_ids = stop_ids
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """Return the renderer of the model in `folder`. Raises ModelError naming the file, or MissingExtra."""
        tokenizer = _load_tokenizer(folder)
        config = _json(folder / "config.json")
        generation = _json(folder / "generation_config.json")
        ids = {tokenizer.eos_token_id, *_ids(config.get("eos_token_id")), *_ids(generation.get("eos_token_id"))}
        template = str(tokenizer.chat_template or "")
        added = tokenizer.get_added_vocab()
        ids |= {added[text] for text in _TEXT_ENDS if text in added}
        ids |= {added[text] for text in _TURN_ENDS if text in added and text in template}
        declared = config.get("vocab_size")
        return cls(
            tokenizer,
            stop_ids=frozenset(ids - {None}),
            # The embedding may have more rows than the tokenizer has words.
            vocabulary=max(len(tokenizer), declared if isinstance(declared, int) else 0),
        )

    def chat(
        self, messages: Sequence[object], *, tools: Sequence[object] | None = None, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation as the model's template writes it. Raises RequestError naming the place."""
        normal = normal_messages(messages)
        described = normal_tools(tools)
        if not self._tokenizer.chat_template:
            raise RequestError("this model has no chat template; use /v1/completions", param="messages")
        from jinja2 import TemplateError

        try:
            text = self._tokenizer.apply_chat_template(
                normal, tools=described, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise RequestError(f"the model's chat template refuses these messages: {error}", param="messages") from error
        return self._encode(text, special_tokens=False, param="messages")  # the template has written them

    def completion(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the token ids of a plain prompt, with whatever the tokenizer puts before every text; ids pass unchanged."""
        ids = self._encode(prompt, special_tokens=True, param="prompt") if isinstance(prompt, str) else self._checked(prompt)
        if not ids:
            raise RequestError("prompt is empty; send at least one token", param="prompt")
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` without special tokens; bytes that are not UTF-8 become U+FFFD."""
        return str(self._backend.decode(tokens, skip_special_tokens=True))

    def _encode(self, text: str, *, special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # a lone surrogate: "\ud800" is valid JSON and no text
            raise RequestError(f"{param} holds {text[error.start]!a}, which is no character", param=param) from error
        # The fast batch leaves out offsets, which cost as much as the rest.
        return list(self._backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0].ids)

    def _checked(self, prompt: Sequence[int]) -> list[int]:
        ids = list(prompt)
        for i, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocabulary:
                raise RequestError(f"prompt[{i}] is {token!r}; a token id is 0 to {self.vocabulary - 1}", param=f"prompt[{i}]")
        return ids


def _load_tokenizer(folder: Path) -> Any:
    file = folder / "tokenizer.json"
    if not file.exists():
        raise ModelError(f"{folder} has no tokenizer.json; fetch the model again, with its tokenizer", path=file)
    if "model" not in _json(file):
        raise ModelError(f"{file} describes no tokenizer; fetch the model again", path=file)
    _json(folder / "tokenizer_config.json")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise MissingExtra("rendering prompts needs transformers: pip install 'headstart[torch]'", extra="torch") from error
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
