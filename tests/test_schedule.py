"""The learning rate of a step."""

import pytest

from trainer.schedule import build_schedule


def build(**changes):
    settings = {"peak": 2.0, "warmup_steps": 10, "total_steps": 100, "decay_ratio": None, "decay_type": "linear"}
    return build_schedule(**{**settings, "min_lr_factor": 0.1, **changes})


@pytest.mark.parametrize("decay_type", ["linear", "sqrt", "cosine"])
@pytest.mark.parametrize("decay_ratio", [None, 0.0, 0.2, 0.9])
def test_the_peak_and_the_floor_are_reached_exactly(decay_type: str, decay_ratio: float | None) -> None:
    schedule = build(decay_type=decay_type, decay_ratio=decay_ratio)
    assert schedule(0) == 2.0 / 10
    assert schedule(9) == 2.0
    assert schedule(99) == pytest.approx(2.0 if decay_ratio == 0.0 else 0.2, abs=1e-15)
    assert schedule(500) == schedule(99)
    rates = [schedule(step) for step in range(100)]
    assert rates[:10] == sorted(rates[:10])
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert all(0 < rate <= 2.0 for rate in rates)


def test_wsd_holds_the_peak_until_its_last_part() -> None:
    schedule = build(decay_ratio=0.2)
    assert [schedule(step) for step in range(9, 80)] == [2.0] * 71
    assert schedule(80) < 2.0


def test_halfway_through_each_shape() -> None:
    for decay_type, factor in (("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)):
        schedule = build(warmup_steps=0, decay_type=decay_type)
        assert schedule(49) == pytest.approx(2.0 * (0.1 + 0.9 * factor))


def test_warm_up_may_be_nothing_or_everything() -> None:
    assert build(warmup_steps=0, decay_ratio=0.0)(0) == 2.0
    assert build(warmup_steps=100)(99) == 2.0
