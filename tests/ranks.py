"""Runs a test's function on several ranks and shows what happened on each.

Owns the processes, their gloo group and the report of a failed or hanging rank. What the ranks do is the test's own.
Ranks meet in a file, so no port is needed and many runs can go on at once. They are forked from one server process
that has imported torch already, so that a rank starts in a fraction of a second. It gets this process's environment;
but what torch reads from it on import, it has read in the server, at the first run of the test session.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from trainer.distributed import use_one_gloo_worker

# The first DTensor imports torch._dynamo, and the first compilation torch._inductor: seconds of work for each rank.
_PRELOADED = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "torch._inductor.compile_fx"]
# Otherwise Inductor may start processes when it is imported. Ranks keep the cores busy without them.
_ONE_COMPILER_A_RANK = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
_SECONDS_FOR_STACKS = 2.0


class RankError(AssertionError):
    """A rank failed or did not end in time; the text holds its traceback or stacks."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_seconds: float = 120) -> list[Any]:
    """Call `function(rank, *args)` on `world_size` ranks and return their results in rank order.

    `function` is defined at the top of a test file; arguments and results must pickle. The default process group (gloo)
    exists while it runs. If a rank fails or the time is up, all ranks are killed and RankError says why.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="ranks-") as name, patch.dict(os.environ, _ONE_COMPILER_A_RANK):
        folder = Path(name)
        call = (function, world_size, args, folder, timeout_seconds, dict(os.environ))
        processes = [
            context.Process(target=_run_rank, args=(rank, *call), name=f"rank {rank}") for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            _wait_for_all(processes, folder, timeout_seconds)
        finally:
            _kill_all(processes)
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world_size)]


def _run_rank(
    rank: int,
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    timeout_seconds: float,
    environment: dict[str, str],
) -> None:
    """Be one rank: the body of a process."""
    os.environ.clear()  # the server's environment is that of the first run of the test session
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve must not fail a test
    stacks = (folder / f"stacks-{rank}").open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(folder / "store"), world_size)
        timeout = timedelta(seconds=timeout_seconds)
        use_one_gloo_worker()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        result = pickle.dumps(function(rank, *args))
        dist.barrier()
        dist.destroy_process_group()
        (folder / f"result-{rank}").write_bytes(result)
    except BaseException:
        draft = folder / f"draft-{rank}"
        draft.write_text(f"{time.monotonic_ns()}\n{traceback.format_exc()}")
        draft.rename(folder / f"failure-{rank}")  # whole or not there: it may be read at once
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # no clean-up: it could wait for the other ranks, which wait for this one


def _wait_for_all(processes: list[BaseProcess], folder: Path, timeout_seconds: float) -> None:
    """Return when every rank has ended well; raise at the first that has not, or when the time is up."""
    deadline = time.monotonic() + timeout_seconds
    running = list(processes)
    while running:
        ended = wait([process.sentinel for process in running], timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            raise RankError(_describe_hang(running, folder, timeout_seconds))
        for process in [process for process in running if process.sentinel in ended]:
            process.join()
            running.remove(process)
        if any(process.exitcode for process in processes):
            raise RankError(_describe_failure(processes, folder))


def _describe_failure(processes: list[BaseProcess], folder: Path) -> str:
    """Return the traceback of the rank that failed first; those that failed after it are often only its victims."""
    failures = []
    for process in processes:
        file = folder / f"failure-{process.name.removeprefix('rank ')}"
        if file.exists():
            when, _, text = file.read_text().partition("\n")
            failures.append((int(when), process.name, text))
        elif process.exitcode not in (0, None, -signal.SIGKILL):
            failures.append((0, process.name, f"ended without a traceback, exit code {process.exitcode}\n"))
    killed = [process.name for process in processes if process.exitcode == -signal.SIGKILL]
    if not failures:
        return f"{', '.join(killed)} killed by signal 9, without a traceback"
    (_, first, text), *others = sorted(failures)
    also = f"\nafter it also failed: {', '.join(name for _, name, _ in others)}" if others else ""
    return f"{first} failed\n{text}{also}"


def _describe_hang(running: list[BaseProcess], folder: Path, timeout_seconds: float) -> str:
    """Let the ranks that still run write the stacks of their threads, and return them."""
    names = ", ".join(process.name for process in running)
    files = {process.name: folder / f"stacks-{process.name.removeprefix('rank ')}" for process in running}
    for process in running:
        if files[process.name].exists() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    deadline = time.monotonic() + _SECONDS_FOR_STACKS
    while time.monotonic() < deadline and not all(file.exists() and file.stat().st_size for file in files.values()):
        time.sleep(0.05)
    time.sleep(0.1)  # the last file may still be growing
    stacks = "".join(
        f"\n{name}:\n{file.read_text() if file.exists() else 'still starting'}" for name, file in files.items()
    )
    return f"not done after {timeout_seconds} seconds: {names}{stacks}"


def _kill_all(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()
