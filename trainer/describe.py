"""What a run is, in a few lines: printed at start, and by `--dry-run` for any number of ranks without them."""

from __future__ import annotations

import re

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.build import Run
from trainer.config.check import accumulation_steps, resolve_global_batch_size
from trainer.config.check_float8 import describe_choices
from trainer.config.schema import Config
from trainer.fit import count_staging_bytes, estimate_launch
from trainer.memory import format_bytes
from trainer.models.registry import FAMILIES, build_shape
from trainer.optim import split_by_decay
from trainer.parallel.mesh import Mesh
from trainer.parts import build_mesh_of, build_sharded_model, choose_float8_of


def describe_launch(run: Run) -> list[str]:
    """Say what begins now: the run, what it runs on, and what the first step waits for."""
    config, place, step = run.config, run.place, run.state.step
    name = f" ({torch.cuda.get_device_name(place.device)})" if place.device.type == "cuda" else ""
    lines = [config.job.description] if config.job.description else []
    lines += describe(config, run.mesh, run.model, place.world_size)
    lines.append(f"Device {place.device}{name}, collectives by {place.backend}, computation by {run.backend}")
    if not config.checkpoint.enable:
        lines.append("No checkpoints will be saved (checkpoint.enable = false)")
    if step >= config.training.steps:
        lines.append(f"Nothing to do: step {step} is done and training.steps = {config.training.steps}")
    elif config.compile.enable:
        lines.append(
            f"Compiling the model as one graph with {run.backend}: the first step waits for it, a minute or so"
        )
    return lines


def describe(config: Config, mesh: Mesh, model: nn.Module, world_size: int) -> list[str]:
    """Say in a few lines what will run: model, mesh, precision, batch and memory."""
    shape, family, training = build_shape(config), FAMILIES[config.model.name], config.training
    parameters = [p for p in model.parameters() if isinstance(p, DTensor)]
    local_parameters = sum(p.to_local().numel() for p in parameters)
    placements = sorted({str(p.placements) for p in parameters})
    decayed, not_decayed = split_by_decay([name for name, _ in model.named_parameters()], config.optimizer.no_decay)
    rows = resolve_global_batch_size(config, world_size)
    return [
        f"Model {config.model.name} {config.model.flavor}: {family.count_parameters(shape):,} parameters, "
        f"{family.count_flops_per_token(shape, training.seq_len) / 1e9:,.2f} GFLOP per token",
        f"Mesh: {mesh} = {world_size} ranks; {local_parameters:,} parameters on this rank, "
        f"placed {', '.join(placements)} over {mesh.storage.mesh_dim_names}",
        f"Precision: parameters and moments {training.dtype}, compute {training.mixed_precision_param}, "
        f"gradient sums {training.mixed_precision_reduce}, loss and gradient norm float32",
        *_describe_float8(config),
        f"Optimizer {config.optimizer.name}: weight decay {config.optimizer.weight_decay} on {len(decayed)} "
        f"parameters, none on {len(not_decayed)} ({', '.join(config.optimizer.no_decay)})",
        f"Batch: {training.local_batch_size} rows x {mesh.data_ranks} data ranks x "
        f"{accumulation_steps(config, world_size)} accumulated = {rows} rows of {training.seq_len} tokens = "
        f"{rows * training.seq_len:,} tokens per step",
        f"Memory estimate: {estimate_launch(config, world_size)}{_describe_staging(config, world_size)}",
    ]


def _describe_staging(config: Config, world_size: int) -> str:
    """Say what an asynchronous save copies, and where it lies: in host memory, on CPUs that of the device as well."""
    copy_bytes = count_staging_bytes(config, world_size)
    return f", and {format_bytes(copy_bytes)} of host memory for the copy of a save" if copy_bytes else ""


def _describe_float8(config: Config) -> list[str]:
    """Say which layers are float8, how, and what that means for the law."""
    if not config.model.is_float8:
        return []
    options = config.quantize.linear.float8
    travel = "float8" if options.enable_fsdp_float8_all_gather else config.training.mixed_precision_param
    how = f"by {options.recipe_name}, weights gathered in {travel}{', emulated' if options.emulate else ''}"
    title, *table = describe_choices(choose_float8_of(config))
    lines = [f"{title} {how}", *table]
    if options.recipe_name == "tensorwise":
        lines.append(
            "float8 tensorwise scales activations and gradients by the largest value of a rank's microbatch: mesh and "
            "microbatches change values below 2**-15 of that by rounding (docs/float8.md)"
        )
    return lines


def describe_dry_run(config: Config, world_size: int) -> list[str]:
    """Describe rank 0 of `world_size` ranks, its model on the meta device. Needs a fake process group of that size."""
    mesh = build_mesh_of(config, torch.device("cpu"), world_size)
    model = build_sharded_model(config, mesh)
    table = [
        f"  {name:40} {tuple(p.shape)!s:>18} -> {tuple(p.to_local().shape)!s:>18}"
        for name, p in model.named_parameters()
        if isinstance(p, DTensor) and not re.match(r"layers\.[1-9]", name)
    ]
    title = "Parameters, whole -> on this rank (blocks after layers.0 repeat it):"
    return [*describe(config, mesh, model, world_size), title, *table]
