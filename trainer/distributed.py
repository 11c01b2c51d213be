"""The processes of a run: device, process groups, agreement between ranks, and a clean end.

The one place that chooses a device or a backend. One process without torchrun gets the same process group as many.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from trainer.config.load import ConfigError
from trainer.door import EXIT_FAILED

log = logging.getLogger(__name__)

FIRST_FAILURE = "fullgraph/first_failure"  # key in the store that the ranks met in
_build_gloo = ProcessGroupGloo.__init__


@dataclass(frozen=True)
class Place:
    """Where this process stands, as torchrun's environment tells; one process alone is rank 0 of 1."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    device: torch.device

    @property
    def backend(self) -> str:
        """NCCL for device tensors plus gloo for host tensors, or gloo alone."""
        return "cuda:nccl,cpu:gloo" if self.device.type == "cuda" else "gloo"


def find_place() -> Place:
    """Read this process's place, and choose its device by capability. Starts nothing."""

    def number(name: str, default: int) -> int:
        return int(os.environ.get(name, default))

    local_rank, local_world_size = number("LOCAL_RANK", 0), number("LOCAL_WORLD_SIZE", 1)
    return Place(
        rank=number("RANK", 0),
        local_rank=local_rank,
        world_size=number("WORLD_SIZE", 1),
        local_world_size=local_world_size,
        device=_choose_device(local_rank, local_world_size),
    )


def _choose_device(local_rank: int, local_world_size: int) -> torch.device:
    """Return a GPU of this rank's own, or the CPU where not every rank of this machine can have one.

    Slurm's --gpus-per-task=1 shows each rank nothing but its own GPU.
    """
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus >= local_world_size:
        return torch.device("cuda", local_rank)
    if gpus == 1 and os.environ.get("SLURM_GPUS_PER_TASK", "").rpartition(":")[2] == "1":
        return torch.device("cuda", 0)
    if local_rank == 0:
        log.warning(
            f"{local_world_size} ranks on this machine and {gpus} GPU{'s' * (gpus > 1)}, and each rank needs one of "
            f"its own: training on the CPU, far slower. To use the GPUs: torchrun --nproc-per-node {gpus}"
        )
    return torch.device("cpu")


@contextlib.contextmanager
def process_group(place: Place, timeout_seconds: int) -> Iterator[None]:
    """Collective over all ranks. Hold the default process group open.

    After an exception nothing is taken down: that may wait for ranks that wait for this one. End the process instead.
    """
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    use_one_gloo_worker()
    alone = "RANK" not in os.environ
    dist.init_process_group(
        place.backend,
        timeout=timedelta(seconds=timeout_seconds),
        rank=place.rank,
        world_size=place.world_size,
        store=dist.HashStore() if alone else None,
        device_id=place.device if place.device.type == "cuda" else None,
    )
    yield
    # A gloo rank that leaves while another still reads from it makes that one abort, so all leave together.
    dist.barrier()
    dist.destroy_process_group()


def use_one_gloo_worker() -> None:
    """Give every gloo group that this process makes from now on one worker thread. A second call changes nothing.

    In PyTorch 2.11 to 2.13 each worker notes the name of the collective that it has finished in a string of the group,
    without a lock (`ProcessGroupGloo::runLoop`, `pgStatus_->lastCompletedWorkName`). Two that finish at once free that
    string twice: "malloc(): unaligned tcache chunk detected", or a crash anywhere later. (A name of up to 15 letters
    needs no allocation; that of an all-gather is longer.) A process alone that keeps 64 all-gathers of four numbers in
    flight died of it within 40 s in each of seven runs of 2.13; with one worker it made 1.8 million of them. The
    collectives of a group now run one after the other, as they do on a GPU.
    """
    ProcessGroupGloo.__init__ = _build_with_one_worker  # type: ignore[method-assign]


def _build_with_one_worker(self: ProcessGroupGloo, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Do what PyTorch's constructor does, which takes the number of workers from its options only.

    All groups have the same devices, so the same threads wait for sockets. Each such thread wakes a hundred times a
    second, and the groups of many meshes would be a load of their own.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    options._threads = 1
    options._devices = _gloo_devices(os.environ.get("GLOO_SOCKET_IFNAME", ""))
    _build_gloo(self, store, rank, size, options)


@functools.cache
def _gloo_devices(interfaces: str) -> list[Any]:
    devices = [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",") if name]
    return devices or [ProcessGroupGloo.create_default_device()]


def end_failed_rank(place: Place, error: Exception) -> NoReturn:
    """Report the error that is being handled, and end this process with code 1 at once.

    The first rank to fail shows its traceback. Those that fail after it have mostly lost their connection to it, and
    say in one line where to look.
    """
    summary = f"{type(error).__name__}: {error}"
    first = _first_failure(place, f"rank {place.rank}: {summary}")
    if first is None:
        log.error(f"Rank {place.rank} failed", exc_info=error)
        get_error_handler().record_exception(error)  # torchrun shows it as the root cause in its own report
    else:
        log.error(f"Rank {place.rank} ended ({summary.splitlines()[0]}) after the failure of {first.splitlines()[0]}")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_FAILED)  # no clean-up: it could wait for the other ranks


def _first_failure(place: Place, own: str) -> str | None:
    """Return what the first failed rank left in the store, or None if that is this one or can't be known."""
    if place.world_size == 1:
        return None
    try:
        first = _get_default_store().compare_set(FIRST_FAILURE, "", own).decode()
    except (RuntimeError, ValueError):  # no store, or its server is gone: this rank's own error is what there is
        return None
    return None if first == own else first


@contextlib.contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Stand in for one of `world_size` ranks without any other process; collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the "fake" backend

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def host_group(timeout_seconds: int) -> dist.ProcessGroup:
    """Collective over all ranks. Make a gloo group for host tensors, apart from the device's traffic."""
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))


def set_timeout(seconds: int, groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the limit of each later collective of `groups`."""
    for group in groups:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def gather_objects(value: Any, group: dist.ProcessGroup) -> list[Any]:
    """Collective over `group`. Return every rank's `value`, in rank order; for small values at start and end only."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def check_agreement(what: str, value: str, group: dist.ProcessGroup) -> None:
    """Collective over `group`. Raise ConfigError on every rank if `value` differs between ranks."""
    values = gather_objects(value, group)
    if len(set(values)) > 1:
        table = "\n".join(f"rank {rank}: {value}" for rank, value in enumerate(values))
        raise ConfigError(
            [f"{what} must be the same on every rank, and is not:\n{table}\nGive all machines the same files."]
        )


def set_determinism(enable: bool) -> None:
    """Say whether an operation must give the same bits each time; one that has no such form is then an error."""
    if enable:
        # cuBLAS reads it when it starts, and isn't deterministic without (docs.nvidia.com/cuda/cublas, Reproducibility)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(enable)


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return host values on `device`. The host goes on at once: the copy stands in the device's queue like any work."""
    if device.type != "cuda":
        return values.to(device)
    # From memory that may be paged out, a copy waits for all that is queued before it.
    return values.pin_memory().to(device, non_blocking=True)


class HostCopy:
    """Device values on their way to the host. Reading them waits for them alone, not for work queued after them."""

    def __init__(self, values: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = values.clone()

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()
