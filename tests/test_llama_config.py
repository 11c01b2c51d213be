"""Laws of Llama's shapes: published parameter counts, and FLOPs counted by hand."""

from __future__ import annotations

import pytest

from trainer.models.llama.config import (
    FLAVORS,
    LlamaConfig,
    build_llama_config,
    count_activation_bytes,
    count_block_parameters,
    count_flops_per_token,
    count_parameters,
)

# From the model cards and the tensors published on the Hugging Face hub.
PUBLISHED_PARAMETERS = {
    ("llama2", "7B"): 6_738_415_616,
    ("llama2", "13B"): 13_015_864_320,
    ("llama2", "70B"): 68_976_648_192,
    ("llama3", "1B"): 1_235_814_400,
    ("llama3", "3B"): 3_212_749_824,
    ("llama3", "8B"): 8_030_261_248,
    ("llama3", "70B"): 70_553_706_496,
    ("llama3", "405B"): 405_853_388_800,
}

TINY = LlamaConfig(dim=4, n_layers=3, n_heads=2, n_kv_heads=1, ffn_dim=10, vocab_size=7)
# By hand: wq 4x4, wk and wv 4x2 each, wo 4x4; three 4x10 matrices; two norms of 4.
TINY_BLOCK = (16 + 8 + 8 + 16) + 3 * 40 + 2 * 4
TINY_MULTIPLYING = 3 * TINY_BLOCK + 4 + 7 * 4


@pytest.mark.parametrize(("name", "flavor"), PUBLISHED_PARAMETERS)
def test_parameters_are_as_published(name: str, flavor: str) -> None:
    assert count_parameters(FLAVORS[name][flavor]) == PUBLISHED_PARAMETERS[name, flavor]


def test_every_flavor_but_the_debug_model_has_a_published_count() -> None:
    flavors = {(name, flavor) for name, table in FLAVORS.items() for flavor in table}
    assert flavors - PUBLISHED_PARAMETERS.keys() == {("llama2", "debugmodel"), ("llama3", "debugmodel")}


def test_parameters_of_a_tiny_model_are_those_counted_by_hand() -> None:
    assert count_block_parameters(TINY) == TINY_BLOCK == 176
    assert count_parameters(TINY) == 3 * 176 + 2 * 28 + 4


def test_a_tied_embedding_counts_once_but_still_multiplies() -> None:
    tied = build_llama_config("llama3", "8B", {"tie_embeddings": True})
    untied = FLAVORS["llama3"]["8B"]
    assert count_parameters(untied) - count_parameters(tied) == 128256 * 4096
    assert count_flops_per_token(untied, 512) == count_flops_per_token(tied, 512)


@pytest.mark.parametrize("seq_len", [1, 5, 2048])
def test_flops_of_a_tiny_model_are_those_counted_by_hand(seq_len: int) -> None:
    # Forward: 2 for each parameter that multiplies. Attention per layer and head: 2 x seq_len x 2 for the scores and
    # as many for the values. Backward costs twice the forward.
    forward = 2 * TINY_MULTIPLYING + 3 * 2 * (2 * seq_len * 2 + 2 * seq_len * 2)
    assert count_flops_per_token(TINY, seq_len) == 3 * forward


def test_flops_of_8b_at_8192_tokens() -> None:
    # 6 x (8,030,261,248 - 525,336,576 looked up) + 12 x 32 x 4096 x 8192
    assert count_flops_per_token(FLAVORS["llama3"]["8B"], 8192) == 45_029_548_032 + 12_884_901_888


def test_activations_grow_with_tokens_and_width_of_compute() -> None:
    one = count_activation_bytes(TINY, tokens=1, compute_bytes=2)
    # By hand: a block 2 x (16 + 8 + 4 + 30) + 8, the head 2 x 8 + 7 x 10.
    assert one == 3 * (2 * 58 + 8) + 16 + 70
    assert count_activation_bytes(TINY, tokens=10, compute_bytes=2) == 10 * one
    assert count_activation_bytes(TINY, tokens=1, compute_bytes=4) > one


def test_changes_replace_widths_and_none_keeps_them() -> None:
    changed = build_llama_config("llama3", "debugmodel", {"dim": 64, "n_layers": 2, "ffn_dim": None})
    assert (changed.dim, changed.n_layers, changed.ffn_dim, changed.head_dim) == (64, 2, 768, 8)
    assert build_llama_config("llama3", "1B", {}).head_dim == 64
    assert build_llama_config("llama3", "1B", {"dim": 1024}).head_dim == 32
    assert build_llama_config("llama3", "1B", {"dim": 1024, "head_dim": 64}).head_dim == 64
