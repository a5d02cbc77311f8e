"""python -m headstart.engine.convert SOURCE.gguf FOLDER: a GGUF model as float32 safetensors with its tokenizer and template.

Runs in a process of its own: gigabytes of working memory, progress bars and warnings of the libraries end with it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def convert(source: Path, folder: Path) -> None:
    place, file = str(source.parent), source.name
    # transformers treats GGUF as a quantiser and refuses to save what it has not unpacked.
    model = AutoModelForCausalLM.from_pretrained(
        place, gguf_file=file, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    for field in ("quantization_config", "_model_name_or_path"):
        if hasattr(model.config, field):
            delattr(model.config, field)
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(place, gguf_file=file)
    # The GGUF names its pre-tokenizer ("smollm": every digit alone), which transformers does not read from there.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
