"""Llama (arXiv 2302.13971, 2307.09288, 2407.21783) as plain single-device modules.

Knows nothing of ranks, sharding, compilation or losses. Built on the meta device; every weight's first value is
declared by `initial_std` and drawn elsewhere, by name. No buffers: positions are an argument and rotary angles are
computed from them, so no state can be left uninitialised. Rotary pairs are feature i and i + E/2, as in Hugging Face
checkpoints, so weights move to and from those without permutation.

Shape suffixes: B rows, T tokens, D width, H query heads, K key/value heads, E head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.llama.config import LlamaConfig, parameter_names

Rotation = tuple[Tensor, Tensor]

ALL_ONES = 0.0  # as a standard deviation: nothing is drawn, and each value starts at one


def rotary_frequencies(c: LlamaConfig, device: torch.device) -> Tensor:
    """Return the E/2 rotary frequencies in radians per position, float32.

    theta ** (-2i/E) of RoFormer (arXiv 2104.09864, section 3.2.2). With a scaling factor, Llama 3.1's rule: wavelengths
    longer than original_seq_len / low_freq_factor are divided by the factor, those shorter than
    original_seq_len / high_freq_factor stay, and those between are interpolated.
    """
    exponents = torch.arange(0, c.head_dim, 2, dtype=torch.float32, device=device) / c.head_dim
    frequencies = 1.0 / c.rope_theta**exponents
    if c.rope_scaling_factor == 1.0:
        return frequencies
    low, high = c.rope_scaling_low_freq_factor, c.rope_scaling_high_freq_factor
    turns = c.rope_scaling_original_seq_len * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / c.rope_scaling_factor)


def rotate(x_BTHE: Tensor, rotation: Rotation) -> Tensor:
    """Rotate each pair (feature i, feature i + E/2) by its angle, in float32; the result has x's dtype."""
    cos_BT1E, sin_BT1E = rotation
    first, second = x_BTHE.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos_BT1E - second * sin_BT1E, second * cos_BT1E + first * sin_BT1E), dim=-1)
    return turned.type_as(x_BTHE)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467), the division in float32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return scaled.type_as(x) * self.weight


class CausalAttention(nn.Module):
    """softmax(q k^T / sqrt(E)) v over the tokens not after the query. No parameters: the seam for other kernels."""

    def forward(self, q_BTHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor) -> Tensor:
        groups = q_BTHE.shape[2] // k_BTKE.shape[2]
        q, k, v = (x.transpose(1, 2) for x in (q_BTHE, k_BTKE, v_BTKE))
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class SelfAttention(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.wq = nn.Linear(c.dim, c.n_heads * c.head_dim, bias=False)
        self.wk = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.wv = nn.Linear(c.dim, c.n_kv_heads * c.head_dim, bias=False)
        self.wo = nn.Linear(c.n_heads * c.head_dim, c.dim, bias=False)
        self.attention = CausalAttention()

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        # The number of heads is whatever the projection yields, so the same lines run on a rank's part of the heads.
        q, k, v = (w(x_BTD).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        out_BTHE = self.attention(rotate(q, rotation), rotate(k, rotation), v)
        return self.wo(out_BTHE.flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(c.dim, c.ffn_dim, bias=False)
        self.w2 = nn.Linear(c.ffn_dim, c.dim, bias=False)
        self.w3 = nn.Linear(c.dim, c.ffn_dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTD)) * self.w3(x_BTD))


class Block(nn.Module):
    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.dim, c.norm_eps)
        self.attention = SelfAttention(c)
        self.ffn_norm = RMSNorm(c.dim, c.norm_eps)
        self.feed_forward = FeedForward(c)

    def forward(self, x_BTD: Tensor, rotation: Rotation) -> Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation)
        return x_BTD + self.feed_forward(self.ffn_norm(x_BTD))


class Llama(nn.Module):
    """The whole model. A child that is None is skipped: a part of the model is the same class with fewer children."""

    def __init__(self, c: LlamaConfig) -> None:
        super().__init__()
        self.config = c
        self.tok_embeddings = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.n_layers)})
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.output = nn.Linear(c.dim, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, x: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Return logits_BTV in the compute dtype.

        `x` is token ids (B, T), or hidden states (B, T, D) where `tok_embeddings` is None. Positions default to 0..T-1.
        """
        if positions_BT is None:
            positions_BT = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        angles_BTE = positions_BT[..., None] * rotary_frequencies(self.config, x.device)
        rotation = (angles_BTE.cos().unsqueeze(2), angles_BTE.sin().unsqueeze(2))

        h_BTD = self.tok_embeddings(x) if self.tok_embeddings is not None else x
        for block in self.layers.values():
            h_BTD = block(h_BTD, rotation)
        h_BTD = self.norm(h_BTD) if self.norm is not None else h_BTD
        return self.output(h_BTD) if self.output is not None else h_BTD


def initial_std(c: LlamaConfig) -> Mapping[str, float]:
    """Map each parameter name to the standard deviation of its initial values, or to ALL_ONES.

    0.02 for matrices, and 0.02 / sqrt(2 x layers) for those that write into the residual stream (GPT-2, section 2.3 of
    Radford et al. 2019), so that the stream's variance doesn't grow with depth; the embedding has 1, because RMSNorm
    divides by its scale anyway, except where it is tied to the output projection.
    """
    into_stream = 0.02 / math.sqrt(2 * c.n_layers)
    by_module = {
        "tok_embeddings": 0.02 if c.tie_embeddings else 1.0,
        **dict.fromkeys(("attention_norm", "ffn_norm", "norm"), ALL_ONES),
        **dict.fromkeys(("wq", "wk", "wv", "w1", "w3"), 0.02),
        **dict.fromkeys(("wo", "w2"), into_stream),
        "output": 1 / math.sqrt(c.dim),
    }
    return {name: by_module[name.split(".")[-2]] for name in parameter_names(c)}
