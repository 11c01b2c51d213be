"""Where a process stands, which device it takes, and how values get there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tiny_run import log_lines

from trainer.distributed import find_place, process_group, set_determinism, set_timeout, to_device

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def find_with(monkeypatch: pytest.MonkeyPatch, *, gpus: int, ranks: int, rank: int = 0) -> tuple[torch.device, str]:
    """Return the device of a rank on a machine with so many GPUs and ranks, and what is said about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    for name, value in numbers.items():
        monkeypatch.setenv(name, str(value))
    with log_lines() as lines:
        device = find_place().device
    return device, "\n".join(lines)


def test_each_rank_takes_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_with(monkeypatch, gpus=4, ranks=2, rank=1) == (torch.device("cuda", 1), "")
    assert find_with(monkeypatch, gpus=0, ranks=2, rank=1) == (CPU, "")


@pytest.mark.parametrize("given", ["1", "h100:1"])
def test_a_rank_that_slurm_shows_its_own_gpu_alone_takes_it(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("SLURM_GPUS_PER_TASK", given)
    assert find_with(monkeypatch, gpus=1, ranks=8, rank=3) == (torch.device("cuda", 0), "")


def test_more_ranks_than_gpus_train_on_the_cpu_and_one_of_them_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device, told = find_with(monkeypatch, gpus=1, ranks=2)
    assert device == CPU
    assert told.startswith("WARNING 2 ranks on this machine and 1 GPU,")
    assert "torchrun --nproc-per-node 1" in told
    assert find_with(monkeypatch, gpus=1, ranks=2, rank=1) == (CPU, "")


@pytest.fixture
def deterministic_again() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic_again")
@pytest.mark.parametrize(("given", "kept"), [(None, ":4096:8"), (":16:8", ":16:8")])
def test_cublas_is_told_to_be_deterministic_unless_the_user_did(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", given or "")
    if given is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    set_determinism(True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == kept
    assert torch.are_deterministic_algorithms_enabled()


class Recorder:
    """A host tensor that notes how it is copied."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def pin_memory(self) -> Recorder:
        self.calls.append("pin_memory")
        return self

    def to(self, device: torch.device, non_blocking: bool = False) -> Recorder:
        self.calls.append((device.type, non_blocking))
        return self


def test_a_copy_to_a_gpu_starts_from_pinned_memory_and_is_not_waited_for() -> None:
    values = Recorder()
    to_device(values, torch.device("cuda"))  # type: ignore[arg-type]
    assert values.calls == ["pin_memory", ("cuda", True)]


@needs_gpu
def test_a_copy_to_a_gpu_waits_for_nothing() -> None:
    values = torch.arange(6).reshape(2, 3)
    to_device(values, torch.device("cuda"))  # starts CUDA, which does wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        copied = to_device(values, torch.device("cuda"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(copied.cpu(), values)


def count_workers(group: dist.ProcessGroup) -> int:
    return group._get_backend(CPU).options._threads


def test_each_gloo_group_has_one_worker_since_two_would_write_to_freed_memory() -> None:
    with process_group(find_place(), timeout_seconds=60):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=50))
        set_timeout(40, [group])
        assert (count_workers(dist.group.WORLD), count_workers(group)) == (1, 1)
