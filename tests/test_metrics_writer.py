import json
import logging
import time
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer.metrics.clock import StepClock
from trainer.metrics.speed import Peak
from trainer.metrics.writer import StepMetrics, build_metrics

SECONDS, FIRST_SECONDS, TOKENS = 2.0, 30.0, 8000
FLOPS_PER_TOKEN, PEAK, RANKS = 6e9, Peak(50e12, "by hand"), 4
# By hand: 8000 tokens in 2 s on 4 ranks are 1000 tokens/s a device; times 6 GFLOP are 6 TFLOP/s; of 50 are 12 %.
TPS, TPS_GLOBAL, TFLOPS, MFU = 1000.0, 4000.0, 6.0, 12.0


@pytest.fixture(autouse=True)
def caplog_sees_the_package(monkeypatch):
    monkeypatch.setattr(logging.getLogger("trainer"), "propagate", True)  # `setup_logging` turns it off


class Now:
    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


@pytest.fixture
def now():
    return Now()


@pytest.fixture
def launch(tmp_path, now):
    """Build the metrics of one launch in the same folder, on a clock that moves when told."""

    def start(resume_step=0, **changes):
        settings = {
            "folder": tmp_path,
            "tb_folder": "tb",
            "enable_tensorboard": False,
            "writes": True,
            "resume_step": resume_step,
            "log_freq": 1,
            "total_steps": 100,
            "flops_per_token": FLOPS_PER_TOKEN,
            "peak": PEAK,
            "device": torch.device("cpu"),
            "ranks": RANKS,
            "color": False,
        }
        metrics = build_metrics(**{**settings, **changes})
        metrics._clock = StepClock(now)
        return metrics

    return start


def numbers(step, loss=None):
    loss = 1 / step if loss is None else loss
    return StepMetrics(step=step, loss=loss, max_loss=2 * loss, grad_norm=0.1, lr=1e-3, tokens_seen=step * TOKENS)


def train(metrics, now, first, last, loss=None):
    """Issue the steps and read each one a step late, as the loop does."""
    for step in range(first, last + 1):
        metrics.start_step()
        now.seconds += FIRST_SECONDS if step == first else SECONDS
        metrics.end_step(step, TOKENS)
        if step > first and metrics.is_logged(step - 1):
            metrics.log(numbers(step - 1, loss))
    metrics.log(numbers(last, loss))


def rows(folder: Path):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def curves(folder: Path):
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def wait_for_next_second():
    """Event files are read in the order of their names, which begin with the second; a relaunch takes longer."""
    time.sleep(1.01 - time.time() % 1)


def test_throughput_leaves_out_the_first_step_validation_and_checkpoints(launch, now, tmp_path):
    metrics = launch()
    train(metrics, now, 1, 2)
    with metrics.apart("validation"):
        now.seconds += 100
    with metrics.apart("checkpoint"):
        now.seconds += 1000
    metrics.start_step()
    now.seconds += SECONDS
    metrics.end_step(3, TOKENS)
    metrics.log(numbers(3))
    first, second, third = rows(tmp_path)
    assert first["tps"] is None
    assert first["compile_seconds"] == FIRST_SECONDS
    for row in (second, third):
        assert (row["tps"], row["tps_global"], row["tflops"]) == pytest.approx((TPS, TPS_GLOBAL, TFLOPS))
        assert row["mfu"] == pytest.approx(MFU)
        assert row["step_seconds"] == SECONDS
    assert (third["validation_seconds"], third["checkpoint_seconds"]) == (100, 1000)


def test_throughput_is_the_mean_since_the_last_line(launch, now, tmp_path):
    train(launch(log_freq=10, total_steps=20), now, 1, 20)
    assert [(row["step"], row["tps"]) for row in rows(tmp_path)] == [(1, None), (10, TPS), (20, TPS)]


def test_a_resume_that_logs_late_still_leaves_its_first_step_out(launch, now, tmp_path):
    train(launch(resume_step=10, log_freq=10, total_steps=20), now, 11, 20)
    (row,) = rows(tmp_path)
    assert (row["tps"], row["compile_seconds"]) == (TPS, FIRST_SECONDS)


def test_validation_has_its_own_line(launch, now, tmp_path):
    metrics = launch()
    train(metrics, now, 1, 1)
    metrics.log_validation(1, loss=1 / 3, tokens=4000, seconds=0.5)
    row = rows(tmp_path)[-1]
    assert (row["step"], row["validation_loss"], row["validation_tokens"]) == (1, 1 / 3, 4000)
    assert "loss" not in row


def test_a_not_a_number_loss_is_logged_and_leaves_the_file_readable(launch, now, tmp_path):
    train(launch(), now, 1, 2, loss=float("nan"))
    assert [(row["loss"], row["non_finite"]) for row in rows(tmp_path)] == [(None, ["loss", "max_loss"])] * 2


def test_the_console_names_the_peak_and_its_source(launch, caplog):
    caplog.set_level(logging.INFO, "trainer")
    launch()
    assert "Peak FLOPS used for computing MFU: 5.000e+13 (by hand)" in caplog.text


def test_mfu_is_null_without_a_peak(launch, now, tmp_path):
    train(launch(peak=None), now, 1, 2)
    assert [row["mfu"] for row in rows(tmp_path)] == [None, None]


def test_a_rank_that_does_not_write_leaves_no_trace(launch, now, tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainer")
    metrics = launch(writes=False, enable_tensorboard=True)
    train(metrics, now, 1, 3)
    with metrics.reading_data(), metrics.apart("validation"):
        now.seconds += 1
    metrics.log_validation(3, loss=1.0, tokens=1, seconds=1.0)
    metrics.text("config", "text")
    metrics.scalar("recompiles", 1, 3)
    metrics.close()
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""
    assert not metrics._clock._stamps  # nor memory that grows with the steps


def test_tensorboard_is_not_written_unless_enabled(launch, now, tmp_path):
    metrics = launch()
    train(metrics, now, 1, 2)
    metrics.close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_tensorboard_shows_what_the_file_holds(launch, now, tmp_path):
    metrics = launch(enable_tensorboard=True)
    train(metrics, now, 1, 3)
    with metrics.apart("checkpoint"):
        now.seconds += 5
    metrics.log_validation(3, loss=0.75, tokens=4000, seconds=0.5)
    metrics.scalar("recompiles", 2, 3)
    metrics.close()
    points = curves(tmp_path)
    # TensorBoard keeps float32.
    for tag, key in {
        "loss_metrics/global_avg_loss": "loss",
        "grad_norm": "grad_norm",
        "n_tokens_seen": "tokens_seen",
    }.items():
        expected = [(row["step"], row[key]) for row in rows(tmp_path) if "loss" in row]
        assert points[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in expected]
    assert points["throughput(tps)"] == [(2, TPS), (3, TPS)]
    assert points["mfu(%)"] == [(2, MFU), (3, MFU)]
    assert points["time_metrics/compile(s)"] == [(1, FIRST_SECONDS)]
    assert points["time_metrics/checkpoint(s)"] == [(3, 5)]
    assert points["validation_metrics/loss"] == [(3, 0.75)]
    assert points["validation_metrics/throughput(tps)"] == [(3, 2000)]
    assert points["recompiles"] == [(3, 2)]


def test_the_points_of_a_step_are_on_disk_once_it_is_logged(launch, now, tmp_path):
    train(launch(enable_tensorboard=True), now, 1, 3)
    (events,) = (tmp_path / "tb").iterdir()
    size_bytes = events.stat().st_size
    time.sleep(0.2)  # a thread that lags behind would write on
    assert events.stat().st_size == size_bytes


def test_a_killed_and_resumed_run_has_each_step_once(launch, now, tmp_path):
    killed = launch(enable_tensorboard=True)  # never closed
    train(killed, now, 1, 15)
    killed.log_validation(10, loss=2.0, tokens=1, seconds=1.0)
    killed.log_validation(15, loss=1.0, tokens=1, seconds=1.0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 16, "lo')
    wait_for_next_second()
    resumed = launch(resume_step=10, enable_tensorboard=True)
    train(resumed, now, 11, 20, loss=0.5)
    resumed.close()
    step_rows = [row for row in rows(tmp_path) if "loss" in row]
    assert [row["step"] for row in step_rows] == list(range(1, 21))
    assert [row["step"] for row in rows(tmp_path) if "validation_loss" in row] == [10]
    points = curves(tmp_path)
    assert [step for step, _ in points["loss_metrics/global_avg_loss"]] == list(range(1, 21))
    assert [value for _, value in points["loss_metrics/global_avg_loss"]][10:] == [0.5] * 10
    assert [step for step, _ in points["validation_metrics/loss"]] == [10]
    assert [step for step, _ in points["throughput(tps)"]] == [*range(2, 11), *range(12, 21)]


def test_a_new_run_in_an_old_folder_shows_one_curve_and_keeps_the_old_file(launch, now, tmp_path):
    train(launch(enable_tensorboard=True), now, 1, 4)
    wait_for_next_second()
    again = launch(enable_tensorboard=True)
    train(again, now, 1, 2, loss=0.5)
    again.close()
    assert curves(tmp_path)["loss_metrics/global_avg_loss"] == [(1, 0.5), (2, 0.5)]
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    (old,) = tmp_path.glob("metrics.jsonl.*")
    assert len(old.read_text().splitlines()) == 4


def test_text_reaches_log_and_tensorboard(launch, tmp_path, caplog):
    caplog.set_level(logging.INFO, "trainer")
    metrics = launch(enable_tensorboard=True)
    metrics.text("sample", "def f(x):")
    metrics.close()
    assert "def f(x):" in caplog.text
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    (point,) = events.Tensors("sample/text_summary")
    assert point.tensor_proto.string_val == [b"def f(x):"]


def test_memory_of_a_cpu_process_is_its_resident_set(launch, now, tmp_path):
    train(launch(), now, 1, 1)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    resident_gib = resident_pages * 4096 / 2**30
    assert rows(tmp_path)[0]["memory_gib"] == pytest.approx(resident_gib, rel=0.5)  # a peak, against the present
