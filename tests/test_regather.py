"""Eager execution: what autograd keeps, and what it makes again. And the self-test of collectives."""

import gc
from typing import Any

import pytest
import torch
from ranks import RankError, run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from trainer.models.llama.config import LlamaConfig
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel import self_test, simple_fsdp
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.regather import regather_in_backward
from trainer.parallel.self_test import check_collectives
from trainer.parallel.simple_fsdp import Precision

SHAPE = LlamaConfig(dim=16, n_layers=2, n_heads=2, n_kv_heads=2, ffn_dim=20, vocab_size=37)


def build() -> Llama:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=2)
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, Precision(torch.float32, torch.float32)))
    initialize(model, torch.device("cpu"), initial_std(SHAPE), seed=0)
    return model


def gradients(model: Llama) -> dict[str, Tensor]:
    found = {name: p.grad.to_local().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def compare_keeping_and_regathering(rank: int) -> dict[str, Any]:
    model = build()
    tokens = torch.arange(12).view(2, 6)
    model(tokens).square().sum().backward()
    kept = gradients(model)

    storages: list[StorageWeakRef] = []
    original = simple_fsdp.gather

    def counting(parameter: DTensor, precision: Precision) -> Tensor:
        whole = original(parameter, precision)
        storages.append(StorageWeakRef(whole.untyped_storage()))
        return whole

    simple_fsdp.gather = counting
    with regather_in_backward():
        loss = model(tokens).square().sum()
    gc.collect()
    alive, gathers = sum(not storage.expired() for storage in storages), len(storages)
    loss.backward()
    again = gradients(model)
    return {
        "alive after forward": alive,
        "gathers": gathers,
        "gathers in backward": len(storages) - gathers,
        "equal": all(torch.equal(kept[name], again[name]) for name in kept),
    }


def test_eager_forward_keeps_no_gathered_weight_and_gradients_are_the_same_bits() -> None:
    for seen in run_ranks(compare_keeping_and_regathering, 2):
        assert seen["gathers"] == 2 * 9 + 3
        assert seen["gathers in backward"] == 2 * 9 + 2  # of the embedding, only rows matter
        assert seen["alive after forward"] == 0
        assert seen["equal"]


def check(rank: int, replicate: int, shard: int, tp: int) -> None:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)
    check_collectives(mesh, torch.device("cpu"))


def check_with_an_average(rank: int) -> None:
    class Averaging:
        def __getattr__(self, name: str) -> Any:
            return getattr(torch.ops._c10d_functional, name)

        def all_reduce(self, x: Tensor, op: str, group: str) -> Tensor:
            return torch.ops._c10d_functional.all_reduce(x, "avg", group)

    self_test.ops = Averaging()
    check(rank, 1, 2, 1)


def test_right_collectives_pass_the_self_test() -> None:
    run_ranks(check, 4, 2, 2, 1)
    run_ranks(check, 2, 1, 1, 2)


def test_a_backend_that_averages_is_named() -> None:
    with pytest.raises(RankError, match="all_reduce over dp_shard"):
        run_ranks(check_with_an_average, 2)
