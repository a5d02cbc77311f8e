"""Tiny GGUF files with random weights: a plain decoder, one with windows, hybrids, a recurrent one. Computed in milliseconds.

Their vocabulary is byte-level with some merges, a chat template and an end of turn, so that prompts go the whole way from
messages to tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np

Kind = Literal["llama", "gemma3", "lfm2", "granitehybrid", "mamba"]

WIDTH, HEADS, KV_HEADS, LAYERS, FEED = 64, 2, 1, 4, 128
CONTEXT = 4096
WINDOW = 96  # of the layers that have one
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "th e", "Ġ the", "i n", "e r", "Ġ a", "o n", "r e", "a t", "e n", "Ġ o", "f f", "Ġo f", "1 2", "Ċ Ċ")


def make_gguf(
    path: Path, kind: Kind = "llama", *, seed: int = 0, tensors_in_a_part: int = 0, says: Mapping[str, Any] | None = None
) -> Path:
    """Write a tiny model of that kind and return its path; `tensors_in_a_part`: in several files, which are named after it;
    `says`: what its metadata say otherwise."""
    random = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, kind, split_max_tensors=tensors_in_a_part)
    tokens = _write_vocabulary(writer)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(_LAYERS.get(kind, LAYERS))

    def tensor(name: str, *shape: int, scale: float = 0.2) -> None:
        writer.add_tensor(name, (random.standard_normal(shape) * scale).astype(np.float32))

    def ones(name: str, *shape: int) -> None:
        writer.add_tensor(name, np.ones(shape, np.float32))

    tensor("token_embd.weight", len(tokens), WIDTH, scale=1.0)
    _WRITE[kind](writer, tensor, ones)
    for key, value in (says or {}).items():
        if key in writer.kv_data[0]:
            writer.kv_data[0][key].value = value
        else:
            writer.add_uint32(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_vocabulary(writer: gguf.GGUFWriter) -> list[str]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    tokens = [chr(byte) for byte in printable] + [chr(0x100 + i) for i in range(len(others))]
    tokens += [merge.replace(" ", "") for merge in MERGES]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(SPECIAL)
    tokens += SPECIAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(tokens.index("<|endoftext|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    return tokens


def _attention(tensor: Any, layer: int) -> None:
    head = WIDTH // HEADS
    tensor(f"blk.{layer}.attn_q.weight", WIDTH, WIDTH)
    tensor(f"blk.{layer}.attn_k.weight", KV_HEADS * head, WIDTH)
    tensor(f"blk.{layer}.attn_v.weight", KV_HEADS * head, WIDTH)
    tensor(f"blk.{layer}.attn_output.weight", WIDTH, WIDTH)


def _feed_forward(tensor: Any, ones: Any, layer: int) -> None:
    ones(f"blk.{layer}.ffn_norm.weight", WIDTH)
    tensor(f"blk.{layer}.ffn_gate.weight", FEED, WIDTH)
    tensor(f"blk.{layer}.ffn_up.weight", FEED, WIDTH)
    tensor(f"blk.{layer}.ffn_down.weight", WIDTH, FEED)


def _llama(writer: gguf.GGUFWriter, tensor: Any, ones: Any) -> None:
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        _attention(tensor, layer)
        _feed_forward(tensor, ones, layer)


def _lfm2(writer: gguf.GGUFWriter, tensor: Any, ones: Any) -> None:
    kernel, head = 3, WIDTH // HEADS
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([0 if layer % 2 == 0 else KV_HEADS for layer in range(LAYERS)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_shortconv_l_cache(kernel)
    writer.add_vocab_size(256 + len(MERGES) + len(SPECIAL))
    ones("token_embd_norm.weight", WIDTH)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        if layer % 2 == 0:
            tensor(f"blk.{layer}.shortconv.conv.weight", WIDTH, kernel)
            tensor(f"blk.{layer}.shortconv.in_proj.weight", 3 * WIDTH, WIDTH)
            tensor(f"blk.{layer}.shortconv.out_proj.weight", WIDTH, WIDTH)
        else:
            _attention(tensor, layer)
            ones(f"blk.{layer}.attn_q_norm.weight", head)
            ones(f"blk.{layer}.attn_k_norm.weight", head)
        _feed_forward(tensor, ones, layer)


def _mamba(writer: gguf.GGUFWriter, tensor: Any, ones: Any) -> None:
    inner, state, kernel, rank = 2 * WIDTH, 16, 4, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        tensor(f"blk.{layer}.ssm_in.weight", 2 * inner, WIDTH)
        tensor(f"blk.{layer}.ssm_conv1d.weight", inner, kernel)
        tensor(f"blk.{layer}.ssm_conv1d.bias", inner)
        tensor(f"blk.{layer}.ssm_x.weight", rank + 2 * state, inner)
        tensor(f"blk.{layer}.ssm_dt.weight", inner, rank)
        tensor(f"blk.{layer}.ssm_dt.bias", inner)
        writer.add_tensor(f"blk.{layer}.ssm_a", -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1)))
        ones(f"blk.{layer}.ssm_d", inner)
        tensor(f"blk.{layer}.ssm_out.weight", WIDTH, inner)


def _gemma3(writer: gguf.GGUFWriter, tensor: Any, ones: Any) -> None:
    """Of six layers one sees everything."""
    head = WIDTH // HEADS
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_sliding_window(WINDOW)
    ones("output_norm.weight", WIDTH)
    for layer in range(_LAYERS["gemma3"]):
        ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        _attention(tensor, layer)
        ones(f"blk.{layer}.attn_q_norm.weight", head)
        ones(f"blk.{layer}.attn_k_norm.weight", head)
        ones(f"blk.{layer}.post_attention_norm.weight", WIDTH)
        _feed_forward(tensor, ones, layer)
        ones(f"blk.{layer}.post_ffw_norm.weight", WIDTH)


def _granitehybrid(writer: gguf.GGUFWriter, tensor: Any, ones: Any) -> None:
    """Mamba 2 and attention in turn."""
    inner, state, kernel, groups, heads = 2 * WIDTH, 16, 4, 1, 4
    channels = inner + 2 * groups * state
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([0 if layer % 2 == 0 else KV_HEADS for layer in range(LAYERS)])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_group_count(groups)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_embedding_scale(1.0)
    writer.add_residual_scale(1.0)
    writer.add_attention_scale((WIDTH // HEADS) ** -0.5)
    writer.add_logit_scale(1.0)
    ones("output_norm.weight", WIDTH)
    for layer in range(LAYERS):
        ones(f"blk.{layer}.attn_norm.weight", WIDTH)
        if layer % 2 == 0:
            tensor(f"blk.{layer}.ssm_in.weight", inner + channels + heads, WIDTH)
            tensor(f"blk.{layer}.ssm_conv1d.weight", channels, kernel)
            tensor(f"blk.{layer}.ssm_conv1d.bias", channels)
            tensor(f"blk.{layer}.ssm_dt.bias", heads)
            writer.add_tensor(f"blk.{layer}.ssm_a", -np.arange(1, heads + 1, dtype=np.float32)[:, None])
            ones(f"blk.{layer}.ssm_d", heads, 1)
            ones(f"blk.{layer}.ssm_norm.weight", groups, inner // groups)
            tensor(f"blk.{layer}.ssm_out.weight", WIDTH, inner)
        else:
            _attention(tensor, layer)
        _feed_forward(tensor, ones, layer)


_LAYERS: dict[Kind, int] = {"gemma3": 6}  # where not as many as all have
_WRITE = {"llama": _llama, "gemma3": _gemma3, "lfm2": _lfm2, "granitehybrid": _granitehybrid, "mamba": _mamba}
