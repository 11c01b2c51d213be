"""Doors answer with an exit code and one clear text, whatever they are given."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from tiny_run import arguments, launch_all, write_dataset

import train
from scripts import generate, print_schedule
from trainer.resume import check_launch

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = sorted(path.name for path in (ROOT / "configs").glob("*.toml"))
REFUSED = 2


def broken(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a finished run of two steps, and what is wrong in the cases below."""
    folder = tmp_path_factory.mktemp("doors")
    write_dataset(folder)
    (folder / "empty").mkdir()
    broken(folder / "file", "in the place of a folder")
    broken(
        folder / "v02.toml",
        "[parallelism]\ncontext_parallel_degree = 2\n[model]\nconverters = ['mx']\n",
    )
    run_ranks(launch_all, 1, [arguments(folder, training__steps=2)])
    return folder


FRESH = {"job__dump_folder": "{}/fresh"}
CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "unknown key": ({"training__stepz": 3}, ["training.stepz", "training.steps"]),
    "wrong type": ({"training__steps": "many"}, ["training.steps = many", "number"]),
    "several at once": (
        {"training__stepz": 3, "optimizer__lr": "fast"},
        ["2 problems", "stepz", "optimizer.lr = fast"],
    ),
    "v0.2 features": ({"config": "{}/v02.toml"}, ["context_parallel_degree", "model.converters", "v02.toml"]),
    "no such config": ({"config": "llama9.toml"}, ["--config llama9.toml", "llama3_8b"]),
    "batch": ({"training__global_batch_size": 5}, ["training.global_batch_size = 5", "5 / 2 is not whole"]),
    "no tokenizer": ({"model__tokenizer_path": "assets/none"}, ["model.tokenizer_path = 'assets/none'", "bytes"]),
    "empty dataset": ({"training__dataset_path": "{}/empty"}, ["training.dataset_path", "no files", "stdlib"]),
    "vocabulary": ({**FRESH, "model__args__vocab_size": 100}, ["model.args.vocab_size = 100", "258"]),
    "dump folder": ({"job__dump_folder": "{}/file"}, ["job.dump_folder", "File exists"]),
    "changed experiment": ({"optimizer__lr": 0.3}, ["optimizer.lr: 0.3 now, 0.01 there", "accept_changes"]),
    "no such step": ({"checkpoint__load_step": 7}, ["checkpoint.load_step = 7", "complete: 2"]),
    "too big": ({**FRESH, "model__args__vocab_size": 10**11}, ["GiB per device (parameters", "memory available now"]),
    "pattern": ({"optimizer__no_decay": "foo"}, ['optimizer.no_decay = ["foo"]', "tok_embeddings.weight"]),
    "world size": ({"world_size": 4}, ["--world-size 4", "--dry-run", "torchrun --nproc-per-node 4"]),
}


def ask(capsys: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, str, str]:
    code = train.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("name", CASES)
def test_what_cannot_run_is_refused_with_code_2_and_a_way_out(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes, words = CASES[name]
    given = {key: value.format(folder) if isinstance(value, str) else value for key, value in changes.items()}
    argv = arguments(folder, **{"training__steps": 2, **given})
    code, out, err = ask(capsys, argv)
    assert code == REFUSED
    assert all(word in err for word in words), err
    assert "Traceback" not in err + out
    assert not dist.is_initialized()
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    waits: list[float] = []
    monkeypatch.setattr(train.time, "sleep", waits.append)
    code, _, err = ask(capsys, argv)
    assert (code, err) == (REFUSED, ""), "one rank of a machine tells it"
    assert waits == [train.SECONDS_TO_PRINT], "or torchrun would end the one that tells it"


def test_a_resume_may_stop_short_of_the_warm_up(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The schedule's length is the first launch's, so `training.steps` alone says nothing about it."""
    argv = [argument for argument in arguments(folder, training__steps=1) if "total_steps" not in argument]
    assert check_launch(train.load_config(argv).config, world_size=1)[1] == []
    fresh = [*argv, f"--job.dump_folder={folder / 'fresh'}"]
    code, _, err = ask(capsys, fresh)
    assert code == REFUSED
    assert "lr_scheduler.warmup_steps = 3, training.steps = 1" in err


def test_a_dry_run_refuses_what_a_run_does(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--dry-run", "--optimizer.no_decay=foo", "--compile.bucket_modules=bar"]
    code, out, err = ask(capsys, flags)
    assert (code, out) == (REFUSED, "")
    assert "2 problems" in err


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("ranks", [1, 8, 512])
def test_a_dry_run_builds_every_shipped_config(config: str, ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    fitting = ["--training.global_batch_size=-1"] if config == "llama3_debug.toml" else []
    if ranks % train.load_config(["--config", config]).config.parallelism.tensor_parallel_degree:
        fitting.append("--parallelism.tensor_parallel_degree=1")
    code, out, err = ask(capsys, ["--config", config, "--dry-run", "--world-size", str(ranks), *fitting])
    assert (code, err) == (0, "")
    assert f"= {ranks} ranks" in out
    assert "tokens per step" in out
    assert "iB per device (parameters" in out
    assert "layers.0.attention.wq.weight" in out
    assert "Shard(dim=0)" in out


def test_the_settings_are_shown_with_their_origins(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = ask(capsys, ["--config", "llama3_1b.toml", "--optimizer.lr", "0.5", "--print-config"])
    assert code == 0
    lines = {line.split(" = ")[0]: line for line in out.splitlines() if " = " in line}
    assert lines["lr"].startswith("lr = 0.5 ")
    assert lines["lr"].endswith("# command line")
    assert "llama3_1b.toml" in lines["flavor"]
    assert "llama3_8b.toml" in lines["tokenizer_path"]
    assert lines["gc_freq"].endswith("# default")


def test_help_takes_less_than_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, str(ROOT / "train.py"), "--help"], capture_output=True, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Its own time: this machine may be busy with other tests.
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert done.returncode == 0
    assert "--training.global_batch_size" in done.stdout
    loaded = "import sys; sys.argv = ['train.py', '--help']; import train; train.main(['--help']); print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, cwd=ROOT).stdout.split()
    assert not {"torch", "numpy", "sentencepiece"} & set(modules)
    assert seconds < 1


@pytest.mark.parametrize("command", ["train.py --help", "scripts/print_schedule.py --config llama3_8b.toml"])
def test_a_reader_that_leaves_gets_no_traceback(command: str) -> None:
    script, *flags = command.split()
    process = subprocess.Popen(
        [sys.executable, str(ROOT / script), *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait() == 141


def test_the_schedule_of_any_step_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--optimizer.lr=1.0", "--lr_scheduler.warmup_steps=4", "--training.steps", "8"]
    assert print_schedule.main([*flags, "--steps", "1,4,8"]) == 0
    assert capsys.readouterr().out.split() == ["1", "2.500000e-01", "4", "1.000000e+00", "8", "0.000000e+00"]
    assert print_schedule.main([*flags, "--optimizer.lrr", "1"]) == REFUSED
    assert "optimizer.lrr" in capsys.readouterr().err
    assert print_schedule.main([*flags, "--lr_scheduler.warmup_steps", "9"]) == REFUSED
    assert "Use at most 8 steps" in capsys.readouterr().err


def test_the_schedule_of_a_resume_is_that_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left_open = [flag for flag in arguments(folder, training__steps=2) if "total_steps" not in flag]
    assert print_schedule.main([*left_open, "--steps", "3,20,21"]) == 0
    assert capsys.readouterr().out.split() == ["3", "1.000000e-02", "20", "0.000000e+00", "21", "0.000000e+00"]
    assert print_schedule.main([*left_open, "--optimizer.lr=0.5"]) == REFUSED
    assert "optimizer.lr: 0.5 now, 0.01 there" in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["", "1,x", "0", "1,,2"])
def test_steps_that_are_no_steps_are_refused(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        print_schedule.main(["--steps", steps])
    assert caught.value.code == REFUSED
    assert "--steps" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--tokens=-1", "--temperature=nan", "--temperature=hot", "--top-k=-2", "--seed=-1"])
def test_sampling_flags_out_of_range_are_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        generate.main(["--checkpoint=x", flag])
    assert caught.value.code == REFUSED
    assert flag.split("=")[0] in capsys.readouterr().err
