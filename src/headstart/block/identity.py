"""What the numbers in a KV cache mean: weights, architecture and position settings, adapters, all by content. Pure.

An identity starts the hash chain, so a block computed by other weights can never be found under this one's keys.
`engine` makes one from a checkpoint; nothing here reads files.
"""

from __future__ import annotations

from dataclasses import dataclass


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

    def root(self) -> bytes:
        """Return the 32 bytes that stand before the first block's key: SHA-256 over tagged, length-framed fields."""
        raise NotImplementedError


def canonical_architecture(config: dict[str, object]) -> bytes:
    """Return canonical bytes (sorted-key compact JSON) of a Hugging Face `config.json`, less fields that only name or
    describe: `_name_or_path`, `transformers_version`, `torch_dtype`, `dtype`, `use_cache`, token-id defaults … Unknown
    fields stay in: a miss too many is better than a wrong answer."""
    raise NotImplementedError
