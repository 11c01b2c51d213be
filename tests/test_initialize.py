"""First values of weights: by name and index, the same on every mesh."""

import dataclasses
import hashlib
import math

import pytest
import torch
from ranks import run_ranks

from trainer.models.llama.config import DEBUG
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.initialize import CHUNK, draw_normal
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.simple_fsdp import Precision

FLOAT32 = Precision(torch.float32, torch.float32)
# 257 rows over 4 ranks are uneven; a feed-forward width of 3 is less than the ranks.
ODD = dataclasses.replace(DEBUG, dim=24, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=12, ffn_dim=3, vocab_size=257)


def hash_weights(rank: int, replicate: int, shard: int, tp: int, tied: bool) -> dict[str, str]:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)
    shape = dataclasses.replace(ODD, tie_embeddings=tied)
    with torch.device("meta"):
        model = Llama(shape)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, FLOAT32))
    initialize(model, torch.device("cpu"), initial_std(shape), seed=3)
    whole = {name: p.full_tensor() for name, p in model.state_dict(keep_vars=True).items()}
    return {name: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest() for name, value in whole.items()}


@pytest.mark.parametrize("tied", [False, True])
def test_every_mesh_starts_from_bit_identical_weights(tied: bool) -> None:
    (alone,) = run_ranks(hash_weights, 1, 1, 1, 1, tied)
    assert len(set(alone.values())) > 10
    for sizes in [(1, 2, 1), (2, 2, 1), (4, 1, 1), (1, 1, 2), (1, 2, 2)]:
        ranks = math.prod(sizes)
        assert run_ranks(hash_weights, ranks, *sizes, tied) == [alone] * ranks


def test_a_value_depends_on_seed_name_and_index_alone() -> None:
    index = torch.arange(1000)
    values = draw_normal(index, seed=0, name="a")
    assert torch.equal(draw_normal(index[137:501], seed=0, name="a"), values[137:501])
    assert not torch.equal(draw_normal(index, seed=1, name="a"), values)
    assert not torch.equal(draw_normal(index, seed=0, name="b"), values)


def test_draws_are_normal_cut_at_three_deviations() -> None:
    values = draw_normal(torch.arange(CHUNK), seed=0, name="weight")
    error = CHUNK**-0.5  # of a mean of CHUNK draws, times five below
    assert abs(values.mean()) < 5 * error
    assert abs(values.var() - 1) < 5 * 2**0.5 * error
    assert values.abs().max() < 3.1
    cut = torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(1.0)) * 2 - 1
    inside = (values.abs() < 1.0).double().mean()
    assert abs(inside - cut) < 0.01  # 68.27 % for the whole bell; cutting and rescaling move it by less than 1 %
    neighbours = torch.corrcoef(torch.stack([values[:-1], values[1:]]))[0, 1]
    assert abs(neighbours) < 5 * error


def test_initial_values_are_pinned() -> None:
    """A change here changes every run's start: it needs a line in the CHANGELOG."""
    expected = [0.3446587957576921, -0.5693931288384004, 0.5407207498501758]
    torch.testing.assert_close(draw_normal(torch.arange(3), seed=0, name="x").tolist(), expected)
