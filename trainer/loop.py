"""The training loop: one step, and what happens between steps.

Assembling the run is `build.py`. The values of a step are read from the device while the next one runs, so nothing here
waits for the device in the steady state; a save or a validation does.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.build import Run, checkpoint_tensors, random_tensors
from trainer.checkpoint.folder import remove_old
from trainer.checkpoint.save import save_checkpoint
from trainer.checkpoint.together import run_together
from trainer.config.text import to_toml
from trainer.data.batches import Microbatch
from trainer.describe import describe
from trainer.distributed import HostCopy, gather_objects, set_timeout
from trainer.evaluate import evaluate
from trainer.generate import before_stop, generate
from trainer.loss import count_labels
from trainer.metrics.report import StepMetrics
from trainer.parallel.compile import report_compilation
from trainer.parallel.gradients import clip_gradients
from trainer.parallel.next_logits import build_next_logits
from trainer.resume import checkpoint_folder

log = logging.getLogger(__name__)


@dataclass
class StepValues:
    """What one step computed, on its way to the host."""

    step: int
    lr: float
    values: HostCopy


def train_step(run: Run) -> StepValues:
    """Do one update of the parameters. Collective over all ranks."""
    run.metrics.start_step()
    with run.metrics.reading_data():
        microbatches = [_to_device(rows, run.place.device) for rows in run.data.microbatches(run.state.step)]
    labels = torch.stack([count_labels(rows.labels_BT) for rows in microbatches]).sum()
    num_tokens = run.mesh.sum(labels)
    rank_share = run.accumulate(microbatches, num_tokens)
    loss = run.mesh.sum(rank_share)
    grad_norm = clip_gradients(run.model.parameters(), run.config.training.max_norm, run.mesh)
    run.state.mask_if_not_finite(loss, grad_norm)
    lr = run.schedule(run.state.step)
    run.optimizer.step(lr, found_inf=run.state.non_finite)
    run.state.advance(num_tokens)
    rank_loss = rank_share * num_tokens / labels.clamp(min=1)
    max_loss = run.mesh.max(rank_loss)
    values = (loss, max_loss, grad_norm, run.state.tokens_seen, run.state.non_finite, rank_loss)
    run.metrics.end_step(run.state.step, run.tokens_per_step)
    return StepValues(run.state.step, lr, HostCopy(torch.stack([value.double() for value in values])))


def _to_device(rows: Microbatch, device: torch.device) -> Microbatch:
    return Microbatch(rows.tokens_BT.to(device), rows.labels_BT.to(device))


def train(run: Run) -> bool:
    """Train for one launch; False if it stopped at a step that wasn't finite. Collective over all ranks."""
    try:
        finished = Loop(run).train()
    except BaseException:
        with contextlib.suppress(OSError):  # a full disk fails once more; the first failure is the one to tell
            run.metrics.close()
        raise
    run.metrics.close()
    return finished


class Loop:
    """Steps one after the other, and between them logs, validation, checkpoints and the wish to stop."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self._unread: StepValues | None = None
        self._bad_step: int | None = None
        self._saved_step = run.state.step  # nothing new to save yet
        self._is_first_step = True

    def train(self) -> bool:
        """Train up to training.steps, a signal, or a step that isn't finite; False for the last. Collective."""
        run, steps = self.run, self.run.config.training.steps
        self._announce()
        interrupted = False
        with _garbage_collected_every(run.config.training.gc_freq) as collect_garbage:
            while run.state.step < steps and not interrupted and self._bad_step is None:
                interrupted = self._advance()
                collect_garbage(run.state.step)
        self._read()
        if self._bad_step is not None:
            self._stop_at(self._bad_step)
            return False
        self._save()
        if interrupted:
            log.info(f"Stopped by a signal after step {run.state.step} of {steps}")
        else:
            self._show_sample()
            log.info("Training completed")
        return True

    def _announce(self) -> None:
        run, config = self.run, self.run.config
        if run.place.rank == 0:
            text = to_toml(config, header="The settings of the newest launch, nothing left open; reproduces the run.")
            Path(config.job.dump_folder, "config.toml").write_text(text, encoding="utf-8")
        if config.job.description:
            log.info(config.job.description)
        for line in describe(config, run.mesh, run.model, run.place.world_size):
            log.info(line)
        if not config.checkpoint.enable:
            log.info("No checkpoints will be saved (checkpoint.enable = false)")
        if run.state.step >= config.training.steps:
            log.info(f"Nothing to do: step {run.state.step} is done and training.steps = {config.training.steps}")
        elif config.compile.enable:
            log.info(
                f"Compiling the model as one graph with {run.backend}: the first step waits for it, a minute or so"
            )

    def _advance(self) -> bool:
        """Do one step and what is due after it; True if a signal asks for the end. Collective over all ranks."""
        run = self.run
        run.interrupt.ask()
        latest = train_step(run)
        self._read()  # the step before, while this one runs
        self._unread = latest
        self._after_first_step()
        interrupted = run.interrupt.agreed() or self._validate_if_due()
        if run.state.step % run.config.checkpoint.interval == 0:
            self._save()
        return interrupted

    def _after_first_step(self) -> None:
        """Compilation is over: tighten the time limit, and let signals ask for a stop instead of ending the process."""
        if not self._is_first_step:
            return
        self._is_first_step = False
        run = self.run
        set_timeout(run.config.comm.train_timeout_seconds, [*run.mesh.groups(), run.host_group])
        run.interrupt.install()
        if run.config.compile.enable:
            report, graphs = report_compilation(), run.graph_report
            found = " (from the compile cache)" if graphs.from_cache else ""
            counts = f"{report.graphs} graph{found}, {report.breaks} breaks, {report.recompiles} recompiles"
            lines = [f"{direction}: {line}" for direction, lines in graphs.lines.items() for line in lines]
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
            self.run.metrics.scalar("recompiles", report_compilation().recompiles, done.step)

    def _name_bad_ranks(self, step: int, loss: float, grad_norm: float, rank_loss: float) -> None:
        """Say where a step stopped being finite. Collective over the host group."""
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

    def _validate_if_due(self) -> bool:
        """Validate every validation.freq steps and after the last; True if a signal cut it short."""
        run, step = self.run, self.run.state.step
        due = step % run.config.validation.freq == 0 or step == run.config.training.steps
        if run.held_out is None or not due:
            return False
        self._read()
        if self._bad_step is not None:
            return False
        start = time.perf_counter()
        with run.metrics.apart("validation"):
            result = evaluate(run.sum_losses, run.held_out, run.mesh, run.place.device, run.interrupt.requested)
        if result is not None:
            run.metrics.log_validation(step, result.loss, result.tokens, time.perf_counter() - start)
        return result is None

    def _save(self, note: dict[str, int] | None = None) -> None:
        """Save a checkpoint of the current step, unless there is one or the step turns out not to be finite."""
        run, settings, step = self.run, self.run.config.checkpoint, self.run.state.step
        self._read()
        if not settings.enable or step == self._saved_step or (self._bad_step is not None and note is None):
            return
        folder = checkpoint_folder(run.config)
        with run.metrics.apart("checkpoint"):
            path = save_checkpoint(
                folder,
                step,
                tensors=checkpoint_tensors(run.model, run.optimizer) | random_tensors(run.place.rank),
                state=run.describe_state() | (note or {}),
                attach=lambda path: run.launch.prepared.tokenizer.save(path / "tokenizer"),
                process_group=run.save_group,
            )
            is_first = run.place.rank == 0
            # The others wait here, under the patient limit of this group, not in a collective of the next step.
            run_together(
                "removing old checkpoints",
                lambda: remove_old(folder, settings.keep_latest_k) if is_first else None,
                run.save_group,
            )
        self._saved_step = step
        log.info(f"Saved {path}")

    def _stop_at(self, bad_step: int) -> None:
        """Go back to the step before, whose weights are still there: no later update was applied."""
        run, state = self.run, self.run.state
        state.step = bad_step - 1
        state.non_finite.zero_()
        self._save(note={"bad_step": bad_step})
        saved = ", and saved" if run.config.checkpoint.enable and state.step > 0 else ""
        if run.place.rank == 0:
            log.error(
                f"Stopped at step {bad_step}: the weights are still those after step {state.step}{saved}. "
                f"The same command computes step {bad_step} again from the same rows. Ways out: a lower optimizer.lr "
                "or training.mixed_precision_param = float32 (with checkpoint.accept_changes), or an earlier "
                "checkpoint.load_step"
            )

    def _show_sample(self) -> None:
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
