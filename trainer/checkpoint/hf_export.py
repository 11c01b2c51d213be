"""Writing a checkpoint's weights as a Hugging Face folder, file by file, and the other way round.

Both directions stream: memory holds one file's tensors. Ranks share the files of an export. A folder gets its name when
it is whole.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.hf_folder import (
    CONFIG_NAME,
    HFFolder,
    read_hf_config,
    write_hf_index,
    write_hf_tensors,
    write_json,
)
from trainer.checkpoint.hf_load import TIED_NAME
from trainer.checkpoint.load import open_checkpoint
from trainer.checkpoint.save import begin_save
from trainer.checkpoint.state import read_state
from trainer.checkpoint.together import is_first, run_together
from trainer.data.tokenizer import Tokenizer, load_tokenizer
from trainer.dtypes import DTYPES
from trainer.files import flush
from trainer.models.registry import FAMILIES, build_meta_model, shape_of_experiment

SHARD_BYTES = 5_000_000_000  # Hugging Face's own default
GENERATION_NAME = "generation_config.json"
_PREFIX = "model."

Progress = Callable[[int, int], None]  # bytes done, and of how many


def export_hf(
    checkpoint: Path,
    folder: Path,
    *,
    dtype: torch.dtype,
    shard_bytes: int = SHARD_BYTES,
    process_group: dist.ProcessGroup | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Collective over all ranks. Write the weights of a step folder to the new `folder`, which transformers loads.

    Raises ValueError on every rank if the checkpoint is damaged or `folder` is there already. `progress` tells of this
    rank's files.
    """
    first = is_first(process_group)
    partial = folder.with_name(f"{folder.name}.partial")
    what = f"writing {folder}"
    run_together(what, lambda: _start(folder, partial) if first else None, process_group)
    source = open_checkpoint(checkpoint, lambda key: key.startswith(_PREFIX), process_group)
    state = run_together(what, lambda: read_state(checkpoint), process_group)
    to_hf_name = FAMILIES[state["experiment"]["model.name"]].to_hf_name
    keys = {to_hf_name(key.removeprefix(_PREFIX)): key for key in source.shapes}
    sizes = {hf: source.shapes[key].numel() * dtype.itemsize for hf, key in keys.items()}
    rank = 0 if process_group is None else dist.get_rank(process_group)
    ranks = 1 if process_group is None else dist.get_world_size(process_group)
    done = 0

    def read(names: list[str]) -> dict[str, Tensor]:
        nonlocal done
        tensors = source.read([keys[name] for name in names])
        done += sum(sizes[name] for name in names)
        progress(done, sum(sizes.values()))
        return {name: tensors[keys[name]].to(dtype) for name in names}

    def write() -> None:
        write_hf_tensors(partial, sizes, read, shard_bytes=shard_bytes, mine=lambda number: number % ranks == rank)

    def finish() -> None:
        if first:
            write_hf_index(partial, sizes, shard_bytes)
            _write_small_files(partial, state, checkpoint, dtype)
            flush(partial)
            partial.rename(folder)
            flush(folder.parent)

    run_together(what, write, process_group)
    run_together(what, finish, process_group)


def _start(folder: Path, partial: Path) -> None:
    if folder.exists():
        raise ValueError(f"{folder} is there already. Move it away, or give another folder")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _write_small_files(folder: Path, state: Mapping[str, Any], checkpoint: Path, dtype: torch.dtype) -> None:
    experiment = state["experiment"]
    family, shape = FAMILIES[experiment["model.name"]], shape_of_experiment(experiment)
    config = family.to_hf_config(shape, experiment["training.seq_len"])
    config["dtype"] = config["torch_dtype"] = str(dtype).removeprefix("torch.")  # new name, and up to transformers 4
    if (checkpoint / "tokenizer").is_dir():
        tokenizer = load_tokenizer(str(checkpoint / "tokenizer"))
        tokenizer.save_for_hf(folder)
        ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
        config |= ids
        write_json(folder / GENERATION_NAME, ids)
    write_json(folder / CONFIG_NAME, config)
    for file in folder.iterdir():
        flush(file)


def import_hf(
    source: Path, folder: Path, *, name: str, dtype: torch.dtype, progress: Progress = lambda done, total: None
) -> Path:
    """Write the weights of a Hugging Face folder as the checkpoint of step 0 in `folder`, and return its path.

    `name` is the family. The checkpoint holds weights alone, for `checkpoint.initial_load_path`. Raises
    ValueError for a folder that is damaged or holds another kind of model.
    """
    family = FAMILIES[name]
    config = read_hf_config(source)
    try:
        shape = family.from_hf_config(config)
    except ValueError as error:
        raise ValueError(f"{source / CONFIG_NAME}: {error}") from error
    with HFFolder(source) as tensors:
        shapes = tensors.shapes()
        if shape.tie_embeddings:
            shapes.pop(TIED_NAME, None)
        names = [n for n, _ in build_meta_model(family, shape).named_parameters()]
        wanted = {f"{_PREFIX}{n}": family.to_hf_name(n) for n in names}
        if set(wanted.values()) != shapes.keys():
            differing = sorted(set(wanted.values()) ^ shapes.keys())
            raise ValueError(f"{source}: its config.json and its tensors differ in {', '.join(differing[:20])}")
        plain = {key: torch.empty(shapes[hf], dtype=dtype, device="meta") for key, hf in wanted.items()}
        return write_weights(
            folder,
            plain,
            lambda key: tensors.read(wanted[key]).to(dtype),
            state=state_of_weights(name, shape, dtype, int(config.get("max_position_embeddings", 2048))),
            tokenizer=find_tokenizer(source),
            progress=progress,
        )


def write_weights(
    folder: Path,
    plain: Mapping[str, Tensor],
    read: Callable[[str], Tensor],
    *,
    state: Mapping[str, Any],
    tokenizer: Tokenizer | None,
    progress: Progress,
) -> Path:
    """Write a checkpoint of step 0 with the meta tensors `plain`, of which `read(key)` returns one at a time."""
    save = begin_save(folder, 0, plain, None)
    done, total = 0, sum(tensor.nbytes for tensor in plain.values())

    def find(item: Any) -> Tensor:
        nonlocal done
        tensor = read(item.index.fqn)
        done += tensor.nbytes
        progress(done, total)
        return tensor

    def attach(path: Path) -> None:
        if tokenizer is not None:
            tokenizer.save(path / "tokenizer")

    return save.seal(lambda: save.write(find, on_host=True), state, attach)


def state_of_weights(name: str, shape: Any, dtype: torch.dtype, seq_len: int) -> dict[str, Any]:
    """Return the state of a checkpoint of weights alone that no run of ours has trained."""
    args = {f"model.args.{key}": value for key, value in vars(shape).items()}
    dtype_name = next(text for text, value in DTYPES.items() if value is dtype)
    return {
        "step": 0,
        "tokens_seen": 0,
        "weights_only": True,
        "experiment": {
            "model.name": name,
            "model.flavor": "debugmodel",
            **args,
            "training.dtype": dtype_name,
            "training.mixed_precision_param": dtype_name,
            "training.seq_len": seq_len,
        },
    }


def find_tokenizer(folder: Path) -> Tokenizer | None:
    """Return the tokenizer that lies in a folder of weights, or None."""
    try:
        return load_tokenizer(str(folder))
    except ValueError:
        return None
