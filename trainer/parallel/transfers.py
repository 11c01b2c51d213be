"""What holding parameters whole moves: one graph that gathers all of them, one that sums all their gradients.

Both are forward-only graphs of SimpleFSDP's own operations, arranged by the same passes as a step's: a block's
collectives become one, and copies in and out go on beside the next. Without a compiler the same lines run as they are.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed.tensor import DTensor, Placement
from torch.fx import Graph, GraphModule

from trainer.parallel.compile import AS_PLANNED
from trainer.parallel.graph_report import Agree, GraphReport, agreed_before_first_use, key_of
from trainer.parallel.overlap.arrange import Overlap, arrange, passes_key
from trainer.parallel.partition import sum_shards_first
from trainer.parallel.simple_fsdp import Precision, gather

Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class Transfers:
    """Both are collective over the data axes, for all parameters of a model in order.

    `gather(parameters)` returns them whole but for their split over `tp`; `sum(addends, placements)` the sums over data
    ranks, placed as said, in the dtype of the addends.
    """

    gather: Callable[[Sequence[Tensor]], list[Tensor]]
    sum: Callable[[list[DTensor], list[Placements]], list[DTensor]]


def gather_all(parameters: Sequence[Tensor], precision: Precision) -> list[Tensor]:
    """Return the parameters whole, in `param_dtype`; without gradient."""
    with torch.no_grad():
        return [gather(parameter, precision) for parameter in parameters]  # type: ignore[arg-type]


def sum_addends(addends: list[DTensor], placements: list[Placements]) -> list[DTensor]:
    """Return the sums of addends over data ranks, placed as parameters are; without gradient."""
    with torch.no_grad():
        return [addend.redistribute(placements=place) for addend, place in zip(addends, placements, strict=True)]


def plain_transfers(precision: Precision) -> Transfers:
    """Return transfers that run as they are, one collective for each parameter."""
    return Transfers(functools.partial(gather_all, precision=precision), sum_addends)


def compile_transfers(
    parameters: Mapping[str, Tensor],
    precision: Precision,
    overlap: Overlap,
    *,
    backend: str,
    gather_report: GraphReport,
    sum_report: GraphReport,
    agree: Agree = lambda order: None,
) -> Transfers:
    """Return the transfers of `parameters`, by name, as a compiled graph each.

    Before a graph first runs, `agree` is given the order of its collectives, on every rank.
    """
    with_gradient = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}

    def compiled(function: Any, moved: Iterable[str], direction: str, report: GraphReport) -> Any:
        modules = tuple(name.rpartition(".")[0] for name in moved)
        compiler = Compiler(Arranged(direction, modules, overlap, report), backend, agree)
        return torch.compile(function, backend=compiler, fullgraph=True, dynamic=False)

    return Transfers(
        compiled(functools.partial(gather_all, precision=precision), parameters, "gather", gather_report),
        compiled(sum_addends, with_gradient, "sum", sum_report),
    )


@dataclass(frozen=True)
class Arranged(CustomGraphPass):
    """Names what a forward-only graph moves by the modules it belongs to, arranges it, and tells the report.

    `shards` are the shapes of this rank's parts of the inputs, as in `Partition`.
    """

    direction: str
    modules: tuple[str, ...]
    overlap: Overlap
    report: GraphReport
    shards: tuple[tuple[int, ...], ...] = ()

    def __call__(self, graph: Graph) -> None:
        gm = graph.owning_module
        assert gm is not None
        name_modules(graph, self.modules)
        sum_shards_first(gm)
        lines = arrange(gm, self.report.axes, self.overlap)
        self.report.record({self.direction: gm}, {self.direction: lines})

    def uuid(self) -> str:
        """Identify the outcome for compile caches: our own source and settings."""
        axes = sorted(self.report.axes.items())
        settings = (self.direction, self.modules, self.overlap.that_decides(), axes, self.shards)
        return hashlib.sha256(Path(__file__).read_bytes() + f"{passes_key()} {settings}".encode()).hexdigest()

    # Inductor copies its settings, and pickles them for its cache's key: this one is shared, and its own key.
    def __deepcopy__(self, memo: Any) -> Arranged:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.uuid(),)


def name_modules(graph: Graph, modules: Sequence[str]) -> None:
    """Note on each node the module of the one parameter that it is a function of. Changes metadata only."""
    inputs = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), Tensor)]
    of_node = dict(zip(inputs, modules, strict=True))
    for node in graph.nodes:
        owners = {of_node[parent] for parent in node.all_input_nodes if parent in of_node}
        if node.op == "call_function" and owners:
            (of_node[node],) = owners
            node.meta["nn_module_stack"] = {"": (of_node[node], nn.Module)}


@dataclass(frozen=True)
class Compiler:
    """The backend for torch.compile that arranges a forward-only graph and runs it with `backend`."""

    arranged: Arranged
    backend: str
    agree: Agree

    def __call__(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        run = self._eagerly if self.backend == "aot_eager" else self._with_inductor
        return agreed_before_first_use(run(gm, inputs), self.arranged.report.order, self.agree)

    def _eagerly(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        def arrange_and_run(traced: GraphModule, example: Any) -> Any:
            self.arranged(traced.graph)
            traced.recompile()
            return boxed_nop(traced, example)

        return aot_autograd(fw_compiler=arrange_and_run, inference_compiler=arrange_and_run)(gm, inputs)

    def _with_inductor(self, gm: GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx  # a second to import, and only needed here

        arranged = replace(
            self.arranged, shards=tuple(tuple(x.to_local().shape) for x in inputs if isinstance(x, DTensor))
        )
        patches = {"post_grad_custom_pre_pass": arranged, **(AS_PLANNED if arranged.overlap.reorder else {})}
        with arranged.report.kept_under(key_of(gm, inputs, arranged.uuid())):
            compiled: Any = compile_fx(gm, inputs, config_patches=patches)
        return compiled
