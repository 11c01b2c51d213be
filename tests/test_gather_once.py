"""Parameters held whole for a step: what then moves, and when. No processes; that numbers stay is test_parity.py's."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.config.schema import Config, replace
from trainer.distributed import fake_process_group
from trainer.models.llama.config import DEBUG
from trainer.models.llama.model import initial_std
from trainer.parallel.accumulate import build_accumulate
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.parallelize import initialize
from trainer.parts import build_mesh_of, build_reading_of, build_sharded_model, build_sum_losses_of

CPU = torch.device("cpu")
PARAMETERS, BUCKETS = 2 * 9 + 3, 2 + 2  # of two blocks, the embedding, and the norm with the head
CONFIG = replace(
    Config(),
    {
        "model.args.dim": 32,
        "model.args.n_layers": 2,
        "model.args.n_heads": 4,
        "model.args.n_kv_heads": 2,
        "model.args.ffn_dim": 50,
        "model.args.vocab_size": 257,
        "training.seq_len": 16,
        "parallelism.fsdp_gather_once": True,
        "compile.backend": "aot_eager",
    },
)


@dataclasses.dataclass
class Rows:
    tokens_BT: torch.Tensor
    labels_BT: torch.Tensor


def accumulate(ranks: int, **changes: Any) -> tuple[list[GraphReport], nn.Module, list[list[str]]]:
    """Accumulate three microbatches; return the reports of the step's graphs, of gathers and of sums, the model, and
    for each microbatch what its parameters were."""
    config = replace(CONFIG, {name.replace("__", "."): value for name, value in changes.items()})
    seen: list[list[str]] = []
    torch._dynamo.reset()
    with fake_process_group(ranks):
        mesh = build_mesh_of(config, CPU, ranks)
        model = build_sharded_model(config, mesh)
        initialize(model, CPU, initial_std(DEBUG), seed=0)
        of_step, of_gather, of_sum = reports = [GraphReport(mesh.axis_of_group()) for _ in range(3)]
        sum_losses = build_sum_losses_of(config, mesh, model, config.compile.backend, of_step)
        reading = build_reading_of(config, mesh, model, config.compile.backend, of_gather, of_sum)

        def watched(tokens_BT: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
            seen.append([type(parameter).__name__ for parameter in model.parameters()])
            return sum_losses(tokens_BT, labels_BT)

        tokens = torch.zeros(3, 16, dtype=torch.int64)
        build_accumulate(watched, reading)([Rows(tokens, tokens)] * 3, torch.tensor(9 * 16.0))
    return reports, model, seen


@pytest.mark.parametrize(("bucketing", "moved"), [("block", BUCKETS), ("none", PARAMETERS)])
def test_a_step_gathers_before_its_first_microbatch_and_sums_after_its_last(bucketing: str, moved: int) -> None:
    (of_step, of_gather, of_sum), model, seen = accumulate(2, compile__bucketing=bucketing)
    assert of_step.order == []
    assert len(of_gather.order or []) == len(of_sum.order or []) == moved
    assert all("all_gather" in line and "dp_shard" in line for line in of_gather.order or [])
    assert all("reduce_scatter" in line and "dp_shard" in line for line in of_sum.order or [])
    assert seen == [["Parameter"] * PARAMETERS] * 3
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert isinstance(parameter.grad, DTensor)
        assert parameter.grad.placements == parameter.placements


def test_tensor_parallel_collectives_of_activations_stay_in_the_step() -> None:
    (of_step, of_gather, of_sum), _, _ = accumulate(4, parallelism__tensor_parallel_degree=2)
    assert of_step.order
    assert all("over tp" in line for line in of_step.order)
    assert all("over dp_shard" in line for line in of_gather.order or [])
    # A norm sees its rank's part of the sequence, so that its gradient is summed over tp, once a step as well.
    over_tp = [line for line in of_sum.order or [] if "over tp" in line]
    assert len(over_tp) == 2 * 2 + 1
    assert all("norm" in line for line in over_tp)


def test_gradients_add_up_and_are_summed_in_the_dtype_asked_for() -> None:
    (_, of_gather, of_sum), _, _ = accumulate(2)
    assert all("bfloat16" in line for line in of_gather.order or [])
    assert all("float32" in line for line in of_sum.order or [])
