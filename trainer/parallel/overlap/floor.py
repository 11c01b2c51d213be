"""The least communication that any schedule leaves exposed, given the order of the computation.

A gather can start with the graph at the earliest, and a sum when its gradient is there; both share the stream of their
axis with what must go before, or after, them. And all of an axis' communication takes its time, whatever is computed.
Latencies are left out, as a bucket could hold anything.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch.fx import Node

from trainer.parallel.mesh import DATA_AXES
from trainer.parallel.overlap.cost import Priced, Ring, collective_seconds, whole_bytes
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.overlap.simulate import simulate


def exposed_floor(priced: Priced, rings: Mapping[str, Ring], hardware: Hardware) -> float:
    """Return the least seconds of data axes' communication that computation has to wait for.

    `priced` is the graph before any bucketing, in which each collective stands where its result is used or its input
    is there.
    """
    computing = simulate(priced, free_data=True)
    begins = {span.node: span.begin for span in computing.spans}
    before = after = sent = 0.0
    arriving = [c for c in priced.collectives.values() if c.axis in DATA_AXES and c.kind == "all_gather"]
    leaving = [c for c in priced.collectives.values() if c.axis in DATA_AXES and c.kind != "all_gather"]
    for c in arriving:
        sent += _travel_seconds(priced, c.start, rings, hardware)
        before = max(before, sent - begins[c.start])
    sent = 0.0
    for c in reversed(leaving):
        sent += _travel_seconds(priced, c.start, rings, hardware)
        after = max(after, sent - (computing.seconds - begins[c.start]))
    total: dict[str, float] = {}
    for c in [*arriving, *leaving]:
        total[c.axis] = total.get(c.axis, 0.0) + _travel_seconds(priced, c.start, rings, hardware)
    return max(before + after, max(total.values(), default=0.0) - computing.seconds)


def _travel_seconds(priced: Priced, start: Node, rings: Mapping[str, Ring], hardware: Hardware) -> float:
    """Return the seconds of a collective less those of an empty one."""
    c = priced.collectives[start]
    ring = rings[c.axis]
    empty = collective_seconds(c.kind, 0, ring, hardware)
    return collective_seconds(c.kind, whole_bytes(c), ring, hardware) - empty
