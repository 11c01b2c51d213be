"""The parts of a run that its config alone describes: mesh, model, loss, compiled function, optimizer.

Whoever needs one of them (a run, the parity check, the graph tool) gets the same one here. Putting a run together, with
its data, checkpoint and metrics, is `build.py`.
"""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from trainer.config.check import dp_degrees
from trainer.config.check_float8 import SECTION, Choice, choose_float8
from trainer.config.load import ConfigError
from trainer.config.schema import Config
from trainer.dtypes import DTYPES
from trainer.fit import graph_limit_bytes
from trainer.loss import UNCOUNTED, sum_token_losses
from trainer.models.registry import FAMILIES, build_shape
from trainer.optim import Optimizer
from trainer.parallel.accumulate import Reading
from trainer.parallel.compile import SumTokenLosses, build_sum_losses
from trainer.parallel.float8.apply import Float8
from trainer.parallel.float8.device import find_missing_float8
from trainer.parallel.graph_report import Agree, GraphReport
from trainer.parallel.mesh import Mesh, build_mesh
from trainer.parallel.overlap.arrange import PLAIN, Overlap
from trainer.parallel.overlap.auto import World
from trainer.parallel.overlap.cost import rings_of
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.parallelize import Layout, parallelize
from trainer.parallel.partition import Partition
from trainer.parallel.simple_fsdp import Precision
from trainer.parallel.tensor import build_loss
from trainer.parallel.transfers import compile_transfers, plain_transfers
from trainer.parallel.whole import WholeParameters


def build_partition(config: Config, overlap: Overlap = PLAIN) -> Partition:
    """Return how the config cuts joint graphs into forward and backward; `overlap` is what is done with the parts."""
    settings = config.activation_checkpoint
    return Partition(
        regather=config.parallelism.fsdp_reshard_after_forward != "never",
        memory_budget=settings.memory_budget if settings.mode == "memory_budget" else 1.0,
        join_scales=config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp,
        overlap=overlap,
    )


def build_overlap(config: Config, mesh: Mesh, backend: str, hardware: Hardware | None) -> Overlap:
    """Return how the config buckets and orders collectives, forecast on `hardware` where it is known."""
    world, limit_bytes = None, 0.0
    if hardware:
        world = World(mesh.axis_of_group(), rings_of(mesh), hardware, fuse=backend == "inductor")
        limit_bytes = graph_limit_bytes(config, mesh.axes.size(), hardware.memory_bytes)
    return Overlap(
        bucketing=config.compile.bucketing,
        reorder=config.compile.reorder,
        blocks=FAMILIES[config.model.name].blocks,
        modules=config.compile.bucket_modules,
        world=world,
        limit_bytes=limit_bytes,
        gather_groups=tuple(mesh.gather_group_beside().items()),
    )


def build_mesh_of(config: Config, device: torch.device, world_size: int) -> Mesh:
    """Collective over all ranks. Build the config's mesh over all ranks."""
    replicate, shard = dp_degrees(config, world_size)
    tp = config.parallelism.tensor_parallel_degree
    separate_gathers = config.parallelism.fsdp_separate_gather_group
    if separate_gathers is None:
        # Measured on gloo only: docs/benchmark.md.
        separate_gathers = device.type == "cpu" and config.compile.enable
    return build_mesh(device, dp_replicate=replicate, dp_shard=shard, tp=tp, separate_gathers=separate_gathers)


def choose_float8_of(config: Config) -> list[Choice]:
    """Return, for each linear layer of the config's model, whether it computes in float8, or why not."""
    return choose_float8(config, FAMILIES[config.model.name].linear_layers(build_shape(config)))


def build_float8(config: Config, device: torch.device) -> Float8:
    """Return which layers of the config's model compute in float8 on `device`, and how. ConfigError where it can't be.

    A CPU whose kernels lack something emulates it.
    """
    options = config.quantize.linear.float8
    missing = find_missing_float8_of(config, device)
    if missing and device.type != "cpu":
        raise ConfigError([refuse_float8(config, missing)])
    return Float8(
        layers=frozenset(choice.name for choice in choose_float8_of(config) if choice.is_chosen),
        recipe=options.recipe_name,
        gather=options.enable_fsdp_float8_all_gather,
        emulate=options.emulate or bool(missing),
    )


def find_missing_float8_of(config: Config, device: torch.device) -> str:
    """Return why `device` can't multiply as the config's float8 recipe does; empty where it can or needn't."""
    options = config.quantize.linear.float8
    if not config.model.is_float8 or options.emulate:
        return ""
    return find_missing_float8(device, options.recipe_name, DTYPES[config.training.mixed_precision_param])


def refuse_float8(config: Config, missing: str) -> str:
    """Say that a device lacks float8: `missing` is what it can't do."""
    return (
        f"model.converters = {list(config.model.converters)}, {SECTION}.recipe_name = "
        f"{config.quantize.linear.float8.recipe_name!r}\nThe device must multiply float8 matrices, and doesn't: "
        f"{missing}. Use another device or recipe, leave the converter out, or, for the same numbers without the "
        f"speed, set {SECTION}.emulate = true."
    )


def build_sharded_model(config: Config, mesh: Mesh) -> nn.Module:
    """Build the config's model on the meta device, parallelized over `mesh`."""
    family = FAMILIES[config.model.name]
    with torch.device("meta"):
        model = family.build_model(build_shape(config)).to(DTYPES[config.training.dtype])
    settings = config.activation_checkpoint
    layout = Layout(
        tensor_plan=family.tensor_plan,
        blocks=family.blocks,
        precision=precision_of(config),
        recompute_mode=settings.mode,
        recompute_option=settings.selective_ac_option,
        float8=build_float8(config, torch.device(mesh.axes.device_type)),
    )
    parallelize(model, mesh, layout)
    return model


def build_loss_of(config: Config, mesh: Mesh) -> SumTokenLosses:
    """Return the loss for logits as the config's model leaves them on `mesh`."""
    return build_loss(
        sum_token_losses,
        mesh,
        vocab_size=build_shape(config).vocab_size,
        uncounted=UNCOUNTED,
        loss_parallel=not config.parallelism.disable_loss_parallel,
    )


def build_sum_losses_of(
    config: Config,
    mesh: Mesh,
    model: nn.Module,
    backend: str,
    report: GraphReport,
    hardware: Hardware | None = None,
    agree: Agree = lambda order: None,
) -> SumTokenLosses:
    """Return f(tokens_BT, labels_BT) -> sum of token losses, compiled with `backend` where the config asks for it.

    `compile.bucketing = "auto"` needs `hardware`, the same on all ranks, unless there is only one.
    """
    return build_sum_losses(
        model,
        build_loss_of(config, mesh),
        enable=config.compile.enable,
        backend=backend,
        loss_inside="loss" in config.compile.components,
        partition=build_partition(config, build_overlap(config, mesh, backend, hardware)),
        report=report,
        agree=agree,
    )


def build_reading_of(
    config: Config,
    mesh: Mesh,
    model: nn.Module,
    backend: str,
    gather_report: GraphReport,
    sum_report: GraphReport,
    hardware: Hardware | None = None,
    agree: Agree = lambda order: None,
) -> Reading:
    """Return within what the function of `build_sum_losses_of` may be called: with the parameters of `model` held
    whole, where the config gathers once a step. The reports are for the graphs of that; the rest is as there.
    """
    if not config.parallelism.fsdp_gather_once:
        return contextlib.nullcontext
    precision = precision_of(config)
    transfers = plain_transfers(precision)
    if config.compile.enable:
        transfers = compile_transfers(
            dict(model.named_parameters()),
            precision,
            build_overlap(config, mesh, backend, hardware),
            backend=backend,
            gather_report=gather_report,
            sum_report=sum_report,
            agree=agree,
        )
    return WholeParameters(model, precision.reduce_dtype, transfers).held


def precision_of(config: Config) -> Precision:
    """Return the dtypes in which the config gathers parameters and sums gradients."""
    training = config.training
    return Precision(DTYPES[training.mixed_precision_param], DTYPES[training.mixed_precision_reduce])


def build_optimizer_of(config: Config, model: nn.Module) -> Optimizer:
    """Return the config's optimizer over the parameters of `model`."""
    settings = config.optimizer
    return Optimizer(
        dict(model.named_parameters()),
        name=settings.name,
        weight_decay=settings.weight_decay,
        no_decay=settings.no_decay,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        momentum=settings.momentum,
    )
