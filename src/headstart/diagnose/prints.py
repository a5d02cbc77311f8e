"""What is known of a prompt without its text: names of its blocks, of its pieces and of some of their lines. Pure.

    prompt  ▓▓▓▓▓▓▓▓│▓▓▓▓▓▓▓▓│▓▓▓▓▓       chain: a name for every block of 64 tokens, which tells of all before it
            └system─┘└──user────┘        segments: a name for every piece and for some of its lines, wherever they stand

The chain says how much of a prompt another one had begun with; segments say which earlier prompt has most of it at all.
Where no tokenizer is known a block is 256 bytes of text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from headstart.block.keys import BLOCK_TOKENS
from headstart.diagnose.causes import Cause
from headstart.diagnose.known import Names
from headstart.diagnose.placing import begins_with_special, text_of
from headstart.diagnose.requests import Conversation, Piece, equal_form
from headstart.diagnose.texts import forms
from headstart.errors import RequestError
from headstart.render import Renderer

BLOCK_BYTES = 256  # 64 token ids as u32, or 64 tokens of text by estimate
RECORD = "headstart_record"
TENANT = "tenant"  # in `apart`, where tenants share nothing
_SHORTEST = 32  # characters of a piece or a line that has a name
_LINES = 16  # of a piece that have names
_AROUND_CHARS = 12  # that a piece costs besides its text: names, quotes, roles
_NameOf = Callable[[bytes], int]


@dataclass(frozen=True, slots=True)
class PiecePrint:
    """A piece by its name, and by its names without what single causes would change."""

    path: str
    kind: str
    chars: int
    name: int
    forms: Mapping[Cause, int]


@dataclass(frozen=True, slots=True)
class Print:
    """`weights` are the characters that each segment stands for, `ends` about how many tokens of the prompt there are up to its
    end. `apart` names what keeps requests from sharing; `pieces` are there only where the text is not."""

    chain: Names
    tokens: int
    exact: bool
    segments: Names
    weights: npt.NDArray[np.uint32]
    ends: npt.NDArray[np.uint32]
    apart: Mapping[str, str] = field(default_factory=dict)
    pieces: tuple[PiecePrint, ...] = ()

    def kept(self, blocks: int) -> int:
        """Return how many tokens are found again where the first `blocks` blocks are known; one is left to compute."""
        return max(0, min(blocks, (self.tokens - 1) // BLOCK_TOKENS)) * BLOCK_TOKENS

    def of_tenant(self, tenant: str) -> Print:
        """Return it as one that has nothing in common with those of other tenants."""
        name = xxhash.xxh3_64_intdigest(tenant.encode("utf-8", "surrogatepass"))
        return replace(self, chain=self.chain ^ np.uint64(name), apart={**self.apart, TENANT: tenant})

    def longer(self, content: bytes) -> Names:
        """Return the chain of `content`, which begins with this prompt."""
        return chain_of(content, _root(self.apart))


@dataclass(frozen=True, slots=True)
class Data:
    """A prompt as it is cut into blocks: token ids as u32, or text as UTF-8."""

    content: bytes
    exact: bool

    @property
    def tokens(self) -> int:
        return len(self.content) // 4


def data_of(conversation: Conversation, renderer: Renderer | None) -> Data:
    """Return what the blocks of a conversation are made of. Raises RequestError where template or tokenizer refuse it."""
    text = text_of(conversation, renderer)
    if not isinstance(text, str):
        try:
            return Data(np.array(text, np.uint32).tobytes(), exact=True)
        except (OverflowError, TypeError, ValueError):
            raise RequestError("a token id is a whole number from 0 on", param="prompt") from None
    if renderer is None:
        return Data(text.encode("utf-8", "surrogatepass"), exact=False)
    ids = renderer.ids(text, special_tokens=begins_with_special(conversation))
    return Data(np.array(ids, np.uint32).tobytes(), exact=True)


def with_answer(answer: str, content: bytes, renderer: Renderer | None, *, cut: bool) -> bytes | None:
    """Return a prompt with its answer behind it, which a server keeps as well; None for what is no text. Of an answer that was
    `cut` the last token is not kept: nobody computed what follows it."""
    if renderer is None:
        return content + f"assistant:\n{answer}<end>\n".encode("utf-8", "surrogatepass")
    try:
        ids = renderer.ids(answer, special_tokens=False)
        return content + np.array(ids[:-1] if cut else ids, np.uint32).tobytes()
    except RequestError:
        return None


def named_chain(conversation: Conversation, data: Data) -> Names:
    """Return the chain of a conversation alone."""
    return chain_of(data.content, _root(_apart(conversation, exact=data.exact)))


def chain_of(content: bytes, root: bytes, key: bytes = b"") -> Names:
    """Return the name of every whole block, each made from the one before."""
    names = []
    name = root
    for begin in range(0, len(content) - BLOCK_BYTES + 1, BLOCK_BYTES):
        name = hashlib.blake2b(name + content[begin : begin + BLOCK_BYTES], digest_size=8, key=key).digest()
        names.append(name)
    return np.frombuffer(b"".join(names), "<u8").astype(np.uint64)


def print_of(conversation: Conversation, data: Data) -> Print:
    """Return what a conversation is known by while its text can be looked up."""
    apart = _apart(conversation, exact=data.exact)
    names, weights, ends = _named(conversation, data.tokens, xxhash.xxh3_64_intdigest)
    return Print(chain_of(data.content, _root(apart)), data.tokens, data.exact, names, weights, ends, apart)


def _named(
    conversation: Conversation, tokens: int, name_of: _NameOf
) -> tuple[Names, npt.NDArray[np.uint32], npt.NDArray[np.uint32]]:
    """Return the names of all segments, what each weighs and about where it ends."""
    found: dict[int, tuple[int, int]] = {}
    end = 0
    for piece in _pieces(conversation):
        end += len(piece.text) + _AROUND_CHARS
        for name, weight in _segments(piece.text, name_of):
            found.setdefault(name, (weight, end))
    table = np.array(list(found.values()), np.int64).reshape(-1, 2)
    ends = table[:, 1] * tokens // max(1, end)
    return np.fromiter(found, np.uint64, len(found)), table[:, 0].astype(np.uint32), ends.astype(np.uint32)


def _apart(conversation: Conversation, *, exact: bool) -> dict[str, str]:
    said = {"model": conversation.model or "", **{name: equal_form(one) for name, one in conversation.adapter.items()}}
    said |= conversation.namespace
    if exact:  # as `judging.apart` has it
        said.pop("prompt_cache_key", None)
    return said


def _root(apart: Mapping[str, str]) -> bytes:
    return hashlib.blake2b(equal_form(apart).encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _pieces(conversation: Conversation) -> Iterator[Piece]:
    if isinstance(conversation.prompt, str):
        yield Piece(conversation.prompt_path, ("prompt",), conversation.prompt)
    elif isinstance(conversation.prompt, tuple):
        lines = [conversation.prompt[n : n + 16] for n in range(0, len(conversation.prompt), 16)]
        yield Piece(conversation.prompt_path, ("prompt",), "\n".join(" ".join(map(str, line)) for line in lines))
    yield from conversation.pieces


def _segments(text: str, name_of: _NameOf) -> Iterator[tuple[int, int]]:
    """Yield names of a text as a whole and of those of its lines that have the smallest ones: these stay when others change."""
    if len(text) < _SHORTEST:
        return
    content = text.encode("utf-8", "surrogatepass")
    yield name_of(content), len(text)
    lines = [line for line in content.splitlines() if len(line) >= _SHORTEST]
    if len(lines) < 2:
        lines = [content[n : n + 256] for n in range(0, len(content), 256)] if len(content) > 512 else []
    if lines:
        named = sorted((xxhash.xxh3_64_intdigest(line), line) for line in set(lines))
        few = max(2, min(_LINES, len(named) // 8))
        for _, line in named[:few]:
            yield name_of(line), max(1, len(text) // few)


# What `record` keeps.


def record_line(conversation: Conversation, key: bytes) -> dict[str, Any]:
    """Return what is kept of a request without its text, as JSON can hold it. Without `key` nobody can try texts against it."""

    def name_of(content: bytes) -> int:
        return int.from_bytes(hashlib.blake2b(content, digest_size=8, key=key).digest(), "little")

    def name_of_text(text: str) -> str:
        return f"{name_of(text.encode('utf-8', 'surrogatepass')):016x}"

    data = data_of(conversation, None)
    apart = _apart(conversation, exact=False)
    names, weights, ends = _named(conversation, data.tokens, name_of)
    pieces = []
    for piece in _pieces(conversation):
        spelled = {str(cause): name_of_text(form) for cause, form in forms(piece.text).items()} if piece.kind == "text" else {}
        pieces.append([piece.path, piece.kind, len(piece.text), name_of_text(piece.text), spelled])
    return {
        RECORD: 1,
        "tokens": data.tokens,
        "exact": data.exact,
        "apart": {name: one if name == "model" else name_of_text(one) for name, one in apart.items()},
        "chain": _packed(chain_of(data.content, _root(apart), key)),
        "segments": _packed(names),
        "weights": _packed(weights.astype(np.uint64)),
        "ends": _packed(ends.astype(np.uint64)),
        "pieces": pieces,
    }


def print_of_line(line: Mapping[str, Any]) -> Print | None:
    """Return what a line of `record` keeps; None where the line is something else. Raises RequestError for a damaged one."""
    if RECORD not in line or "chain" not in line:
        return None
    if line[RECORD] != 1:
        raise RequestError(f"was written by another version of headstart (record {line[RECORD]})")
    try:
        return Print(
            _unpacked(line["chain"]),
            int(line["tokens"]),
            bool(line["exact"]),
            _unpacked(line["segments"]),
            _unpacked(line["weights"]).astype(np.uint32),
            _unpacked(line["ends"]).astype(np.uint32),
            {str(name): str(one) for name, one in line["apart"].items()},
            tuple(
                PiecePrint(path, kind, chars, int(name, 16), {Cause(cause): int(one, 16) for cause, one in spelled.items()})
                for path, kind, chars, name, spelled in line["pieces"]
            ),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RequestError(f"is no whole line of a record: {error}") from error


def _packed(names: Names) -> str:
    return base64.b64encode(names.astype("<u8").tobytes()).decode("ascii")


def _unpacked(packed: str) -> Names:
    return np.frombuffer(base64.b64decode(packed, validate=True), "<u8").astype(np.uint64)
