"""Which collectives share a bucket, and which buckets stand at one place of the computation: a stage.

A stage is what one transformer block needs, or leaves; its buckets are one for each kind, axis, dtype and reduction.
Decided from names of modules, and bounded by the bytes of padded shards: all data ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch.fx import GraphModule

from trainer.parallel.overlap.find import Collective, module_of

# A bucket is one buffer. This is above every block of a 70B model and of a 405B one over 8 tensor-parallel ranks, and
# keeps a model without blocks from being one bucket.
MAX_BUCKET_BYTES = 4 << 30


@dataclass(frozen=True)
class Bucket:
    """Collectives that become one. Buckets of one `stage` of the same graph start at the same place."""

    stage: int
    label: str
    collectives: tuple[Collective, ...]


def plan_singly(collectives: Sequence[Collective]) -> list[Bucket]:
    """Return a bucket for each of SimpleFSDP's collectives."""
    ours = [c for c in collectives if c.is_ours]
    return [Bucket(stage, c.module, (c,)) for stage, c in enumerate(ours)]


def plan_by_block(collectives: Sequence[Collective], blocks: str) -> list[Bucket]:
    """Return buckets by transformer block; what lies before, between or after blocks is together.

    In a Llama's forward the embedding is what lies before, and the last norm and the head are what lies after.
    """
    entered: dict[tuple[str, int], set[str]] = {}
    labels: list[str | None] = []
    for c in collectives:
        passed = entered.setdefault(_side(c), set())
        label = match(c.module, blocks)
        if label:
            passed.add(label)
        labels.append(label or f"after {len(passed)} blocks")
    return _fill(collectives, labels)


def plan_by_modules(collectives: Sequence[Collective], patterns: Sequence[str]) -> list[Bucket]:
    """Return buckets as `patterns` say; what matches none stays alone.

    A pattern is one of modules' names, "layers.*", each match a bucket; or several joined by +, "norm+output", which
    together are one bucket. The first that matches counts.
    """
    labels = [next((found for pattern in patterns if (found := match(c.module, pattern))), None) for c in collectives]
    return _fill(collectives, labels)


def match(module: str, pattern: str) -> str | None:
    """Return the name of the bucket that `pattern` gives a module, or any module inside the one it names."""
    path = module.split(".")
    for part in pattern.split("+"):
        depth = part.count(".") + 1
        if len(path) >= depth and all(map(fnmatchcase, path, part.split("."))):
            return pattern if "+" in pattern else ".".join(path[:depth])
    return None


def check_patterns(patterns: Iterable[str], modules: Iterable[str]) -> None:
    """Raise ValueError for a pattern, or one of those joined by +, that matches none of `modules`."""
    names = set(modules)
    for pattern in patterns:
        for part in pattern.split("+"):
            if not any(match(name, part) for name in names):
                known = sorted({name.split(".")[0] for name in names if name})
                raise ValueError(
                    f"compile.bucket_modules has {part!r}, which matches no module of the model; each pattern must "
                    f"match one. The model's first-level modules are {', '.join(known)}"
                )


def find_modules(gm: GraphModule) -> set[str]:
    """Return the names of all modules whose operations are in the graph."""
    return {module_of(node) for node in gm.graph.nodes if node.op == "call_function"}


def _side(c: Collective) -> tuple[str, int]:
    """Weights and gradients, and sums of sums, have stages of their own."""
    return c.serves, c.sums_before


def _fill(collectives: Sequence[Collective], labels: Sequence[str | None]) -> list[Bucket]:
    stages = _Stages()
    groups: dict[tuple[object, ...], list[list[Collective]]] = {}
    names: dict[int, str] = {}
    for c, label in zip(collectives, labels, strict=True):
        if not c.is_ours:
            continue
        stage = stages.enter(_side(c), label)
        names[stage] = label or c.module
        buckets = groups.setdefault((stage, c.kind, c.group, c.dtype, c.op), [[]])
        if buckets[-1] and _bytes([*buckets[-1], c]) > MAX_BUCKET_BYTES:
            buckets.append([])
        buckets[-1].append(c)
    return [
        Bucket(stage, names[stage], tuple(bucket))  # type: ignore[index,arg-type]
        for (stage, *_), buckets in groups.items()
        for bucket in buckets
    ]


def _bytes(collectives: Iterable[Collective]) -> int:
    return sum(max(c.bytes_in, c.bytes_out) for c in collectives)


class _Stages:
    """Numbers stages. A label that comes back after two others is a new stage: its buffer isn't held for so long."""

    def __init__(self) -> None:
        self.count = 0
        self.open: dict[tuple[str, int], dict[str, int]] = {}

    def enter(self, side: tuple[str, int], label: str | None) -> int:
        open_stages: dict[str, int] = self.open.setdefault(side, {})
        stage = open_stages.pop(label, None) if label else None
        if stage is None:
            stage = self.count
            self.count += 1
        if label:
            open_stages[label] = stage
            while len(open_stages) > 2:
                open_stages.pop(next(iter(open_stages)))
        return stage
