"""The order in which parallelism is applied to a plain model, in one place.

The order matters: what is applied first lies innermost. Each `apply_*` returns at once where its axis is 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from trainer.parallel.initialize import materialize
from trainer.parallel.mesh import Mesh
from trainer.parallel.simple_fsdp import Precision, apply_simple_fsdp


def parallelize(
    model: nn.Module,
    mesh: Mesh,
    *,
    precision: Precision,
) -> None:
    """Shard `model`, built on the meta device, over `mesh`. Changes `model`; allocates nothing.

    The data axes come last, so that a gather is the outermost thing a parameter's reader sees.
    """
    apply_simple_fsdp(model, mesh.data, precision)


def initialize(model: nn.Module, device: torch.device, initial_std: Mapping[str, float], seed: int) -> None:
    """Allocate this rank's shards of a parallelized model and give them their initial values. Changes `model`."""
    materialize(model, device, initial_std, seed)
