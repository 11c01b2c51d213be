"""How fast a device can multiply at best: the yardstick of MFU.

A table of vendors' dense peaks by exact device name and dtype. A device that is not in it, a CPU included, is
measured; it never gets another device's peak. What a model needs per token is counted with the model.
"""

import re
import time
from typing import NamedTuple

import torch

from trainer.metrics.speed import Peak


class _Device(NamedTuple):
    name: (
        str  # a pattern for the whole name, so that a laptop, MIG slice or PCIe variant is not taken for its big sister
    )
    peak_teraflops: dict[str, float]
    source: str
    compute_units: int | None = None  # where the driver gives a partition of the device the name of the whole


# Dense peaks: datasheets often print the number with 2:4 sparsity, which is twice this. Consumer cards: with float32
# accumulation, as PyTorch multiplies. A name is what `torch.cuda.get_device_name` returns.
_DEVICES = (
    _Device(
        r"Tesla V100-SXM2-(16|32)GB(-LS)?",
        {"float16": 125.0, "float32": 15.7},
        "NVIDIA V100 datasheet",
    ),
    _Device(
        r"Tesla V100-PCIE-(16|32)GB",
        {"float16": 112.0, "float32": 14.0},
        "NVIDIA V100 datasheet",
    ),
    _Device(r"Tesla T4", {"float16": 65.0, "float32": 8.1}, "NVIDIA T4 datasheet"),
    _Device(
        r"(NVIDIA )?A100(-SXM4-(40|80)GB|-PCIE-(40|80)GB| 80GB PCIe)",
        {"bfloat16": 312.0, "float16": 312.0, "tf32": 156.0, "float32": 19.5},
        "NVIDIA A100 datasheet",
    ),
    _Device(
        r"NVIDIA A10",
        {"bfloat16": 125.0, "float16": 125.0, "tf32": 62.5, "float32": 31.2},
        "NVIDIA A10 datasheet",
    ),
    _Device(
        r"NVIDIA A40",
        {"bfloat16": 149.7, "float16": 149.7, "tf32": 74.8, "float32": 37.4},
        "NVIDIA A40 datasheet",
    ),
    _Device(
        r"NVIDIA RTX A6000",
        {"bfloat16": 154.8, "float16": 154.8, "tf32": 77.4, "float32": 38.7},
        "NVIDIA Ampere GA102 whitepaper",
    ),
    _Device(
        r"NVIDIA GeForce RTX 3090",
        {"bfloat16": 71.0, "float16": 71.0, "tf32": 35.6, "float32": 35.6},
        "NVIDIA Ampere GA102 whitepaper",
    ),
    _Device(
        r"NVIDIA GeForce RTX 4090",
        {"bfloat16": 165.2, "float16": 165.2, "tf32": 82.6, "float32": 82.6, "float8": 330.3},
        "NVIDIA Ada whitepaper",
    ),
    _Device(
        r"NVIDIA GeForce RTX 5090",
        {"bfloat16": 209.5, "float16": 209.5, "tf32": 104.8, "float32": 104.8, "float8": 419.0},
        "NVIDIA RTX Blackwell whitepaper",
    ),
    _Device(
        r"NVIDIA L4",
        {"bfloat16": 121.0, "float16": 121.0, "tf32": 60.0, "float32": 30.3, "float8": 242.5},
        "NVIDIA L4 datasheet",
    ),
    _Device(
        r"NVIDIA L40S",
        {"bfloat16": 362.05, "float16": 362.05, "tf32": 183.0, "float32": 91.6, "float8": 733.0},
        "NVIDIA L40S datasheet",
    ),
    _Device(
        r"NVIDIA H100 (80|96)GB HBM3",  # SXM: the only one that names its memory
        {"bfloat16": 989.4, "float16": 989.4, "tf32": 494.7, "float32": 66.9, "float8": 1978.9},
        "NVIDIA H100 SXM whitepaper",
    ),
    _Device(
        r"NVIDIA H100 PCIe",
        {"bfloat16": 756.0, "float16": 756.0, "tf32": 378.0, "float32": 51.2, "float8": 1513.0},
        "NVIDIA H100 PCIe datasheet",
    ),
    _Device(
        r"NVIDIA H100 NVL",
        {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60.0, "float8": 1670.5},
        "NVIDIA H100 NVL datasheet",
    ),
    _Device(
        r"NVIDIA H200",
        {"bfloat16": 989.5, "float16": 989.5, "tf32": 494.5, "float32": 67.0, "float8": 1979.0},
        "NVIDIA H200 SXM datasheet",
    ),
    _Device(
        r"NVIDIA H200 NVL",
        {"bfloat16": 835.5, "float16": 835.5, "tf32": 417.5, "float32": 60.0, "float8": 1670.5},
        "NVIDIA H200 NVL datasheet",
    ),
    _Device(
        r"NVIDIA B200",
        {"bfloat16": 2250.0, "float16": 2250.0, "tf32": 1125.0, "float32": 75.0, "float8": 4500.0},
        "NVIDIA HGX B200 datasheet",
    ),
    _Device(
        r"NVIDIA GB200",
        {"bfloat16": 2500.0, "float16": 2500.0, "tf32": 1250.0, "float32": 80.0, "float8": 5000.0},
        "NVIDIA GB200 NVL72 datasheet",
    ),
    _Device(
        r"AMD Instinct MI250X",  # half the datasheet: the package holds two devices, and a rank has one of them
        {"bfloat16": 191.5, "float16": 191.5, "float32": 47.85},
        "AMD MI250X datasheet, one of two dies",
        compute_units=110,
    ),
    _Device(
        r"AMD Instinct MI300X",
        {"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float8": 2614.9},
        "AMD MI300X datasheet",
        compute_units=304,
    ),
    _Device(
        r"AMD Instinct MI325X",
        {"bfloat16": 1307.4, "float16": 1307.4, "tf32": 653.7, "float32": 163.4, "float8": 2614.9},
        "AMD MI325X datasheet",
        compute_units=304,
    ),
)

MEASURE_SECONDS = 0.8
_RUNS = 3  # one to warm up, the best of the others counts
_FIRST_SIZE = 128
_LARGEST_SIZE = 16384  # three such matrices fit on any accelerator


def peak_flops(device: torch.device, dtype: torch.dtype) -> Peak:
    """Find the dense peak of `device` multiplying in `dtype`, or measure it (in under a second)."""
    return listed_peak_flops(device, dtype) or _measure(device, dtype)


def listed_peak_flops(device: torch.device, dtype: torch.dtype) -> Peak | None:
    """Find the dense peak of `device` multiplying in `dtype` in the table; None where it isn't there."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return _look_up(properties.name, _kind_of(dtype), properties.multi_processor_count)


def _look_up(name: str, kind: str, compute_units: int) -> Peak | None:
    for device in _DEVICES:
        if not re.fullmatch(device.name, name) or kind not in device.peak_teraflops:
            continue
        if device.compute_units in (None, compute_units):
            return Peak(device.peak_teraflops[kind] * 1e12, f"{device.source}, {kind}, dense")
    return None


def _kind_of(dtype: torch.dtype) -> str:
    """Name the column of the table; float32 multiplies as TF32 only where torch has been told so."""
    kind = str(dtype).removeprefix("torch.")
    if kind.startswith("float8"):
        return "float8"
    if kind == "float32" and _tf32_is_allowed():
        return "tf32"
    return kind


def _tf32_is_allowed() -> bool:
    precision = torch.backends.cuda.matmul.fp32_precision
    if precision == "none":  # not set for matmuls: the setting for all operations holds
        precision = torch.backends.fp32_precision  # type: ignore[attr-defined]
    return precision == "tf32"


def _measure(device: torch.device, dtype: torch.dtype) -> Peak:
    """Time square matmuls of growing size; on a CPU, with the threads this rank has."""
    deadline = time.perf_counter() + MEASURE_SECONDS
    size, best, seconds = _FIRST_SIZE, 0.0, 0.0
    while time.perf_counter() + _RUNS * seconds < deadline:
        seconds = _matmul_seconds(size, device, dtype)
        best = max(best, 2 * size**3 / seconds)
        # Twice the size is eight times the work. Where that is too much, more of the same outlasts a busy moment.
        if size < _LARGEST_SIZE and time.perf_counter() + _RUNS * 8 * seconds < deadline:
            size, seconds = 2 * size, 8 * seconds
    kind = str(dtype).removeprefix("torch.")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Peak(best, f"measured matmul peak: {name} has none for {kind} in the table of known devices")


def _matmul_seconds(size: int, device: torch.device, dtype: torch.dtype) -> float:
    # Ones, not random numbers: the run's random state is not touched.
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(_RUNS):
        _wait_for(device)
        began = time.perf_counter()
        torch.mm(matrix, matrix)
        _wait_for(device)
        times.append(time.perf_counter() - began)
    return min(times[1:])


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
