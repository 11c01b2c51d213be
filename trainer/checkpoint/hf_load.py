"""Loading weights from a Hugging Face folder into parameters of any mesh: each rank reads its own parts only."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.checkpoint.hf_folder import HFFolder
from trainer.checkpoint.load import check_patterns, matches
from trainer.checkpoint.together import run_together

TIED_NAME = "lm_head.weight"  # stored by some although it is the embedding


def load_hf_parameters(
    folder: Path,
    parameters: Mapping[str, Tensor],
    to_hf_name: Callable[[str], str],
    *,
    exclude: Sequence[str] = (),
    process_group: dist.ProcessGroup | None,
) -> None:
    """Collective over all ranks. Fill `parameters` (plain or DTensors, "model.<our name>") in place, cast to theirs.

    Names and shapes of both sides are compared first: ValueError on every rank that lists what differs. Parameters of
    the patterns `exclude` stay as they are, and a pattern of none is an error. `process_group` is a host-side group of
    all ranks, or None for one.
    """
    check_patterns(folder, exclude, set(parameters), process_group)
    names = {key: to_hf_name(key.removeprefix("model.")) for key in parameters}
    left = {names[key] for key in parameters if matches(key, exclude)}

    def load() -> None:
        with HFFolder(folder) as source:
            theirs = {name: shape for name, shape in source.shapes().items() if name not in left}
            if TIED_NAME not in names.values():
                theirs.pop(TIED_NAME, None)
            ours = {names[key]: parameter for key, parameter in parameters.items() if names[key] not in left}
            _compare(folder, theirs, {name: tuple(parameter.shape) for name, parameter in ours.items()})
            for name, parameter in ours.items():
                _fill(parameter, source, name)

    run_together(f"loading {folder}", load, process_group)


def _compare(folder: Path, theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]) -> None:
    missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
    unlike = [f"{n} is {theirs[n]} there and {ours[n]} here" for n in ours if n in theirs and theirs[n] != ours[n]]
    told = [f"not there: {', '.join(missing)}"] * bool(missing) + [f"only there: {', '.join(extra)}"] * bool(extra)
    if told or unlike:
        raise ValueError(f"{folder} does not fit the model: {'; '.join(told + unlike)}. Use the model it was made with")


@torch.no_grad()
def _fill(parameter: Tensor, source: HFFolder, hf_name: str) -> None:
    if not isinstance(parameter, DTensor):
        parameter.copy_(source.read(hf_name))
        return
    size, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = parameter.to_local()
    if part.numel():
        part.copy_(source.read(hf_name, start, size))
