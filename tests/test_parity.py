"""The law on the smallest scale: a mesh changes where numbers are computed, not what they are."""

import dataclasses
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from trainer.data.batches import Microbatch, TrainingData
from trainer.data.rows import Rows
from trainer.loss import UNCOUNTED, count_labels, sum_token_losses
from trainer.models.llama.config import DEBUG
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.optim import Optimizer
from trainer.parallel.accumulate import build_accumulate
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss

# Float32 sums in another order; measured 1e-7 (loss, norm) and 7e-7 (weights) after 20 steps on four ranks.
RELATIVE = 1e-5
ABSOLUTE = 1e-5

SHAPE = dataclasses.replace(DEBUG, dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=50, vocab_size=257)
SEQ_LEN, GLOBAL_ROWS, STEPS = 16, 8, 8
FLOAT32 = Precision(torch.float32, torch.float32)


@dataclasses.dataclass(frozen=True)
class Case:
    replicate: int = 1
    shard: int = 1
    tp: int = 1
    local_rows: int = 2
    optimizer: str = "AdamW"
    backend: str = "eager"
    tied: bool = False
    loss_inside: bool = True
    loss_parallel: bool = True
    regather: bool = True
    recompute: str = "none"
    option: str = ""
    memory_budget: float = 1.0
    precision: Precision = FLOAT32

    @property
    def ranks(self) -> int:
        return self.replicate * self.shard * self.tp


def tokens() -> Any:
    # 101 tokens make a short last row, so that counted labels differ between ranks in some step.
    return torch.randint(0, 257, (101 + 6 * SEQ_LEN,), generator=torch.Generator().manual_seed(5)).numpy()


def train(rank: int, case: Case) -> dict[str, Any]:
    """Train a tiny Llama and return losses, gradient norms, final weights and counted labels."""
    mesh = build_mesh(torch.device("cpu"), dp_replicate=case.replicate, dp_shard=case.shard, tp=case.tp)
    shape = dataclasses.replace(SHAPE, tie_embeddings=case.tied)
    with torch.device("meta"):
        model = Llama(shape)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, case.precision, case.recompute, case.option))
    initialize(model, torch.device("cpu"), initial_std(shape), seed=0)
    optimizer = Optimizer(dict(model.named_parameters()), name=case.optimizer, weight_decay=0.1, no_decay=("*norm*",))
    sum_losses = build_sum_losses(
        model,
        build_loss(sum_token_losses, mesh, vocab_size=257, uncounted=UNCOUNTED, loss_parallel=case.loss_parallel),
        enable=case.backend != "eager",
        backend=case.backend,
        loss_inside=case.loss_inside,
        partition=Partition(case.regather, case.memory_budget),
        report=GraphReport(mesh.axis_of_group()),
    )
    accumulate = build_accumulate(sum_losses)
    data = TrainingData(
        Rows(tokens(), SEQ_LEN),
        seed=0,
        global_batch_size=GLOBAL_ROWS,
        local_batch_size=case.local_rows,
        data_rank=mesh.data_rank,
        data_ranks=mesh.data_ranks,
    )
    result: dict[str, Any] = {"loss": [], "norm": [], "labels": []}
    for step in range(STEPS):
        microbatches: list[Microbatch] = data.microbatches(step)
        labels = torch.stack([count_labels(rows.labels_BT) for rows in microbatches]).sum()
        divisor = mesh.sum(labels)
        loss = mesh.sum(accumulate(microbatches, divisor))
        norm = clip_gradients(model.parameters(), 0.3, mesh)
        optimizer.step(0.01, torch.zeros(()))
        result["loss"].append(loss.item())
        result["norm"].append(norm.item())
        result["labels"].append(int(labels))
    result["weights"] = {name: p.detach().full_tensor() for name, p in model.named_parameters()}
    return result


def train_cases(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    return [train(rank, case) for case in cases]


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    torch.testing.assert_close(actual["loss"], expected["loss"], rtol=RELATIVE, atol=0.0)
    torch.testing.assert_close(actual["norm"], expected["norm"], rtol=RELATIVE, atol=0.0)
    assert actual["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(actual["weights"][name], weight, rtol=0.0, atol=ABSOLUTE, msg=name)


ALONE = [Case(local_rows=8, optimizer=optimizer, tied=tied) for optimizer in ("AdamW", "SGD") for tied in (False, True)]
TWO_RANKS = [
    Case(shard=2),
    Case(replicate=2, local_rows=4),
    Case(shard=2, optimizer="SGD", local_rows=1),
    Case(shard=2, tied=True, optimizer="SGD"),
    Case(shard=2, backend="aot_eager"),
    Case(shard=2, backend="aot_eager", loss_inside=False, tied=True, regather=False),
    Case(tp=2, local_rows=8, optimizer="SGD"),
    Case(tp=2, local_rows=4, tied=True, loss_parallel=False),
    Case(tp=2, local_rows=8, backend="aot_eager"),
]
FOUR_RANKS = [
    Case(shard=4),
    Case(replicate=2, shard=2, optimizer="SGD"),
    Case(replicate=4, tied=True),
    Case(replicate=2, shard=2, backend="aot_eager"),
    Case(shard=2, tp=2, optimizer="SGD"),
    Case(replicate=2, tp=2, tied=True, optimizer="SGD"),
    Case(shard=2, tp=2, tied=True, backend="aot_eager"),
]
RECOMPUTE = [("full", ""), ("selective", "2"), ("selective", "op")]


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, bool], dict[str, Any]]:
    (results,) = run_ranks(train_cases, 1, ALONE)
    return {(case.optimizer, case.tied): result for case, result in zip(ALONE, results, strict=True)}


@pytest.mark.parametrize("cases", [TWO_RANKS, FOUR_RANKS], ids=["2", "4"])
def test_a_mesh_changes_no_loss_norm_or_weight(cases: list[Case], alone: dict[Any, dict[str, Any]]) -> None:
    per_rank = run_ranks(train_cases, cases[0].ranks, cases)
    for case, results in zip(cases, zip(*per_rank, strict=True), strict=True):
        for result in results:
            assert_same(result, alone[case.optimizer, case.tied])
        counted = {tuple(result["labels"]) for result in results}
        assert len(counted) > 1 or case.tp == case.ranks, "the data was meant to give ranks different numbers of labels"


def test_recomputing_changes_no_bit_in_eager() -> None:
    cases = [Case(shard=2), *(Case(shard=2, recompute=mode, option=option) for mode, option in RECOMPUTE)]
    for plain, *others in run_ranks(train_cases, 2, cases):
        for other in others:
            assert other["loss"] == plain["loss"]
            assert other["norm"] == plain["norm"]
            assert all(torch.equal(weight, other["weights"][name]) for name, weight in plain["weights"].items())


@pytest.mark.slow
def test_recomputing_in_the_graph_changes_nothing(alone: dict[Any, dict[str, Any]]) -> None:
    cases = [Case(shard=2, backend="aot_eager", recompute=mode, option=option) for mode, option in RECOMPUTE]
    cases += [Case(tp=2, local_rows=8, backend="aot_eager", recompute="full")]
    cases += [Case(shard=2, backend="aot_eager", memory_budget=0.3)]
    for results in run_ranks(train_cases, 2, cases, timeout_seconds=300):
        for result in results:
            assert_same(result, alone["AdamW", False])


def test_the_number_of_microbatches_changes_nothing(alone: dict[Any, dict[str, Any]]) -> None:
    cases = [Case(local_rows=rows, optimizer="SGD") for rows in (1, 2, 4)]
    (results,) = run_ranks(train_cases, 1, cases)
    for result in results:
        assert_same(result, alone["SGD", False])


def test_the_same_seed_gives_the_same_bits() -> None:
    first, second = (run_ranks(train_cases, 2, [Case(shard=2)]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert one[0]["loss"] == other[0]["loss"]
        assert one[0]["norm"] == other[0]["norm"]
        assert all(torch.equal(weight, other[0]["weights"][name]) for name, weight in one[0]["weights"].items())


def gradients_of(rank: int) -> dict[str, Any]:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=2)
    with torch.device("meta"):
        model = Llama(SHAPE)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, Precision(torch.bfloat16, torch.float32)))
    initialize(model, torch.device("cpu"), initial_std(SHAPE), seed=0)
    model.tok_embeddings.requires_grad_(False)
    used = model.layers["0"].attention.wq.weight
    logits = model(torch.zeros(1, 4, dtype=torch.int64))
    logits.float().sum().backward()
    stored = dict(model.named_parameters())
    return {
        "gathered": (type(used), used.dtype, tuple(used.shape)),
        "logits": logits.dtype,
        "frozen": stored["tok_embeddings.weight"].grad is None,
        "same placement": all(
            isinstance(p, DTensor) and p.grad.placements == p.placements and p.grad.dtype == p.dtype
            for p in stored.values()
            if p.grad is not None
        ),
        "with gradient": sum(p.grad is not None for p in stored.values()),
        "names": list(model.state_dict()) == list(Llama(SHAPE).state_dict()),
    }


def test_reading_a_parameter_gathers_it_and_its_gradient_is_stored_as_it_is() -> None:
    for seen in run_ranks(gradients_of, 2):
        assert seen["gathered"] == (torch.Tensor, torch.bfloat16, (32, 32))
        assert seen["logits"] == torch.bfloat16
        assert seen["frozen"]
        assert seen["same placement"]
        assert seen["with gradient"] == 2 * 9 + 2
        assert seen["names"]
