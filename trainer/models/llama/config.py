"""Llama's shapes: flavors, names of parameters, and parameter, FLOP and activation counts as arithmetic.

Owns names and numbers only; imports no torch. Sources of the shapes: the config.json files published with Llama 2
(7B, 13B, 70B), Llama 3.1 (8B, 70B, 405B) and Llama 3.2 (1B, 3B). Llama 3.0 is the 3.1 shape with
rope_scaling_factor = 1.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LlamaConfig:
    """Widths of one model. `rope_scaling_factor` 1 means unscaled rotary frequencies."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_dim: int
    vocab_size: int
    head_dim: int = 0  # 0: dim // n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling_factor: float = 1.0
    rope_scaling_low_freq_factor: float = 1.0
    rope_scaling_high_freq_factor: float = 4.0
    rope_scaling_original_seq_len: int = 8192
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.dim % self.n_heads == 0:
            object.__setattr__(self, "head_dim", self.dim // self.n_heads)


def _llama2(dim: int, layers: int, heads: int, kv_heads: int, ffn: int) -> LlamaConfig:
    return LlamaConfig(dim, layers, heads, kv_heads, ffn, vocab_size=32000, rope_theta=10000.0)


def _llama3(dim: int, layers: int, heads: int, ffn: int, factor: float, tied: bool, head_dim: int = 128) -> LlamaConfig:
    return LlamaConfig(
        dim,
        layers,
        heads,
        n_kv_heads=8,
        ffn_dim=ffn,
        vocab_size=128256,
        head_dim=head_dim,
        rope_scaling_factor=factor,
        tie_embeddings=tied,
    )


DEBUG = LlamaConfig(dim=256, n_layers=6, n_heads=8, n_kv_heads=4, ffn_dim=768, vocab_size=4096)

FLAVORS: dict[str, dict[str, LlamaConfig]] = {
    "llama2": {
        "debugmodel": dataclasses.replace(DEBUG, rope_theta=10000.0),
        "7B": _llama2(4096, 32, 32, 32, 11008),
        "13B": _llama2(5120, 40, 40, 40, 13824),
        "70B": _llama2(8192, 80, 64, 8, 28672),
    },
    "llama3": {
        "debugmodel": DEBUG,
        "1B": _llama3(2048, 16, 32, 8192, factor=32.0, tied=True, head_dim=64),
        "3B": _llama3(3072, 28, 24, 8192, factor=32.0, tied=True),
        "8B": _llama3(4096, 32, 32, 14336, factor=8.0, tied=False),
        "70B": _llama3(8192, 80, 64, 28672, factor=8.0, tied=False),
        "405B": _llama3(16384, 126, 128, 53248, factor=8.0, tied=False),
    },
}


def build_llama_config(name: str, flavor: str, changes: dict[str, Any]) -> LlamaConfig:
    """Return the flavor's shape with `changes` applied; None keeps the flavor's. KeyError for an unknown flavor."""
    given = {key: value for key, value in changes.items() if value is not None}
    if {"dim", "n_heads"} & given.keys():
        given.setdefault("head_dim", 0)
    return dataclasses.replace(FLAVORS[name][flavor], **given)


_BLOCK_MODULES = (
    *("attention_norm", "attention.wq", "attention.wk", "attention.wv", "attention.wo"),
    *("ffn_norm", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
)


def weight_modules(c: LlamaConfig) -> list[str]:
    """Name the modules that use a weight, in the order of the model."""
    blocks = [f"layers.{i}.{name}" for i in range(c.n_layers) for name in _BLOCK_MODULES]
    return ["tok_embeddings", *blocks, "norm", "output"]


def linear_layers(c: LlamaConfig) -> dict[str, tuple[int, int]]:
    """Map the names of the linear layers, in the order of the model, to (output features, input features)."""
    heads, kv_heads = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    shapes = {
        "wq": (heads, c.dim),
        "wk": (kv_heads, c.dim),
        "wv": (kv_heads, c.dim),
        "wo": (c.dim, heads),
        "w1": (c.ffn_dim, c.dim),
        "w2": (c.dim, c.ffn_dim),
        "w3": (c.ffn_dim, c.dim),
        "output": (c.vocab_size, c.dim),
    }
    by_name = {name: shapes.get(name.rpartition(".")[2]) for name in weight_modules(c)}
    return {name: shape for name, shape in by_name.items() if shape}


def parameter_names(c: LlamaConfig) -> list[str]:
    """Name the parameters, in the order of the model; a tied output projection has none of its own."""
    return [f"{name}.weight" for name in weight_modules(c) if not (name == "output" and c.tie_embeddings)]


def count_parameters(c: LlamaConfig) -> int:
    """Count the parameters; a tied embedding counts once."""
    embeddings = c.vocab_size * c.dim * (1 if c.tie_embeddings else 2)
    return embeddings + c.n_layers * count_block_parameters(c) + c.dim


def count_block_parameters(c: LlamaConfig) -> int:
    """Count the parameters of one transformer block."""
    attention = c.dim * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads)
    return attention + 3 * c.dim * c.ffn_dim + 2 * c.dim


def count_flops_per_token(c: LlamaConfig, seq_len: int) -> int:
    """Count the floating-point operations of one token, forward and backward.

    PaLM appendix B (arXiv 2204.02311): 6 for each parameter that multiplies (the embedding is a lookup; a tied one
    still multiplies as the output projection), and 12 x layers x heads x head_dim x seq_len for attention, where the
    half that causality leaves out is counted too.
    """
    multiplying = c.n_layers * count_block_parameters(c) + c.dim + c.vocab_size * c.dim
    return 6 * multiplying + 12 * c.n_layers * c.n_heads * c.head_dim * seq_len


def count_activation_bytes(c: LlamaConfig, tokens: int, compute_bytes: int) -> int:
    """Estimate the bytes that one microbatch of `tokens` tokens keeps for backward, without recomputation.

    Counted per token and block, after Korthikanti et al. (arXiv 2205.05198, section 4) for SwiGLU and an attention
    that keeps no scores: both norms' inputs and outputs (4 dim), queries, keys and values, the attention output and
    its float32 row statistics, and the feed-forward layer's two branches and their product. The head keeps its input,
    the logits and their float32 copy with the gradient of the loss.
    """
    heads = c.n_heads * c.head_dim
    block = (4 * c.dim + 2 * heads + 2 * c.n_kv_heads * c.head_dim + 3 * c.ffn_dim) * compute_bytes + 4 * c.n_heads
    head = 2 * c.dim * compute_bytes + c.vocab_size * (compute_bytes + 8)
    return tokens * (c.n_layers * block + head)
