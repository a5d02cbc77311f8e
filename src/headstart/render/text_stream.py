"""Token ids becoming text while they arrive: only what later tokens cannot change is handed out.

Held back are the bytes of an unfinished character and text that may be the beginning of a stop string:

    tokens ─▶ window of recent ids ─▶ new text ─▶ held │ safe ─▶ client
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from headstart.errors import RequestError
from headstart.render.renderer import Renderer

_UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character (yet)


class TextStream:
    """All pushes and the finish joined are `renderer.decode(tokens)` up to where the first stop string to be complete begins.

    Of stop strings that are complete at the same character the longest counts, of those that are complete within the first
    `min_tokens` tokens none. `special`: with the names of special tokens. Not safe between threads."""

    def __init__(self, renderer: Renderer, stop: Sequence[str] = (), *, min_tokens: int = 0, special: bool = False) -> None:
        for i, text in enumerate(stop):
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop[{i}] must be a string that is not empty", param="stop")
        self.met: str | None = None  # the stop string that ended it
        self._decode = partial(renderer.decode, special=True) if special else renderer.decode
        self._stop = tuple(stop)
        self._unlooked = min_tokens  # tokens still to come with which no stop string may be complete
        self._sent = 0  # characters
        self._held = ""
        self._window: list[int] = []  # ids already shown, kept as context, then ids that are not
        self._context = 0  # how many of them are context
        self._shown = ""  # the context's text

    @property
    def stopped(self) -> bool:
        return self.met is not None

    @property
    def characters(self) -> int:
        """How many characters there are so far, those that are held included: where the next token's text begins."""
        return self._sent + len(self._held)

    @property
    def sent(self) -> int:
        """How many characters were handed out."""
        return self._sent

    def push(self, token: int) -> str:
        """Return the text that is safe to send after `token`; nothing once a stop string was met."""
        if self.stopped:
            return ""
        ending = self._unlooked == 0
        self._unlooked = max(0, self._unlooked - 1)
        self._window.append(token)
        text = self._decode(self._window)
        if text.endswith(_UNFINISHED) or len(text) <= len(self._shown):
            return ""
        new = text[len(self._shown) :]
        # A decoder may treat a text's first token apart (it drops its space), so new ids are decoded behind older ones.
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._shown = self._decode(self._window)
        return self._handed_out(self._release(new, ending=ending))

    def finish(self) -> str:
        """Return what is still held: no token follows. Twice is fine."""
        if self.stopped:
            return ""
        rest = self._decode(self._window)[len(self._shown) :]
        self._window, self._context, self._shown = [], 0, ""
        safe = self._release(rest, ending=self._unlooked == 0)
        if not self.stopped:
            safe, self._held = safe + self._held, ""
        return self._handed_out(safe)

    def _handed_out(self, text: str) -> str:
        self._sent += len(text)
        return text

    def _release(self, new: str, *, ending: bool) -> str:
        text = self._held + new
        met = [(at + len(stop), at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if met and ending:
            _, at, self.met = min(met)
            self._held = ""
            return text[:at]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`, less than the whole of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
