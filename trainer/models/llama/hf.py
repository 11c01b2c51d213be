"""Hugging Face's names and config keys for our parameters and shapes.

The rotary layout is the same on both sides (see model.py), so tensors keep their values and only names change.
"""

from __future__ import annotations

import re
from typing import Any

from trainer.models.llama.config import LlamaConfig

_TOP = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.wq.weight": "self_attn.q_proj.weight",
    "attention.wk.weight": "self_attn.k_proj.weight",
    "attention.wv.weight": "self_attn.v_proj.weight",
    "attention.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "feed_forward.w1.weight": "mlp.gate_proj.weight",
    "feed_forward.w2.weight": "mlp.down_proj.weight",
    "feed_forward.w3.weight": "mlp.up_proj.weight",
}


def to_hf_name(name: str) -> str:
    """Return Hugging Face's name of our parameter `name`. KeyError for an unknown one."""
    block = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
    return f"model.layers.{block[1]}.{_BLOCK[block[2]]}" if block else _TOP[name]


def to_hf_config(c: LlamaConfig, max_position_embeddings: int) -> dict[str, Any]:
    """Return the `config.json` keys that describe the shape `c` to Hugging Face's LlamaConfig."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling_factor != 1.0:
        rope |= {
            "rope_type": "llama3",
            "factor": c.rope_scaling_factor,
            "low_freq_factor": c.rope_scaling_low_freq_factor,
            "high_freq_factor": c.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": c.rope_scaling_original_seq_len,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": c.dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.ffn_dim,
        "vocab_size": c.vocab_size,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": rope,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": c.tie_embeddings,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
    }
