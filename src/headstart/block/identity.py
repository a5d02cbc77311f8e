"""What the numbers in a KV cache mean: weights, architecture and position settings, adapters, all by content. Pure.

An identity starts the hash chain, so a block computed by other weights can never be found under this one's keys.
`engine` makes one from a checkpoint; nothing here reads files.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from hashlib import sha256

from headstart.block.framing import frame
from headstart.block.keys import BLOCK_TOKENS

_DOMAIN = b"headstart identity 1\0"
_TAG_BLOCK_TOKENS = 1
_TAG_WEIGHTS = 2
_TAG_ARCHITECTURE = 3
_TAG_ADAPTER = 4
_TAG_VERSION = 5

# Fields of a Hugging Face configuration that only name, describe or set defaults outside the forward pass. The
# arithmetic's dtype belongs to the representation. Placeholder ids (image_token_id …) steer the forward pass and stay.
_DESCRIPTIVE = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "bos_token_id",
        "decoder_start_token_id",
        "do_sample",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "label2id",
        "max_length",
        "max_new_tokens",
        "min_length",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "temperature",
        "top_k",
        "top_p",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Identity:
    """`weights`: digest of the checkpoint's tensors. `architecture`: canonical bytes of every configuration field that
    changes the numbers (RoPE and YaRN settings, window, norms …). `adapters`: content digests in the order applied.
    `version`: given by the operator for weights that change while serving; None otherwise.
    """

    weights: bytes
    architecture: bytes
    adapters: tuple[bytes, ...] = ()
    version: str | None = None

    def __post_init__(self) -> None:
        if not self.weights or not all(self.adapters):
            raise ValueError("an identity needs the content digest of its weights and of each adapter; one is empty")

    def root(self) -> bytes:
        """Return the 32 bytes that stand before the first block's key: SHA-256 over tagged, length-framed fields."""
        fields = [
            frame(_TAG_BLOCK_TOKENS, struct.pack("<I", BLOCK_TOKENS)),
            frame(_TAG_WEIGHTS, self.weights),
            frame(_TAG_ARCHITECTURE, self.architecture),
            *(frame(_TAG_ADAPTER, adapter) for adapter in self.adapters),
        ]
        if self.version is not None:
            fields.append(frame(_TAG_VERSION, self.version.encode()))
        return sha256(_DOMAIN + b"".join(fields)).digest()


def canonical_architecture(config: dict[str, object]) -> bytes:
    """Return canonical bytes (sorted-key compact JSON) of a Hugging Face `config.json`, less fields that only name or
    describe: `_name_or_path`, `transformers_version`, `torch_dtype`, `dtype`, `use_cache`, token-id defaults … Unknown
    fields stay in: a miss too many is better than a wrong answer.

    Nested configurations (`text_config` …) lose the same fields; `quantization_config` is kept whole. Raises TypeError
    for a value that JSON does not know.
    """
    return json.dumps(_without_descriptions(config), sort_keys=True, separators=(",", ":")).encode()


def _without_descriptions(config: dict[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in config.items():
        if name in _DESCRIPTIVE:
            continue
        # Only what is called a configuration holds these fields; in any other table a like name may mean something else.
        nested = name.endswith("_config") and name != "quantization_config" and isinstance(value, dict)
        kept[name] = _without_descriptions(value) if nested and isinstance(value, dict) else value
    return kept
