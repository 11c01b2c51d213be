"""The families a config's `model.name` may name, what the trainer needs of each, and the shape a config asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.config.schema import Config
from trainer.models.llama import config as llama_config
from trainer.models.llama import hf as llama_hf
from trainer.models.llama import model as llama_model
from trainer.models.llama import plan as llama_plan


@dataclass(frozen=True)
class Family:
    """What a model family offers; each function takes the family's own shape object."""

    build_config: Callable[[str, str, dict[str, Any]], Any]
    build_model: Callable[[Any], nn.Module]
    initial_std: Callable[[Any], Mapping[str, float]]  # by parameter name; 0 means that all values start at one
    count_parameters: Callable[[Any], int]
    count_flops_per_token: Callable[[Any, int], int]
    count_activation_bytes: Callable[[Any, int, int], int]
    linear_layers: Callable[[Any], dict[str, tuple[int, int]]]  # names and (output, input) features
    tensor_plan: Mapping[str, str]
    blocks: str
    to_hf_name: Callable[[str], str]
    to_hf_config: Callable[[Any, int], dict[str, Any]]  # takes the longest sequence
    from_hf_config: Callable[[Mapping[str, Any]], Any]  # ValueError


LLAMA = Family(
    build_config=llama_config.build_llama_config,
    build_model=llama_model.Llama,
    initial_std=llama_model.initial_std,
    count_parameters=llama_config.count_parameters,
    count_flops_per_token=llama_config.count_flops_per_token,
    count_activation_bytes=llama_config.count_activation_bytes,
    linear_layers=llama_config.linear_layers,
    tensor_plan=llama_plan.TENSOR_PARALLEL,
    blocks=llama_plan.BLOCKS,
    to_hf_name=llama_hf.to_hf_name,
    to_hf_config=llama_hf.to_hf_config,
    from_hf_config=llama_hf.from_hf_config,
)

FAMILIES: dict[str, Family] = {"llama2": LLAMA, "llama3": LLAMA}


def build_shape(config: Config) -> Any:
    """Return the shape object of the config's model."""
    model = config.model
    return FAMILIES[model.name].build_config(model.name, model.flavor, vars(model.args))


def shape_of_experiment(experiment: Mapping[str, Any]) -> Any:
    """Return the shape object of the model whose experiment half a checkpoint stores."""
    name, flavor, prefix = experiment["model.name"], experiment["model.flavor"], "model.args."
    changes = {key.removeprefix(prefix): value for key, value in experiment.items() if key.startswith(prefix)}
    return FAMILIES[name].build_config(name, flavor, changes)


def build_meta_model(family: Family, shape: Any) -> nn.Module:
    """Return the model of a shape without memory."""
    with torch.device("meta"):
        return family.build_model(shape)
