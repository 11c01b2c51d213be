"""Every collective of a graph: what it is, what it moves, and whom it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

ops = torch.ops._c10d_functional
WAIT = ops.wait_tensor.default
KINDS = {
    ops.all_gather_into_tensor.default: "all_gather",
    ops.reduce_scatter_tensor.default: "reduce_scatter",
    ops.all_reduce.default: "all_reduce",
}


@dataclass(frozen=True)
class Collective:
    """One collective: its start and wait in the graph, the mesh axis it runs over, and the module it belongs to."""

    kind: str
    axis: str
    dtype: torch.dtype
    bytes_in: int
    bytes_out: int
    module: str
    start: Node
    wait: Node


def find_collectives(gm: GraphModule, axes: Mapping[str, str]) -> list[Collective]:
    """Return the collectives of `gm` in order. `axes` maps names of process groups to mesh axes."""
    found = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or node.target not in KINDS:
            continue
        (wait,) = (user for user in node.users if user.target is WAIT)
        given, result = node.args[0].meta["val"], node.meta["val"]
        found.append(
            Collective(
                kind=KINDS[node.target],
                axis=axes[node.args[-1]],
                dtype=given.dtype,
                bytes_in=given.numel() * given.itemsize,
                bytes_out=result.numel() * result.itemsize,
                module=module_of(node),
                start=node,
                wait=wait,
            )
        )
    return found


def module_of(node: Node) -> str:
    """Return the dotted name of the module in whose forward `node`, or what it is the gradient of, was traced."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("",))[0] if stack else ""
    # Dynamo writes the path from the traced function's variable on: L['self'], G['model'], fn.__closure__[0]...
    _, _, name = path.rpartition("]")
    return name.removeprefix(".").removeprefix("cell_contents").removeprefix(".")


def summarize(collectives: list[Collective]) -> list[str]:
    """Return a line for each kind, axis and dtype, with how many there are and the bytes they take in."""
    count: Counter[tuple[str, str, str]] = Counter()
    taken: Counter[tuple[str, str, str]] = Counter()
    for c in collectives:
        key = (c.kind, c.axis, str(c.dtype).removeprefix("torch."))
        count[key] += 1
        taken[key] += c.bytes_in
    return [
        f"{number} {kind} over {axis} in {dtype}, {taken[kind, axis, dtype] / 1e6:,.2f} MB in"
        for (kind, axis, dtype), number in sorted(count.items())
    ]
