"""An automatic plan: buckets grown greedily until what they move can no longer be hidden, within a memory limit.

After the SimpleFSDP paper (arXiv 2411.00284): along the collectives, one more joins the open bucket as long as the
bucket's communication fits into the computation of the bucket before, else a new bucket begins. The rule is greedy and
its costs are estimates, so its outcome is only a candidate, like the plans by block and without buckets. The simulator
judges, and the chosen plan is never worse there than those two. Everything here follows from the graph's global sizes
and the described hardware, so all ranks choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from trainer.parallel.overlap.bucket import merge
from trainer.parallel.overlap.cost import Priced, Ring, collective_seconds, price, whole_bytes
from trainer.parallel.overlap.find import Collective, find_collectives
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.overlap.plan import MAX_BUCKET_BYTES, Bucket, plan_by_block, plan_singly
from trainer.parallel.overlap.reorder import Staged, reorder
from trainer.parallel.overlap.simulate import Simulation, simulate

# What part of the computation before it a bucket may fill: all, as in the paper, or less, where estimates of what is
# left over are too high.
TIGHTNESS = (1.0, 0.5)
# What is this much slower than the fastest is as fast, as far as estimates tell, and the smaller is better: on two CPU
# ranks a plan that was to be 6 % faster than that by block took 11 % longer (docs/benchmark.md).
NO_SLOWER = 1.1


@dataclass(frozen=True)
class World:
    """What a graph is to run on: groups' axes, axes' rings, devices, and whether kernels are fused."""

    axes: Mapping[str, str]
    rings: Mapping[str, Ring]
    hardware: Hardware
    fuse: bool = True

    def price(self, gm: GraphModule) -> Priced:
        return price(gm, self.axes, self.rings, self.hardware, fuse=self.fuse)


@dataclass(frozen=True)
class Candidate:
    """A plan for the graph it was made for, and what the simulator says of it."""

    name: str
    buckets: list[Bucket]
    priced: Priced  # of the graph as the plan leaves it
    simulation: Simulation

    @property
    def exposed_seconds(self) -> float:
        """Seconds of data axes' communication that computation waits for."""
        return self.simulation.exposed_seconds(self.priced, data=True)


def plan_automatically(gm: GraphModule, world: World, *, blocks: str, limit_bytes: float) -> list[Candidate]:
    """Return candidates for `gm` with the chosen one first. `limit_bytes` is what the graph may hold at its peak.

    A candidate over the limit is chosen only if all are, and then the smallest.
    """
    priced = world.price(gm)
    collectives = list(priced.collectives.values())
    # Two stages of a plan are in memory at once: one in use, one on its way.
    room = max(0, limit_bytes - simulate(priced).peak_bytes) / 2
    plans: dict[str, list[Bucket]] = {"none": plan_singly(collectives), "block": plan_by_block(collectives, blocks)}
    for tightness in TIGHTNESS:
        greedy = plan_greedily(priced, world, tightness=tightness, limit_bytes=room)
        if _grouping(greedy) not in map(_grouping, plans.values()):  # to judge a plan is most of the work
            plans[f"greedy {tightness}"] = greedy
    candidates = [judge(gm, world, name, buckets) for name, buckets in plans.items()]
    return sorted(candidates, key=_preference(candidates, limit_bytes))


def _grouping(buckets: Sequence[Bucket]) -> list[tuple[int, list[Node]]]:
    return [(bucket.stage, [c.start for c in bucket.collectives]) for bucket in buckets]


def _preference(candidates: Sequence[Candidate], limit_bytes: float) -> Callable[[Candidate], tuple[float, ...]]:
    """Prefer what fits; what exposes no more than the plans by block and without buckets; the fast; the small."""

    def excess(candidate: Candidate) -> float:
        return max(0.0, candidate.simulation.peak_bytes - limit_bytes)

    simple = [c for c in candidates if c.name in ("none", "block")]
    fitting = [c for c in simple if not excess(c)] or simple
    most = min(c.exposed_seconds for c in fitting)
    allowed = [c for c in candidates if not excess(c) and c.exposed_seconds <= most] or candidates
    fast = NO_SLOWER * min(c.simulation.seconds for c in allowed)
    return lambda c: (
        excess(c),
        c.exposed_seconds > most,
        c.simulation.seconds > fast,
        c.simulation.peak_bytes,
        c.simulation.seconds,
    )


def judge(gm: GraphModule, world: World, name: str, buckets: list[Bucket], *, overlap: bool = True) -> Candidate:
    """Carry out a plan on a copy of `gm` and simulate it."""
    copy = copy_graph(gm)
    if buckets:
        collectives = {c.start.name: c for c in find_collectives(copy, world.axes)}
        staged = [Staged(b.stage, merge(copy, [collectives[c.start.name] for c in b.collectives])) for b in buckets]
        reorder(copy, staged, overlap=overlap)
    priced = world.price(copy)
    return Candidate(name, buckets, priced, simulate(priced))


def plan_greedily(priced: Priced, world: World, *, tightness: float, limit_bytes: float) -> list[Bucket]:
    """Return buckets by the paper's rule, none with more than `limit_bytes` unless it is a single collective."""
    ours = [c for c in priced.collectives.values() if c.is_ours]
    limit = min(limit_bytes, MAX_BUCKET_BYTES)
    buckets: list[Bucket] = []
    stage = 0
    for serves, level in sorted({(c.serves, c.sums_before) for c in ours}):
        line = [c for c in ours if (c.serves, c.sums_before) == (serves, level)]
        for part in _cut(line, _room_until(priced, serves), world, tightness, limit):
            buckets += _by_key(stage, part)
            stage += 1
    return buckets


def _cut(
    line: Sequence[Collective], room: Mapping[Node, float], world: World, tightness: float, limit: float
) -> list[list[Collective]]:
    """Cut `line` where one more would no longer be hidden by what is computed between the bucket before and this."""
    parts: list[list[Collective]] = []
    hides = 0.0
    for c in line:
        part = parts[-1] if parts else []
        fits = sum(map(whole_bytes, [*part, c])) <= limit
        # To close a bucket that has no computation of its own would hide nothing of the next.
        is_idle = bool(part) and room[c.start] <= room[part[0].start]
        if part and fits and (is_idle or _seconds([*part, c], world) <= tightness * hides):
            part.append(c)
            continue
        if part:
            hides = room[c.start] - room[part[0].start]
        parts.append([c])
    return parts


def _seconds(part: Sequence[Collective], world: World) -> float:
    moved: dict[tuple[str, str], int] = {}
    for c in part:
        moved[c.kind, c.axis] = moved.get((c.kind, c.axis), 0) + whole_bytes(c)
    return sum(
        collective_seconds(kind, size, world.rings[axis], world.hardware) for (kind, axis), size in moved.items()
    )


def _by_key(stage: int, part: Sequence[Collective]) -> list[Bucket]:
    groups: dict[tuple[object, ...], list[Collective]] = {}
    for c in part:
        groups.setdefault((c.kind, c.group, c.dtype, c.op), []).append(c)
    return [Bucket(stage, found[0].module, tuple(found)) for found in groups.values()]


def _room_until(priced: Priced, serves: str) -> dict[Node, float]:
    """Return, at each collective, the seconds so far in which those that serve `serves` could have run.

    That is computation, tensor parallelism's collectives included, less what SimpleFSDP's others take of their stream.
    """
    passed, room = 0.0, {}
    for node in priced.gm.graph.nodes:
        c = priced.collectives.get(node)
        seconds = priced.seconds.get(node, 0.0)
        if c is not None:
            room[node] = passed
        if c is None or not c.is_ours:
            passed += seconds
        elif c.serves != serves:
            passed -= seconds
    return room


class _Sketch(GraphModule):
    """A graph to change and look at, never to run: writing its code is most of the cost of copying it."""

    def recompile(self) -> None:  # type: ignore[override]
        pass


def copy_graph(gm: GraphModule) -> GraphModule:
    """Return a module with a graph of its own that can't be run; nodes keep their names and meta."""
    graph = Graph()
    copied = graph.graph_copy(gm.graph, {}, return_output_node=True)
    assert isinstance(copied, tuple)
    value, output = copied
    graph.output(value).meta.update(output.meta)
    return _Sketch(gm, graph)
