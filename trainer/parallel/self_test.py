"""Two numbers through each collective a run needs, before it relies on them.

A backend that averages where it should sum, or mixes up ranks, gives a wrong gradient scale that no loss curve shows.
"""

from __future__ import annotations

import torch

from trainer.parallel.mesh import AXES, Mesh

ops = torch.ops._c10d_functional


def check_collectives(mesh: Mesh, device: torch.device) -> None:
    """Collective over every axis. Raise RuntimeError naming the axis and collective that computes wrongly."""
    for axis in AXES:
        size, rank = mesh.axes.size(AXES.index(axis)), mesh.axes.get_local_rank(axis)
        if size == 1:
            continue
        group = mesh.axes.get_group(axis).group_name
        mine = torch.tensor([rank + 1.0, 10.0 * rank], device=device)
        everyone = torch.tensor([[r + 1.0, 10.0 * r] for r in range(size)], device=device)
        results = {
            "all_reduce": (ops.all_reduce(mine, "sum", group), everyone.sum(0)),
            "all_gather": (ops.all_gather_into_tensor(mine, size, group), everyone.flatten()),
            "reduce_scatter": (ops.reduce_scatter_tensor(everyone * mine[0], "sum", size, group),
                               everyone[rank : rank + 1] * size * (size + 1) / 2),
        }  # fmt: skip
        for name, (result, expected) in results.items():
            got = ops.wait_tensor(result).flatten()
            if not torch.equal(got, expected.flatten()):
                raise RuntimeError(
                    f"{name} over {axis} ({size} ranks) gave {got.tolist()} on its rank {rank} where "
                    f"{expected.flatten().tolist()} is right. Gradients would be wrong: check the communication "
                    "backend and its version before training here"
                )
