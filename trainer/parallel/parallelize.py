"""The order in which parallelism is applied to a plain model, in one place.

Each `apply_*` returns at once where it has nothing to do, so no one asks here which axes there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from trainer.parallel.float8.apply import NOTHING_IN_FLOAT8, Float8, apply_float8
from trainer.parallel.initialize import materialize
from trainer.parallel.mesh import Mesh
from trainer.parallel.recompute import apply_recompute
from trainer.parallel.simple_fsdp import Precision, apply_simple_fsdp
from trainer.parallel.tensor import apply_tensor_parallel


@dataclass(frozen=True)
class Layout:
    """What is to be applied to a model: its own tables, and the settings that say how."""

    tensor_plan: Mapping[str, str]
    blocks: str
    precision: Precision
    recompute_mode: str = "none"
    recompute_option: str = ""
    float8: Float8 = NOTHING_IN_FLOAT8


def parallelize(model: nn.Module, mesh: Mesh, layout: Layout) -> None:
    """Shard `model`, built on the meta device, over `mesh`. Changes `model`; allocates nothing.

    Tensor parallelism comes first, since it decides what the rest of the model computes with; float8 then decides how
    that is multiplied. Recomputation wraps whole blocks, the collectives at their borders included. The data axes come
    last: a gather is what reading a parameter means, so it happens inside everything else.
    """
    apply_tensor_parallel(model, mesh, layout.tensor_plan)
    apply_float8(model, mesh, layout.float8, layout.tensor_plan)
    apply_recompute(model, layout.blocks, mode=layout.recompute_mode, option=layout.recompute_option)
    apply_simple_fsdp(model, mesh, layout.precision)


def initialize(model: nn.Module, device: torch.device, initial_std: Mapping[str, float], seed: int) -> None:
    """Allocate this rank's shards of a parallelized model and give them their initial values. Changes `model`."""
    materialize(model, device, initial_std, seed)
