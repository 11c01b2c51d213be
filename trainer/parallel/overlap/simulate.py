"""A scheduled graph on its streams: when everything runs, what communication is exposed, and what memory is live.

Nodes run in the graph's order. Computation is one stream, and each process group is another: a collective joins that of
its group when its start is reached, and runs when it is free; a wait holds computation until it is done. What it is
held is exposed. Streams don't slow one another down. Memory is that of `storage.py`, from the node that makes it to the
last that reads.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

from torch.fx import Node

from trainer.parallel.mesh import DATA_AXES
from trainer.parallel.overlap.cost import Priced
from trainer.parallel.overlap.find import Collective
from trainer.parallel.overlap.storage import REDUCE_CHAIN, Storage, is_view, packet

KINDS = ("gathered", "activations", "gradients")


@dataclass(frozen=True)
class Span:
    """Something that runs from `begin` for `seconds`. `collective` is None for computation."""

    node: Node
    begin: float
    seconds: float
    collective: Collective | None = None

    @property
    def end(self) -> float:
        return self.begin + self.seconds


@dataclass
class Simulation:
    """One direction of a step. `live` holds, at each change, the seconds and the live bytes by kind."""

    seconds: float = 0.0
    spans: list[Span] = field(default_factory=list)
    exposed: dict[Node, float] = field(default_factory=dict)  # by the collective's start
    live: list[tuple[float, dict[str, int]]] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)  # by kind, when their sum is largest

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def left_bytes(self) -> int:
        """What is live at the end: the graph's outputs."""
        return sum(self.live[-1][1].values()) if self.live else 0

    def exposed_seconds(self, priced: Priced, *, data: bool) -> float:
        """Return the exposed seconds of the data axes' collectives, or of all the others."""
        held = ((priced.collectives[start].axis, seconds) for start, seconds in self.exposed.items())
        return sum(seconds for axis, seconds in held if (axis in DATA_AXES) == data)


def simulate(priced: Priced, *, free_data: bool = False) -> Simulation:
    """Run a priced graph.

    Each process group has a stream. With `free_data` collectives of data axes take no time, which tells what else there
    is to wait for.
    """
    result = Simulation()
    now = 0.0
    free_at: dict[str, float] = {}
    done: dict[Node, Span] = {}
    begins: dict[Node, float] = {}
    for node in priced.gm.graph.nodes:
        begins[node] = now
        if node in priced.collectives:
            collective = priced.collectives[node]
            seconds = 0.0 if free_data and collective.axis in DATA_AXES else priced.seconds[node]
            span = Span(node, max(now, free_at.get(collective.group, 0.0)), seconds, collective)
            free_at[collective.group] = span.end
            done[collective.wait] = span
            result.spans.append(span)
        elif node in done:
            span = done[node]
            if span.end > now:
                result.exposed[span.node] = result.exposed.get(span.node, 0.0) + span.end - now
                now = span.end
        elif priced.seconds.get(node):
            result.spans.append(Span(node, now, priced.seconds[node]))
            now += priced.seconds[node]
    result.seconds = max([now, *free_at.values()])
    _trace_memory(priced, begins, result)
    return result


def _trace_memory(priced: Priced, begins: dict[Node, float], result: Simulation) -> None:
    """Fill in live bytes over the nodes. Inputs that are parameters or tokens are not counted: they are the state."""
    nodes = list(priced.gm.graph.nodes)
    place = {node: i for i, node in enumerate(nodes)}
    kinds = find_kinds(priced)
    changes: list[list[tuple[str, int]]] = [[] for _ in range(len(nodes) + 1)]
    for storage, kind in kinds.items():
        if priced.storages.is_internal(storage):
            continue
        changes[place[storage.node]].append((kind, storage.bytes))
        last = _last_use(storage, priced, place, len(nodes) - 1)
        changes[last + 1].append((kind, -storage.bytes))
    live = dict.fromkeys(KINDS, 0)
    for node, here in zip(nodes, changes, strict=False):
        if not here:
            continue
        # What a kernel frees, it frees after it has allocated, so frees of the node before come first.
        for kind, change in sorted(here, key=lambda entry: entry[1]):
            live[kind] += change
        result.live.append((begins[node], dict(live)))
        if sum(live.values()) > result.peak_bytes:
            result.peak = dict(live)


def _last_use(storage: Storage, priced: Priced, place: dict[Node, int], end: int) -> int:
    if storage.is_output:
        return end
    last = place[storage.node]
    for reader in storage.readers:
        # A collective reads its input, and fills its output, until it is waited for.
        wait = priced.collectives[reader].wait if reader in priced.collectives else reader
        last = max(last, place[wait])
    if storage.node in priced.collectives:
        last = max(last, place[priced.collectives[storage.node].wait])
    return last


def is_state(storage: Storage) -> bool:
    """Tell whether the storage is there before and after the step: parameters and tokens, which are primals."""
    return storage.is_input and str(storage.node.target).startswith("primals")


def find_kinds(priced: Priced) -> dict[Storage, str]:
    """Say of each storage that comes and goes what it holds.

    Gathered: weights' gathers, and other functions of parameters alone. Gradients: what only casts, copies and
    collectives part from an output of the backward graph. Activations: all else, what forward keeps for backward
    included.
    """
    storages = [s for made in priced.storages.made.values() for s in made if not is_state(s)]
    gathered: set[Storage] = set()
    for storage in storages:
        if _is_weight(storage, priced, gathered):
            gathered.add(storage)
    gradients = _gradients(priced) if not _is_forward(priced) else set()
    return {s: "gathered" if s in gathered else "gradients" if s in gradients else "activations" for s in storages}


def _is_weight(storage: Storage, priced: Priced, weights: Container[Storage]) -> bool:
    """Tell whether a storage holds a weight's gather, or is computed from parameters and `weights` alone."""
    c = priced.collectives.get(storage.node)
    if c is not None and c.serves == "weight":
        return True
    reads = priced.storages.reads.get(storage.node, {})
    return bool(reads) and all(
        read in weights or (is_state(read) and read.node.meta["val"].is_floating_point()) for read in reads
    )


def _is_forward(priced: Priced) -> bool:
    return not any("tangents" in str(node.target) for node in priced.gm.graph.find_nodes(op="placeholder"))


def _gradients(priced: Priced) -> set[Storage]:
    found = {s for made in priced.storages.made.values() for s in made if s.is_output and not s.is_input}
    ahead = list(found)
    while ahead:
        node = ahead.pop().node
        if node in priced.collectives or packet(node) in REDUCE_CHAIN or is_view(node):
            new = {s for s in priced.storages.reads.get(node, {}) if not s.is_input} - found
            found |= new
            ahead += new
    return found
