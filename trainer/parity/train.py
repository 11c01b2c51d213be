"""Training one case for some steps: the trainer's own model, mesh, step and optimizer, on random tokens.

Also the same on PyTorch's FSDP2, from the same weights. Comparing is `verify.py`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from trainer.config.schema import Config
from trainer.data.batches import Microbatch, TrainingData
from trainer.data.rows import Rows
from trainer.distributed import Place
from trainer.launch import build_shape
from trainer.loss import count_labels
from trainer.models.registry import FAMILIES
from trainer.optim import local
from trainer.parallel.accumulate import build_accumulate
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.graph_report import GraphReport
from trainer.parallel.mesh import AXES, Mesh
from trainer.parallel.overlap.hardware import HARDWARE
from trainer.parallel.parallelize import initialize
from trainer.parity.case import Case
from trainer.parts import build_optimizer_of, build_reading_of, build_sharded_model, build_sum_losses_of


@dataclass
class Result:
    """What one rank saw of a training. `weights` are whole and on the host, and kept on rank 0 alone."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    digest: str = ""

    @property
    def bits(self) -> tuple[Any, ...]:
        """Whatever is the same where every bit is; small."""
        return tuple(self.losses), tuple(self.norms), self.digest


def build_mesh_of_first(case: Case, place: Place) -> Mesh | None:
    """Build the case's mesh over the first ranks; None on the others. Collective over all ranks.

    All ranks form meshes of that size side by side. ValueError if they can't.
    """
    if place.world_size % case.ranks:
        raise ValueError(
            f"{case.mesh} needs {case.ranks} ranks, and a case runs on a divisor of all the ranks, which are "
            f"{place.world_size}. Use another number of processes"
        )
    sizes = (place.world_size // case.ranks, 1, case.replicate, case.shard, 1, case.tp)
    side_by_side = init_device_mesh(place.device.type, sizes, mesh_dim_names=("side", *AXES))
    return Mesh(side_by_side[AXES]) if side_by_side.get_local_rank("side") == 0 else None


class Trainee:
    """A case's model on its mesh. It can be trained again from its first weights without compiling again."""

    def __init__(self, case: Case, base: Config, mesh: Mesh, place: Place) -> None:
        config = case.configure(base)
        torch.use_deterministic_algorithms(config.debug.deterministic)
        self._mesh, self._place = mesh, place
        self._model = build_sharded_model(config, mesh)
        initialize(self._model, place.device, _initial_std(config), config.debug.seed)
        if case.fsdp2:
            self._model = _rebuild_with_fsdp2(self._model, config, mesh, place.device)
        of_step, of_gather, of_sum = (GraphReport(mesh.axis_of_group()) for _ in range(3))
        # An automatic plan for any hardware must be right; described, it is the same one wherever this runs.
        hardware = HARDWARE["H100"] if case.bucketing == "auto" else None
        parts = config, mesh, self._model, config.compile.backend
        sum_losses = build_sum_losses_of(*parts, of_step, hardware)
        self._accumulate = build_accumulate(sum_losses, build_reading_of(*parts, of_gather, of_sum, hardware))
        self._first = [local(p.detach()).clone() for p in self._model.parameters()]

    def train(self, config: Config) -> Result:
        """Train the steps of `config` with its optimizer, at its peak learning rate. Collective over the mesh."""
        for parameter, first in zip(self._model.parameters(), self._first, strict=True):
            local(parameter.detach()).copy_(first)
        optimizer = build_optimizer_of(config, self._model)
        data = _build_data(config, self._mesh)
        result = Result()
        for step in range(config.training.steps):
            microbatches = [_to_device(rows, self._place.device) for rows in data.microbatches(step)]
            labels = torch.stack([count_labels(rows.labels_BT) for rows in microbatches]).sum()
            loss = self._mesh.sum(self._accumulate(microbatches, self._mesh.sum(labels)))
            norm = clip_gradients(self._model.parameters(), config.training.max_norm, self._mesh)
            optimizer.step(config.optimizer.lr, torch.zeros((), device=self._place.device))
            result.losses.append(loss.item())
            result.norms.append(norm.item())
            result.labels.append(int(labels))
        self._read_weights(result)
        return result

    def _read_weights(self, result: Result) -> None:
        digest = hashlib.sha256()
        for name, parameter in self._model.named_parameters():
            assert isinstance(parameter, DTensor)
            weight = parameter.full_tensor().detach().cpu().contiguous()
            digest.update(weight.view(torch.uint8).numpy().data)
            if self._place.rank == 0:
                result.weights[name] = weight
        result.digest = digest.hexdigest()


def _initial_std(config: Config) -> Any:
    return FAMILIES[config.model.name].initial_std(build_shape(config))


def _rebuild_with_fsdp2(ours: nn.Module, config: Config, mesh: Mesh, device: torch.device) -> nn.Module:
    """Return a model with the same weights, sharded block by block by PyTorch's `fully_shard`."""
    family = FAMILIES[config.model.name]
    with torch.device("meta"):
        model = family.build_model(build_shape(config))
    model.to_empty(device=device)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), ours.parameters(), strict=True):
            assert isinstance(weight, DTensor)
            parameter.copy_(weight.full_tensor())
    for name, module in model.named_modules():
        if fnmatchcase(name, family.blocks) and name.count(".") == family.blocks.count("."):
            fully_shard(module, mesh=mesh.axes["dp_shard"])
    fully_shard(model, mesh=mesh.axes["dp_shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a sum over ranks, as ours; the default is a mean
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other that takes a factor
    return model


def _build_data(config: Config, mesh: Mesh) -> TrainingData:
    """Return random rows, half as many again as a step has; the last has few labels, so ranks count differently."""
    training = config.training
    rows = training.global_batch_size * 3 // 2 + 1
    tokens = (rows - 1) * training.seq_len + training.seq_len // 4 + 1
    draws = np.random.default_rng(config.debug.seed).integers(build_shape(config).vocab_size, size=tokens)
    return TrainingData(
        Rows(draws, training.seq_len),
        seed=config.debug.seed,
        global_batch_size=training.global_batch_size,
        local_batch_size=training.local_batch_size,
        data_rank=mesh.data_rank,
        data_ranks=mesh.data_ranks,
    )


def _to_device(rows: Microbatch, device: torch.device) -> Microbatch:
    return Microbatch(rows.tokens_BT.to(device), rows.labels_BT.to(device))
