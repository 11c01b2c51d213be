"""Compilation of the model and its loss as one graph, and what the compiler did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch import config as functorch_config
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from trainer.parallel.float8.cache import find_calls
from trainer.parallel.graph_report import Agree, GraphReport, agreed_before_first_use, key_of
from trainer.parallel.partition import Partition
from trainer.parallel.regather import regather_in_backward

SumTokenLosses = Callable[[Tensor, Tensor], Tensor]


# Inductor keeps collectives in the order of the graph, but would move them among the computation to save memory. And it
# would keep a freed buffer for a later value of its size, also over the start of a sum of gradients, where the peak is.
AS_PLANNED = {
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "reorder_for_compute_comm_overlap": False,
    "allow_buffer_reuse": False,
}


@dataclass(frozen=True)
class CompileReport:
    """Counts since the process started: graphs, graph breaks, and captures after the first of each function."""

    graphs: int
    breaks: int
    recompiles: int


def report_compilation(functions: int) -> CompileReport:
    """Read the compiler's counters, of a process that compiles so many functions."""
    from torch._dynamo.utils import counters

    graphs = counters["stats"]["unique_graphs"]
    return CompileReport(graphs, sum(counters["graph_break"].values()), max(0, graphs - functions))


def build_backend(
    name: str, partition: Partition, report: GraphReport, agree: Agree
) -> Callable[[GraphModule, list[Any]], Callable[..., Any]]:
    """Return the backend for torch.compile that cuts joint graphs with `partition` and runs the parts with `name`."""
    partition = replace(partition, record=report.record, axes=tuple(sorted(report.axes.items())))
    if name == "aot_eager":
        aot_eager = aot_autograd(fw_compiler=boxed_nop, partition_fn=partition, keep_inference_input_mutations=True)
        return lambda gm, inputs: agreed_before_first_use(aot_eager(gm, inputs), report.order, agree)
    from torch._inductor.compile_fx import compile_fx  # a second to import, and only needed here

    as_planned = AS_PLANNED if partition.overlap.reorder else {}

    def inductor(gm: GraphModule, inputs: list[Any]) -> Any:
        shards = tuple(tuple(x.to_local().shape) for x in inputs if isinstance(x, DTensor))
        of_this_rank, calls = replace(partition, shards=shards), find_calls()
        patches = {"custom_partitioner_fn": of_this_rank, "unsafe_marked_cacheable_functions": calls, **as_planned}
        with (
            report.kept_under(key_of(gm, inputs, f"{of_this_rank.uuid()} {calls}")),
            # The graphs of both their directions are captured beside the graph, and are part of the compiler's key.
            functorch_config.patch(autograd_cache_allow_custom_autograd_functions=True),
        ):
            compiled: Any = compile_fx(gm, inputs, config_patches=patches)
        return agreed_before_first_use(compiled, report.order, agree)

    return inductor


def _regathering(sum_losses: SumTokenLosses) -> SumTokenLosses:
    def with_regather(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with regather_in_backward():
            return sum_losses(tokens_BT, labels_BT)

    return with_regather


def build_sum_losses(
    model: nn.Module,
    sum_token_losses: SumTokenLosses,
    *,
    enable: bool,
    backend: str,
    loss_inside: bool,
    partition: Partition,
    report: GraphReport,
    agree: Agree = lambda order: None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return f(tokens_BT, labels_BT) -> sum of token losses, compiled as one graph where `enable`.

    The loss is part of the graph where `loss_inside`, so that the compiler may fuse it. A graph break is an error.
    Before a graph first runs, `agree` is given the order of its collectives, on every rank.
    """

    def sum_losses(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        return sum_token_losses(model(tokens_BT), labels_BT)

    if not enable:
        return _regathering(sum_losses) if partition.regather else sum_losses
    compiler = build_backend(backend, partition, report, agree)
    if loss_inside:
        return torch.compile(sum_losses, backend=compiler, fullgraph=True, dynamic=False)
    compiled = torch.compile(model, backend=compiler, fullgraph=True, dynamic=False)
    return lambda tokens_BT, labels_BT: sum_token_losses(compiled(tokens_BT), labels_BT)
