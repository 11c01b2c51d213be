"""The numbers of one logged step and the three forms they take: console line, JSON object, TensorBoard curves.

Knows the names users know (the v0.2 tags and line format), not where the forms are written, which is `writer.py`.
"""

import math
import time
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer.log import paint
from trainer.metrics.clock import Totals
from trainer.metrics.speed import Speed
from trainer.units import GIB

Fields = list[tuple[str, str]]  # text and its colour


@dataclass(frozen=True)
class StepMetrics:
    """What the loop read from the device for one step."""

    step: int
    loss: float  # mean over the counted tokens of all data ranks
    max_loss: float  # largest mean loss of any data rank
    grad_norm: float  # before clipping
    lr: float
    tokens_seen: int  # all ranks, since step 0


class Memory(NamedTuple):
    """This rank's peak: of the CUDA allocator since the last reading, or of a CPU process's resident set so far."""

    reserved_bytes: int
    total_bytes: int
    cuda: dict[str, float]  # more curves, which only the CUDA allocator can tell

    @property
    def gib(self) -> float:
        return self.reserved_bytes / GIB

    @property
    def percent(self) -> float:
        return 100 * self.reserved_bytes / self.total_bytes

    def curves(self) -> dict[str, float]:
        return {"memory/max_reserved(GiB)": self.gib, "memory/max_reserved(%)": self.percent, **self.cuda}


@dataclass(frozen=True)
class StepReport:
    metrics: StepMetrics
    lap: Totals  # sums since the last logged step
    speed: Speed
    memory: Memory

    @property
    def data_seconds(self) -> float:
        return self.lap.data_seconds / self.lap.steps

    def row(self) -> dict[str, Any]:
        """Give the object of `metrics.jsonl`: seconds are means a step, those kept apart sums since the last line."""
        m, lap, speed = self.metrics, self.lap, self.speed
        return {
            "step": m.step,
            "loss": m.loss,
            "max_loss": m.max_loss,
            "grad_norm": m.grad_norm,
            "lr": m.lr,
            "tokens_seen": m.tokens_seen,
            "tps": speed.tps,
            "tps_global": speed.tps_global,
            "tflops": speed.tflops,
            "mfu": speed.mfu_percent,
            "mfu_float8": speed.mfu_float8_percent,
            "memory_gib": self.memory.gib,
            "step_seconds": speed.step_seconds,
            "data_seconds": self.data_seconds,
            "validation_seconds": lap.validation_seconds,
            "checkpoint_seconds": lap.checkpoint_seconds,
            "compile_seconds": lap.compile_seconds,
            "wall_time": time.time(),
        }

    def curves(self) -> dict[str, float | None]:
        """Give the point of each TensorBoard curve; None leaves it out."""
        m, speed = self.metrics, self.speed
        data_percent = None if speed.step_seconds is None else 100 * self.data_seconds / speed.step_seconds
        return {
            "loss_metrics/global_avg_loss": m.loss,
            "loss_metrics/global_max_loss": m.max_loss,
            "grad_norm": m.grad_norm,
            "lr": m.lr,
            "n_tokens_seen": m.tokens_seen,
            "throughput(tps)": speed.tps,
            "throughput_global(tps)": speed.tps_global,
            "tflops": speed.tflops,
            "mfu(%)": speed.mfu_percent,
            "mfu_float8(%)": speed.mfu_float8_percent,
            "time_metrics/end_to_end(s)": speed.step_seconds,
            "time_metrics/data_loading(s)": self.data_seconds,
            "time_metrics/data_loading(%)": data_percent,
            **self.memory.curves(),
        }

    def line(self, total_steps: int, *, color: bool) -> str:
        m, speed = self.metrics, self.speed
        fields = [
            (f"step: {m.step:{max(2, len(str(total_steps)))}}", "red"),
            (f"loss: {m.loss:7.4f}", "green"),
            (f"grad_norm: {m.grad_norm:7.4f}", "orange"),
            (f"lr: {m.lr:.2e}", "yellow"),
            memory_field(self.memory),
            (f"tps: {_or_dash(speed.tps, ',.0f'):>7}", "blue"),
            (f"tflops: {_or_dash(speed.tflops, ',.2f'):>6}", "cyan"),
            (f"mfu: {_or_dash(speed.mfu_percent, '.2f', '%'):>6}", "magenta"),
            (f"eta: {_time_left(total_steps - m.step, speed.step_seconds)}", "yellow"),
        ]
        if speed.mfu_float8_percent is not None:
            fields.append((f"mfu_float8: {speed.mfu_float8_percent:.2f}%", "magenta"))
        if self.lap.compile_seconds > 0:
            fields.append((f"compile: {self.lap.compile_seconds:.1f}s", "red"))
        return join_fields(fields, color=color)


def memory_field(memory: Memory) -> tuple[str, str]:
    return f"memory: {memory.gib:5.2f}GiB({memory.percent:.1f}%)", "turquoise"


def join_fields(fields: Fields, *, color: bool) -> str:
    return "  ".join(paint(text, hue) if color else text for text, hue in fields)


def _or_dash(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _time_left(steps: int, step_seconds: float | None) -> str:
    """Training time only: validations and checkpoints to come are not foreseen."""
    if step_seconds is None:
        return "-"
    minutes, seconds = divmod(math.ceil(step_seconds * steps), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
