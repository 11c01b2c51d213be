"""Descriptions of the hardware that the cost model runs on, as data, each number with its source.

Peaks are vendors' dense ones. Efficiencies say what part of a peak a good kernel reaches on its own, as others have
measured and published. One number is fitted, and said so: IN_A_STEP.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

GB = 1e9
GIB = 1024**3


@dataclass(frozen=True)
class Link:
    """What a rank has to send and receive over at once, and what each step of a ring costs besides."""

    bytes_per_second: float
    step_seconds: float


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and how ranks of it are connected. `source` says where the numbers are from."""

    name: str
    bfloat16_flops: float
    float32_flops: float
    matmul_efficiency: float
    attention_efficiency: float
    memory_bytes_per_second: float
    memory_efficiency: float
    memory_bytes: float
    step_efficiency: float  # of what kernels reach alone, they reach this within a training step
    kernel_seconds: float  # the shortest a kernel takes, its launch included
    collective_seconds: float  # to start a collective
    intra_node: Link
    inter_node: Link
    ranks_per_node: int
    source: str
    float8_flops: float | None = None  # None: the device has no float8

    def matmul_flops(self, dtype: torch.dtype) -> float:
        """Return the floating-point operations per second that large matmuls in `dtype` reach."""
        return self._peak(dtype) * self.matmul_efficiency * self.step_efficiency

    def attention_flops(self, dtype: torch.dtype) -> float:
        """Return the floating-point operations per second that fused attention in `dtype` reaches."""
        return self._peak(dtype) * self.attention_efficiency * self.step_efficiency

    def bytes_per_second(self) -> float:
        """Return what kernels that only move bytes reach."""
        return self.memory_bytes_per_second * self.memory_efficiency * self.step_efficiency

    def _peak(self, dtype: torch.dtype) -> float:
        if dtype.itemsize == 1 and self.float8_flops:
            return self.float8_flops
        return self.float32_flops if dtype.itemsize >= 4 else self.bfloat16_flops


# What streaming kernels reach of the memory's peak: BabelStream and compiled pointwise kernels get 0.8 to 0.92 on A100
# and H100. One number for all GPUs.
STREAMING = 0.85

# Steps of a ring and starts of a collective: NCCL's own constants for its protocol for large messages (src/graph/
# tuning.cc: hwLat of NVLINK and NET, baseLat). NVLink bandwidths that NCCL counts on: src/graph/topo.h, links x speed.
NVLINK_STEP, NETWORK_STEP, START = 3.4e-6, 14e-6, 8.4e-6

# Of a network card's wire speed NCCL's all-gather reaches about nine tenths at 400 Gb/s (nccl-tests, many reports).
CARD_400 = Link(0.9 * 400e9 / 8, NETWORK_STEP)
CARD_200 = Link(0.9 * 200e9 / 8, NETWORK_STEP)

# A GPU at a power cap of a part p of its TDP keeps about p ** (1/3) of its clock, since power grows with the clock
# times the square of the voltage, and voltage with the clock.
CAP_500_OF_700 = (500 / 700) ** (1 / 3)

# Within a step kernels don't reach what they reach alone: shapes are not the best ones, the device is hot, collectives
# take part of it, and fusion is not as complete as the model has it. Fitted once, to the tokens/s of row T1b of
# docs/published_runs.toml with the loss compiled, and used for every GPU; with 1 the model says a third more.
IN_A_STEP = 0.77

# Matmuls: "maximum achievable matmul FLOPS", bfloat16, of S. Bekman's Machine Learning Engineering (2025, chapter
# compute/accelerator): the best of many shapes, mean of 100 runs, in TFLOP/s: A100 271.2 of 312, H100 SXM 794.5 of 989,
# B200 1745 of 2250. Attention: FlashAttention-2 at 8k tokens, causal, heads of 128: 333 TFLOP/s forward on H100 (arXiv
# 2407.08608, figure 5), 50 to 73 % of the peak on A100 (arXiv 2307.08691). For B200 none was found: the H100's part.
# Float8 matmuls are taken to reach the same part of their peak, twice bfloat16's, as bfloat16's do; not measured here.
HARDWARE = {
    "H100": Hardware(
        name="H100",
        bfloat16_flops=989.4e12,
        float32_flops=66.9e12,
        matmul_efficiency=794.5 / 989.4,
        attention_efficiency=333 / 989.4,
        memory_bytes_per_second=2.4e12,
        memory_efficiency=STREAMING,
        memory_bytes=96 * GB,
        step_efficiency=IN_A_STEP * CAP_500_OF_700,
        kernel_seconds=2e-6,
        collective_seconds=START,
        intra_node=Link(370 * GB, NVLINK_STEP),
        inter_node=CARD_400,
        ranks_per_node=8,
        source="the machines of the published runs (docs/published_runs.toml): SXM, 96 GB HBM2e, capped at 500 W",
        float8_flops=1978.9e12,
    ),
    "H200": Hardware(
        name="H200",
        bfloat16_flops=989.5e12,
        float32_flops=67e12,
        matmul_efficiency=794.5 / 989.4,
        attention_efficiency=333 / 989.4,
        memory_bytes_per_second=4.8e12,
        memory_efficiency=STREAMING,
        memory_bytes=141 * GB,
        step_efficiency=IN_A_STEP,
        kernel_seconds=2e-6,
        collective_seconds=START,
        intra_node=Link(370 * GB, NVLINK_STEP),
        inter_node=CARD_400,
        ranks_per_node=8,
        source="NVIDIA H200 SXM datasheet; compute as H100 SXM at 700 W",
        float8_flops=1979e12,
    ),
    "A100": Hardware(
        name="A100",
        bfloat16_flops=312e12,
        float32_flops=19.5e12,
        matmul_efficiency=271.2 / 312,
        attention_efficiency=0.6,
        memory_bytes_per_second=2.039e12,
        memory_efficiency=STREAMING,
        memory_bytes=80 * GB,
        step_efficiency=IN_A_STEP,
        kernel_seconds=2e-6,
        collective_seconds=START,
        intra_node=Link(240 * GB, NVLINK_STEP),
        inter_node=CARD_200,
        ranks_per_node=8,
        source="NVIDIA A100 80 GB SXM datasheet; DGX A100: one 200 Gb/s card per GPU",
    ),
    "B200": Hardware(
        name="B200",
        bfloat16_flops=2250e12,
        float32_flops=75e12,
        matmul_efficiency=1745 / 2250,
        attention_efficiency=333 / 989.4,
        memory_bytes_per_second=8e12,
        memory_efficiency=STREAMING,
        memory_bytes=180 * GB,
        step_efficiency=IN_A_STEP,
        kernel_seconds=2e-6,
        collective_seconds=START,
        intra_node=Link(720 * GB, NVLINK_STEP),
        inter_node=CARD_400,
        ranks_per_node=8,
        source="NVIDIA HGX B200 datasheet; one 400 Gb/s card per GPU",
        float8_flops=4500e12,
    ),
    # One core of a two-core x86 virtual machine with AVX-512 and AMX, measured with torch 2.13: matmuls of 2048 wide,
    # causal attention over 1024 tokens, an addition of large tensors, a thousand additions of 16 numbers. Collectives
    # are estimates of gloo's over the loopback device; a run on CPUs measures its own (`measure.py`).
    "CPU": Hardware(
        name="CPU",
        bfloat16_flops=425e9,
        float32_flops=102e9,
        matmul_efficiency=1.0,
        attention_efficiency=0.3,
        memory_bytes_per_second=7 * GB,
        memory_efficiency=1.0,
        memory_bytes=8 * GIB,
        step_efficiency=1.0,
        kernel_seconds=5e-6,
        collective_seconds=200e-6,
        intra_node=Link(1.5 * GB, 50e-6),
        inter_node=Link(1.5 * GB, 50e-6),
        ranks_per_node=1024,
        source="an x86 core, measured; its collectives are estimates",
    ),
}


def find_hardware(name: str, *, float8: bool = False) -> Hardware:
    """Return the description called `name`, with float8 if asked. ValueError, with all names, if there is none."""
    if name not in HARDWARE:
        raise ValueError(f"--hardware {name}: it is not described. Use one of {', '.join(HARDWARE)}.")
    if float8 and HARDWARE[name].float8_flops is None:
        able = [other for other, hardware in HARDWARE.items() if hardware.float8_flops]
        raise ValueError(
            f'--hardware {name}, model.converters = ["float8"]: no float8 peak is described for it. Use one of '
            f"{', '.join(able)}, or leave the converter out."
        )
    return HARDWARE[name]
