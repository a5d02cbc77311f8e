"""What a single token stands for, in bytes: a token may be a part of a character, which no text can say."""

from __future__ import annotations

import re
from typing import Any

from headstart.render.parts import kinds

_SPACE = "\u2581"  # what SentencePiece writes for one


class TokenBytes:
    """Bytes of the tokens of one tokenizer (of the library `tokenizers`)."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._added = {token: added.content for token, added in backend.get_added_tokens_decoder().items()}
        self._kinds = kinds(backend.decoder)

    def __getitem__(self, token: int) -> bytes:
        """Return the token's bytes; those of its name for a special one, none for a number that is no token."""
        if token in self._added:
            return str(self._added[token]).encode()
        written = self._backend.id_to_token(token)
        if written is None:
            return b""
        if "ByteLevel" in self._kinds:
            return b"".join(_BYTE_OF.get(character, character.encode()) for character in written)
        if self._kinds & {"Metaspace", "Replace"}:
            number = re.fullmatch(r"<0x([0-9A-F]{2})>", written)
            return bytes([int(number[1], 16)]) if number else written.replace(_SPACE, " ").encode()
        return str(self._backend.decode([token], skip_special_tokens=False)).encode()


def _byte_level() -> dict[str, bytes]:
    """Byte-level vocabularies write printable bytes as themselves and the others as U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {chr(0x100 + i): bytes([byte]) for i, byte in enumerate(others)}


_BYTE_OF = _byte_level()
