"""One collective instead of several of the same kind, axis, dtype and reduction.

A merged gather costs one copy of the shards in, and one of each weight out: the weight lies in the buffer in pieces,
one from each rank. A merged sum costs one copy of the gradients in and none out: results are views of the buffer.
The graph is left out of order; `reorder.py` puts every node where it belongs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from trainer.parallel.overlap.find import LAYOUTS, WAIT, Collective

aten = torch.ops.aten


def merge(gm: GraphModule, collectives: Sequence[Collective]) -> Collective:
    """Replace `collectives`, which are in order, by one, and return it. Changes `gm`."""
    first = collectives[0]
    if len(collectives) == 1:
        return first
    build = Builder(gm, collectives)
    taken, left = {
        "all_gather": (build.join_shards, build.cut_weights),
        "reduce_scatter": (build.join_by_rank, build.cut_flat),
        "all_reduce": (build.join_flat, build.cut_flat),
    }[first.kind]
    with build.fake_mode:
        start = build.call(first.start, first.start.target, taken(), *first.start.args[1:])
        wait = build.call(first.wait, WAIT, start)
        results = left(wait)
    modules = tuple(dict.fromkeys(name for c in collectives for name in c.modules))
    start.meta["merged_modules"] = modules
    for c, result in zip(collectives, results, strict=True):
        c.wait.replace_all_uses_with(result)
        gm.graph.erase_node(c.wait)
        gm.graph.erase_node(c.start)
    for unused in build.replaced:
        gm.graph.erase_node(unused)
    for given in build.given:
        erase_unused(gm, given)
    return Collective(
        kind=first.kind,
        axis=first.axis,
        dtype=first.dtype,
        bytes_in=sum(c.bytes_in for c in collectives),
        bytes_out=sum(c.bytes_out for c in collectives),
        module=first.module,
        start=start,
        wait=wait,
        serves=first.serves,
        sums_before=first.sums_before,
        modules=modules,
    )


def erase_unused(gm: GraphModule, node: Node) -> None:
    """Erase cuts and views that nothing reads any more."""
    while not node.users and node.target in LAYOUTS:
        parent = node.args[0]
        gm.graph.erase_node(node)
        if not isinstance(parent, Node):
            return
        node = parent


class Builder:
    """Adds the nodes around one merged collective, where the last of the old ones stands."""

    def __init__(self, gm: GraphModule, collectives: Sequence[Collective]) -> None:
        self.graph = gm.graph
        self.collectives = collectives
        self.given = [c.start.args[0] for c in collectives]
        self.before = collectives[-1].start
        self.replaced: list[Node] = []
        self.fake_mode = collectives[0].start.meta["val"].fake_mode

    def call(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Add a call that has the metadata of `like` and a value of its own."""
        node = self.add(like, target, *args, **kwargs)
        node.meta["val"] = target(*torch.fx.map_arg(args, lambda parent: parent.meta["val"]), **kwargs)
        return node

    def copy(self, old: Node, source: Node, *, joins: bool) -> Node:
        """Add a contiguous copy of `source` that stands for `old`, whose shape and value it has.

        A reshape that joins dims copies. One that doesn't, since a dim is 1, would leave pieces where they are.
        """
        if not joins:
            source = self.call(old, aten.clone.default, source, memory_format=torch.contiguous_format)
        node = self.add(old, aten.reshape.default, source, list(old.meta["val"].shape))
        node.meta["val"] = old.meta["val"]
        return node

    def add(self, like: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta", "from_node")}
        return node

    def cut(self, buffer: Node, sizes: list[int], dim: int) -> list[Node]:
        """Add the parts of a buffer, which are views of it."""
        parts = self.call(buffer, aten.split_with_sizes.default, buffer, sizes, dim)
        return [self.call(c.wait, operator.getitem, parts, index) for index, c in enumerate(self.collectives)]

    def shaped(self, node: Node, shape: Sequence[int]) -> Node:
        """Give a contiguous value another shape, which costs nothing."""
        if tuple(node.meta["val"].shape) == tuple(shape):
            return node
        return self.call(
            node, aten.view.default if node.meta["val"].is_contiguous() else aten.reshape.default, node, list(shape)
        )

    def join_shards(self) -> Node:
        return self.call(
            self.given[0], aten.cat.default, [self.shaped(given, [given.meta["val"].numel()]) for given in self.given]
        )

    def join_flat(self) -> Node:
        """Join values end to end; where they are all of one buffer, cut in the same order, that buffer is it."""
        return find_buffer(self.given) or self.join_shards()

    def join_by_rank(self) -> Node:
        """Join gradients so that each rank's parts lie together."""
        ranks = self.collectives[0].start.args[2]
        rows = [self.shaped(given, [ranks, given.meta["val"].numel() // ranks]) for given in self.given]
        joined = self.call(self.given[0], aten.cat.default, rows, 1)
        return self.shaped(joined, [joined.meta["val"].numel()])

    def cut_flat(self, wait: Node) -> list[Node]:
        shapes = [c.wait.meta["val"].shape for c in self.collectives]
        parts = self.cut(wait, [shape.numel() for shape in shapes], 0)
        return [self.shaped(part, shape) for part, shape in zip(parts, shapes, strict=True)]

    def cut_weights(self, wait: Node) -> list[Node]:
        ranks = self.collectives[0].start.args[1]
        table = self.shaped(wait, [ranks, wait.meta["val"].numel() // ranks])
        parts = self.cut(table, [given.meta["val"].numel() for given in self.given], 1)
        return [
            self.turn(c, part) or self.copy(c.wait, part, joins=c.wait.meta["val"].shape[0] > ranks)
            for c, part in zip(self.collectives, parts, strict=True)
        ]

    def turn(self, c: Collective, part: Node) -> Node | None:
        """Where the graph cuts a gathered weight by rank and joins it along dim 1, let that be the one copy out."""
        joined = find_columns(c)
        if joined is None:
            return None
        ranks, (rows, columns) = c.start.args[1], c.start.args[0].meta["val"].shape
        table = self.call(c.wait, aten.view.default, part, [ranks, rows, columns])
        turned = self.call(c.wait, aten.permute.default, table, [1, 0, 2])
        joined.replace_all_uses_with(self.copy(joined, turned, joins=columns > 1))
        pieces = joined.args[0]
        split = pieces[0].args[0]
        self.replaced += [joined, *pieces, split]
        return part


def find_columns(c: Collective) -> Node | None:
    """Return the value in which a weight that is divided by columns, and gathered by rows, is whole, or None."""
    if len(c.wait.users) != 1 or len(c.wait.meta["val"].shape) != 2:
        return None
    (split,) = c.wait.users
    if split.target is not aten.split.Tensor or split.args != (c.wait, c.start.args[0].meta["val"].shape[0]):
        return None
    pieces = list(split.users)
    if not pieces or any(len(piece.users) != 1 for piece in pieces):
        return None
    (joined,) = pieces[0].users
    is_joined = joined.target is aten.cat.default and joined.args[1:] == (1,)
    in_order = is_joined and [piece.args[1] for piece in joined.args[0]] == list(range(c.start.args[1]))
    return joined if in_order and set(joined.args[0]) == set(pieces) else None


def find_buffer(parts: Sequence[Node]) -> Node | None:
    """Return the flat buffer of which `parts` are all parts, in order; None where there is none."""
    cuts = [part.args[0] if part.target is aten.view.default else part for part in parts]
    if any(cut.target is not operator.getitem for cut in cuts):
        return None
    split = cuts[0].args[0]
    if [cut.args for cut in cuts] != [(split, index) for index in range(len(cuts))]:
        return None
    if split.target is not aten.split_with_sizes.default or len(split.args[1]) != len(cuts):
        return None
    buffer = split.args[0]
    return buffer if buffer.meta["val"].dim() == 1 else None
