"""The renderer of a GGUF: its own tokenizer, as libllama reads it, and the chat template that it carries.

The library `tokenizers` knows the kinds of Hugging Face's files; a GGUF names its pre-tokenizer by a word that only llama.cpp
has the meaning of. So the tokens here are libllama's own, and equal to what any program on it makes of the same text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from headstart.render.plain import PlainTokenizer
from headstart.render.renderer import Ids, Renderer, Tokens, text_bytes
from headstart.render.special import Special
from headstart.render.tokenising import Tokeniser


class Words(Protocol):
    """A vocabulary; safe from several threads."""

    size: int

    @property
    def begin_id(self) -> int | None: ...

    @property
    def end_id(self) -> int | None: ...

    @property
    def begins(self) -> bool:
        """Whether every text begins with `begin_id`."""
        ...

    def stop_ids(self) -> frozenset[int]: ...

    def name(self, token: int) -> str: ...

    def tokenise(self, text: str, *, special_tokens: bool) -> list[int]: ...

    def token_bytes(self, token: int) -> bytes: ...

    def special_tokens(self) -> dict[str, int]: ...

    def looked_for(self) -> dict[str, bool]:
        """Return the names of tokens that are looked for in a text before all else; whether they take spaces beside them."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str: ...


class GGUFRenderer(Renderer):
    """See `Renderer`."""

    def __init__(self, words: Words, *, template: str | None) -> None:
        named = {"bos_token": words.begin_id, "eos_token": words.end_id}
        special = {name: words.name(token) for name, token in named.items() if token is not None}
        self._words = words
        self._tokenizer = self._writer = PlainTokenizer(None, template=template, special=special)
        self._longest_token_bytes = max(len(words.name(token).encode()) for token in range(words.size))
        self._tokeniser = Tokeniser(
            lambda texts: [words.tokenise(text, special_tokens=False) for text in texts],
            _special(words.looked_for()),
            vocabulary=words.size,
        )
        self.stop_ids = words.stop_ids()
        self._special_tokens = words.special_tokens()
        self.vocabulary = words.size

    @property
    def begin_id(self) -> int | None:
        return self._words.begin_id

    @property
    def ends(self) -> frozenset[str]:
        return frozenset(map(self._words.name, self.stop_ids))

    def tokenise(self, text: str, *, special_tokens: bool) -> Tokens:
        text_bytes(text, param="prompt")
        ids = self._words.tokenise(text, special_tokens=special_tokens)
        data, at, begins = text.encode(), 0, []
        characters = 0
        for token in ids:
            written = self._words.token_bytes(token)
            inside = bool(written) and written[0] & 0xC0 == 0x80  # of a character that began with a token before
            begins.append(max(0, characters - inside))
            if not data.startswith(written, at):  # a beginning that stands in no text, or a space that was put before
                written = written.removeprefix(b" ")
                if not data.startswith(written, at):
                    continue
            # A byte that goes on with a character begins none.
            characters += sum(byte & 0xC0 != 0x80 for byte in written)
            at += len(written)
        return Tokens(ids, begins)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        return self._words.decode(tokens, special=special)

    def token_bytes(self, token: int) -> bytes:
        return self._words.token_bytes(token)

    def _begun(self, ids: Ids) -> Ids:
        begin = self._words.begin_id
        if self._words.begins and begin is not None and (not ids or ids[0] != begin):
            ids.insert(0, begin)  # not every template writes the beginning that the file asks for
        return ids

    def _encode(self, text: str, *, special_tokens: bool, param: str, context_tokens: int | None) -> list[int]:
        self._refuse_too_long(text_bytes(text, param=param), context_tokens, param=param)
        return self._words.tokenise(text, special_tokens=True) if special_tokens else self._tokeniser.ids(text)


def _special(looked_for: Mapping[str, bool]) -> Special:
    if any("\ufffd" in name for name in looked_for):
        return Special(())  # the bytes of such a name are no text, and may be found within a character
    others = {name for name, takes_spaces in looked_for.items() if takes_spaces}
    # Libllama looks for the longest first, wherever it stands: cut only where that makes no difference.
    return Special(looked_for.keys() - others, others, certain_alone=True)
