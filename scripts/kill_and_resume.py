"""Kill a run at random moments of its saves, resume it each time, and compare its end with that of an undisturbed run.

`python scripts/kill_and_resume.py --kills 50` trains a small model on two ranks that save after every step. All ranks
are killed (SIGKILL) while a checkpoint is written or sealed; after each kill every complete checkpoint is verified. The
last checkpoints of both runs must have the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer.checkpoint.folder import checkpoint_path
from trainer.checkpoint.inspect import inspect_checkpoints
from trainer.checkpoint.manifest import Seal, read_manifest
from trainer.door import EXIT_FAILED, open_door

ROOT = Path(__file__).resolve().parents[1]
SECONDS_TO_START = 300
STEPS_PER_KILL = 4
SETTINGS = {
    "model.tokenizer_path": "bytes",
    "model.args.dim": 256,
    "model.args.n_layers": 2,
    "model.args.vocab_size": 4096,
    "training.dataset": "jsonl",
    "training.seq_len": 16,
    "training.global_batch_size": 2,
    "training.local_batch_size": 1,
    "training.mixed_precision_param": "float32",
    "lr_scheduler.warmup_steps": 1,
    "compile.enable": False,
    "checkpoint.enable": True,
    "checkpoint.interval": 1,
    "checkpoint.keep_latest_k": 2,
}


class Launch:
    """One launch of the run, its ranks started here, so that all of them can be killed at once."""

    def __init__(self, folder: Path, name: str, steps: int, arguments: argparse.Namespace) -> None:
        self.checkpoints = folder / name / "checkpoint"
        settings = SETTINGS | {
            "job.dump_folder": folder / name,
            "training.dataset_path": folder / "documents.jsonl",
            "training.cache_folder": folder / "cache",
            "training.steps": steps,
            "checkpoint.async_mode": arguments.async_mode,
        }
        command = [sys.executable, str(ROOT / "train.py"), *(f"--{key}={value}" for key, value in settings.items())]
        self.log = folder / f"{name}.log"
        meet = {"WORLD_SIZE": arguments.ranks, "LOCAL_WORLD_SIZE": arguments.ranks, "MASTER_PORT": find_port()}
        with self.log.open("w") as log:
            self.ranks = [
                subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=_environment(meet, rank))
                for rank in range(arguments.ranks)
            ]

    def wait(self) -> None:
        """Wait for a good end. RuntimeError with the log otherwise."""
        codes = [process.wait() for process in self.ranks]  # of all: no rank may be left behind
        if any(codes):
            raise RuntimeError(self.log.read_text())

    def wait_for_save(self, after: int) -> str | None:
        """Wait until a save of a step above `after` begins; return its folder's name, or None if the run ended."""
        deadline = time.monotonic() + SECONDS_TO_START
        while all(process.poll() is None for process in self.ranks):
            for path in self.checkpoints.glob("step-*.partial"):
                if _step_of(path.name) > after:
                    return path.name
            if time.monotonic() > deadline:
                raise RuntimeError(f"no save began in {SECONDS_TO_START} seconds\n{self.log.read_text()}")
            time.sleep(0.001)
        self.wait()
        return None

    def kill(self) -> None:
        """Kill all ranks at once."""
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.wait()


def _environment(meet: dict[str, int], rank: int) -> dict[str, str]:
    place = {"RANK": rank, "LOCAL_RANK": rank, "MASTER_ADDR": "127.0.0.1", **meet}
    usual = {"OMP_NUM_THREADS": "1"} | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {})
    return usual | dict(os.environ) | {key: str(value) for key, value in place.items()}


def find_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def _step_of(name: str) -> int:
    return int(name.split("-")[1].split(".")[0])


def check_folder(folder: Path, before: int) -> int:
    """Verify what counts as complete, and return the newest step. RuntimeError for damage, or if `before` is gone."""
    contents = inspect_checkpoints(folder, verify=True)
    damaged = [f"{entry.name}: {entry.fault}" for entry in contents.entries if entry.fault and "." not in entry.name]
    complete = [_step_of(entry.name) for entry in contents.entries if entry.fault is None]
    if damaged or max(complete, default=0) < before:
        raise RuntimeError(f"after step {before} was complete: {damaged or 'it is gone'}\n{list(contents.lines())}")
    return max(complete, default=0)


def kill_often(folder: Path, arguments: argparse.Namespace, steps: int) -> Path:
    """Run with kills, and then to the end. Return its last checkpoint."""
    choose, newest = random.Random(arguments.seed), 0
    for number in range(1, arguments.kills + 1):
        launch = Launch(folder, "killed", steps, arguments)
        try:
            after = min(newest + choose.randrange(1, STEPS_PER_KILL), steps - 1)
            name = launch.wait_for_save(after - 1)
            delay = choose.uniform(0, arguments.most_seconds)
            time.sleep(delay)
        finally:
            launch.kill()
        if name is None:
            raise RuntimeError(f"the run ended before kill {number}")
        newest = check_folder(launch.checkpoints, newest)
        print(f"kill {number}: {delay * 1e3:.0f} ms after {name} began; newest complete: step {newest}", flush=True)
    launch = Launch(folder, "killed", steps, arguments)
    launch.wait()
    return checkpoint_path(launch.checkpoints, steps)


def data_of(checkpoint: Path) -> dict[str, Seal]:
    """Return size and checksum of each file with tensors."""
    return {name: seal for name, seal in read_manifest(checkpoint).files.items() if name.endswith(".distcp")}


def main(argv: list[str]) -> int:
    """Return the exit code: 0, or 1 if anything was lost or differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="how often to kill (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the run (default: %(default)s)")
    parser.add_argument("--async-mode", default="async", help="checkpoint.async_mode (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (default: %(default)s)")
    parser.add_argument("--most-seconds", type=float, default=0.8, help="latest kill in a save (default: %(default)s)")
    arguments = parser.parse_args(argv)
    steps = STEPS_PER_KILL * (arguments.kills + 1)
    with tempfile.TemporaryDirectory(prefix="fullgraph-kills-") as name:
        folder = Path(name)
        texts = [f"Document {n} says: {'abc ' * (n % 7)}{n * n}.\n" for n in range(200)]
        lines = [json.dumps({"text": text}) + "\n" for text in texts]
        (folder / "documents.jsonl").write_text("".join(lines), encoding="utf-8")
        try:
            killed = data_of(kill_often(folder, arguments, steps))
            undisturbed = Launch(folder, "undisturbed", steps, arguments)
            undisturbed.wait()
            expected = data_of(checkpoint_path(undisturbed.checkpoints, steps))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return EXIT_FAILED
    if killed != expected:
        print(f"After {arguments.kills} kills the tensors of step {steps} differ from those of an undisturbed run")
        return EXIT_FAILED
    print(f"{arguments.kills} kills, {steps} steps: the same bytes as undisturbed, in {len(expected)} files")
    return 0


if __name__ == "__main__":
    open_door(main)
