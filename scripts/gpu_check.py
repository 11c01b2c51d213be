"""Run what only a GPU can show, and print one table: `python scripts/gpu_check.py [--markdown FILE]`.

Every check is a command of this repository in a process of its own, so one that crashes costs its row only. Where there
is no GPU the same checks run small on the CPU, which shows that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.door import EXIT_FAILED, open_door

ROOT = Path(__file__).resolve().parents[1]
LAST_WORDS = 400  # characters of a failed command's output that are shown
DEBUG = ["--config", "llama3_debug", "--model.tokenizer_path", "bytes", "--validation.enable", "false"]
# Llama 3.2 1B's shapes without its files: over text that is always there, by bytes.
ONE_BILLION = [
    *(
        "--config",
        "llama3_1b",
        "--model.tokenizer_path",
        "bytes",
        "--training.dataset",
        "stdlib",
        "--training.dataset_path",
        "",
    ),
    *("--training.steps", "12", "--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "1"),
    *("--training.global_batch_size", "-1", "--validation.enable", "false", "--checkpoint.enable", "false"),
]
# Blocks of Llama 3.1 8B, four of them, over the same text.
EIGHT_BILLION_BLOCKS = [
    *("--config", "llama3_8b", "--model.args.n_layers", "4", "--model.args.vocab_size", "512"),
    *("--model.tokenizer_path", "bytes", "--training.dataset", "stdlib", "--training.dataset_path", ""),
    *("--training.steps", "12", "--lr_scheduler.warmup_steps", "2", "--metrics.log_freq", "1"),
    *("--training.global_batch_size", "-1", "--validation.enable", "false", "--checkpoint.enable", "false"),
]
FLOAT8 = ["--model.converters", "float8"]
FLOAT8_LOSS = 0.02  # how far a loss may be from bfloat16's after so few steps, relative
SMALL = [
    "--model.args.n_layers",
    "1",
    "--model.args.dim",
    "64",
    "--model.args.ffn_dim",
    "96",
    "--training.seq_len",
    "32",
]


@dataclass(frozen=True)
class Outcome:
    """One row of the table."""

    name: str
    passed: bool
    seen: str
    seconds: float


class Failed(Exception):
    """A check that did not hold; the text says what was seen."""


def main(argv: list[str]) -> int:
    """Return the exit code: 0 if every check holds."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    parser.add_argument("--limit", type=float, default=480, metavar="SECONDS", help="start no check after so many")
    arguments = parser.parse_args(argv)
    began = time.perf_counter()
    outcomes = []
    with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
        for name, check in CHECKS.items():
            if time.perf_counter() - began > arguments.limit:
                print(f"{name}: not started, {arguments.limit:.0f} s are over", flush=True)
                continue
            outcomes.append(do(name, check, Path(folder)))
            print(line(outcomes[-1]), flush=True)
    table = "\n".join([title(), "", "| check | | seen | seconds |", "|---|---|---|---|", *map(row, outcomes), ""])
    if arguments.markdown:
        arguments.markdown.write_text(table, encoding="utf-8")
    return 0 if all(outcome.passed for outcome in outcomes) else EXIT_FAILED


def do(name: str, check: Callable[[Path], str], folder: Path) -> Outcome:
    began = time.perf_counter()
    try:
        passed, seen = True, check(folder)
    except (Failed, subprocess.TimeoutExpired, OSError) as error:
        passed, seen = False, str(error)
    return Outcome(name, passed, seen, time.perf_counter() - began)


def line(outcome: Outcome) -> str:
    return f"{'PASS' if outcome.passed else 'FAIL'}  {outcome.name} ({outcome.seconds:.0f} s): {outcome.seen}"


def row(outcome: Outcome) -> str:
    seen = " ".join(outcome.seen.split()).replace("|", "/")
    return f"| {outcome.name} | {'PASS' if outcome.passed else 'FAIL'} | {seen} | {outcome.seconds:.0f} |"


def title() -> str:
    import torch

    device = torch.cuda.get_device_name() if has_gpu() else "CPU: nothing below is about a GPU"
    command = " ".join(["python", *sys.argv])
    return f"{time.strftime('%Y-%m-%d')}, {device}, torch {torch.__version__}, `{command}`"


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def run(command: list[str], *, timeout: float = 300, **environment: str) -> str:
    """Run a Python script of the repository and return its output. Failed, with its last words, if it fails."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise Failed(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-LAST_WORDS:]}")
    return done.stdout


def train(folder: Path, *arguments: str, **environment: str) -> list[dict[str, Any]]:
    """Train in `folder` and return the logged steps so far."""
    run(["train.py", *arguments, "--job.dump_folder", str(folder)], **environment)
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [logged for logged in lines if "loss" in logged]


def check_tests(folder: Path) -> str:
    """The tests that skip where there is no GPU."""
    return run(["-m", "pytest", "-m", "not slow", "tests/test_distributed.py", "-p", "no:cacheprovider"]).splitlines()[
        -1
    ]


def check_parity(folder: Path) -> str:
    device = "cuda" if has_gpu() else "cpu"
    said = run(["scripts/verify_parity.py", "--processes", "1", "--device", device], timeout=420)
    return said.strip().splitlines()[-1]


def check_cold_and_warm_start(folder: Path) -> str:
    """Two launches with a compile cache of their own."""
    seconds = []
    for name in ("cold", "warm"):
        cache = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
        arguments = [*DEBUG, "--training.steps", "12", "--checkpoint.enable", "false", "--sample.tokens", "0"]
        train(folder / name, *arguments, **cache)
        text = (folder / name / "metrics.jsonl").read_text()
        seconds.append(
            next(found["compile_seconds"] for found in map(json.loads, text.splitlines()) if "compile_seconds" in found)
        )
    return f"first step {seconds[0]:.1f} s cold, {seconds[1]:.1f} s with a warm compile cache"


def check_resume(folder: Path) -> str:
    """20 steps straight are 10 and 10, bit for bit."""
    fixed = [*DEBUG, "--debug.deterministic", "true", "--lr_scheduler.total_steps", "20", "--metrics.log_freq", "1"]
    straight = train(folder / "straight", *fixed, "--training.steps", "20")
    train(folder / "parts", *fixed, "--training.steps", "10")
    parts = train(folder / "parts", *fixed, "--training.steps", "20")
    numbers = [[(s["step"], s["loss"], s["grad_norm"]) for s in steps] for steps in (straight, parts)]
    if numbers[0] != numbers[1]:
        raise Failed(f"{numbers[0][-1]} straight, {numbers[1][-1]} in two parts")
    return f"step 20: loss {straight[-1]['loss']:.6f} both ways"


def check_saves(folder: Path) -> str:
    """A checkpoint that is copied while the GPU computes has the bytes of one that is saved in step."""
    from trainer.checkpoint.manifest import read_manifest

    fixed = [*DEBUG, "--debug.deterministic", "true", "--training.steps", "9", "--checkpoint.interval", "4"]
    fixed += ["--lr_scheduler.warmup_steps", "2"]
    seals = []
    for mode in ("disabled", "async_with_pinned_mem" if has_gpu() else "async"):
        train(folder / mode, *fixed, "--checkpoint.async_mode", mode)
        files = read_manifest(folder / mode / "checkpoint" / "step-8").files
        seals.append({name: seal for name, seal in files.items() if name.endswith(".distcp")})
    if seals[0] != seals[1]:
        raise Failed(f"step 8 differs: {seals}")
    return f"step 8: {sum(seal.num_bytes for seal in seals[0].values()):,} bytes, the same both ways"


def check_speed(folder: Path, name: str, *arguments: str) -> str:
    small = [] if has_gpu() else [*SMALL, "--model.args.n_heads", "4", "--model.args.n_kv_heads", "2"]
    logged = train(folder / name, *ONE_BILLION, *small, *arguments)[-1]
    return (
        f"{logged['tps']:,.0f} tokens/s, {logged['tflops']:.1f} TFLOP/s, MFU {logged['mfu']:.1f} %, "
        f"peak {logged['memory_gib']:.2f} GiB, loss {logged['loss']:.4f}"
    )


def check_float8(folder: Path) -> str:
    """Speed over bfloat16 and distance of the loss, by recipe."""
    small = [] if has_gpu() else [*SMALL, "--model.args.n_heads", "4", "--model.args.n_kv_heads", "2"]
    logged = {}
    for name in ("bfloat16", "tensorwise", "rowwise"):
        recipe = [] if name == "bfloat16" else [*FLOAT8, "--quantize.linear.float8.recipe_name", name]
        logged[name] = train(folder / f"float8-{name}", *EIGHT_BILLION_BLOCKS, *small, *recipe)[-1]
    plain = logged.pop("bfloat16")
    said = [f"bfloat16 {plain['tps']:,.0f} tokens/s, loss {plain['loss']:.4f}"]
    for name, last in logged.items():
        off = last["loss"] / plain["loss"] - 1
        said.append(f"{name} {last['tps'] / plain['tps']:.2f} times that, loss {off:+.2%}")
        if not abs(off) <= FLOAT8_LOSS:
            raise Failed("; ".join(said))
    return "; ".join(said)


CHECKS: dict[str, Callable[[Path], str]] = {
    "tests of the device": check_tests,
    "start, cold and warm": check_cold_and_warm_start,
    "resume": check_resume,
    "saves": check_saves,
    "1B, nothing recomputed": lambda folder: check_speed(folder, "none"),
    "1B, recompute op": lambda folder: check_speed(folder, "op", "--activation_checkpoint.mode", "selective"),
    "1B, recompute full": lambda folder: check_speed(folder, "full", "--activation_checkpoint.mode", "full"),
    "1B, not compiled": lambda folder: check_speed(folder, "eager", "--compile.enable", "false"),
    "float8 beside bfloat16, 8B blocks": check_float8,
    "parity of one process": check_parity,
}

if __name__ == "__main__":
    open_door(main)
