"""The optimizer against formulas, and against its own mask."""

import pytest
import torch
from torch import nn

from trainer.optim import Optimizer, split_by_decay

NONE = torch.zeros(())
INF = torch.ones(())


def build(name: str, **settings) -> tuple[nn.Parameter, nn.Parameter, Optimizer]:
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 2, generator=generator))
    norm = nn.Parameter(torch.randn(2, generator=generator))
    optimizer = Optimizer({"weight": weight, "norm": norm}, name=name, weight_decay=0.1, no_decay=("norm",), **settings)
    return weight, norm, optimizer


def give_gradients(*parameters: nn.Parameter, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for p in parameters:
        p.grad = torch.randn(p.shape, generator=generator)
    return [p.grad.double() for p in parameters]


def test_adamw_follows_its_formula() -> None:
    """Decoupled weight decay, algorithm 2 of arXiv 1711.05101, in float64."""
    weight, norm, optimizer = build("AdamW", betas=(0.9, 0.95), eps=1e-8)
    expected = [weight.detach().double(), norm.detach().double()]
    first, second = [0.0, 0.0], [0.0, 0.0]
    for number in range(1, 4):
        gradients = give_gradients(weight, norm, seed=number)
        for i, (g, decay) in enumerate(zip(gradients, (0.1, 0.0), strict=True)):
            first[i] = 0.9 * first[i] + 0.1 * g
            second[i] = 0.95 * second[i] + 0.05 * g * g
            update = (first[i] / (1 - 0.9**number)) / ((second[i] / (1 - 0.95**number)).sqrt() + 1e-8)
            expected[i] = expected[i] * (1 - 0.01 * decay) - 0.01 * update
        optimizer.step(0.01, NONE)
    torch.testing.assert_close(weight.detach().double(), expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(norm.detach().double(), expected[1], rtol=1e-6, atol=1e-6)
    assert weight.grad is None


def test_sgd_with_momentum_follows_its_formula() -> None:
    weight, norm, optimizer = build("SGD", momentum=0.9)
    expected, buffer = weight.detach().double(), 0.0
    for number in range(1, 4):
        gradient = give_gradients(weight, norm, seed=number)[0]
        buffer = 0.9 * buffer + gradient + 0.1 * expected
        expected = expected - 0.01 * buffer
        optimizer.step(0.01, NONE)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), [("AdamW", {}), ("Adam", {}), ("SGD", {}), ("SGD", {"momentum": 0.9})])
def test_a_masked_step_leaves_everything_as_it_was(name: str, settings: dict[str, float]) -> None:
    weight, norm, optimizer = build(name, **settings)
    give_gradients(weight, norm, seed=1)
    optimizer.step(0.01, NONE)
    before = {key: value.clone() for key, value in optimizer.state_tensors().items()}
    weights = [weight.detach().clone(), norm.detach().clone()]
    weight.grad, norm.grad = torch.full_like(weight, torch.nan), torch.full_like(norm, torch.inf)
    optimizer.step(0.01, INF)
    assert torch.equal(weight, weights[0])
    assert torch.equal(norm, weights[1])
    after = optimizer.state_tensors()
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_decay_groups_follow_the_patterns() -> None:
    names = ["tok_embeddings.weight", "layers.0.attention_norm.weight", "layers.0.attention.wq.weight", "norm.weight"]
    decayed, kept = split_by_decay(names, ("*norm*", "tok_embeddings.*"))
    assert decayed == ["layers.0.attention.wq.weight"]
    assert kept == [names[0], names[1], names[3]]


def test_a_frozen_parameter_is_left_out() -> None:
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = Optimizer(
        {"weight": nn.Parameter(torch.ones(2)), "frozen": frozen}, name="AdamW", weight_decay=0.1, no_decay=()
    )
    assert list(optimizer.parameters) == ["weight"]
