"""Tiny models that are not plain attention alone: kinds and configurations for `tiny_model_folder(kind, **config)`."""

from __future__ import annotations

from typing import Any

_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
_MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
_CONVOLUTIONS = {"conv_L_cache": 3, "layer_types": ["conv", "full_attention", "conv"]}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}

# With recurrent layers, kept apart for each request and served with the prefix cache.
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next, gated delta nets, experts": ("qwen3_next", {**_DELTA, **_EXPERTS, "decoder_sparse_step": 1}),
    "qwen3.5, gated delta nets": ("qwen3_5_text", _DELTA),
    "jamba, Mamba whose scan begins with nothing": (
        "jamba",
        {"mamba_d_state": 8, "mamba_dt_rank": 8, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 2},
    ),
    "zamba, Mamba that goes on by single rows": (
        "zamba",
        {
            "num_key_value_heads": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "n_mamba_heads": 2,
            "mamba_dt_rank": 8,
            "attention_head_dim": 32,
            "attention_hidden_size": 128,
        },
    ),
    "bamba, Mamba2": ("bamba", {**_MAMBA2, "attn_layer_indices": [1]}),
    "granite, Mamba2, experts": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "falcon-h1, both in each layer": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "mamba_n_heads": 4}),
    "zamba2, one attention in several places": (
        "zamba2",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "chunk_size": 16,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        },
    ),
    "lfm2, short convolutions": ("lfm2", {**_CONVOLUTIONS, **_ROPE, "block_ff_dim": 128, "block_auto_adjust_ff_dim": False}),
    "nemotron-h, Mamba2 and layers without either": (
        "nemotron_h",
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "mamba", "mlp"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "ssm_state_size": 16,
            "chunk_size": 16,
        },
    ),
    "kimi, gated delta nets and latent attention": (
        "kimi_linear",
        {
            "num_hidden_layers": 4,
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "mlp_layer_types": ["dense"] * 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": None,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "head_dim": 8,
        },
    ),
    "mamba2, no attention at all": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16, "expand": 2},
    ),
}

# Run as they are, without the prefix cache: (kind, configuration, what the reason says, how they are run).
AS_THEY_ARE: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "bloom, ALiBi": ("bloom", {}, "biased by distance (ALiBi)", "CHUNKS"),
    "llama, dynamic RoPE": (
        "llama",
        {
            "max_position_embeddings": 64,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0},
        },
        "dynamic RoPE",
        "WHOLE",
    ),
    "recurrent gemma, state in its modules": (
        "recurrent_gemma",
        {"lru_width": 64, "attention_window_size": 32, "num_key_value_heads": 1},
        "no layer keeps a state",
        "ANEW",
    ),
}
