"""Ranks that a door starts on this machine by itself, where torchrun hasn't started any.

Owns their number, their environment and their exit code. What a rank does is the door's own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.multiprocessing as mp
from torch.distributed import TCPStore, is_nccl_available

from trainer.door import EXIT_FAILED, tell_of_faults


class Refused(ValueError):
    """Arguments that can't be followed."""


def choose_device(wanted: str | None) -> str:
    """Return the kind of device that all ranks use: the one asked for, or cuda where there is one. Refused."""
    available = torch.cuda.is_available() and is_nccl_available()
    if wanted == "cuda" and not available:
        raise Refused("--device cuda: PyTorch finds no GPU with NCCL here. Use --device cpu, or install a CUDA build")
    return wanted or ("cuda" if available else "cpu")


def count_ranks(wanted: int | None, device: str, *, flag: str, on_cpu: int) -> int:
    """Return how many ranks there are: those asked for by `flag`, torchrun's, one a GPU, or `on_cpu`. Refused."""
    given = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else None
    limit = torch.cuda.device_count() if device == "cuda" else None
    ranks = wanted or given or limit or on_cpu
    if wanted is not None and wanted < 1:
        raise Refused(f"{flag} {wanted}: there must be at least 1")
    if given not in (None, ranks):
        raise Refused(f"{flag} {wanted}: torchrun has started {given}. Leave it out under torchrun")
    if given is None and limit is not None and ranks > limit:
        raise Refused(f"{flag} {wanted}: each needs a GPU, and there are {limit}. Use at most {limit}, or --device cpu")
    return ranks


def start_ranks(ranks: int, device: str, run: Callable[..., int], *args: Any) -> int:
    """Call `run(*args)` on every rank and return their exit code; under torchrun this process is a rank already.

    Where a rank raises or dies, the others are ended, and what happened is printed.

    Ranks meet at a port that the system chooses. On CPUs each has one thread, as under torchrun.
    """
    if "RANK" in os.environ:
        return run(*args)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    try:
        mp.spawn(_be_rank, (ranks, store.port, device, run, args), nprocs=ranks)
    except mp.ProcessExitedException as error:
        if error.exit_code >= 0:
            return error.exit_code
        print(f"Rank {error.error_index} was ended by {error.signal_name}", file=sys.stderr)
        return 128 - error.exit_code  # as a shell reports it
    except mp.ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    return 0


def _be_rank(rank: int, ranks: int, port: int, device: str, run: Callable[..., int], args: tuple[Any, ...]) -> None:
    tell_of_faults()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update({key: str(value) for key, value in place.items()})
    # The store is served by the parent already, as it is by torchrun.
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    if device == "cpu":
        torch.set_num_threads(1)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    code = run(*args)
    if code:
        sys.exit(code)
