"""The training loop: steps one after the other, and what happens between them.

Assembling the run is `build.py`, one step `step.py`. The values of a step are read from the device while the next one
runs, so nothing here waits for the device in the steady state; a save or a validation does.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path

from torch import Tensor

from trainer.build import Run
from trainer.checkpoint.folder import checkpoint_path
from trainer.checkpoint.hf_export import export_hf
from trainer.checkpoint.saver import Progress
from trainer.config.arithmetic import count_of
from trainer.config.text import to_toml
from trainer.describe import describe_launch
from trainer.distributed import gather_objects, set_timeout
from trainer.dtypes import DTYPES
from trainer.evaluate import evaluate
from trainer.generate import before_stop, generate
from trainer.metrics.report import StepMetrics
from trainer.parallel.compile import report_compilation
from trainer.parallel.next_logits import build_next_logits
from trainer.parallel.parameters import find_not_finite
from trainer.resume import checkpoint_folder
from trainer.state import checkpoint_tensors, random_tensors, weight_tensors
from trainer.step import StepValues, train_step

log = logging.getLogger(__name__)


class Ending(Enum):
    """How a launch ended."""

    COMPLETED = "all steps done"
    INTERRUPTED = "a signal"
    NOT_FINITE = "a step that is not finite"


def train(run: Run) -> Ending:
    """Collective over all ranks. Train for one launch: up to training.steps, a signal, or a step that isn't finite."""
    try:
        ending = Loop(run).go()
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk fails once more; the first failure is the one to tell
            run.metrics.close()
        raise
    run.metrics.close()
    return ending


class Loop:
    """Steps one after the other, and between them logs, validation, checkpoints and the wish to stop."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._unread: StepValues | None = None
        self._bad_step: int | None = None
        self._interrupted = False
        self._saved_step = run.state.step  # nothing new to save yet
        self._saved_at = time.monotonic()

    def go(self) -> Ending:
        """Collective over all ranks. Do all that a launch does."""
        self._announce()
        self._validate_if_missed()
        with _garbage_collected_every(self.run.config.training.gc_freq) as collect_garbage:
            if self._goes_on():
                self._step()
                self._after_compilation()
                self._between_steps()
            while self._goes_on():
                self._step()
                self._between_steps()
                collect_garbage(self.run.state.step)
        return self._end()

    def _announce(self) -> None:
        run, config = self.run, self.run.config
        if run.place.rank == 0:
            text = to_toml(config, header="The settings of the newest launch, nothing left open; reproduces the run.")
            Path(config.job.dump_folder, "config.toml").write_text(text, encoding="utf-8")
        for line in describe_launch(run):
            log.info(line)

    def _goes_on(self) -> bool:
        return self.run.state.step < self.run.config.training.steps and not self._interrupted and self._bad_step is None

    def _step(self) -> None:
        """Collective over all ranks. Do a step, and read the values of the one before while it runs."""
        self.run.interrupt.ask(self.run.saver.progress(), self._is_save_overdue())
        latest = train_step(self.run)
        self._read()
        self._unread = latest

    def _between_steps(self) -> None:
        """Collective over all ranks. Hear of signals and of the save in flight, validate and save where due."""
        self._interrupted = self.run.interrupt.agreed()
        progress, overdue = self.run.interrupt.largest
        self._hear_of_save(progress)
        if self._is_validation_due() and not self._interrupted:
            self._validate()
        # The last save of a launch is made at its end, in step: there is nothing more to do beside it.
        due = overdue or self.run.state.step % self.run.config.checkpoint.interval == 0
        if due and self._goes_on():
            self._save_if_new()

    def _is_save_overdue(self) -> bool:
        """Tell whether this rank's clock asks for a save."""
        minutes = self.run.config.checkpoint.interval_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60 * minutes

    def _end(self) -> Ending:
        """Collective over all ranks. Save what is new, and say how it ended."""
        self._read()
        if self._bad_step is not None:
            self._stop_at(self._bad_step)
            return Ending.NOT_FINITE
        self._save_at_end()
        if self._interrupted:
            log.info(f"Stopped by a signal after step {self.run.state.step} of {self.run.config.training.steps}")
            return Ending.INTERRUPTED
        self._show_sample()
        log.info("Training completed")
        return Ending.COMPLETED

    def _after_compilation(self) -> None:
        """Tighten the time limit, and let signals ask for a stop instead of ending the process."""
        run = self.run
        set_timeout(run.config.comm.train_timeout_seconds, [*run.mesh.groups(), run.host_group])
        run.interrupt.install()
        if run.config.compile.enable:
            report, graphs = report_compilation(len(run.graph_reports)), run.graph_reports
            found = " (from the compile cache)" if all(graph.from_cache for graph in graphs) else ""
            counts = (
                f"{count_of(report.graphs, 'graph')}{found}, {report.breaks} breaks, {report.recompiles} recompiles"
            )
            by_direction = {name: lines for graph in graphs for name, lines in graph.lines.items()}
            lines = [f"{direction}: {line}" for direction, lines in by_direction.items() for line in lines]
            run.metrics.text("compiled", "\n  ".join([f"Compiled {counts}", *lines]))

    def _read(self) -> None:
        """Take in the values of the last unread step: log it, or note that it wasn't finite."""
        done, self._unread = self._unread, None
        if done is None or self._bad_step is not None:
            return
        loss, max_loss, grad_norm, tokens_seen, non_finite, rank_loss = done.values.read()
        if non_finite:
            self._bad_step = done.step
            self._name_bad_ranks(done.step, loss, grad_norm, rank_loss)
        elif self.run.metrics.is_logged(done.step):
            self.run.metrics.log(StepMetrics(done.step, loss, max_loss, grad_norm, done.lr, int(tokens_seen)))
            self.run.metrics.scalar("recompiles", report_compilation(len(self.run.graph_reports)).recompiles, done.step)

    def _name_bad_ranks(self, step: int, loss: float, grad_norm: float, rank_loss: float) -> None:
        """Collective over the host group. Say where a step stopped being finite."""
        finite = gather_objects(math.isfinite(rank_loss), self.run.host_group)
        ranks = [str(rank) for rank, is_finite in enumerate(finite) if not is_finite]
        if len(ranks) == len(finite) > 1:
            where = "the loss of every rank"
        elif ranks:
            where = f"the loss of rank {', '.join(ranks)}, the others' being finite"
        else:
            where = "the gradient; the loss of every rank is finite"
        if self.run.place.rank == 0:
            log.error(f"Step {step} is not finite: loss {loss}, grad_norm {grad_norm}. Not finite is {where}")
        self._name_bad_parameter()

    def _name_bad_parameter(self) -> None:
        """Collective over the host group. Name the first parameter that has not been finite before, if any."""
        run = self.run
        parameters = dict(run.model.named_parameters())
        bad = {name for found in gather_objects(find_not_finite(parameters), run.host_group) for name in found}
        first = next((name for name in parameters if name in bad), None)
        if first and run.place.rank == 0:
            of_float8 = ", and with it its float8 scale where it has one" if run.config.model.is_float8 else ""
            log.error(f"Before the step, the first parameter that is not finite is {first}{of_float8}")

    def _is_validation_due(self) -> bool:
        run, step = self.run, self.run.state.step
        return run.held_out is not None and (
            step % run.config.validation.freq == 0 or step == run.config.training.steps
        )

    def _validate_if_missed(self) -> None:
        """Collective over all ranks. Validate the step that was loaded, if a signal came before that was done."""
        run, step = self.run, self.run.state.step
        if step == 0 or not self._is_validation_due():
            return
        if not any(gather_objects(run.metrics.has_validation(step), run.host_group)):  # one rank has the file
            self._validate()

    def _validate(self) -> None:
        """Collective over all ranks. Validate, unless the step turns out not to be finite; a signal cuts it short."""
        run = self.run
        assert run.held_out is not None
        self._read()
        if self._bad_step is not None:
            return
        start = time.perf_counter()
        with run.metrics.apart("validation"), run.reading():
            result = evaluate(run.sum_losses, run.held_out, run.mesh, run.place.device, run.interrupt.requested)
        if result is None:
            self._interrupted = True
        else:
            run.metrics.log_validation(run.state.step, result.loss, result.tokens, time.perf_counter() - start)

    def _save_if_new(self, *, in_step: bool = False) -> None:
        """Collective over all ranks. Save the current step, unless it is saved or turns out not to be finite."""
        self._read()
        if self._bad_step is None and self.run.state.step != self._saved_step:
            self._save({}, in_step=in_step)

    def _save_at_end(self) -> None:
        """Collective over all ranks. Save what is new; after the last step of all, in the form that was asked for."""
        run, settings = self.run, self.run.config.checkpoint
        is_whole = not self._interrupted and run.state.step == run.config.training.steps
        if not is_whole or not settings.enable:
            self._save_if_new(in_step=True)
            run.saver.finish()
            return
        if settings.last_save_model_only and run.state.step != self._saved_step:
            self._save({"weights_only": True}, tensors=weight_tensors(run.model, settings.export_dtype), in_step=True)
        self._save_if_new(in_step=True)
        run.saver.finish()
        if settings.last_save_in_hf:
            self._export()

    def _export(self) -> None:
        """Collective over all ranks. Write the weights of the step that is saved as a Hugging Face folder."""
        run = self.run
        saved = checkpoint_path(checkpoint_folder(run.config), run.state.step)
        folder = saved.with_name(f"{saved.name}-hf")
        if any(gather_objects(folder.exists(), run.save_group)):
            log.info(f"{folder} is there already, and is left as it is")
            return
        dtype = DTYPES[run.config.checkpoint.export_dtype]
        with run.metrics.apart("checkpoint"):
            export_hf(saved, folder, dtype=dtype, process_group=run.save_group)
        log.info(f"Saved {folder}, for Hugging Face")

    def _save(self, note: dict[str, int], *, tensors: dict[str, Tensor] | None = None, in_step: bool = False) -> None:
        """Collective over all ranks. Save a checkpoint of the current step; its state says `note` too.

        All of the run's tensors, unless others are given.
        """
        run, step = self.run, self.run.state.step
        if not run.config.checkpoint.enable:
            return
        everything = checkpoint_tensors(run.model, run.optimizer) | random_tensors(run.place.rank)
        with run.metrics.apart("checkpoint"):
            run.saver.save(
                step,
                tensors=everything if tensors is None else tensors,
                state=run.describe_state() | note,
                attach=lambda path: run.launch.prepared.tokenizer.save(path / "tokenizer"),
                in_step=in_step,
            )
        self._saved_step = step
        self._saved_at = time.monotonic()

    def _hear_of_save(self, progress: int) -> None:
        """Collective over all ranks. Seal the save in flight, if `progress`, the largest of all ranks, says so."""
        if progress in (Progress.WRITTEN, Progress.FAILED):
            with self.run.metrics.apart("checkpoint"):
                self.run.saver.hear(progress)

    def _stop_at(self, bad_step: int) -> None:
        """Collective over all ranks. Go back to the step before: no later update was applied to the weights."""
        run, state = self.run, self.run.state
        state.step = bad_step - 1
        state.non_finite.zero_()
        run.saver.finish()
        saved = ""
        if run.config.checkpoint.enable and state.step > 0:
            # Also where this step was saved before anyone knew: its checkpoint is to name the bad step.
            self._save({"bad_step": bad_step}, in_step=True)
            saved = ", and saved"
        if run.place.rank == 0:
            log.error(
                f"Stopped at step {bad_step}: the weights are still those after step {state.step}{saved}. "
                f"The same command computes step {bad_step} again from the same rows. Ways out: a lower optimizer.lr "
                "or training.mixed_precision_param = float32 (with checkpoint.accept_changes), or an earlier "
                "checkpoint.load_step"
            )

    def _show_sample(self) -> None:
        """Collective over all ranks. Log a text that the model continues."""
        run, settings = self.run, self.run.config.sample
        if settings.tokens == 0:
            return
        tokenizer = run.launch.prepared.tokenizer
        prompt = tokenizer.encode(settings.prompt)
        drawn = generate(
            build_next_logits(run.model, run.mesh, run.place.device, vocab_size=run.launch.shape.vocab_size),
            [tokenizer.bos_id, *prompt],
            vocab_size=tokenizer.vocab_size,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=run.config.debug.seed,
        )
        # All of them on every rank: one that stopped earlier, by a last bit, would leave the others waiting.
        ids = list(itertools.islice(drawn, settings.tokens))
        text = tokenizer.decode([*prompt, *before_stop(ids, tokenizer.eos_id)])
        run.metrics.text("sample", f"Sample after step {run.state.step}:\n{text}")


@contextlib.contextmanager
def _garbage_collected_every(steps: int) -> Iterator[Callable[[int], None]]:
    """Keep Python's collector off, so that it runs on all ranks at the same steps instead of stalling one at a time."""

    def collect(step: int) -> None:
        if step % steps == 0:
            gc.collect(1)

    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
