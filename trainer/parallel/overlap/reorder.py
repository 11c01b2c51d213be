"""Where starts and waits stand: each node of the graph is put in its place again, in one pass.

Computation keeps its order. A weight's gather, and what leads from it to its first use, is put where it is needed: the
wait before that use, the start before the stage before is waited for, so that it travels while that stage computes. A
gradient's sum starts when its last part is there, and is waited for as late as memory allows: before another stage's
gradients are joined that would, together with what is on its way, hold more than the largest stage does by itself.
Memory is bounded by that: two stages of weights, and the largest of gradients, are on their way or in use.
A start stands right after a kernel that nothing fuses with: a compiler that fuses what is around a wait can then not
carry the wait ahead of the start.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node
from torch.utils.flop_counter import flop_registry

from trainer.parallel.overlap.find import CASTS, COPIES, WAIT, Collective, find_weights


@dataclass(frozen=True)
class Staged:
    """A collective and the stage it belongs to."""

    stage: int
    collective: Collective


def reorder(gm: GraphModule, staged: Sequence[Staged], *, overlap: bool) -> None:
    """Put every node of `gm` in its place. Changes `gm`.

    Without `overlap` a gather starts where it is waited for, and a sum is waited for where it starts; the graph is
    sorted all the same.
    """
    order = _Order(gm, staged, overlap).place_all()
    (output,) = gm.graph.find_nodes(op="output")
    for node in order:
        output.prepend(node)


class _OnTheirWay:
    """Sums of one level that have started and aren't waited for, the oldest first, and what each stage's hold."""

    def __init__(self, sums: Sequence[Staged]) -> None:
        self.bytes: dict[int, int] = {}
        for item in sums:
            self.bytes[item.stage] = self.bytes.get(item.stage, 0) + item.collective.bytes_in
        self.most = max(self.bytes.values())
        self.held = 0
        self.started: dict[int, list[Staged]] = {}

    def add(self, item: Staged) -> None:
        if item.stage not in self.started:
            self.started[item.stage] = []
            self.held += self.bytes[item.stage]
        self.started[item.stage].append(item)

    def too_many_with(self, stage: int) -> list[Staged]:
        """Remove and return what is to be waited for, that `stage` and the rest hold no more than the largest stage."""
        gone: list[Staged] = []
        while stage not in self.started and self.started and self.held + self.bytes[stage] > self.most:
            gone += self._take_oldest()
        return gone

    def all(self) -> list[Staged]:
        """Remove and return all."""
        gone: list[Staged] = []
        while self.started:
            gone += self._take_oldest()
        return gone

    def _take_oldest(self) -> list[Staged]:
        oldest = next(iter(self.started))
        self.held -= self.bytes[oldest]
        return self.started.pop(oldest)


class _Order:
    """The new order while it grows."""

    def __init__(self, gm: GraphModule, staged: Sequence[Staged], overlap: bool) -> None:
        self.graph = gm.graph
        self.overlap = overlap
        self.placed: dict[Node, None] = {}
        gathers = [item for item in staged if item.collective.serves == "weight"]
        sums = [item for item in staged if item.collective.serves == "gradient"]
        # Placed when something reads them: functions of parameters, and casts and joins that lead to a sum.
        self.on_demand = set(find_weights(gm))
        for item in sums:
            self.on_demand |= _find_copy_in(item.collective.start)
        # Placed when all that they read is there: what follows a sum.
        self.following = _find_following([item.collective.wait for item in sums])
        self.sum_stage = {item.collective.start: item for item in sums}
        self.held = {item.collective.wait for item in sums}
        levels = sorted({item.collective.sums_before for item in sums})
        self.on_their_way = {
            level: _OnTheirWay([item for item in sums if item.collective.sums_before == level]) for level in levels
        }
        self.starts_after: dict[Node | None, int] = {None: 1}  # how many stages of gathers have started after a node
        self.gathers = self._in_order_of_use(gathers)
        self.started = 0

    def place_all(self) -> list[Node]:
        for node in self.graph.nodes:
            if node.op == "placeholder":
                self._place(node)
        self._start_gathers(self.starts_after[None])
        for node in self.graph.nodes:
            if node.op != "output" and node not in self.on_demand and node not in self.following:
                self._demand(node)
        for sums in self.on_their_way.values():
            self._wait_for(sums.all())
        for node in self.graph.nodes:
            if node.op != "output":
                self._demand(node)
        return list(self.placed)

    def _demand(self, node: Node) -> None:
        """Place `node` after all that it reads."""
        if node in self.sum_stage and node not in self.placed:
            self._make_room(self.sum_stage[node])
        ahead = [node]
        while ahead:
            current = ahead[-1]
            missing = [parent for parent in current.all_input_nodes if parent not in self.placed]
            if missing:
                ahead += reversed(missing)
                continue
            ahead.pop()
            if current not in self.placed:
                self._place(current)

    def _place(self, node: Node) -> None:
        self.placed[node] = None
        self._start_gathers(self.starts_after.get(node, 0))
        if node in self.sum_stage:
            self._sum_started(self.sum_stage[node])
        for user in node.users:
            if user in self.following and user not in self.held and self._is_ready(user):
                self._demand(user)

    def _is_ready(self, node: Node) -> bool:
        return node not in self.placed and all(parent in self.placed for parent in node.all_input_nodes)

    def _start_gathers(self, stages: int) -> None:
        """Start gathers until so many stages have been started."""
        while self.overlap and self.started < min(stages, len(self.gathers)):
            self.started += 1
            for item in self.gathers[self.started - 1]:
                self._demand(item.collective.start)

    def _make_room(self, item: Staged) -> None:
        self._wait_for(self.on_their_way[item.collective.sums_before].too_many_with(item.stage))

    def _sum_started(self, item: Staged) -> None:
        if self.overlap:
            self.on_their_way[item.collective.sums_before].add(item)
        else:
            self._wait_for([item])

    def _wait_for(self, items: Sequence[Staged]) -> None:
        for item in items:
            if item.collective.wait not in self.placed:
                self._place(item.collective.wait)

    def _in_order_of_use(self, gathers: Sequence[Staged]) -> list[list[Staged]]:
        """Return the gathers by stage, stages in the order in which computation first reads from them."""
        by_wait = {item.collective.wait: item for item in gathers}
        stages: dict[int, list[Staged]] = {}
        seen: set[Node] = set()
        barrier: Node | None = None  # the last node that no kernel around a wait is fused with
        for node in self.graph.nodes:
            if node in self.on_demand or node in self.following:
                continue
            for wait in self._first_waits(node, by_wait, seen):
                stage = by_wait[wait].stage
                if stage not in stages:
                    stages[stage] = []
                    self.starts_after[barrier] = len(stages) + 1
                    barrier = wait
                stages[stage].append(by_wait[wait])
            if _is_barrier(node):
                barrier = node
        return list(stages.values())

    def _first_waits(self, node: Node, waits: Container[Node], seen: set[Node]) -> list[Node]:
        """Return the waits that `node` needs, by way of nodes on demand, and that no node before it needed."""
        found = []
        ahead = list(reversed(node.all_input_nodes))
        while ahead:
            current = ahead.pop()
            if current in self.on_demand and current not in seen:
                seen.add(current)
                found += [current] if current in waits else []
                ahead += reversed(current.all_input_nodes)
        return found


def _is_barrier(node: Node) -> bool:
    """Whether `node` is a kernel of its own: a matmul, an attention, a collective of the computation."""
    return node.target is WAIT or getattr(node.target, "overloadpacket", None) in flop_registry


def _find_copy_in(start: Node) -> set[Node]:
    """Return the casts and joins that lead to `start` alone; up to a cast that makes values smaller."""
    inside = {start}
    ahead = list(start.all_input_nodes)
    while ahead:
        node = ahead.pop()
        if node in inside or node.target not in COPIES or not set(node.users) <= inside:
            continue
        if node.target in CASTS and node.meta["val"].itemsize < node.args[0].meta["val"].itemsize:
            continue
        inside.add(node)
        ahead += node.all_input_nodes
    return inside - {start}


def _find_following(waits: Sequence[Node]) -> set[Node]:
    """Return the waits of sums and all that comes of them but the output."""
    found: set[Node] = set()
    ahead = list(waits)
    while ahead:
        node = ahead.pop()
        if node.op != "output" and node not in found:
            found.add(node)
            ahead += node.users
    return found
