"""Activation recomputation: what a block doesn't keep for backward and computes again.

`torch.utils.checkpoint` does the work, eagerly or inside the compiled graph, where it becomes marks that the partition
reads. Blocks keep their names and parameters: only their class changes. The mode `memory_budget` needs no marks; the
partitioner chooses by itself.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BY_OPERATION = "op"

aten = torch.ops.aten
MATMULS = {aten.mm.default, aten.addmm.default, aten._scaled_mm.default}
ALWAYS_KEPT = {
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _keep_every_second_matmul() -> Callable[..., CheckpointPolicy]:
    """Return a policy for one call of one block: keeps attention, sums over ranks, and matmuls number 2, 4, 6, ..."""
    counts = {False: 0, True: 0}

    def policy(ctx: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in MATMULS:
            counts[ctx.is_recompute] += 1
            kept = counts[ctx.is_recompute] % 2 == 0
        else:
            kept = operation in ALWAYS_KEPT
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _keep_some_operations() -> Any:
    """Make the contexts of one checkpointed call."""
    return create_selective_checkpoint_contexts(_keep_every_second_matmul())


# Compile caches tell policies apart by this attribute, and are bypassed without it.
_keep_some_operations.cache_hash = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()  # type: ignore[attr-defined]


@functools.cache
def _recomputing_class(cls: type[nn.Module], by_operation: bool) -> type[nn.Module]:
    settings: dict[str, Any] = {"context_fn": _keep_some_operations} if by_operation else {}

    def forward(self: nn.Module, *inputs: Any) -> Any:
        # Nothing in a block draws random numbers, so there is no random state to keep.
        run = functools.partial(cls.forward, self)
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)

    return type(f"Recomputing{cls.__name__}", (cls,), {"forward": forward})


def apply_recompute(model: nn.Module, blocks: str, *, mode: str, option: str) -> None:
    """Let the modules whose names match `blocks` recompute themselves in backward. Changes `model`.

    `mode` is none, selective, full or memory_budget; for `selective`, `option` is "op", or n as text for every n-th
    block.
    """
    if mode in ("none", "memory_budget"):
        return
    names = [
        name for name, _ in model.named_modules() if fnmatchcase(name, blocks) and name.count(".") == blocks.count(".")
    ]
    by_operation = mode == "selective" and option == BY_OPERATION
    every = int(option) if mode == "selective" and not by_operation else 1
    for number, name in enumerate(names, start=1):
        if number % every == 0:
            block = model.get_submodule(name)
            block.__class__ = _recomputing_class(type(block), by_operation)  # type: ignore[arg-type]
