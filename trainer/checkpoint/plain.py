"""A checkpoint as a plain model on one device, for looking at it: no process group, no sharding, no optimizer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainer.checkpoint.load import load_tensors
from trainer.checkpoint.state import read_state
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.dtypes import DTYPES
from trainer.models.registry import FAMILIES, build_meta_model, shape_of_experiment
from trainer.parallel.parameters import replace_parameters


def load_plain_model(path: Path, device: torch.device, dtype: torch.dtype | None = None) -> tuple[nn.Module, Tokenizer]:
    """Return the model and tokenizer of the step folder `path`. ValueError if it is damaged or isn't a checkpoint.

    Parameters are cast to `dtype`, or to the one that training computes in, so that the model gives the numbers it gave
    there.
    """
    experiment = read_state(path)["experiment"]
    model = build_meta_model(FAMILIES[experiment["model.name"]], shape_of_experiment(experiment))
    model.to(DTYPES[experiment["training.dtype"]])
    replace_parameters(model, lambda _, p: nn.Parameter(torch.empty_like(p, device=device)))
    load_tensors(
        path,
        {f"model.{key}": p.detach() for key, p in model.named_parameters()},
        allow_missing=lambda key: False,
        allow_extra=lambda key: not key.startswith("model."),
        cast=True,
        process_group=None,
    )
    compute_dtype = dtype or DTYPES[experiment["training.mixed_precision_param"]]
    replace_parameters(model, lambda _, p: nn.Parameter(p.detach().to(compute_dtype)))
    return model, load_tokenizer(str(path / "tokenizer"))
