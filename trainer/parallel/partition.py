"""Cutting the joint graph into forward and backward: what is kept between them, and what is computed again.

One function serves every compiler backend. Which values of a block are recomputed is already marked in the graph by
`torch.utils.checkpoint`; here gathered parameters are marked, and the cut itself is PyTorch's min-cut partitioner.
Both parts then go through the passes of `overlap/`, before any backend sees them.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.fx import GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from trainer.parallel.overlap.arrange import PLAIN, Overlap, arrange, join_scales, passes_key
from trainer.parallel.overlap.find import WAIT, find_weights, is_number
from trainer.parallel.overlap.plan import check_patterns, find_modules

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
LAYOUT_CHANGES = {
    operator.getitem,
    torch.ops.aten.cat.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.constant_pad_nd.default,
    torch.ops.aten.new_zeros.default,  # the part of a rank that has none
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.split_with_sizes.default,
    torch.ops.aten.view.default,
}

# PyTorch keeps a value that crosses from one recompute region to a later one. Gathers are one region that comes after
# every block's, so that a block which recomputes doesn't make the partitioner keep the gathered weight it reads.
GATHER_REGION = 1 << 30


# Takes the graphs by direction, and lines about what the plan of each does.
Record = Callable[[Mapping[str, GraphModule], Mapping[str, list[str]]], None]


@dataclass(frozen=True)
class Partition(CustomPartitionerFn):
    """Cuts joint graphs. With `regather`, gathered parameters are gathered again in backward instead of kept.

    `memory_budget` is the part of activation memory, from 0 to 1, that the cut may use; below 1 the partitioner chooses
    what else to compute again, by a knapsack of run time against bytes. With `join_scales` ranks agree on the float8
    scales of all weights at once. `overlap` says how collectives are bucketed and ordered, `axes` which mesh axis a
    process group is. `shards` are the shapes of this rank's parts of the inputs: in PyTorch's key for a compiled graph
    a DTensor counts as the whole, so that a rank whose parts are smaller would be given the graph of another that
    shares its cache.
    """

    regather: bool
    memory_budget: float = 1.0
    join_scales: bool = False
    overlap: Overlap = PLAIN
    axes: tuple[tuple[str, str], ...] = ()
    shards: tuple[tuple[int, ...], ...] = ()
    record: Record | None = field(default=None, repr=False, compare=False)

    def __call__(self, gm: GraphModule, joint_inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
        merge_repeated(gm)
        sum_shards_first(gm)
        mark_gathered(gm, self.regather)
        check_patterns(self.overlap.modules, find_modules(gm) if self.overlap.modules else ())
        changes: dict[str, Any] = {"activation_memory_budget": self.memory_budget}
        # The mesh is an input of the graph and has no size that the knapsack could count. torch 2.11 counts it as
        # nothing by itself and lacks the setting; the check can go with its support.
        if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
            changes["unsafe_treat_script_objects_as_zero_size"] = True
        budget = functorch_config.patch(changes)
        with budget, attention_without_random_numbers(gm) as restore:
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **settings)
            restore(forward)
            restore(backward)
        graphs, plans = {"forward": forward, "backward": backward}, {}
        for name, part in graphs.items():
            if self.join_scales:
                join_scales(part, dict(self.axes))
            plans[name] = arrange(part, dict(self.axes), self.overlap)
            part.recompile()
        if self.record:
            self.record(graphs, plans)
        return forward, backward

    def uuid(self) -> str:
        """Identify the outcome for compile caches: our own source and settings."""
        settings = replace(self, overlap=self.overlap.that_decides())
        return hashlib.sha256(Path(__file__).read_bytes() + f"{passes_key()} {settings}".encode()).hexdigest()

    # Inductor copies its settings, and pickles them for its cache's key: this one is shared, and its own key.
    def __deepcopy__(self, memo: Any) -> Partition:
        return self

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.uuid(),)


def merge_repeated(gm: GraphModule) -> None:
    """Let equal functions of parameters be computed once: a tied embedding is gathered for both its uses.

    Changes the graph of `gm`, as the passes below do; to run it, recompile it.
    """
    first: dict[str, Node] = {}
    for node in find_weights(gm):
        key = repr((node.target, node.args, node.kwargs))
        if key in first:
            node.replace_all_uses_with(first[key])
            gm.graph.erase_node(node)
        else:
            first[key] = node


def sum_shards_first(gm: GraphModule) -> None:
    """Where a gradient is summed over two axes, scatter over one before the other sums: it then has less to move.

    DTensor sums over `dp_replicate` first, the whole gradient, and scatters over `dp_shard` after. Sums commute, and
    with the cuts and padding between the two, so the all-reduce can take what the reduce-scatter leaves.
    """
    for all_reduce in gm.graph.find_nodes(op="call_function", target=ALL_REDUCE):
        (wait,) = all_reduce.users
        scatter = _only_scatter_after(wait)
        if scatter is None or all_reduce.args[1] != "sum" or scatter.args[1] != "sum":
            continue
        (scattered,) = scatter.users
        users = list(scattered.users)
        with gm.graph.inserting_after(scattered):
            moved = gm.graph.call_function(ALL_REDUCE, (scattered, *all_reduce.args[1:]))
        with gm.graph.inserting_after(moved):
            last = gm.graph.call_function(WAIT, (moved,))
        moved.meta, last.meta = scattered.meta.copy(), scattered.meta.copy()
        for user in users:
            user.replace_input_with(scattered, last)
        wait.replace_all_uses_with(all_reduce.args[0])
        gm.graph.erase_node(wait)
        gm.graph.erase_node(all_reduce)


def _only_scatter_after(node: Node) -> Node | None:
    """Return the reduce-scatter that takes all of `node` and nothing else, only cut, padded and joined on the way."""
    inside, joins, scatters = {node}, set(), set()
    ahead = list(node.users)
    while ahead:
        user = ahead.pop()
        if user.target is REDUCE_SCATTER:
            scatters.add(user)
        elif user.target in LAYOUT_CHANGES:
            inside.add(user)
            joins |= set(user.all_input_nodes)
            ahead += user.users
        else:
            return None
    return scatters.pop() if len(scatters) == 1 and joins <= inside else None


def mark_gathered(gm: GraphModule, regather: bool) -> None:
    """Mark gathered parameters to be computed again in backward, or to be kept, whatever their block does.

    A single number on which ranks agree, as the largest magnitude of what is cast to float8, is always kept: to compute
    it again takes the whole shard, and a collective.
    """
    for node in gm.graph.find_nodes(op="call_function", target=WAIT):
        if is_number(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node in find_weights(gm):
        if is_number(node):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        elif regather:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            node.meta["ac_graph_id"] = GATHER_REGION
        elif node.target is WAIT:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


@contextlib.contextmanager
def attention_without_random_numbers(gm: GraphModule) -> Iterator[Callable[[GraphModule], None]]:
    """Hide from the partitioner that attention may draw random numbers, which it doesn't: there is no dropout.

    Otherwise it saves and restores random states around a recomputed attention, and torch 2.12 and 2.13 fail to do that
    in a graph whose inputs are DTensors. The yielded function puts the operators back in a graph made from `gm`.
    """
    hidden: dict[Callable[..., Any], Any] = {}
    for node in gm.graph.nodes:
        if must_recompute(node) and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            assert "scaled_dot_product" in str(node.target), f"recomputing {node.target} needs its random state"
            node.target = _hide(node.target, hidden)
    yield lambda made: _unhide(made, hidden)


def _hide(target: Any, hidden: dict[Callable[..., Any], Any]) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        return target(*args, **kwargs)

    hidden[attention] = target
    return attention


def _unhide(gm: GraphModule, hidden: dict[Callable[..., Any], Any]) -> None:
    for node in gm.graph.nodes:
        if node.op == "call_function":
            node.target = hidden.get(node.target, node.target)
