"""Text to token ids and back, with the model's own tokenizer and chat template. Heavy libraries are imported where used."""

from headstart.render.gguf import GGUFRenderer
from headstart.render.renderer import Renderer, Tokens
from headstart.render.text_stream import TextStream

__all__ = ["GGUFRenderer", "Renderer", "TextStream", "Tokens"]
