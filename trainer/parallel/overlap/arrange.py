"""The graph passes in their visible order: find, plan, bucket, reorder.

The same code arranges forward and backward graphs, for gloo, NCCL or a fake process group. It communicates nothing,
and what it decides about collectives depends on nothing that differs between ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.fx import GraphModule

from trainer.parallel.overlap.bucket import merge
from trainer.parallel.overlap.find import Collective, find_collectives
from trainer.parallel.overlap.plan import Bucket, plan_by_block, plan_by_modules, plan_singly
from trainer.parallel.overlap.reorder import Staged, reorder


@dataclass(frozen=True)
class Overlap:
    """How collectives are bucketed and ordered.

    `bucketing` is "none", or "block": by the modules that the pattern `blocks` names, or, where there are any, by the
    patterns of `modules` ("tok_embeddings", "layers.*", "norm+output").
    """

    bucketing: str = "none"
    reorder: bool = False
    blocks: str = "layers.*"
    modules: tuple[str, ...] = ()


PLAIN = Overlap()  # graphs as they were traced


def plan(collectives: Sequence[Collective], overlap: Overlap) -> list[Bucket]:
    """Return which of SimpleFSDP's collectives share a bucket."""
    if overlap.bucketing == "none":
        return plan_singly(collectives)
    if overlap.bucketing == "block":
        if overlap.modules:
            return plan_by_modules(collectives, overlap.modules)
        return plan_by_block(collectives, overlap.blocks)
    raise ValueError(f"there is no bucketing {overlap.bucketing!r}; use 'none' or 'block'")


def arrange(gm: GraphModule, axes: Mapping[str, str], overlap: Overlap) -> list[Bucket]:
    """Bucket and reorder the collectives of `gm` as `overlap` says; return the buckets as planned.

    Changes the graph of `gm`; to run it, recompile it.

    `axes` maps names of process groups to mesh axes.
    """
    if overlap.bucketing == "none" and not overlap.reorder:
        return []
    buckets = plan(find_collectives(gm, axes), overlap)
    staged = [Staged(bucket.stage, merge(gm, bucket.collectives)) for bucket in buckets]
    reorder(gm, staged, overlap=overlap.reorder)
    return buckets


def passes_key() -> str:
    """Identify the passes' source, for compile caches."""
    sources = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
