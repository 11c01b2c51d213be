"""What a step allocates at its peak, measured by the profiler's allocation events.

On a fake process group: gloo frees buffers in threads of its own, whose events the profiler doesn't see.
"""

import dataclasses

import pytest
import torch
from ranks import run_ranks
from torch.profiler import ProfilerActivity, profile

from trainer.distributed import fake_process_group
from trainer.loss import sum_token_losses
from trainer.models.llama.config import LlamaConfig, count_parameters
from trainer.models.llama.model import Llama, initial_std
from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
from trainer.parallel.compile import build_sum_losses
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import Layout, initialize, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision

FLOAT32 = Precision(torch.float32, torch.float32)
# Many tokens and small weights, so that activations make the peak; and the other way round.
ACTIVATIONS = LlamaConfig(dim=64, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=160, vocab_size=64)
WEIGHTS = LlamaConfig(dim=128, n_layers=4, n_heads=4, n_kv_heads=4, ffn_dim=512, vocab_size=64)


@dataclasses.dataclass(frozen=True)
class Case:
    shape: LlamaConfig
    rows: int
    seq_len: int
    regather: bool = True
    recompute: str = "none"
    option: str = ""
    memory_budget: float = 1.0
    backend: str = "aot_eager"
    loss_inside: bool = True


def peak_bytes(case: Case, shard: int) -> int:
    """Return the most bytes that forward and backward hold at once, over what there was before."""
    torch._dynamo.reset()
    mesh = build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=shard)
    with torch.device("meta"):
        model = Llama(case.shape)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, FLOAT32, case.recompute, case.option))
    initialize(model, torch.device("cpu"), initial_std(case.shape), seed=0)
    sum_losses = build_sum_losses(
        model,
        sum_token_losses,
        enable=case.backend != "eager",
        backend=case.backend,
        loss_inside=case.loss_inside,
        partition=Partition(case.regather, case.memory_budget),
        report=GraphReport(mesh.axis_of_group()),
    )
    tokens = torch.zeros(case.rows, case.seq_len, dtype=torch.int64)
    sum_losses(tokens, tokens).backward()
    model.zero_grad()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        sum_losses(tokens, tokens).backward()
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = peak = 0
    for _, change in changes:
        held += change
        peak = max(peak, held)
    return peak


def peaks(cases: list[Case], shard: int) -> list[int]:
    with fake_process_group(shard):
        return [peak_bytes(case, shard) for case in cases]


@pytest.mark.slow
def test_each_recompute_mode_lowers_the_peak() -> None:
    base = Case(ACTIVATIONS, rows=4, seq_len=128)
    modes = [
        base,
        dataclasses.replace(base, recompute="selective", option="2"),
        dataclasses.replace(base, recompute="selective", option="op"),
        dataclasses.replace(base, recompute="full"),
        dataclasses.replace(base, memory_budget=0.4),
    ]
    none, every_second, by_operation, full, budget = peaks(modes, shard=1)
    print(f"none {none} every second {every_second} op {by_operation} full {full} budget {budget}")
    assert full < every_second < none
    assert full < by_operation < none
    assert budget < none


@pytest.mark.slow
def test_gathering_again_holds_fewer_weights() -> None:
    base = Case(WEIGHTS, rows=1, seq_len=8)
    cases = [
        dataclasses.replace(base, backend=backend, regather=regather)
        for backend in ("aot_eager", "eager")
        for regather in (True, False)
    ]
    compiled, compiled_keeping, eager, eager_keeping = peaks(cases, shard=2)
    print(f"compiled {compiled} keeping {compiled_keeping}, eager {eager} keeping {eager_keeping}")
    # Kept: all weights at the end of forward. Gathered again: a layer's weights and gradients at a time.
    most = 4 * count_parameters(WEIGHTS) / 3
    assert compiled < compiled_keeping - most
    assert eager < eager_keeping - most


def share(rank: int, shape: LlamaConfig, shard: int) -> int:
    mesh = build_mesh(torch.device("cpu"), dp_replicate=1, dp_shard=shard)
    with torch.device("meta"):
        model = Llama(shape)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, FLOAT32))
    initialize(model, torch.device("cpu"), initial_std(shape), seed=0)
    return sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())


def test_parameters_of_a_rank_fall_as_one_over_the_ranks() -> None:
    for shard in (1, 2, 4):
        for held in run_ranks(share, shard, WEIGHTS, shard):
            assert held == 4 * count_parameters(WEIGHTS) // shard
