"""What the compiler was given: the collectives of the forward and the backward graph, for the start-up log.

On a compile-cache hit no pass of ours runs, so the report is kept in the compiler's cache folder beside what it
describes, under a key of all that decides the graphs.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

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

    def keep(self, key: str) -> None:
        """Store what was recorded; or, where nothing was because the compiler's cache had the graphs, look it up."""
        path = Path(cache_dir(), "fullgraph", f"{key}.json")
        if self.lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = path.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps(self.lines))
            draft.replace(path)
        elif path.exists():
            self.lines, self.from_cache = json.loads(path.read_text()), True


def key_of(gm: GraphModule, inputs: list[Any], partition_key: str) -> str:
    """Return a key of what decides the graphs made from the captured `gm`."""
    shapes = [(str(type(x)), tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else str(x) for x in inputs]
    text = "\n".join([str(gm.graph), str(shapes), partition_key, torch.__version__])
    return hashlib.sha256(text.encode()).hexdigest()
