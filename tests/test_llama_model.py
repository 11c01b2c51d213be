"""The plain model against Hugging Face's Llama, and against its own arithmetic."""

import dataclasses

import pytest
import torch
import transformers

from trainer.models.llama.config import FLAVORS, LlamaConfig, count_parameters, parameter_names, weight_modules
from trainer.models.llama.hf import to_hf_config, to_hf_name
from trainer.models.llama.model import ALL_ONES, Llama, initial_std

TINY = LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, ffn_dim=56, vocab_size=97, rope_theta=10000.0)
# Original context 8 puts the tiny model's wavelengths on all three sides of Llama 3.1's rule.
SCALED = {"rope_theta": 500000.0, "rope_scaling_factor": 8.0, "rope_scaling_original_seq_len": 8}
FAMILIES = {
    "llama2": TINY,
    "llama2-gqa": dataclasses.replace(TINY, n_kv_heads=2),
    "llama3": dataclasses.replace(TINY, n_kv_heads=1, rope_theta=500000.0),
    "llama3.1": dataclasses.replace(TINY, n_kv_heads=2, **SCALED),
    "llama3.2": dataclasses.replace(TINY, n_kv_heads=2, tie_embeddings=True, **{**SCALED, "rope_scaling_factor": 32.0}),
    "wide-heads": dataclasses.replace(TINY, head_dim=16),
}
# Two float32 evaluations of the same formula in another order of sums.
TOLERANCE = 1e-5


def build_random(c: LlamaConfig) -> Llama:
    torch.manual_seed(0)
    model = Llama(c)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, 0.3)
    return model


def build_pair(c: LlamaConfig):
    ours = build_random(c)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**to_hf_config(c, 64)))
    weights = {to_hf_name(name): value.detach().clone() for name, value in ours.named_parameters()}
    missing, unexpected = theirs.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if c.tie_embeddings else [])
    theirs.tie_weights()
    return ours, theirs


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_hugging_face(family: str) -> None:
    ours, theirs = build_pair(FAMILIES[family])
    tokens = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
    logits, expected = ours(tokens), theirs(tokens).logits
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2)) / logits.numel()
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    theirs_by_name = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        wanted = theirs_by_name[to_hf_name(name)].grad
        torch.testing.assert_close(p.grad, wanted, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_positions_shift_nothing_but_the_rotation() -> None:
    """Attention scores depend on differences of positions, so moving all positions changes no logit."""
    model = build_random(TINY)
    tokens = torch.randint(0, 97, (1, 8))
    moved = model(tokens, torch.arange(5, 13).unsqueeze(0))
    torch.testing.assert_close(model(tokens), moved, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["7B", "8B", "405B", "1B"])
def test_counted_parameters_are_those_of_the_built_model(name: str) -> None:
    c = FLAVORS["llama2" if name == "7B" else "llama3"][name]
    with torch.device("meta"):
        model = Llama(c)
    assert sum(p.numel() for p in model.parameters()) == count_parameters(c)


@pytest.mark.parametrize("tied", [False, True])
def test_names_are_known_without_the_model(tied: bool) -> None:
    c = dataclasses.replace(TINY, tie_embeddings=tied)
    model = Llama(c)
    assert parameter_names(c) == list(dict(model.named_parameters()))
    assert weight_modules(c) == [name for name, module in model.named_modules() if "weight" in module._parameters]


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_an_initial_value(tied: bool) -> None:
    c = dataclasses.replace(TINY, tie_embeddings=tied)
    std = initial_std(c)
    assert std.keys() == dict(Llama(c).named_parameters()).keys()
    assert {name for name, value in std.items() if value == ALL_ONES} == {name for name in std if "norm" in name}
    assert std["layers.1.feed_forward.w2.weight"] == std["layers.0.attention.wo.weight"] == 0.01  # two blocks
    assert std["tok_embeddings.weight"] == (0.02 if tied else 1.0)


def test_a_part_of_the_model_is_the_model_with_fewer_children() -> None:
    whole = build_random(TINY)
    tokens = torch.randint(0, 97, (2, 8))
    expected = whole(tokens)
    first, second = Llama(TINY), Llama(TINY)
    for part, layer in ((first, "1"), (second, "0")):
        part.load_state_dict(whole.state_dict())
        del part.layers[layer]
    first.norm = first.output = second.tok_embeddings = None
    torch.testing.assert_close(second(first(tokens)), expected)
