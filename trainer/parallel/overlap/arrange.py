"""The graph passes in their visible order: groups of gathers, find, plan, bucket, reorder.

The same code arranges forward and backward graphs, for gloo, NCCL or a fake process group. It communicates nothing,
and what it decides about collectives depends on nothing that differs between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch.fx import GraphModule

from trainer.parallel.overlap.auto import Candidate, World, plan_automatically
from trainer.parallel.overlap.bucket import merge
from trainer.parallel.overlap.find import ALL_GATHER, Collective, find_collectives, find_weights
from trainer.parallel.overlap.plan import Bucket, plan_by_block, plan_by_modules, plan_singly
from trainer.parallel.overlap.reorder import Staged, reorder
from trainer.parallel.overlap.simulate import simulate
from trainer.units import GIB


@dataclass(frozen=True)
class Overlap:
    """How collectives are bucketed and ordered.

    `bucketing` is "none", "auto", or "block": by the modules that the pattern `blocks` names, or, where there are any,
    by the patterns of `modules` ("tok_embeddings", "layers.*", "norm+output"). `world` is what the graphs will run on;
    with it what a plan does is forecast, and "auto" needs it, and `limit_bytes`: what a graph may hold at its peak.
    `gather_groups` are pairs of process groups over the same ranks: gathers move from the first to the second.
    """

    bucketing: str = "none"
    reorder: bool = False
    blocks: str = "layers.*"
    modules: tuple[str, ...] = ()
    world: World | None = None
    limit_bytes: float = 0.0
    gather_groups: tuple[tuple[str, str], ...] = ()

    def that_decides(self) -> Overlap:
        """Return what of it decides the graphs: a forecast changes nothing, unless the plan is made by it."""
        return self if self.bucketing == "auto" else replace(self, world=None, limit_bytes=0.0)


PLAIN = Overlap()  # graphs as they were traced


def plan(collectives: Sequence[Collective], overlap: Overlap) -> list[Bucket]:
    """Return which of SimpleFSDP's collectives share a bucket, where that depends on nothing but their modules."""
    if overlap.bucketing == "none":
        return plan_singly(collectives)
    if overlap.bucketing == "block":
        if overlap.modules:
            return plan_by_modules(collectives, overlap.modules)
        return plan_by_block(collectives, overlap.blocks)
    raise ValueError(f"there is no bucketing {overlap.bucketing!r}; use 'none', 'block' or 'auto'")


def arrange(gm: GraphModule, axes: Mapping[str, str], overlap: Overlap) -> list[str]:
    """Bucket and reorder the collectives of `gm` as `overlap` says; return a line about what that does, if forecast.

    Changes the graph of `gm`; to run it, recompile it.

    `axes` maps names of process groups to mesh axes.
    """
    move_gathers(gm, dict(overlap.gather_groups))
    if overlap.bucketing == "none" and not overlap.reorder:
        return []
    world = overlap.world
    before = examine(gm, world, "as traced") if world else None
    if overlap.bucketing == "auto":
        assert world is not None, "an automatic plan needs to know what the graph will run on"
        chosen = plan_automatically(gm, world, blocks=overlap.blocks, limit_bytes=overlap.limit_bytes)[0]
        name, buckets = f"auto ({chosen.name})", chosen.buckets
    else:
        name, buckets = overlap.bucketing, plan(find_collectives(gm, axes), overlap)
    staged = [Staged(bucket.stage, merge(gm, bucket.collectives)) for bucket in buckets]
    reorder(gm, staged, overlap=overlap.reorder)
    return [compare(before, examine(gm, world, name))] if world and before else []


def move_gathers(gm: GraphModule, groups: Mapping[str, str]) -> None:
    """Let weights be gathered on the process groups that `groups` names beside their own.

    A process group does one thing after the other. On two, a gather need not wait for a sum of gradients.
    """
    if groups:
        weights = find_weights(gm)
        for node in gm.graph.find_nodes(op="call_function", target=ALL_GATHER):
            if node in weights and node.args[-1] in groups:
                node.args = (*node.args[:-1], groups[node.args[-1]])


def join_scales(gm: GraphModule, axes: Mapping[str, str]) -> None:
    """Merge the reductions that find the largest magnitudes of weights, into one for each process group.

    One group's results are what the next one's take in, so they go one after the other.
    """
    groups = dict.fromkeys(c.group for c in find_collectives(gm, axes) if c.serves == "scale")
    for group in groups:
        merge(gm, [c for c in find_collectives(gm, axes) if c.serves == "scale" and c.group == group])
        # Put them where they belong, and leave everything else where it is.
        singles = [Staged(bucket.stage, *bucket.collectives) for bucket in plan_singly(find_collectives(gm, axes))]
        reorder(gm, singles, overlap=False)


def examine(gm: GraphModule, world: World, name: str) -> Candidate:
    """Simulate `gm` as it is."""
    priced = world.price(gm)
    return Candidate(name, [], priced, simulate(priced))


def compare(before: Candidate, after: Candidate) -> str:
    """Say in a line what a plan changes, as simulated."""

    def facts(candidate: Candidate) -> tuple[str, str, str]:
        count = sum(c.is_data for c in candidate.priced.collectives.values())
        peak = candidate.simulation.peak_bytes / GIB
        return str(count), f"{candidate.exposed_seconds * 1e3:,.2f}", f"{peak:,.3f}"

    counts, exposed, peaks = zip(facts(before), facts(after), strict=True)
    return (
        f"plan {after.name}: {' -> '.join(counts)} collectives over data axes; simulated: exposed "
        f"{' -> '.join(exposed)} ms of {after.simulation.seconds * 1e3:,.1f}, peak {' -> '.join(peaks)} GiB"
    )


def passes_key() -> str:
    """Identify the passes' source, for compile caches."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
