"""What the compiler was given: the collectives of the forward and the backward graph, for the start-up log.

On a compile-cache hit no pass of ours runs, so the report is kept in the compiler's cache folder beside what it
describes, under a key of all that decides the graphs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from trainer.files import write_aside
from trainer.parallel.overlap.find import find_collectives, summarize


@dataclass
class GraphReport:
    """Lines about each direction's collectives. `axes` maps names of process groups to mesh axes."""

    axes: Mapping[str, str]
    lines: dict[str, list[str]] = field(default_factory=dict)
    from_cache: bool = False

    def record(self, forward: GraphModule, backward: GraphModule) -> None:
        """Describe graphs that were just made."""
        graphs = {"forward": forward, "backward": backward}
        self.lines = {name: summarize(find_collectives(gm, self.axes)) for name, gm in graphs.items()}
        self.from_cache = False

    @contextlib.contextmanager
    def kept_under(self, key: str) -> Iterator[None]:
        """Around a compilation: store what it recorded, or look it up where the compiler's cache had the graphs."""
        self.lines = {}
        yield
        path = Path(cache_dir(), "fullgraph", f"{key}.json")
        if self.lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_aside(path) as file:
                file.write(json.dumps(self.lines).encode())
        elif path.exists():
            self.lines, self.from_cache = json.loads(path.read_text(encoding="utf-8")), True


def key_of(gm: GraphModule, inputs: list[Any], partition_key: str) -> str:
    """Return a key of what decides the graphs made from the captured `gm`: its operations, those inside recomputed
    blocks and what these keep, the inputs' kinds and shapes, and the partition."""
    graphs = [f"{name} {_text(module)}" for name, module in gm.named_modules() if isinstance(module, GraphModule)]
    shapes = [(str(type(x)), tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else str(x) for x in inputs]
    text = "\n".join([*graphs, str(shapes), partition_key, torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()


def _text(gm: GraphModule) -> str:
    policies = [node.meta.get("_checkpoint_context_fn") for node in gm.graph.nodes]
    return f"{gm.graph} {[policy.cache_hash for policy in policies if policy is not None]}"
