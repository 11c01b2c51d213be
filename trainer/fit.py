"""Whether a config fits its devices: the memory it takes, from the settings alone, before anything is allocated.

The sum itself, and what a device has, is `memory.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from trainer.config.check import dp_degrees
from trainer.config.check_float8 import choose_float8
from trainer.config.schema import Config
from trainer.config.values import write_value
from trainer.distributed import Place
from trainer.dtypes import DTYPES
from trainer.memory import MemoryEstimate, device_capacity_bytes, estimate_memory, format_bytes
from trainer.models.registry import FAMILIES, Family, build_shape
from trainer.units import GIB

USABLE = 0.9  # of a device's memory: the rest is for what an allocator can't use, and the libraries' own


def check_memory(config: Config, place: Place) -> list[str]:
    return [*_check_device(config, place), *_check_host(config, place)]


def _check_device(config: Config, place: Place) -> list[str]:
    estimate = estimate_launch(config, place.world_size)
    capacity = device_capacity_bytes(place.device, place.local_world_size)
    if estimate.total_bytes <= capacity:
        return []
    has = "the GPU has" if place.device.type == "cuda" else "of the memory available now a rank's share is"
    return [
        f"model.flavor = {config.model.flavor!r}, training.local_batch_size = {config.training.local_batch_size}, "
        f"training.seq_len = {config.training.seq_len} on {place.world_size} ranks\n"
        f"The run needs {estimate}, and {has} {format_bytes(capacity)}. "
        "Use more ranks, or lower one of the three."
    ]


def _check_host(config: Config, place: Place) -> list[str]:
    """Check the copy of an asynchronous save, which on CPUs lies beside what training holds."""
    copy_bytes = count_staging_bytes(config, place.world_size)
    held_bytes = 0 if place.device.type == "cuda" else estimate_launch(config, place.world_size).total_bytes
    capacity = device_capacity_bytes(torch.device("cpu"), place.local_world_size)
    if not copy_bytes or held_bytes > capacity or held_bytes + copy_bytes <= capacity:
        return []
    beside = f" beside the {format_bytes(held_bytes)} of training" if held_bytes else ""
    return [
        f"checkpoint.async_mode = {write_value(config.checkpoint.async_mode)} on {place.world_size} ranks\n"
        f"An asynchronous save copies {format_bytes(copy_bytes)} of each rank to host memory{beside}, and of what is "
        f"available there now a rank's share is {format_bytes(capacity)}. Use more ranks, or leave "
        "checkpoint.async_mode out."
    ]


def count_staging_bytes(config: Config, world_size: int) -> int:
    """Return what a rank copies to host memory for an asynchronous save: its parts of parameters and moments.

    Replicas have the same parts, and divide them among them. 0 where no save is asynchronous.
    """
    if not config.checkpoint.enable or config.checkpoint.async_mode == "disabled":
        return 0
    estimate = estimate_launch(config, world_size)
    return (estimate.parameters_bytes + estimate.moments_bytes) // dp_degrees(config, world_size)[0]


def estimate_launch(config: Config, world_size: int) -> MemoryEstimate:
    """Estimate what one device must hold, from the settings alone. Errs on the low side: it may refuse a launch."""
    shape, family = build_shape(config), FAMILIES[config.model.name]
    tp = config.parallelism.tensor_parallel_degree
    gathers_once = config.parallelism.fsdp_gather_once
    keeps_gathered = gathers_once or config.parallelism.fsdp_reshard_after_forward == "never"
    # Gathered again in backward, parameters of about two blocks are whole at a time: one in use, one on its way.
    gathered = shape if keeps_gathered else dataclasses.replace(shape, n_layers=min(2, shape.n_layers))
    in_compute_dtype, in_float8 = _count_gathered(config, family, gathered)
    reduce_bytes = DTYPES[config.training.mixed_precision_reduce].itemsize
    return estimate_memory(
        parameters=family.count_parameters(shape) // tp,
        gathered_parameters=in_compute_dtype // tp,
        gathered_float8_parameters=in_float8 // tp,
        shards=dp_degrees(config, world_size)[1],
        moments={"SGD": 1 if config.optimizer.momentum else 0}.get(config.optimizer.name, 2),
        storage_bytes=DTYPES[config.training.dtype].itemsize,
        compute_bytes=DTYPES[config.training.mixed_precision_param].itemsize,
        activations_bytes=_count_activation_bytes(config, family, shape) // tp,
        whole_gradients_bytes=family.count_parameters(shape) // tp * reduce_bytes if gathers_once else 0,
    )


def _count_gathered(config: Config, family: Family, shape: Any) -> tuple[int, int]:
    """Count the parameters that are gathered in the compute dtype, and those in float8: a tied head is in both."""
    parameters = family.count_parameters(shape)
    if not config.quantize.linear.float8.enable_fsdp_float8_all_gather:
        return parameters, 0
    chosen = [choice for choice in choose_float8(config, family.linear_layers(shape)) if choice.is_chosen]
    sizes = {choice.name: choice.out_features * choice.in_features for choice in chosen}
    of_embedding = sizes.get("output", 0) if shape.tie_embeddings else 0
    in_float8 = sum(sizes.values())
    return parameters - in_float8 + of_embedding, in_float8


def graph_limit_bytes(config: Config, world_size: int, memory_bytes: float) -> float:
    """Return what a graph may hold at its peak: the limit of a step less what is always there.

    `memory_bytes` is what a rank has, of which a part is left to the allocator where the config names no limit.
    """
    limit_gib = config.compile.memory_limit_gib
    limit = memory_bytes * USABLE if limit_gib is None else limit_gib * GIB
    estimate = estimate_launch(config, world_size)
    return limit - estimate.parameters_bytes - estimate.moments_bytes


def _count_activation_bytes(config: Config, family: Family, shape: Any) -> int:
    """Estimate what a microbatch keeps for backward, between all and, recomputed in full, the inputs of blocks."""
    settings, compute_bytes = config.activation_checkpoint, DTYPES[config.training.mixed_precision_param].itemsize
    tokens = config.training.local_batch_size * config.training.seq_len
    everything = family.count_activation_bytes(shape, tokens, compute_bytes)
    one_block = family.count_activation_bytes(dataclasses.replace(shape, n_layers=1), tokens, compute_bytes)
    least = one_block + (shape.n_layers - 1) * tokens * shape.dim * compute_bytes
    kept_ratio = {
        "none": 1.0,
        "selective": _selective_ratio(settings.selective_ac_option),
        "full": 0.0,
        "memory_budget": settings.memory_budget,
    }[settings.mode]
    return int(least + (everything - least) * kept_ratio)


def _selective_ratio(option: str) -> float:
    """Return what selective recomputation keeps: all but every n-th block, or roughly half of each one's results."""
    return 1 - 1 / int(option) if option.isdecimal() else 0.5
