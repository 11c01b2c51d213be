"""Which memory the values of a graph live in: views share it, and fused pointwise values need none.

A storage is what one operation allocates. Under Inductor most of what a graph names never exists, by two rules. A
pointwise value that reads few storages is computed anew wherever it is used, unless a matmul, attention, a collective
or the output takes it. The rest forms kernels along data where no such operation lies between, and what only its own
kernel reads needs no memory. Both are simpler than Inductor's own rules, and know no sizes of caches or registers.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from trainer.parallel.overlap.shards import ShardSide

aten = torch.ops.aten
WAIT = torch.ops._c10d_functional.wait_tensor.default
# Inductor stores a value that reads more: torch._inductor.config.realize_reads_threshold where it has several users,
# and realize_acc_reads_threshold where it has one.
MOST_READS_SHARED, MOST_READS = 4, 8
INDEXING = {aten.embedding, aten.gather, aten.index, aten.index_select}  # they read as much as they give
SCALED_MATMUL = aten._scaled_mm  # of float8 operands
MATMULS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, SCALED_MATMUL}
# What stands between a gradient as it is computed and the graph's output, besides collectives and views.
REDUCE_CHAIN = {aten.cat, aten.clone, aten.constant_pad_nd, aten._to_copy, torch.ops.prims.convert_element_type}
WHOLE_KERNELS = MATMULS | {
    aten.embedding_dense_backward,
    aten._unsafe_masked_index_put_accumulate,
    aten.index_put,
    aten.sort,
}


@dataclass(eq=False)
class Storage:
    """What `node` allocates. `readers` are the nodes that read it in a kernel of theirs, in order."""

    node: Node
    bytes: int
    is_input: bool = False
    is_output: bool = False
    readers: list[Node] = field(default_factory=list)


@dataclass
class Storages:
    """All storages of a graph: what each node allocates, and what it reads with how many bytes of it."""

    made: dict[Node, tuple[Storage, ...]] = field(default_factory=dict)
    reads: dict[Node, dict[Storage, int]] = field(default_factory=dict)
    fused: set[Node] = field(default_factory=set)  # computed where they are used
    kernels: dict[Node, Node] = field(default_factory=dict)  # the first node of the kernel that a node is part of
    seen_by: dict[Node, tuple[Storage, ...]] = field(default_factory=dict)  # views too: what a value lives in

    def kernel_of(self, node: Node) -> Node:
        return self.kernels.get(node, node)

    def is_internal(self, storage: Storage) -> bool:
        """Tell whether nothing outside its own kernel sees the storage, so that it needs no memory."""
        if storage.is_output or not storage.readers or storage.node not in self.kernels:
            return False
        kernel = self.kernel_of(storage.node)
        return all(self.kernel_of(reader) is kernel for reader in storage.readers)


def packet(node: Node) -> object:
    """Return the operator without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


def is_view(node: Node) -> bool:
    """Tell whether the node gives another look at memory that is there: views, waits, elements of a list."""
    if node.target in (operator.getitem, WAIT, aten._unsafe_view.default):
        return True
    if node.target is aten.reshape.default:  # a copy where a view won't do
        given, made = node.args[0].meta["val"], node.meta["val"]  # type: ignore[union-attr]
        return given.is_contiguous() or given.shape == made.shape
    return _aliases(node.target)


@functools.cache  # a graph has many nodes and few operators, which answer slowly
def _aliases(target: object) -> bool:
    schema = getattr(target, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(result.alias_info is not None for result in schema.returns)


@functools.cache
def _name(target: object) -> str:
    return str(target)


def is_attention(node: Node) -> bool:
    return "scaled_dot_product" in _name(node.target)


def is_collective(node: Node) -> bool:
    return _name(node.target).startswith("_c10d_functional.") and node.target is not WAIT


def is_fusible(node: Node) -> bool:
    """Tell whether Inductor generates the operation's kernel itself and may fuse it with others."""
    if node.op != "call_function" or is_view(node) or is_attention(node) or is_collective(node):
        return False
    return packet(node) not in WHOLE_KERNELS


def tensors_of(node: Node) -> list[torch.Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return [value for value in values if isinstance(value, torch.Tensor)]


def bytes_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def find_storages(gm: GraphModule, side: ShardSide, *, fuse: bool) -> Storages:
    """Find what memory each value lives in; with `fuse`, as Inductor would fuse the graph.

    What is on the side of shards has no memory of its own: a gather's input is the gather's, and what comes of a
    scattered gradient is a look at it, further sums too, which Inductor takes in place.
    """
    found = Storages()
    for node in gm.graph.nodes:
        if node.op == "output":
            for storage in _all_seen(node, found):
                storage.is_output = True
        elif node.op == "placeholder":
            _make(node, found, is_input=True)
        elif node.op != "call_function":
            continue
        elif node in side.before:
            found.seen_by[node] = ()
        elif node in side.gathers:
            _gather(node, found, copied=node in side.copied)
        elif node in side.after:
            found.seen_by[node] = tuple(dict.fromkeys(_all_seen(node, found)))
        elif is_view(node):
            _look(node, found)
        else:
            _read(node, found)
            if fuse and _stays_in_a_kernel(node, found):
                found.fused.add(node)
                found.seen_by[node] = ()
            else:
                _make(node, found)
                for storage in found.reads[node]:
                    storage.readers.append(node)
    if fuse:
        found.kernels = _join_kernels(found)
    return found


def _make(node: Node, found: Storages, *, is_input: bool = False) -> None:
    made = tuple(Storage(node, bytes_of(tensor), is_input) for tensor in tensors_of(node))
    found.made[node] = found.seen_by[node] = made


def _gather(node: Node, found: Storages, *, copied: bool) -> None:
    given: Node = node.args[0]  # type: ignore[assignment]
    result, taken = (Storage(node, sum(map(bytes_of, tensors_of(value)))) for value in (node, given))
    found.made[node], found.seen_by[node] = (result, taken) if copied else (result,), (result,)
    found.reads[node] = {}


def _look(node: Node, found: Storages) -> None:
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    seen = found.seen_by.get(source, ()) if source else ()
    picks_one = node.target is operator.getitem and source in found.made and len(seen) > 1
    found.seen_by[node] = (seen[node.args[1]],) if picks_one else seen  # type: ignore[index]
    if source in found.fused:
        found.fused.add(node)
        found.reads[node] = found.reads[source]


def _read(node: Node, found: Storages) -> None:
    """Collect what the node's kernel reads, through values that are computed inside it."""
    reads: dict[Storage, int] = {}
    limit = sum(map(bytes_of, tensors_of(node))) if packet(node) in INDEXING else None
    for given in node.all_input_nodes:
        if given in found.fused:
            parts = found.reads[given]
        else:
            taken = sum(map(bytes_of, tensors_of(given)))
            parts = {storage: min(storage.bytes, taken) for storage in found.seen_by.get(given, ())}
        for storage, size in parts.items():
            size = size if limit is None else min(size, limit)
            reads[storage] = max(reads.get(storage, 0), size)
    found.reads[node] = reads


def _stays_in_a_kernel(node: Node, found: Storages) -> bool:
    most = MOST_READS_SHARED if len(node.users) > 1 else MOST_READS
    if not is_fusible(node) or len(found.reads[node]) > most or _is_reduction(node):
        return False
    return all(is_fusible(user) for user in users_through_views(node))


def _is_reduction(node: Node) -> bool:
    largest = max((tensor.numel() for given in node.all_input_nodes for tensor in tensors_of(given)), default=0)
    return sum(tensor.numel() for tensor in tensors_of(node)) < largest and packet(node) not in INDEXING


def users_through_views(node: Node) -> Iterator[Node]:
    """Yield the operations, or the output, that use the node's memory."""
    ahead = list(node.users)
    while ahead:
        user = ahead.pop()
        if user.op == "call_function" and is_view(user):
            ahead += user.users
        else:
            yield user


def _all_seen(node: Node, found: Storages) -> Iterator[Storage]:
    for given in node.all_input_nodes:
        yield from found.seen_by.get(given, ())


def _join_kernels(storages: Storages) -> dict[Node, Node]:
    """Map each stored fusible node to the first one of its kernel.

    Two join along data where both have the same number of other operations on the longest way to them, so that no
    kernel needs its own result.
    """
    level: dict[Node, int] = {}
    first: dict[Node, Node] = {}
    for node, reads in storages.reads.items():
        if node not in storages.made:
            continue
        sources = [storage.node for storage in reads]
        level[node] = max((level.get(source, 0) + (source not in first) for source in sources), default=0)
        if is_fusible(node):
            near = [_find(first, source) for source in sources if source in first and level[source] == level[node]]
            first[node] = near[0] if near else node
            for other in near[1:]:
                first[_find(first, other)] = first[node]
    return {node: _find(first, node) for node in first}


def _find(first: dict[Node, Node], node: Node) -> Node:
    while first[node] is not node:
        first[node] = first[first[node]]
        node = first[node]
    return node
