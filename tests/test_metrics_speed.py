import pytest

from trainer.metrics.clock import Totals
from trainer.metrics.speed import Peak, Speed, compute_speed

LAP = Totals(steps=5, timed_steps=4, timed_tokens=8000, timed_seconds=2.0)


def test_speed_by_hand():
    # 8000 tokens in 2 s on 4 devices: 4000 tokens/s, 1000 a device. At 6 GFLOP a token a device does 6 TFLOP/s, which
    # is 12 % of a peak of 50 TFLOP/s.
    speed = compute_speed(LAP, ranks=4, flops_per_token=6e9, peak=Peak(50e12, "by hand"))
    assert speed == pytest.approx(Speed(step_seconds=0.5, tps=1000, tps_global=4000, tflops=6, mfu_percent=12))


def test_mfu_is_the_ratio_of_palm_appendix_b():
    """PaLM 540B, table 3: 238.3K tokens/s on 6144 TPU v4 (275 TFLOP/s) is an MFU of 46.2 % with attention.

    6N = 6 * 540.35e9 and 12 * layers * heads * head width * length = 12 * 118 * 48 * 256 * 2048 FLOPs per token.
    """
    flops_per_token = 6 * 540.35e9 + 12 * 118 * 48 * 256 * 2048
    lap = Totals(steps=1, timed_steps=1, timed_tokens=238_300, timed_seconds=1.0)
    speed = compute_speed(lap, ranks=6144, flops_per_token=flops_per_token, peak=Peak(275e12, "TPU v4"))
    assert speed.mfu_percent == pytest.approx(46.2, abs=0.1)


def test_mfu_is_unknown_without_a_peak():
    speed = compute_speed(LAP, ranks=4, flops_per_token=6e9, peak=None)
    assert speed.mfu_percent is None
    assert speed.tps == 1000


def test_the_float8_peak_has_a_number_of_its_own():
    speed = compute_speed(LAP, 4, 6e9, peak=Peak(50e12, "by hand"), float8_peak=Peak(100e12, "by hand"))
    assert speed.mfu_percent == pytest.approx(12)
    assert speed.mfu_float8_percent == pytest.approx(6)


def test_nothing_timed_has_no_speed():
    assert compute_speed(Totals(steps=1), ranks=1, flops_per_token=1.0, peak=None) == Speed()
