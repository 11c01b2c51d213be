"""Every collective of a graph: what it is, what it moves, and whom it serves.

SimpleFSDP's are those over data axes that gather a weight or sum a gradient; only these are planned for. What finds a
weight's float8 scale goes where the weight's gather needs it. All other collectives, those of tensor parallelism first
of all, are part of the computation.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from trainer.parallel.mesh import DATA_AXES

ops = torch.ops._c10d_functional
aten = torch.ops.aten
WAIT = ops.wait_tensor.default
ALL_GATHER = ops.all_gather_into_tensor.default
KINDS = {
    ALL_GATHER: "all_gather",
    ops.reduce_scatter_tensor.default: "reduce_scatter",
    ops.all_reduce.default: "all_reduce",
}
CASTS = {aten._to_copy.default, torch.ops.prims.convert_element_type.default}
LAYOUTS = {
    operator.getitem,
    aten.alias.default,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.detach.default,
    aten.permute.default,
    aten.reshape.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.squeeze.dim,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
    aten.view.dtype,
    aten._unsafe_view.default,
}
COPIES = LAYOUTS | CASTS
# What may happen to a summed gradient on its way out of the graph.
AFTER_SUMS = COPIES | {WAIT, aten.add.Tensor, aten.mul.Tensor, aten.div.Tensor, *KINDS}


@dataclass(frozen=True)
class Collective:
    """One collective: its start and wait in the graph, the mesh axis it runs over, and the modules it belongs to.

    `serves` is "weight" for SimpleFSDP's gathers, "gradient" for its sums, "scale" for what finds a weight's float8
    scale, and empty for all else. `sums_before` counts
    the sums that a gradient has been through: an all-reduce that takes what a reduce-scatter leaves has 1.
    """

    kind: str
    axis: str
    dtype: torch.dtype
    bytes_in: int
    bytes_out: int
    module: str
    start: Node
    wait: Node
    serves: str = ""
    sums_before: int = 0
    modules: tuple[str, ...] = ()

    @property
    def dtype_name(self) -> str:
        """What travels; single bytes are float8, which not every backend knows."""
        return "float8 (uint8)" if self.dtype.itemsize == 1 else str(self.dtype).removeprefix("torch.")

    @property
    def is_ours(self) -> bool:
        """Whether it is one that SimpleFSDP gathers a weight or sums a gradient with."""
        return self.serves in ("weight", "gradient")

    @property
    def is_data(self) -> bool:
        """Whether it runs over a data axis."""
        return self.axis in DATA_AXES

    @property
    def group(self) -> str:
        """The name of its process group."""
        return str(self.start.args[-1])

    @property
    def op(self) -> str:
        """How it reduces; empty for a gather."""
        return "" if self.kind == "all_gather" else str(self.start.args[1])

    def copy_in(self) -> list[Node]:
        """Return the casts, cuts and joins that lead to its start and nowhere else, in order."""
        return find_copy_in(self.start)

    def copy_out(self) -> list[Node]:
        """Return the cuts and joins that stand between its wait and what uses its result, in order."""
        found = {self.wait}
        following = []
        ahead = list(self.wait.users)
        while ahead:
            node = ahead.pop(0)
            if node not in found and node.target in LAYOUTS and set(node.all_input_nodes) <= found:
                found.add(node)
                following.append(node)
                ahead += node.users
        return following


def find_collectives(gm: GraphModule, axes: Mapping[str, str]) -> list[Collective]:
    """Return the collectives of `gm` in order. `axes` maps names of process groups to mesh axes."""
    starts = [node for node in gm.graph.nodes if node.op == "call_function" and node.target in KINDS]
    weights = find_weights(gm)
    sums_before = _count_sums(starts, axes)
    found = []
    for node in starts:
        (wait,) = (user for user in node.users if user.target is WAIT)
        kind, axis, module = KINDS[node.target], axes[node.args[-1]], module_of(node)
        serves = ""
        if axis in DATA_AXES and kind == "all_gather" and node in weights:
            serves = "weight"
        elif node in sums_before:
            serves = "gradient"
        elif kind == "all_reduce" and node in weights:
            serves = "scale"
        given, result = node.args[0].meta["val"], node.meta["val"]
        found.append(
            Collective(
                kind=kind,
                axis=axis,
                dtype=given.dtype,
                bytes_in=given.numel() * given.itemsize,
                bytes_out=result.numel() * result.itemsize,
                module=module,
                start=node,
                wait=wait,
                serves=serves,
                sums_before=sums_before.get(node, 0),
                modules=node.meta.get("merged_modules", (module,)),
            )
        )
    return found


def is_parameter(placeholder: Node) -> bool:
    """Tell parameters from token ids, saved values and tangents.

    AOTAutograd calls a graph's inputs primals, and those of one that has no backward arg.
    """
    value, name = placeholder.meta.get("val"), str(placeholder.target)
    return isinstance(value, torch.Tensor) and value.is_floating_point() and name.startswith(("primals", "arg"))


def is_number(node: Node) -> bool:
    """Tell whether the value is a single number, as the scale of a float8 weight and what leads to it.

    That has no dims, or two. One element along one dim is a vector's: a shard of a norm's weight may be so small.
    """
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.numel() == 1 and value.ndim != 1


def is_saved_number(placeholder: Node) -> bool:
    """Tell whether forward has left a single number to backward, as it does with the scale of a float8 weight."""
    return is_number(placeholder) and not str(placeholder.target).startswith(("primals", "tangents"))


def find_weights(gm: GraphModule) -> dict[Node, None]:
    """Return, in order, the computed values that are functions of parameters: casts, gathers, cuts, joins, scales.

    Of parameters alone, or of parameters and single numbers that forward has saved.
    """
    found: dict[Node, None] = {}
    inputs = gm.graph.find_nodes(op="placeholder")
    parameters = {node for node in inputs if is_parameter(node)}
    numbers = {node for node in inputs if is_saved_number(node)}
    for node in gm.graph.nodes:
        given = set(node.all_input_nodes) - numbers
        if node.op == "call_function" and given and all(parent in found or parent in parameters for parent in given):
            found[node] = None
    return found


def find_copy_in(start: Node) -> list[Node]:
    """Return the casts, cuts and joins that lead to `start` and nowhere else, in order."""
    inside = {start}
    found: list[Node] = []
    ahead = list(start.all_input_nodes)
    while ahead:
        node = ahead.pop(0)
        if node not in inside and node.target in COPIES and set(node.users) <= inside:
            inside.add(node)
            found.append(node)
            ahead += node.all_input_nodes
    return found[::-1]


def _count_sums(starts: list[Node], axes: Mapping[str, str]) -> dict[Node, int]:
    """Return the sums of gradients over data axes, each with how many sums over data axes are behind it.

    A sum over a data axis is one of a gradient if its result goes to the graph's output with no computation between.
    """
    leaves: dict[Node, bool] = {}
    over_data = [node for node in starts if axes[node.args[-1]] in DATA_AXES]
    sums = [node for node in over_data if KINDS[node.target] != "all_gather" and node.args[1] == "sum"]
    level = {node: 0 for node in sums if _goes_out(node, leaves)}
    for node in list(level):
        for later in _sums_after(node, level):
            level[later] = max(level[later], level[node] + 1)
    return level


def _goes_out(node: Node, known: dict[Node, bool]) -> bool:
    """Whether all that comes of `node` is the graph's output, by operations that only finish a sum."""
    stack = [node]
    while stack:
        current = stack[-1]
        waiting = [user for user in current.users if user not in known and user.op != "output"]
        if current.target not in AFTER_SUMS:
            known[current] = False
        elif waiting:
            stack += waiting
            continue
        else:
            known[current] = all(user.op == "output" or known[user] for user in current.users)
        stack.pop()
    return known[node]


def _sums_after(node: Node, sums: Mapping[Node, int]) -> list[Node]:
    """Return the next sums on the ways from `node` to the output."""
    found, seen, ahead = [], {node}, list(node.users)
    while ahead:
        current = ahead.pop()
        if current in seen or current.op == "output":
            continue
        seen.add(current)
        if current in sums:
            found.append(current)
        else:
            ahead += current.users
    return found


def module_of(node: Node) -> str:
    """Return the dotted name of the module in whose forward `node`, or what it is the gradient of, was traced."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    path = next(reversed(list(stack.values())), ("",))[0] if stack else ""
    # Dynamo writes the path from the traced function's variable on: L['self'], G['model'], fn.__closure__[0]...
    _, _, name = path.rpartition("]")
    return name.removeprefix(".").removeprefix("cell_contents").removeprefix(".")


def describe(c: Collective) -> str:
    """Say what a collective is, by what is the same on all ranks: shards that come out uneven differ in bytes."""
    return " ".join([c.kind, *filter(None, [c.op]), f"over {c.axis} in {c.dtype_name} for {', '.join(c.modules)}"])


def summarize(collectives: list[Collective]) -> list[str]:
    """Return a line for each kind, axis and dtype, with how many there are and the bytes they take in."""
    count: Counter[tuple[str, str, str]] = Counter()
    taken: Counter[tuple[str, str, str]] = Counter()
    for c in collectives:
        key = (c.kind, c.axis, c.dtype_name)
        count[key] += 1
        taken[key] += c.bytes_in
    return [
        f"{number} {kind} over {axis} in {dtype}, {taken[kind, axis, dtype] / 1e6:,.2f} MB in"
        for (kind, axis, dtype), number in sorted(count.items())
    ]
