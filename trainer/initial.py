"""Starting from given weights: whether `checkpoint.initial_load_path` holds the model that the config describes.

Needs no torch, so a launch that can't start is refused at once. Loading the tensors is `begin.py`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from trainer.checkpoint.folder import resolve_step_folder
from trainer.checkpoint.state import read_state
from trainer.config.schema import Config
from trainer.models.llama.config import LlamaConfig, build_llama_config
from trainer.models.llama.hf import from_hf_config

_PREFIX = "model.args."
_OF_SCALING = tuple(f"rope_scaling_{key}" for key in ("low_freq_factor", "high_freq_factor", "original_seq_len"))


def find_initial(config: Config) -> Path | None:
    """Return the folder of weights to start from: of safetensors, or a step folder. ValueError if it isn't there."""
    checkpoint = config.checkpoint
    if not checkpoint.initial_load_path:
        return None
    path = Path(checkpoint.initial_load_path)
    return path if checkpoint.initial_load_in_hf else resolve_step_folder(path)


def check_initial(config: Config) -> list[str]:
    """Compare the model's shape with the one that was stored with the weights; return what differs.

    Shapes of tensors are compared again when they are loaded; some of these numbers are in none.
    """
    given = f"checkpoint.initial_load_path = {config.checkpoint.initial_load_path!r}"
    try:
        path = find_initial(config)
        if path is None:
            return []
        theirs = _read_hf_shape(path) if config.checkpoint.initial_load_in_hf else _read_shape(path)
        ours = build_llama_config(config.model.name, config.model.flavor, vars(config.model.args))
    except KeyError:  # of the flavor, which is told by its own rule
        return []
    except (ValueError, OSError) as error:
        return [f"{given}\n{error}"]
    differing = [
        f"{_PREFIX}{f.name}: {getattr(ours, f.name)} here, {getattr(theirs, f.name)} there"
        for f in dataclasses.fields(LlamaConfig)
        if getattr(ours, f.name) != getattr(theirs, f.name)
        and not (f.name in _OF_SCALING and ours.rope_scaling_factor == theirs.rope_scaling_factor == 1)
    ]
    if not differing:
        return []
    return [f"{given}\nThe weights are those of another model:\n" + "\n".join(differing) + "\nUse the shape they have."]


def _read_shape(path: Path) -> LlamaConfig:
    experiment = read_state(path)["experiment"]
    changes = {key.removeprefix(_PREFIX): value for key, value in experiment.items() if key.startswith(_PREFIX)}
    return build_llama_config(experiment["model.name"], experiment["model.flavor"], changes)


def _read_hf_shape(path: Path) -> LlamaConfig:
    file = path / "config.json"
    try:
        return from_hf_config(json.loads(file.read_bytes()))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}. Name a folder with safetensors and a config.json") from error
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{file}: {error}") from error
