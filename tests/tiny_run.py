"""A run small enough for a test: its settings, its data, and launching it on the ranks of `run_ranks`."""

from __future__ import annotations

import json
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.build import Run, build_run
from trainer.config.load import load_config
from trainer.distributed import find_place
from trainer.launch import plan_launch
from trainer.log import setup_logging
from trainer.loop import Ending, train
from trainer.resume import find_resume

TINY = {
    "model.flavor": "debugmodel",
    "model.tokenizer_path": "bytes",
    "model.args.dim": 32,
    "model.args.n_layers": 1,
    "model.args.n_heads": 4,
    "model.args.n_kv_heads": 2,
    "model.args.ffn_dim": 48,
    "model.args.vocab_size": 258,
    "training.dataset": "jsonl",
    "training.seq_len": 16,
    "training.global_batch_size": 4,
    "training.local_batch_size": 2,
    "training.steps": 20,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.total_steps": 20,
    "lr_scheduler.warmup_steps": 3,
    "optimizer.lr": 0.01,
    "compile.enable": False,
    "checkpoint.enable": True,
    "metrics.log_freq": 1,
    "metrics.peak_tflops": 1.0,
}


def write_dataset(folder: Path, documents: int = 60) -> Path:
    """Write documents of different lengths, so that rows at the ends have fewer labels than others."""
    path = folder / "documents.jsonl"
    texts = [f"Document {number} says: {'abc ' * (number % 7)}{number * number}.\n" for number in range(documents)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def arguments(folder: Path, name: str = "run", **changes: Any) -> list[str]:
    """Return the command line of a tiny run in `folder`/`name`; `training__steps=5` changes a setting."""
    settings = TINY | {
        "job.dump_folder": folder / name,
        "training.dataset_path": folder / "documents.jsonl",
        "training.cache_folder": folder / "cache",
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return [f"--{key}={value}" for key, value in settings.items()]


@dataclass
class Result:
    """What one rank saw of a launch."""

    ending: Ending | None = None
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    error: str = ""


def launch_once(argv: list[str], *, change: Callable[[Run], None] | None = None) -> Result:
    """Collective over all ranks. Do one launch in the process group that exists, as train.py does."""
    torch._dynamo.reset()
    setup_logging(int(os.environ["RANK"]), color=False)
    result = Result()
    with log_lines() as result.log:
        place = find_place()
        config = load_config(argv).config
        run = build_run(plan_launch(config, place, find_resume(config)), place)
        if change is not None:
            change(run)
        try:
            result.ending = train(run)
        except Exception:
            result.error = traceback.format_exc()
    result.weights = {name: p.detach().full_tensor() for name, p in run.model.named_parameters()}
    return result


def launch_all(rank: int, commands: list[list[str]]) -> list[Result]:
    """Do launches one after the other: a function for `run_ranks`."""
    return [launch_once(argv) for argv in commands]


def read_rows(dump_folder: Path, key: str = "loss") -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl that have `key`."""
    lines = (dump_folder / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if key in row]


def read_numbers(dump_folder: Path) -> list[tuple[int, float, float, float, int]]:
    """Return what must not depend on the machine, of each logged step."""
    return [
        (row["step"], row["loss"], row["grad_norm"], row["lr"], row["tokens_seen"]) for row in read_rows(dump_folder)
    ]


def assert_equal_weights(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    assert actual
    for name, weight in expected.items():
        assert torch.equal(actual[name], weight), name


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def log_lines() -> Iterator[list[str]]:
    lines: list[str] = []
    handler = _Lines(lines)
    logging.getLogger("trainer").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("trainer").removeHandler(handler)
