"""The hardware that a run is on: described by its device's name, else measured once, the same numbers on all ranks.

Measured numbers are rounded, so that another launch most likely plans alike, and its compile cache is of use.
The run's folder keeps the description, and a resume on the same hardware takes it from there.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.files import write_aside
from trainer.parallel.overlap.hardware import HARDWARE, Hardware, Link

log = logging.getLogger(__name__)

MATMUL_WIDTH = 1024
ATTENTION_TOKENS = 1024
STREAM_BYTES = 64 << 20
LARGE_BYTES = 8 << 20
RUNS = 4  # the first warms up, the fastest of the others counts


def find_hardware_of_run(device: torch.device, folder: Path, memory_bytes: int, group: dist.ProcessGroup) -> Hardware:
    """Collective over all ranks. Return what describes `device`, the ranks' links included, and keep it in `folder`.

    A device of the table is as it stands there, others are measured. `memory_bytes` is what one rank may use.
    All ranks get rank 0's; `group` is for host tensors.
    """
    shared: list[Any] = [None]
    if dist.get_rank() == 0:
        shared = [_read_kept(folder, _key(device))]
    dist.broadcast_object_list(shared, src=0, group=group)
    hardware = shared[0] or _look_up(device) or _measure(device, memory_bytes)
    shared = [hardware]
    dist.broadcast_object_list(shared, src=0, group=group)
    if dist.get_rank() == 0:
        _keep(folder, _key(device), shared[0])
    return shared[0]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"


def _key(device: torch.device) -> str:
    """Name what a description holds for."""
    threads = torch.get_num_threads()
    return f"{_name(device)}, {dist.get_world_size()} ranks of {threads} threads, torch {torch.__version__}"


def _file(folder: Path) -> Path:
    return folder / "hardware.json"


def _read_kept(folder: Path, key: str) -> Hardware | None:
    if not _file(folder).exists():
        return None
    try:
        kept = json.loads(_file(folder).read_text(encoding="utf-8"))
        if kept.pop("found_on") != key:
            return None
        links = {name: Link(**kept[name]) for name in ("intra_node", "inter_node")}
        return Hardware(**(kept | links))
    except (ValueError, TypeError, KeyError) as error:
        log.warning(f"{_file(folder)} is damaged ({error}); describing the hardware again")
        return None


def _keep(folder: Path, key: str, hardware: Hardware) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with write_aside(_file(folder)) as file:
        file.write(json.dumps({"found_on": key} | dataclasses.asdict(hardware), indent=2).encode())


def _look_up(device: torch.device) -> Hardware | None:
    if device.type != "cuda":
        return None
    words = re.split(r"[ -]", _name(device))
    return next((hardware for name, hardware in HARDWARE.items() if name in words), None)


def _measure(device: torch.device, memory_bytes: int) -> Hardware:
    """Collective over all ranks. Measure for about a second, all ranks at once, as they compute in training."""
    bfloat16, float32 = (_matmul_flops(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    link, start = _measure_link(device)
    return Hardware(
        name=_name(device),
        bfloat16_flops=_round(bfloat16),
        float32_flops=_round(float32),
        matmul_efficiency=1.0,
        attention_efficiency=_round(min(1.0, _attention_flops(device) / float32)),
        memory_bytes_per_second=_round(_stream_bytes_per_second(device)),
        memory_efficiency=1.0,
        memory_bytes=_round(memory_bytes),
        step_efficiency=1.0,
        kernel_seconds=_round(_kernel_seconds(device)),
        collective_seconds=start,
        intra_node=link,
        inter_node=link,
        ranks_per_node=dist.get_world_size(),
        source=f"measured: {_key(device)}",
    )


def _round(value: float) -> float:
    """Keep two digits: more are noise."""
    return float(f"{value:.1e}")


def _seconds(device: torch.device, run: Callable[[], Any]) -> float:
    """Return the seconds of the fastest of some runs."""
    times = []
    for _ in range(RUNS):
        _wait_for(device)
        began = time.perf_counter()
        run()
        _wait_for(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


# Ones, not random numbers: the run's random state is not touched.
def _matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    matrix = torch.ones(MATMUL_WIDTH, MATMUL_WIDTH, device=device, dtype=dtype)
    return 2 * MATMUL_WIDTH**3 / _seconds(device, lambda: matrix @ matrix)


def _attention_flops(device: torch.device) -> float:
    """Of causal attention in float32: two matmuls, of which half is computed."""
    heads, size = 4, 64
    query = torch.ones(1, heads, ATTENTION_TOKENS, size, device=device)
    attention = torch.nn.functional.scaled_dot_product_attention
    seconds = _seconds(device, lambda: attention(query, query, query, is_causal=True))
    return 2 * heads * ATTENTION_TOKENS**2 * size / seconds


def _stream_bytes_per_second(device: torch.device) -> float:
    """Of an addition: two values read and one written."""
    values = torch.ones(STREAM_BYTES // 4, device=device)
    result = torch.empty_like(values)
    return 3 * STREAM_BYTES / _seconds(device, lambda: torch.add(values, values, out=result))


def _kernel_seconds(device: torch.device) -> float:
    values, count = torch.ones(16, device=device), 200

    def add_often() -> None:
        for _ in range(count):
            values.add_(1)

    return _seconds(device, add_often) / count


def _measure_link(device: torch.device) -> tuple[Link, float]:
    """Collective over all ranks. Return the ring over all ranks, and the seconds that an empty gather takes."""
    ranks = dist.get_world_size()
    if ranks == 1:
        return HARDWARE["CPU"].intra_node, HARDWARE["CPU"].collective_seconds  # nothing is sent

    def gather_seconds(whole_bytes: int) -> float:
        part = torch.ones(whole_bytes // 4 // ranks, device=device)
        whole = list(torch.empty(part.numel() * ranks, device=device).chunk(ranks))
        return _seconds(device, lambda: dist.all_gather(whole, part))

    small, large = gather_seconds(64 * ranks), gather_seconds(LARGE_BYTES)
    moved = LARGE_BYTES * (ranks - 1) / ranks
    # Steps of the ring can't be told from the start; the rounds of an all-reduce then count it once too seldom.
    return Link(_round(moved / max(large - small, 1e-6)), 0.0), _round(small)
