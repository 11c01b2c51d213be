"""Hugging Face's names and config keys for our parameters and shapes, and Meta's.

Hugging Face's rotary layout is ours (see model.py), so tensors keep their values and only names change. In Meta's files
the names are ours, and the rotary layout is another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

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
        stretched = int(c.rope_scaling_factor * c.rope_scaling_original_seq_len)
        max_position_embeddings = max(max_position_embeddings, stretched)
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


_ABSENT = {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "quantization_config": None}


def from_hf_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Return the shape that a `config.json` describes. ValueError for what our Llama can't compute, and for damage."""
    if config.get("model_type") != "llama":
        raise ValueError(f"model_type is {config.get('model_type')!r}, and only 'llama' is known here")
    for key, only in _ABSENT.items():
        if config.get(key, only) != only:
            raise ValueError(f"{key} is {config[key]!r}, and the Llama here has only {only!r}")
    try:
        return LlamaConfig(
            dim=int(config["hidden_size"]),
            n_layers=int(config["num_hidden_layers"]),
            n_heads=int(config["num_attention_heads"]),
            n_kv_heads=int(config.get("num_key_value_heads") or config["num_attention_heads"]),
            head_dim=int(config.get("head_dim") or 0),
            ffn_dim=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            **_from_hf_rope(config),
        )
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except (TypeError, AttributeError) as error:
        raise ValueError(f"a value has the wrong type ({error})") from error


def _from_hf_rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary frequencies; up to transformers 4 the base stands beside `rope_scaling`, since 5 inside."""
    rope: Mapping[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = {"rope_theta": float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return found
    if kind != "llama3":
        raise ValueError(f"rope_type is {kind!r}, and only 'default' and 'llama3' are known here")
    return found | {
        "rope_scaling_factor": float(rope["factor"]),
        "rope_scaling_low_freq_factor": float(rope["low_freq_factor"]),
        "rope_scaling_high_freq_factor": float(rope["high_freq_factor"]),
        "rope_scaling_original_seq_len": int(rope["original_max_position_embeddings"]),
    }


def from_meta_config(params: Mapping[str, Any], ffn_dim: int, vocab_size: int) -> LlamaConfig:
    """Return the shape that Meta's `params.json` describes; the two widths are those of the tensors.

    ValueError for scaled rotary frequencies (Llama 3.1 and 3.2): the file doesn't say by how much.
    """
    if params.get("use_scaled_rope"):
        raise ValueError("use_scaled_rope: params.json doesn't tell the factor, and Hugging Face's config.json does")
    dim, heads = int(params["dim"]), int(params["n_heads"])
    return LlamaConfig(
        dim=dim,
        n_layers=int(params["n_layers"]),
        n_heads=heads,
        n_kv_heads=int(params.get("n_kv_heads") or heads),
        ffn_dim=ffn_dim,
        vocab_size=vocab_size,
        norm_eps=float(params.get("norm_eps", 1e-5)),
        rope_theta=float(params.get("rope_theta", 10000.0)),
    )


def from_meta_tensor(c: LlamaConfig, name: str, tensor: Tensor) -> Tensor:
    """Return our values of Meta's tensor `name`: its rotary pairs are neighbours, ours stand half a head apart."""
    if not name.endswith(("attention.wq.weight", "attention.wk.weight")):
        return tensor
    return tensor.unflatten(0, (-1, c.head_dim // 2, 2)).transpose(1, 2).reshape(tensor.shape)
