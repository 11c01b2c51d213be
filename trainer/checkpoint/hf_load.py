"""Loading weights from a Hugging Face folder into parameters of any mesh: each rank reads its own parts only."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from trainer.checkpoint.hf_folder import HFFolder
from trainer.checkpoint.together import run_together

TIED_NAME = "lm_head.weight"  # stored by some although it is the embedding


def load_hf_parameters(
    folder: Path,
    parameters: Mapping[str, Tensor],
    to_hf_name: Callable[[str], str],
    *,
    keep: Callable[[str], bool],
    process_group: dist.ProcessGroup | None,
) -> None:
    """Collective over all ranks. Fill `parameters` (by our names, plain or DTensors) in place, cast to their dtypes.

    Names and shapes of both sides are compared first: ValueError on every rank that lists what differs. Parameters for
    which `keep(name)` holds stay as they are. `process_group` is a host-side group of all ranks, or None for one.
    """
    ours = {to_hf_name(name): (name, parameter) for name, parameter in parameters.items()}

    def load() -> None:
        with HFFolder(folder) as source:
            _compare(folder, source.shapes(), {hf: tuple(p.shape) for hf, (_, p) in ours.items()})
            for hf_name, (name, parameter) in ours.items():
                if not keep(name):
                    _fill(parameter, source, hf_name)

    run_together(f"loading {folder}", load, process_group)


def _compare(folder: Path, theirs: dict[str, tuple[int, ...]], ours: dict[str, tuple[int, ...]]) -> None:
    if TIED_NAME not in ours:
        theirs.pop(TIED_NAME, None)
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
