import re

import pytest

from trainer.metrics.clock import Totals
from trainer.metrics.report import Memory, StepMetrics, StepReport
from trainer.metrics.speed import Speed

METRICS = StepMetrics(step=10, loss=6.12341, max_loss=6.5, grad_norm=1.23451, lr=8e-4, tokens_seen=81920)
SPEED = Speed(step_seconds=0.83, tps=12345.4, tps_global=24690.8, tflops=1.234, mfu_percent=12.341)
MEMORY = Memory(int(1.234 * 2**30), int(24.2 * 2**30), {})
REPORT = StepReport(METRICS, Totals(steps=5, data_seconds=1.0), SPEED, MEMORY)


def report(step, loss=6.0, speed=SPEED):
    metrics = StepMetrics(step=step, loss=loss, max_loss=loss, grad_norm=1.0, lr=8e-4, tokens_seen=1)
    return StepReport(metrics, Totals(steps=1), speed, MEMORY)


def test_the_line_has_the_familiar_form():
    assert REPORT.line(110, color=False) == (
        "step:  10  loss:  6.1234  grad_norm:  1.2345  lr: 8.00e-04  memory:  1.23GiB(5.1%)  "
        "tps:  12,345  tflops:   1.23  mfu: 12.34%  eta: 0:01:23"
    )


def test_the_fields_of_all_steps_are_aligned():
    lines = [
        report(1, 12.5, Speed()).line(1000, color=False),
        report(10, 9.0, SPEED).line(1000, color=False),
        report(1000, 2.25, SPEED._replace(tps=999_999, tflops=612.5, mfu_percent=3.5)).line(1000, color=False),
    ]
    columns = [[match.start() for match in re.finditer(r"\w+:(?= )", line)] for line in lines]
    assert columns[0] == columns[1] == columns[2]
    assert len(columns[0]) == 9


def test_color_changes_nothing_but_color():
    painted = REPORT.line(110, color=True)
    assert "\033[32mloss:" in painted
    assert re.sub(r"\033\[[\d;]*m", "", painted) == REPORT.line(110, color=False)


def test_a_step_without_timing_has_dashes_nulls_and_no_points():
    untimed = StepReport(METRICS, Totals(steps=1, compile_seconds=32.1), Speed(), MEMORY)
    line = untimed.line(100, color=False)
    assert re.search(r"tps: +-  tflops: +-  mfu: +-  eta: -  compile: 32.1s$", line)
    row = untimed.row()
    assert [row[key] for key in ("tps", "tps_global", "tflops", "mfu", "step_seconds")] == [None] * 5
    assert row["compile_seconds"] == 32.1
    left_out = {tag for tag, value in untimed.curves().items() if value is None}
    assert left_out >= {"throughput(tps)", "tflops", "mfu(%)", "time_metrics/end_to_end(s)"}


def test_a_float8_run_has_its_own_mfu_beside_the_familiar_one():
    shown = report(10, speed=SPEED._replace(mfu_float8_percent=6.2)).line(110, color=False)
    assert "mfu: 12.34%" in shown
    assert shown.endswith("mfu_float8: 6.20%")


def test_the_row_has_every_promised_key():
    promised = "step loss grad_norm lr tps tps_global tflops mfu memory_gib data_seconds step_seconds tokens_seen"
    row = REPORT.row()
    assert set(row) >= {*promised.split(), "max_loss", "wall_time"}
    assert row["data_seconds"] == 0.2  # a mean a step
    assert row["memory_gib"] == pytest.approx(1.234)


def test_the_curves_have_the_v02_tags():
    tags = set(REPORT.curves())
    assert tags >= {
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "throughput(tps)",
        "tflops",
        "mfu(%)",
        "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)",
        "time_metrics/data_loading(%)",
        "memory/max_reserved(GiB)",
        "memory/max_reserved(%)",
        "n_tokens_seen",
        "lr",
    }
    assert REPORT.curves()["time_metrics/data_loading(%)"] == pytest.approx(100 * 0.2 / 0.83)


@pytest.mark.parametrize(
    ("steps_left", "eta"), [(0, "0:00:00"), (1, "0:00:01"), (100, "0:01:23"), (500_000, "115:16:40")]
)
def test_time_left_is_steps_left_at_the_present_speed(steps_left, eta):
    assert report(10).line(10 + steps_left, color=False).endswith(f"eta: {eta}")
