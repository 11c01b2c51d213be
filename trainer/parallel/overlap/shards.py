"""A rank's own side of data parallelism: shards before their gather, and gradients after their reduce-scatter.

Rows that ranks don't divide evenly give them shards of different sizes, and graphs of different nodes: one rank pads
and cuts where another doesn't. Each rank plans by itself, and all must decide alike. So the cost model charges neither
time nor memory on this side, but for the collectives and their buffers, whose sizes are padded: equal on all ranks.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from trainer.parallel.overlap.find import CASTS, Collective

aten = torch.ops.aten
# What makes a gather's input on every rank: the cast, and the join of a bucket. Padding isn't everywhere.
MAKES = CASTS | {aten.cat.default}


@dataclass
class ShardSide:
    """The nodes on the side of shards: `before` lead to `gathers` alone, `after` come of scattered gradients alone.

    What finds a shard's float8 scale counts as a gather. A gather in `copied` has a buffer made for it to read.
    `padded` are the bytes that collectives after the scatters, by start, move where shards are padded.
    """

    gathers: set[Node] = field(default_factory=set)
    before: set[Node] = field(default_factory=set)
    copied: set[Node] = field(default_factory=set)
    after: set[Node] = field(default_factory=set)
    padded: dict[Node, int] = field(default_factory=dict)


def find_shard_side(gm: GraphModule, collectives: Collection[Collective]) -> ShardSide:
    """Find what in `gm` depends on the size of this rank's own shards."""
    side = ShardSide(gathers={c.start for c in collectives if c.serves in ("weight", "scale")})
    scatters = {c.wait for c in collectives if c.serves == "gradient" and c.kind == "reduce_scatter"}
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    for node in reversed(calls):
        if node not in side.gathers and node.users and all(_is_gathered(user, side) for user in node.users):
            side.before.add(node)
    made: set[Node] = set()
    for node in calls:
        given = node.all_input_nodes
        if node in side.before and (node.target in MAKES or not made.isdisjoint(given)):
            made.add(node)
        elif node in side.gathers and not made.isdisjoint(given):
            side.copied.add(node)
        elif any(source in scatters or source in side.after for source in given):
            side.after.add(node)
    side.padded = {c.start: _bytes_before_cuts(c.start) for c in collectives if c.start in side.after}
    return side


def _is_gathered(user: Node, side: ShardSide) -> bool:
    return user in side.gathers or user in side.before


def _bytes_before_cuts(start: Node) -> int:
    given = start.args[0]
    while given.target is aten.slice.Tensor:  # type: ignore[union-attr]
        given = given.args[0]  # type: ignore[union-attr]
    value = given.meta["val"]  # type: ignore[union-attr]
    return value.numel() * value.itemsize
