"""Hugging Face decoders through our own attention and KV memory, with continuous batching and the prefix cache below.

`open_engine(folder, config, on_progress=…)` is the door. Needs the extra `headstart[torch]`.
"""
