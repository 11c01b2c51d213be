"""Whether a run fits: the bytes each device must hold, as a sum that can be printed before anything is allocated."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.units import GIB, MIB


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one device, by what they hold."""

    parameters_bytes: int
    gradients_bytes: int
    moments_bytes: int
    gathered_bytes: int
    activations_bytes: int

    @property
    def total_bytes(self) -> int:
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.moments_bytes
            + self.gathered_bytes
            + self.activations_bytes
        )

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters_bytes,
            "gradients": self.gradients_bytes,
            "moments": self.moments_bytes,
            "gathered parameters": self.gathered_bytes,
            "activations": self.activations_bytes,
        }
        listed = " + ".join(f"{name} {format_bytes(value)}" for name, value in parts.items())
        return f"{format_bytes(self.total_bytes)} per device ({listed})"


def format_bytes(count: int) -> str:
    """Write a number of bytes in the unit that suits it."""
    return f"{count / GIB:,.2f} GiB" if count >= GIB / 10 else f"{count / MIB:,.1f} MiB"


def estimate_memory(
    *,
    parameters: int,
    gathered_parameters: int,
    gathered_float8_parameters: int,
    shards: int,
    moments: int,
    storage_bytes: int,
    compute_bytes: int,
    activations_bytes: int,
    whole_gradients_bytes: int = 0,
) -> MemoryEstimate:
    """Estimate one device's share of `parameters` divided over `shards` ranks, with `moments` per parameter.

    `gathered_parameters` of them are whole at a time. A single rank gathers nothing, and only holds a copy where
    compute has another dtype. `gathered_float8_parameters` are whole at a time as single bytes, always a copy.
    `whole_gradients_bytes` are those of gradients before they are summed, where they are whole until then.
    """
    per_rank = -(-parameters // shards)
    copies = shards > 1 or storage_bytes != compute_bytes
    return MemoryEstimate(
        parameters_bytes=per_rank * storage_bytes,
        gradients_bytes=per_rank * storage_bytes + whole_gradients_bytes,
        moments_bytes=per_rank * storage_bytes * moments,
        gathered_bytes=(gathered_parameters * compute_bytes if copies else 0) + gathered_float8_parameters,
        activations_bytes=activations_bytes,
    )


def device_capacity_bytes(device: torch.device, ranks_on_host: int) -> int:
    """Return what one rank may use: the device's memory, or its share of the host's that is available now."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(min(_host_available_bytes(), _cgroup_available_bytes(Path("/")))) // ranks_on_host


def _host_available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Return what Linux says is available now, elsewhere the whole memory."""
    if meminfo.exists():
        facts = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_available_bytes(root: Path) -> float:
    """Return what the control groups of this process leave it (of a container, a batch job), or infinity.

    A limit of any enclosing group counts. Files in the page cache count as used there, but give way.
    https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files, and version 1's names of the same.
    """
    membership = root / "proc/self/cgroup"
    if not membership.exists():
        return math.inf
    available = math.inf
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = mount / path.lstrip("/")
        for group in (folder for folder in (own, *own.parents) if folder.is_relative_to(mount)):
            available = min(available, _group_available_bytes(group, *names))
    return available


def _group_available_bytes(group: Path, limit: str, usage: str, cache: str) -> float:
    try:
        limit_bytes = (group / limit).read_text().strip()
        used_bytes = int((group / usage).read_text())
        facts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root group has no limit, and a container sees its own group only
        return math.inf
    return math.inf if limit_bytes == "max" else max(0, int(limit_bytes) - used_bytes + int(facts.get(cache, 0)))
