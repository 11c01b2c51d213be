"""Where the numbers of a run go: one console line a logged step, `metrics.jsonl`, and TensorBoard.

Takes plain floats that were already read from the device, so nothing here waits for it. A resumed run continues each
curve in place: no step appears twice. Ranks that do not write make the same calls, which do nothing there.
The formulas are in `speed.py`, names and formats in `report.py`, time in `clock.py`.
"""

import logging
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from trainer.log import terminal_takes_color
from trainer.metrics.clock import Apart, StepClock
from trainer.metrics.lines import MetricsFile
from trainer.metrics.report import Memory, StepMetrics, StepReport, join_fields, memory_field
from trainer.metrics.speed import Peak, compute_speed
from trainer.units import GIB

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

FILE_NAME = "metrics.jsonl"


class _Run(NamedTuple):
    """What does not change during a launch."""

    resume_step: int
    log_freq: int
    total_steps: int
    flops_per_token: float
    peak: Peak | None
    float8_peak: Peak | None
    device: torch.device
    ranks: int
    color: bool


class Metrics:
    """The loop calls `start_step`, `reading_data` and `end_step` for every step, and `log` for those to be shown.

    `log` may come while a later step runs: times are those stamped by `end_step`.
    """

    def __init__(self, run: _Run, file: MetricsFile | None, tensorboard: "SummaryWriter | None") -> None:
        self._run = run
        self._file = file  # None on a rank that does not write
        self._tensorboard = tensorboard
        self._clock = StepClock()
        self._last_step = run.resume_step

    def is_logged(self, step: int) -> bool:
        """Tell whether `step` gets a line: step 1, every `log_freq`-th and the last."""
        return step in (1, self._run.total_steps) or step % self._run.log_freq == 0

    def start_step(self) -> None:
        self._clock.start_step()

    def reading_data(self) -> AbstractContextManager[None]:
        """Count the seconds spent inside as waiting for data."""
        return self._clock.reading_data()

    def end_step(self, step: int, tokens: int) -> None:
        """Stamp `step`, which trains on `tokens` tokens over all ranks, as issued."""
        if self._file is None:
            return  # a stamp that no `log` fetches would stay for ever
        is_first = not self._clock.first_step_is_done
        self._clock.end_step(step, tokens)
        self._last_step = step
        if is_first:
            self.scalar("time_metrics/compile(s)", self._clock.apart_seconds("compile"), step)

    @contextmanager
    def apart(self, kind: Apart) -> Iterator[None]:
        """Keep the seconds spent inside out of the throughput, and record them under their own name."""
        before = self._clock.apart_seconds(kind)
        with self._clock.apart(kind):
            yield
        self.scalar(f"time_metrics/{kind}(s)", self._clock.apart_seconds(kind) - before, self._last_step)

    def log(self, metrics: StepMetrics) -> None:
        """Print and record a step, with averages over the steps since the last logged one."""
        if self._file is None:
            return
        run, lap = self._run, self._clock.lap(metrics.step)
        speed = compute_speed(lap, run.ranks, run.flops_per_token, run.peak, run.float8_peak)
        report = StepReport(metrics, lap, speed, _read_memory(run.device))
        logger.info(report.line(run.total_steps, color=run.color))
        self._file.append(report.row())
        self._add_points(report.curves(), metrics.step)

    def log_validation(self, step: int, loss: float, tokens: int, seconds: float) -> None:
        """Print and record a mean `loss` over `tokens` held-out tokens of all ranks."""
        if self._file is None:
            return
        tps = tokens / seconds / self._run.ranks
        memory = _read_memory(self._run.device)
        fields = [
            (f"validate step: {step:2}", "red"),
            (f"loss: {loss:7.4f}", "green"),
            memory_field(memory),
            (f"tps: {tps:7,.0f}", "blue"),
        ]
        logger.info(join_fields(fields, color=self._run.color))
        row = {"step": step, "validation_loss": loss, "validation_tokens": tokens, "validation_seconds": seconds}
        self._file.append({**row, "wall_time": time.time()})
        curves = {"loss": loss, "throughput(tps)": tps, **memory.curves()}
        self._add_points({f"validation_metrics/{name}": value for name, value in curves.items()}, step)

    def has_validation(self, step: int) -> bool:
        """Tell whether a validation after `step` is recorded, as far as this rank knows: one that doesn't write, no."""
        return self._file is not None and self._file.has(step, "validation_loss")

    def scalar(self, tag: str, value: float, step: int) -> None:
        """Add one point to a TensorBoard curve."""
        if self._tensorboard is not None:
            self._tensorboard.add_scalar(tag, value, step)

    def text(self, tag: str, text: str) -> None:
        """Log `text`, and show it in TensorBoard's text tab."""
        if self._file is None:
            return
        logger.info(text)
        if self._tensorboard is not None:
            self._tensorboard.add_text(tag, text, self._last_step)

    def close(self) -> None:
        """Write out what is still in memory; nothing can be logged after."""
        if self._file is not None:
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()

    def _add_points(self, curves: Mapping[str, float | None], step: int) -> None:
        if self._tensorboard is None:
            return
        for tag, value in curves.items():
            if value is not None:
                self.scalar(tag, value, step)
        # Points go through a thread and a buffer; a killed run would lose them, and a resume would leave a gap.
        self._tensorboard.flush()


def build_metrics(
    *,
    folder: Path,
    tb_folder: str,
    enable_tensorboard: bool,
    writes: bool,
    resume_step: int,
    log_freq: int,
    total_steps: int,
    flops_per_token: float,
    peak: Peak | None,
    float8_peak: Peak | None = None,
    device: torch.device,
    ranks: int,
    color: bool,
) -> Metrics:
    """Open the run's files in `folder`, cut back to `resume_step`, on the rank that `writes`.

    With `resume_step` 0, an older `metrics.jsonl` is renamed and older TensorBoard points are hidden; with k, the
    points up to step k stay and the run adds to them.
    """
    run = _Run(
        resume_step,
        log_freq,
        total_steps,
        flops_per_token,
        peak,
        float8_peak,
        device,
        ranks,
        color and terminal_takes_color(),
    )
    if not writes:
        return Metrics(run, file=None, tensorboard=None)
    if peak is None:
        logger.info("Peak FLOPS unknown: no MFU")
    else:
        logger.info(f"Peak FLOPS used for computing MFU: {peak.flops_per_second:.3e} ({peak.source})")
    if float8_peak is not None:
        logger.info(f"Peak FLOPS used for mfu_float8: {float8_peak.flops_per_second:.3e} ({float8_peak.source})")
    file = MetricsFile(folder / FILE_NAME, resume_step)
    return Metrics(run, file, _open_tensorboard(folder / tb_folder, resume_step) if enable_tensorboard else None)


def _open_tensorboard(folder: Path, resume_step: int) -> "SummaryWriter":
    from torch.utils.tensorboard import SummaryWriter

    # Readers drop the points from `purge_step` on that earlier files of the folder hold; the files stay as they are.
    return SummaryWriter(str(folder), purge_step=resume_step + 1 if resume_step > 0 else 0)


def _read_memory(device: torch.device) -> Memory:
    """Read this rank's peak memory; on CUDA, begin a new peak."""
    if device.type != "cuda":
        # Linux counts in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        return Memory(peak_bytes, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), {})
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    stats = torch.cuda.memory_stats(device)
    torch.cuda.reset_peak_memory_stats(device)
    active_bytes = stats["active_bytes.all.peak"]
    curves = {
        "memory/max_active(GiB)": active_bytes / GIB,
        "memory/max_active(%)": 100 * active_bytes / total_bytes,
        "memory/num_alloc_retries": stats["num_alloc_retries"],
        "memory/num_ooms": stats["num_ooms"],
    }
    return Memory(stats["reserved_bytes.all.peak"], total_bytes, curves)
