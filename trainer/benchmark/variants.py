"""The variants of a benchmark: one model, from the same weights, under each way to train it on all ranks.

PyTorch's own ways are set up as their documentation recommends; docs/benchmark.md says where each line comes from.
Gradient clipping and the optimizer are the trainer's own for all that hold DTensors, so what differs is how parameters
are sharded, gathered and compiled. Timing is `measure.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from dataclasses import replace as replace_fields
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer.config.schema import Config, replace
from trainer.data.batches import Microbatch
from trainer.dtypes import DTYPES
from trainer.loss import sum_token_losses
from trainer.models.registry import FAMILIES, build_shape
from trainer.optim import Optimizer, local
from trainer.parallel.accumulate import Accumulate, build_accumulate
from trainer.parallel.compile import SumTokenLosses
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import Mesh, with_gather_groups
from trainer.parallel.overlap.hardware import Hardware
from trainer.parallel.parallelize import initialize
from trainer.parts import build_optimizer_of, build_sharded_model, build_sum_losses_of

FSDP2_EAGER = "fsdp2"
FSDP2_COMPILED = "fsdp2+compile"
AUTO = "auto"
GATHER_GROUP = "parallelism.fsdp_separate_gather_group"
# What of SimpleFSDP's settings each of its variants has; the config has all the rest.
SIMPLE_FSDP: dict[str, dict[str, Any]] = {
    "eager": {"compile.enable": False},
    "none": {"compile.bucketing": "none", "compile.reorder": False},
    "block": {"compile.bucketing": "block"},
    "block+group": {"compile.bucketing": "block", GATHER_GROUP: True},
    AUTO: {"compile.bucketing": "auto"},
}
# Unless a variant says otherwise.
COMPILED = {"compile.enable": True, "compile.reorder": True, GATHER_GROUP: False}


@dataclass
class Variant:
    """One way to train. `step` does what every step does: forward, backward, clipping, optimizer."""

    name: str
    model: nn.Module
    accumulate: Accumulate
    clip: Callable[[], Tensor]
    optimizer: Optimizer
    lr: float
    loss_scale: float = 1.0
    bucket_bytes: int = 0

    def step(self, rows: Microbatch, divisor: Tensor) -> Tensor:
        """Collective over all ranks. Update the parameters once; return this rank's share of the loss."""
        loss = self.accumulate([rows], divisor / self.loss_scale)
        self.clip()
        self.optimizer.step(self.lr, torch.zeros((), device=divisor.device))
        return loss / self.loss_scale

    def kept_bytes(self) -> int:
        """Return the bytes that stay between steps: parameters, moments, and DDP's gradient buckets."""
        kept = [*self.model.parameters(), *self.optimizer.state_tensors().values()]
        storages = [local(tensor.detach()).untyped_storage() for tensor in kept]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()) + self.bucket_bytes


@dataclass(frozen=True)
class Setup:
    """What all variants share. `hardware` is what an automatic plan is made for."""

    config: Config
    mesh: Mesh
    device: torch.device
    hardware: Hardware | None = None


def build_variant(name: str, setup: Setup) -> Variant:
    """Collective over all ranks. Allocate the variant `name` with the config's first weights, and its optimizer."""
    config = setup.config
    ours = build_sharded_model(config, setup.mesh)
    initialize(ours, setup.device, FAMILIES[config.model.name].initial_std(build_shape(config)), config.debug.seed)
    return VARIANTS[name](setup, ours)


def _assemble(name: str, setup: Setup, model: nn.Module, sum_losses: SumTokenLosses) -> Variant:
    config, mesh = setup.config, setup.mesh
    return Variant(
        name=name,
        model=model,
        accumulate=build_accumulate(sum_losses),
        clip=lambda: clip_gradients(model.parameters(), config.training.max_norm, mesh),
        optimizer=build_optimizer_of(config, model),
        lr=config.optimizer.lr,
    )


def _build_simple_fsdp(plan: str) -> Build:
    def build(setup: Setup, ours: nn.Module) -> Variant:
        config = replace(setup.config, COMPILED | SIMPLE_FSDP[plan])
        mesh = replace_fields(setup.mesh, gather_groups={})
        if config.parallelism.fsdp_separate_gather_group:
            mesh = with_gather_groups(mesh)
        report = GraphReport(mesh.axis_of_group())
        sum_losses = build_sum_losses_of(config, mesh, ours, config.compile.backend, report, setup.hardware)
        return _assemble(plan, setup, ours, sum_losses)

    return build


def _build_fsdp2(*, compiled: bool) -> Build:
    def build(setup: Setup, ours: nn.Module) -> Variant:
        config = setup.config
        model = _build_plain_model(config)
        backend = config.compile.backend if compiled else None
        shard_by_block(model, FAMILIES[config.model.name].blocks, setup.mesh, config, backend)
        model.to_empty(device=setup.device)
        for parameter, weight in zip(model.parameters(), ours.parameters(), strict=True):
            local(parameter.detach()).copy_(local(weight.detach()))  # both divide dim 0, in the same way
        name = FSDP2_COMPILED if compiled else FSDP2_EAGER
        return _assemble(name, setup, model, _losses_of(model, backend))

    return build


def shard_by_block(model: nn.Module, blocks: str, mesh: Mesh, config: Config, backend: str | None) -> None:
    """Apply FSDP2 to every block and then to the root; compile each block before, where there is a `backend`."""
    training = config.training
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[training.mixed_precision_param],
        reduce_dtype=DTYPES[training.mixed_precision_reduce],
        cast_forward_inputs=False,  # or rotary angles would be rounded to bfloat16, and only here
    )
    shard = mesh.axes["dp_shard"]
    for name, module in model.named_modules():
        if fnmatchcase(name, blocks) and name.count(".") == blocks.count("."):
            if backend:
                module.compile(backend=backend, fullgraph=True)
            fully_shard(module, mesh=shard, mp_policy=policy)
    fully_shard(model, mesh=shard, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum over ranks, as ours; the default is a mean
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other that takes a factor


def _build_ddp(setup: Setup, ours: nn.Module) -> Variant:
    config, mesh, device = setup.config, setup.mesh, setup.device
    model = _build_plain_model(config).to_empty(device=device)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), ours.parameters(), strict=True):
            assert isinstance(weight, DTensor)
            parameter.copy_(weight.full_tensor())
    wrapped = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh.axes.get_group("dp_shard"),
        gradient_as_bucket_view=True,
    )
    if dist.get_backend(wrapped.process_group) == "fake":  # whose collectives complete without a result
        wrapped.register_comm_hook(None, lambda _, bucket: _done(bucket.buffer()))
    compiled = torch.compile(wrapped, backend=config.compile.backend)
    dtype = DTYPES[config.training.mixed_precision_param]

    def compute_logits(tokens_BT: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not torch.float32):
            return compiled(tokens_BT)

    variant = _assemble("ddp+compile", setup, model, _losses_of(compute_logits, config.compile.backend))
    parameters, max_norm = list(model.parameters()), config.training.max_norm
    variant.clip = lambda: nn.utils.clip_grad_norm_(parameters, max_norm, foreach=True)
    variant.bucket_bytes = sum(parameter.nbytes for parameter in parameters)
    variant.loss_scale = mesh.data_ranks  # DDP takes the mean of the ranks' gradients
    return variant


def _done(value: Tensor) -> torch.futures.Future[Tensor]:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(value)
    return future


def _losses_of(model: Callable[[Tensor], Tensor], loss_backend: str | None) -> SumTokenLosses:
    """Return f(tokens_BT, labels_BT) -> sum of token losses, the loss compiled by itself where there is a backend."""
    loss = torch.compile(sum_token_losses, backend=loss_backend, fullgraph=True) if loss_backend else sum_token_losses
    return lambda tokens_BT, labels_BT: loss(model(tokens_BT), labels_BT)


def _build_plain_model(config: Config) -> nn.Module:
    with torch.device("meta"):
        return FAMILIES[config.model.name].build_model(build_shape(config)).to(DTYPES[config.training.dtype])


Build = Callable[[Setup, nn.Module], Variant]
VARIANTS: dict[str, Build] = {
    FSDP2_EAGER: _build_fsdp2(compiled=False),
    FSDP2_COMPILED: _build_fsdp2(compiled=True),
    "ddp+compile": _build_ddp,
    **{name: _build_simple_fsdp(name) for name in SIMPLE_FSDP},
}
