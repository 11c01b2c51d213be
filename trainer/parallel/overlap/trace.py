"""Tracing a step's graphs for any number of ranks on one machine, without memory, devices or other processes.

The model's parameters become fake tensors, and the capture and the cut are those of training: torch.compile with the
run's `Partition`. Only what would run the graphs is left out.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import default_partition, make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from trainer.optim import like_parameter
from trainer.parallel.overlap.arrange import PLAIN
from trainer.parallel.parameters import replace_parameters
from trainer.parallel.partition import Partition


@dataclass(frozen=True)
class Traced:
    """The two graphs of a step, the bytes of one rank's share of the parameters, and the loss where it is outside."""

    forward: GraphModule
    backward: GraphModule
    parameter_bytes: int
    loss: tuple[GraphModule, GraphModule] | None = None  # forward and backward, which run without a compiler


def trace(
    model: nn.Module,
    sum_token_losses: Callable[[Tensor, Tensor], Tensor],
    *,
    rows: int,
    seq_len: int,
    partition: Partition,
    backend: str,
    loss_inside: bool = True,
) -> Traced:
    """Trace the step of a parallelized model on the meta device, over a fake process group. Changes `model`.

    The graphs are as the cut leaves them; how collectives are bucketed and ordered is left to the caller.
    `backend` decides which operations the graph is made of, as it does in training. Without `loss_inside` the loss has
    graphs of its own.
    """
    mode = FakeTensorMode()
    replace_parameters(model, lambda _, parameter: _fake(parameter, mode))
    graphs: list[GraphModule] = []
    cut = replace(partition, overlap=PLAIN, record=lambda made, _: graphs.extend(made.values()))

    def cut_nothing_twice(*arguments: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        """Keep for backward what was computed in forward, as without a compiler."""
        parts = default_partition(*arguments, **options)
        graphs.extend(parts)
        return parts

    def sum_losses(tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        return sum_token_losses(model(tokens_BT), labels_BT)

    torch._dynamo.reset()
    with mode, _without_garbage_collection():
        tokens_BT = torch.zeros(rows, seq_len, dtype=torch.int64)
        if loss_inside:
            _capture(sum_losses, cut, backend)(tokens_BT, tokens_BT)
        else:
            made = _capture(model, cut, backend)(tokens_BT)  # of the capture's own fake mode
            logits_BTV = torch.empty(made.shape, dtype=made.dtype, requires_grad=True)
            _capture(sum_token_losses, cut_nothing_twice, "eager")(logits_BTV, tokens_BT)
    forward, backward, *loss = graphs
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    parameter_bytes = sum(shard.numel() * shard.itemsize for shard in shards)
    return Traced(forward, backward, parameter_bytes, (loss[0], loss[1]) if loss else None)


def _capture(function: Callable[..., Tensor], cut: Callable[..., Any], backend: str) -> Callable[..., Tensor]:
    """Return `function` as torch.compile captures it and `cut` divides its joint graph, with nothing that runs."""
    compiler = aot_autograd(
        fw_compiler=_return_values,
        partition_fn=cut,
        decompositions=_decompositions(backend),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Tensor] = torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)
    return compiled


@contextlib.contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """A graph of tens of thousands of nodes is walked at each collection, and nothing in it is garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _fake(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    assert isinstance(parameter, DTensor)
    local = parameter.to_local()
    with mode:
        shard = torch.empty(local.shape, dtype=local.dtype)
    return nn.Parameter(like_parameter(shard, parameter), requires_grad=parameter.requires_grad)


def _decompositions(backend: str) -> Any:
    if backend != "inductor":
        return None
    from torch._inductor.decomposition import select_decomp_table  # a second to import, and only needed here

    return select_decomp_table()


def _return_values(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Be a compiler whose product returns the fake values that tracing has computed already."""
    (output,) = gm.graph.find_nodes(op="output")
    values = [None if node is None else node.meta["val"] for node in output.args[0]]
    return make_boxed_func(lambda *arguments: values)
