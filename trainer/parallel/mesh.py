"""The device mesh: axes `pp, dp_replicate, dp_shard, cp, tp`, all always there. The only place that multiplies ranks.

An axis of size 1 is an axis like any other, and costs nothing: DTensor issues no collective over a single rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")
STORAGE_AXES = (*DATA_AXES, "tp")


@dataclass(frozen=True)
class Mesh:
    """All ranks of the run by axis.

    `gather_groups` are second process groups over the ranks of an axis, if gathers are to travel on one of their own.
    """

    axes: DeviceMesh
    gather_groups: Mapping[str, dist.ProcessGroup] = field(default_factory=dict)

    @property
    def storage(self) -> DeviceMesh:
        """The axes that parameters are stored over: data axes and tp."""
        return self.axes[STORAGE_AXES]

    @property
    def data(self) -> DeviceMesh:
        return self.axes[DATA_AXES]

    def size(self, axis: str) -> int:
        """Return how many ranks stand along `axis`."""
        return self.axes.size(AXES.index(axis))

    @property
    def tp_ranks(self) -> int:
        return self.size("tp")

    @property
    def data_ranks(self) -> int:
        """How many ranks read different rows."""
        return self.data.size()

    @property
    def data_rank(self) -> int:
        """Which of them this rank is: row-major over the data axes."""
        replicate, shard = (self.axes.get_local_rank(axis) for axis in DATA_AXES)
        return replicate * self.size("dp_shard") + shard

    def axis_of_group(self) -> dict[str, str]:
        """Map the names of process groups, as graphs hold them, to axes of more than one rank."""
        wide = [axis for axis in AXES if self.size(axis) > 1]
        first: dict[str, str] = {self.axes.get_group(axis).group_name: axis for axis in wide}
        return first | {group.group_name: axis for axis, group in self.gather_groups.items()}

    def gather_group_beside(self) -> dict[str, str]:
        """Map the name of a process group to that of the second one over the same ranks."""
        return {self.axes.get_group(axis).group_name: group.group_name for axis, group in self.gather_groups.items()}

    def groups(self) -> list[dist.ProcessGroup]:
        """Return the process groups of all axes, and the one of all ranks."""
        of_axes = [self.axes.get_group(axis) for axis in AXES]
        return [dist.distributed_c10d._get_default_group(), *of_axes, *self.gather_groups.values()]

    def sum(self, value: Tensor, over: tuple[str, ...] = DATA_AXES) -> Tensor:
        """Collective over `over`. Return the sum of `value`; axes of size 1 are skipped."""
        return self._reduce(value, over, dist.ReduceOp.SUM)

    def max(self, value: Tensor, over: tuple[str, ...] = DATA_AXES) -> Tensor:
        """Collective over `over`. Return the elementwise largest `value`; axes of size 1 are skipped."""
        return self._reduce(value, over, dist.ReduceOp.MAX)

    def _reduce(self, value: Tensor, over: tuple[str, ...], op: dist.ReduceOp.RedOpType) -> Tensor:
        result = value.detach().clone()
        for axis in over:
            if self.size(axis) > 1:
                dist.all_reduce(result, op=op, group=self.axes.get_group(axis))
        return result

    def __str__(self) -> str:
        return " x ".join(f"{axis} {self.size(axis)}" for axis in AXES)


def build_mesh(
    device: torch.device, *, dp_replicate: int, dp_shard: int, tp: int = 1, separate_gathers: bool = False
) -> Mesh:
    """Collective over all ranks. Build the mesh over those of the default process group."""
    sizes = (1, dp_replicate, dp_shard, 1, tp)
    axes = init_device_mesh(device.type, sizes, mesh_dim_names=AXES)
    return with_gather_groups(Mesh(axes)) if separate_gathers else Mesh(axes)


def with_gather_groups(mesh: Mesh) -> Mesh:
    """Collective over all ranks. Return `mesh` with second process groups, on which gathers travel."""
    gathering = [axis for axis in ("dp_shard",) if mesh.size(axis) > 1]
    return replace(mesh, gather_groups={axis: _second_group(mesh.axes, AXES.index(axis)) for axis in gathering})


def _second_group(axes: DeviceMesh, dim: int) -> dist.ProcessGroup:
    """Collective over all ranks. Make one more process group of this rank and those beside it along a dimension."""
    lines = axes.mesh.movedim(dim, -1).reshape(-1, axes.size(dim)).tolist()
    group, _ = dist.new_subgroups_by_enumeration(lines)
    assert group is not None
    return group
