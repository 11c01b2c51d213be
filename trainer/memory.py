"""Whether a run fits: the bytes each device must hold, as a sum that can be printed before anything is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import torch

GIB = 1024**3


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
        listed = " + ".join(f"{name} {value / GIB:.2f}" for name, value in parts.items())
        return f"{listed} = {self.total_bytes / GIB:.2f} GiB per device"


def estimate_memory(
    *,
    parameters: int,
    shards: int,
    moments: int,
    storage_bytes: int,
    compute_bytes: int,
    activations_bytes: int,
) -> MemoryEstimate:
    """Estimate one device's share of a model of `parameters` divided over `shards` ranks, with `moments` per parameter.

    Gathered parameters are counted whole: until they are gathered again in backward, each stays from its use in forward
    to its use in backward. A single rank gathers nothing, and only holds a copy where compute has another dtype.
    """
    per_rank = -(-parameters // shards)
    copies = shards > 1 or storage_bytes != compute_bytes
    return MemoryEstimate(
        parameters_bytes=per_rank * storage_bytes,
        gradients_bytes=per_rank * storage_bytes,
        moments_bytes=per_rank * storage_bytes * moments,
        gathered_bytes=parameters * compute_bytes if copies else 0,
        activations_bytes=activations_bytes,
    )


def device_capacity_bytes(device: torch.device, ranks_on_host: int) -> int:
    """Return what one rank may use: the device's memory, or its share of the host's that is available now."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    with open("/proc/meminfo") as lines:
        facts = dict(line.split(":", 1) for line in lines)
    return int(facts["MemAvailable"].split()[0]) * 1024 // ranks_on_host
