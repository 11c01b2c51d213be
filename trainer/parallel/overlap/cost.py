"""Seconds of every node of a graph on described hardware. Arithmetic only: nothing is measured or run.

A matmul or attention takes the longer of its FLOPs and its bytes. Other kernels take their bytes: what they read and
write of storages (`storage.py`), each storage once per kernel. Under Inductor neighbours share a kernel where no
matmul, attention or collective lies between them. A collective is a ring: each rank passes on all but its own part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from trainer.parallel.mesh import AXES, Mesh
from trainer.parallel.overlap.find import Collective, find_collectives
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.overlap.shards import find_shard_side
from trainer.parallel.overlap.storage import (
    MATMULS,
    SCALED_MATMUL,
    Storage,
    Storages,
    find_storages,
    is_attention,
    packet,
    tensors_of,
)


@dataclass(frozen=True)
class Ring:
    """The ranks of one mesh axis: how many, and how far apart neighbours are in the numbering of all ranks."""

    ranks: int
    stride: int = 1

    def ranks_in_node(self, hardware: Hardware) -> int:
        """Return how many of the axis' ranks share a node; nodes hold consecutive ranks."""
        return max(1, min(self.ranks, hardware.ranks_per_node // self.stride))


def rings_of(mesh: Mesh) -> dict[str, Ring]:
    """Return the ring of every axis of the mesh."""
    sizes = mesh.axes.shape
    return {axis: Ring(sizes[i], math.prod(sizes[i + 1 :])) for i, axis in enumerate(AXES)}


def collective_seconds(kind: str, whole_bytes: int, ring: Ring, hardware: Hardware) -> float:
    """Return how long a collective over `ring` takes whose gathered, or not yet reduced, tensor has `whole_bytes`.

    A ring all-gather or reduce-scatter has n - 1 steps and moves (n - 1) / n of the whole through every rank; an
    all-reduce is both. Ranks of one node enter the network by a card each, so the ring is as wide as they are many.
    """
    n, local = ring.ranks, ring.ranks_in_node(hardware)
    nodes = -(-n // local)
    inside, between = hardware.intra_node, hardware.inter_node
    bandwidth = inside.bytes_per_second
    if nodes > 1:
        bandwidth = local * between.bytes_per_second
        bandwidth = min(bandwidth, inside.bytes_per_second) if local > 1 else bandwidth
    crossings = nodes - 1
    latency = (n - 1 - crossings) * inside.step_seconds + crossings * between.step_seconds
    rounds = 2 if kind == "all_reduce" else 1
    return hardware.collective_seconds + rounds * (latency + (n - 1) / n * whole_bytes / bandwidth)


def whole_bytes(collective: Collective) -> int:
    """Return the bytes of the whole tensor that a collective gathers, scatters or sums."""
    return max(collective.bytes_in, collective.bytes_out)


@dataclass(frozen=True)
class Priced:
    """A graph with the seconds of each of its nodes; those of collectives stand at their starts."""

    gm: GraphModule
    seconds: dict[Node, float]
    collectives: dict[Node, Collective]  # by start
    storages: Storages
    flops: int

    def compute_seconds(self) -> float:
        return sum(seconds for node, seconds in self.seconds.items() if node not in self.collectives)


def price(
    gm: GraphModule, axes: Mapping[str, str], rings: Mapping[str, Ring], hardware: Hardware, *, fuse: bool
) -> Priced:
    """Price every node of `gm`. `axes` maps names of process groups to mesh axes, and `rings` those to their ranks.

    With `fuse`, kernels are those that Inductor would make; else each operation is one.
    """
    collectives = {c.start: c for c in find_collectives(gm, axes)}
    side = find_shard_side(gm, collectives.values())
    storages = find_storages(gm, side, fuse=fuse)
    charged: set[tuple[Node, Storage]] = set()
    started: set[Node] = set()
    seconds: dict[Node, float] = {}
    flops = 0
    for node in gm.graph.nodes:
        if node in collectives:
            c = collectives[node]
            moved = side.padded.get(node, whole_bytes(c))
            seconds[node] = collective_seconds(c.kind, moved, rings[c.axis], hardware)
        elif node in storages.made and node.op == "call_function":
            kernel, own = storages.kernel_of(node), count_flops(node)
            moved = _bytes_moved(node, storages, charged)
            seconds[node] = _kernel_seconds(node, own, moved, hardware, starts=kernel not in started)
            started.add(kernel)
            flops += own
    return Priced(gm, seconds, collectives, storages, flops)


def _kernel_seconds(node: Node, flops: int, moved: int, hardware: Hardware, *, starts: bool) -> float:
    least = hardware.kernel_seconds if starts else 0.0
    seconds = max(least, moved / hardware.bytes_per_second())
    if flops:
        dtype = tensors_of(node.all_input_nodes[0])[0].dtype
        rate = hardware.attention_flops if is_attention(node) else hardware.matmul_flops
        seconds = max(seconds, flops / rate(dtype))
    return seconds


def _bytes_moved(node: Node, storages: Storages, charged: set[tuple[Node, Storage]]) -> int:
    """Count what the node reads, beyond what its kernel has or has read already, and what it writes for others."""
    kernel, moved = storages.kernel_of(node), 0
    for storage, size in storages.reads[node].items():
        if (kernel, storage) not in charged and storages.kernel_of(storage.node) is not kernel:
            moved += size
        charged.add((kernel, storage))
    return moved + sum(storage.bytes for storage in storages.made[node] if not storages.is_internal(storage))


def count_flops(node: Node) -> int:
    """Count the floating-point operations of a matmul or attention; 0 for anything else."""
    if is_attention(node):
        return _attention_flops(node)
    if packet(node) not in MATMULS:
        return 0
    # (..., M, K) times (..., K, N), two for each multiplication and addition. A bias comes first, scales come last.
    operands = node.args[:2] if packet(node) is SCALED_MATMUL else node.args[-2:]
    left, right = (tensors_of(given)[0].shape for given in operands)  # type: ignore[arg-type]
    return 2 * math.prod(left) * right[-1]


def _attention_flops(node: Node) -> int:
    """Two matmuls of queries with keys and scores with values; backward has five (arXiv 2205.14135, appendix B).

    The half that causality leaves out isn't computed by fused kernels.
    """
    is_backward = "backward" in str(node.target)
    inputs = node.args[1:4] if is_backward else node.args[:3]
    query, key, value = (tensors_of(given)[0].shape for given in inputs)  # type: ignore[arg-type]
    scores = math.prod(query[:-1]) * key[-2]
    matmuls = 3 * query[-1] + 2 * value[-1] if is_backward else query[-1] + value[-1]
    return 2 * scores * matmuls // (2 if _argument(node, "is_causal") else 1)


def _argument(node: Node, name: str) -> object:
    """Return the value of an operator's argument by its name in the schema."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    place = names.index(name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, False)
