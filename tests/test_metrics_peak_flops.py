import time
from types import SimpleNamespace

import pytest
import torch

from trainer.metrics import peak_flops as module
from trainer.metrics.peak_flops import listed_peak_flops, peak_flops
from trainer.metrics.speed import Peak

BF16, FP16, FP32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
MEASURED = Peak(1.0, "measured")


@pytest.fixture
def on_cuda(monkeypatch):
    """Give the peak that a CUDA device of some name would get, on a machine without one."""

    def ask(name, dtype, compute_units=0):
        properties = SimpleNamespace(name=name, multi_processor_count=compute_units)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(module, "_measure", lambda device, dtype: MEASURED)
        return peak_flops(torch.device("cuda", 0), dtype)

    return ask


@pytest.fixture
def float32_precision():
    before = torch.backends.cuda.matmul.fp32_precision
    yield
    torch.backends.cuda.matmul.fp32_precision = before


# Dense teraflops of the vendors' datasheets, written down a second time.
@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA A100-SXM4-80GB", BF16, 312),
        ("NVIDIA A100 80GB PCIe", FP16, 312),
        ("NVIDIA A100-PCIE-40GB", FP32, 19.5),
        ("NVIDIA A10", BF16, 125),
        ("NVIDIA H100 80GB HBM3", BF16, 989.4),
        ("NVIDIA H100 80GB HBM3", FP8, 1978.9),
        ("NVIDIA H100 80GB HBM3", FP32, 66.9),
        ("NVIDIA H100 PCIe", BF16, 756),
        ("NVIDIA H100 NVL", BF16, 835.5),
        ("NVIDIA H200", BF16, 989.5),
        ("NVIDIA B200", BF16, 2250),
        ("NVIDIA L40S", BF16, 362.05),
        ("NVIDIA L4", BF16, 121),
        ("NVIDIA GeForce RTX 4090", BF16, 165.2),
    ],
)
def test_known_devices_have_their_datasheet_peak(on_cuda, name, dtype, teraflops):
    peak = on_cuda(name, dtype)
    assert peak.flops_per_second == pytest.approx(teraflops * 1e12, rel=1e-12)
    assert any(vendor in peak.source for vendor in ("NVIDIA", "AMD"))


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H20",
        "NVIDIA H100",
        "NVIDIA GH200 480GB",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA L40",
        "AMD Instinct MI250X / MI250",
        "Some New Device",
    ],
)
def test_a_similar_name_is_measured_instead(on_cuda, name):
    assert on_cuda(name, BF16, compute_units=304) == MEASURED


def test_a_dtype_the_device_does_not_multiply_is_measured(on_cuda):
    assert on_cuda("NVIDIA A100-SXM4-80GB", FP8) == MEASURED
    assert on_cuda("Tesla V100-SXM2-32GB", BF16) == MEASURED


def test_a_partition_does_not_get_the_peak_of_the_whole(on_cuda):
    assert on_cuda("AMD Instinct MI300X", BF16, compute_units=304).flops_per_second == pytest.approx(1307.4e12)
    assert on_cuda("AMD Instinct MI300X", BF16, compute_units=38) == MEASURED


def test_float32_has_the_tf32_peak_only_where_tf32_is_allowed(on_cuda, float32_precision):
    torch.set_float32_matmul_precision("highest")
    assert on_cuda("NVIDIA H200", FP32).flops_per_second == pytest.approx(67e12)
    torch.set_float32_matmul_precision("high")
    assert on_cuda("NVIDIA H200", FP32).flops_per_second == pytest.approx(494.5e12)
    torch.set_float32_matmul_precision("highest")


def test_no_two_rows_of_the_table_match_one_name():
    names = [device.name for device in module._DEVICES if "(" not in device.name]
    assert len(names) > 10
    for name in names:
        assert sum(bool(module.re.fullmatch(device.name, name)) for device in module._DEVICES) == 1


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_cpu_is_measured_in_under_a_second(dtype):
    began = time.perf_counter()
    peak = peak_flops(torch.device("cpu"), dtype)
    spent = time.perf_counter() - began
    name = str(dtype).removeprefix("torch.")
    assert peak.source == f"measured matmul peak: cpu has none for {name} in the table of known devices"
    assert spent < 2  # one second, and as much again for a busy machine


def test_the_measured_peak_is_not_below_an_ordinary_matmul():
    size = 512
    matrix = torch.ones(size, size)
    torch.mm(matrix, matrix)
    began = time.perf_counter()
    torch.mm(matrix, matrix)
    ordinary = 2 * size**3 / (time.perf_counter() - began)
    peak = peak_flops(torch.device("cpu"), FP32).flops_per_second
    assert ordinary / 2 < peak < ordinary * 100  # wide: other processes run; a wrong count of operations is 1e3 off


def test_a_device_without_a_listed_float8_peak_has_none_and_not_that_of_another_dtype(on_cuda):
    assert listed_peak_flops(torch.device("cpu"), FP8) is None
    on_cuda("NVIDIA A100-SXM4-80GB", BF16)
    assert listed_peak_flops(torch.device("cuda", 0), FP8) is None
    on_cuda("NVIDIA H100 80GB HBM3", BF16)
    assert listed_peak_flops(torch.device("cuda", 0), FP8).flops_per_second == pytest.approx(1978.9e12)


def test_measuring_leaves_the_random_state_alone():
    before = torch.random.get_rng_state()
    peak_flops(torch.device("cpu"), FP32)
    assert torch.equal(before, torch.random.get_rng_state())
