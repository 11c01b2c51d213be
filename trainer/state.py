"""What a checkpoint holds: how far the run is, and the tensors of model, optimizer and random generators by key."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from trainer.checkpoint.rng import random_state
from trainer.dtypes import DTYPES
from trainer.optim import Optimizer


@dataclass
class TrainState:
    """How far the run is. `non_finite` is 1 from the first step on whose loss or gradient norm was not finite."""

    step: int
    tokens_seen: Tensor
    non_finite: Tensor

    @classmethod
    def start(cls, device: torch.device) -> TrainState:
        return cls(0, torch.zeros((), dtype=torch.int64, device=device), torch.zeros((), device=device))

    def mask_if_not_finite(self, loss: Tensor, grad_norm: Tensor) -> None:
        """Mask this update and all later ones on the device, if a value isn't finite."""
        self.non_finite = torch.maximum(self.non_finite, (~torch.isfinite(loss + grad_norm)).float())

    def advance(self, tokens: Tensor) -> None:
        self.step += 1
        self.tokens_seen += tokens * (1 - self.non_finite).long()


def checkpoint_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Every tensor of a checkpoint by key but the random states, sharing memory with the run."""
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    return parameters | {f"optimizer.{key}": value for key, value in optimizer.state_tensors().items()}


def weight_tensors(model: nn.Module, dtype: str) -> dict[str, Tensor]:
    """The weights alone, rounded to `dtype`."""
    return {f"model.{name}": p.detach().to(DTYPES[dtype]) for name, p in model.named_parameters()}


def random_tensors(rank: int) -> dict[str, Tensor]:
    """The random state of this rank, under keys of its own."""
    return {f"rng.rank_{rank}.{name}": value for name, value in random_state().items()}
