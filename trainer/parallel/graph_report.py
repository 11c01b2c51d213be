"""What the compiler was given: the collectives of the forward and the backward graph, for the start-up log.

On a compile-cache hit no pass of ours runs, so the report is kept in the compiler's cache folder beside what it
describes, under a key of all that decides the graphs. Ranks compare their reports before the graphs first run: each
has planned, or loaded, its own, and two orders of the collectives would hang or mix up tensors.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from trainer.distributed import gather_objects
from trainer.files import write_aside
from trainer.parallel.overlap.find import describe, find_collectives, summarize

log = logging.getLogger(__name__)


@dataclass
class GraphReport:
    """What is in each direction's graph. `axes` maps names of process groups to mesh axes.

    `lines` are for people, collectives by kind and what the plan does; `order` has one text for each collective in the
    order of the graphs, the same on all ranks. It is None where it isn't known: the compiler's cache had the graphs,
    and what was kept beside them is gone.
    """

    axes: Mapping[str, str]
    lines: dict[str, list[str]] = field(default_factory=dict)
    order: list[str] | None = None
    from_cache: bool = False

    def record(self, graphs: Mapping[str, GraphModule], plans: Mapping[str, list[str]]) -> None:
        """Describe graphs that were just made, and the lines that say what their plan does, both by direction."""
        found = {name: find_collectives(gm, self.axes) for name, gm in graphs.items()}
        self.lines = {name: [*summarize(collectives), *plans[name]] for name, collectives in found.items()}
        self.order = [f"{name}: {describe(c)}" for name, collectives in found.items() for c in collectives]
        self.from_cache = False

    @contextlib.contextmanager
    def kept_under(self, key: str) -> Iterator[None]:
        """Around a compilation: store what it recorded, or look it up where the compiler's cache had the graphs."""
        self.lines, self.order = {}, None
        yield
        path = Path(cache_dir(), "fullgraph", f"{key}.json")
        if self.order is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_aside(path) as file:
                file.write(json.dumps({"lines": self.lines, "order": self.order}).encode())
        elif path.exists():
            kept = json.loads(path.read_text(encoding="utf-8"))
            self.lines, self.order, self.from_cache = kept["lines"], kept["order"], True


Order = list[str] | None
Agree = Callable[[Order], None]


def agreed_before_first_use(run: Callable[..., Any], order: Order, agree: Agree) -> Callable[..., Any]:
    """Return `run`, which before its first call lets all ranks agree on the order of its collectives."""
    is_agreed = False

    @functools.wraps(run)
    def agreed(*arguments: Any) -> Any:
        nonlocal is_agreed
        if not is_agreed:
            agree(order)
            is_agreed = True
        return run(*arguments)

    return agreed


def check_order(order: Order, group: dist.ProcessGroup) -> None:
    """Collective over `group`. RuntimeError on every rank if the ranks' collectives differ, in kind or in order."""
    digests = gather_objects(hashlib.sha256(json.dumps(order).encode()).hexdigest(), group)
    if len(set(digests)) == 1:
        if order is None and dist.get_rank(group) == 0:
            log.warning(f"The order of the collectives is not known: it is missing in {Path(cache_dir(), 'fullgraph')}")
        return
    orders = gather_objects(order, group)  # all of them, now that it is an error
    first = orders[0]
    rank, other = next((rank, other) for rank, other in enumerate(orders) if other != first)
    raise RuntimeError(
        f"Ranks have compiled graphs whose collectives differ, and would wait for one another forever.\n"
        f"{_first_difference(first, other, rank)}\n"
        "All ranks need the same source, settings and torch release. If they have them, delete the compile cache of "
        f"each machine (here {cache_dir()}) and report this."
    )


def _first_difference(first: Order, other: Order, rank: int) -> str:
    if first is None or other is None:
        return f"What {'rank 0' if first is None else f'rank {rank}'} runs is not known: its record is missing"
    at = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        return f"rank 0 has {len(first)} of them, rank {rank} has {len(other)}"
    return f"Collective {at + 1} of rank 0: {first[at]}\nCollective {at + 1} of rank {rank}: {other[at]}"


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
