"""Where a launch starts: a checkpoint, given weights or new ones; which, is told. And what a run leaves at its end."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from tiny_run import Result, arguments, launch_all, launch_once, read_numbers, write_dataset

from trainer.build import Run
from trainer.checkpoint.folder import list_checkpoints, remove_old
from trainer.checkpoint.hf_export import export_hf
from trainer.checkpoint.plain import load_plain_model
from trainer.checkpoint.state import read_state
from trainer.config.check import check_config
from trainer.config.load import ConfigError, load_config
from trainer.config.schema import Config, replace
from trainer.loop import Ending
from trainer.resume import check_launch, find_resume


def launch_each(rank: int, commands: list[list[str]]) -> list[Result | str]:
    """Launch one after the other; of one that is refused, the reason."""
    results: list[Result | str] = []
    for argv in commands:
        try:
            results.append(launch_once(argv))
        except ConfigError as error:
            results.append(str(error))
    return results


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of six steps: one plain, one that ends with bfloat16 weights, and a Hugging Face folder."""
    folder = tmp_path_factory.mktemp("trained")
    write_dataset(folder)
    ends = {"last_save_model_only": True, "last_save_in_hf": True, "export_dtype": "bfloat16"}
    changes = {f"checkpoint__{key}": value for key, value in ends.items()}
    commands = [
        arguments(folder, "plain", training__steps=6, checkpoint__interval=3),
        arguments(folder, "weights", training__steps=6, checkpoint__interval=3, **changes),
    ]
    results = run_ranks(launch_all, 2, commands)[0]
    assert [result.ending for result in results] == [Ending.COMPLETED] * 2
    export_hf(folder / "plain" / "checkpoint" / "step-6", folder / "hf", dtype=torch.float32)
    return folder


def step_0_loss(result: Result | str) -> str:
    assert isinstance(result, Result), result
    (line,) = [line for line in result.log if "step:  1 " in line]
    return line.split("loss: ")[1].split()[0]


def test_a_start_from_given_weights_has_them_and_nothing_else(trained: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path)
    (tmp_path / "ours" / "checkpoint").mkdir(parents=True)  # an empty folder must not shadow the path
    given = {"training__steps": 2, "checkpoint__initial_load_path": trained / "plain" / "checkpoint"}
    hf = {**given, "checkpoint__initial_load_path": trained / "hf", "checkpoint__initial_load_in_hf": True}
    commands = [
        arguments(tmp_path, "ours", **given),
        arguments(tmp_path, "hf", **hf),
        arguments(tmp_path, "tp", **hf, parallelism__tensor_parallel_degree=2),
        arguments(tmp_path, "new", training__steps=2),
        arguments(tmp_path, "ours", **{**given, "training__steps": 3}),
    ]
    ours, from_hf, tp, new, resumed = run_ranks(launch_each, 2, commands)[0]
    assert step_0_loss(ours) == step_0_loss(from_hf) == step_0_loss(tp) != step_0_loss(new)
    assert read_numbers(tmp_path / "ours")[:2] == read_numbers(tmp_path / "hf")
    told = [next(line for line in result.log if "Start" in line or "Resum" in line) for result in (ours, new, resumed)]
    assert "Starting at step 0 from the weights of" in told[0]
    assert "step-6, with new optimizer state, schedule and data" in told[0]
    assert "Starting from new weights, drawn from debug.seed = 0" in told[1]
    assert "Resuming from" in told[2]
    assert any("checkpoint.initial_load_path is not read" in line for line in resumed.log)


def test_what_is_not_loaded_is_said_by_patterns_that_match(trained: Path, tmp_path: Path) -> None:
    write_dataset(tmp_path)
    folder = tmp_path / "run"
    os.symlink(trained / "plain", folder)
    given = {
        "training__steps": 2,
        "checkpoint__initial_load_path": trained / "plain" / "checkpoint",
        "checkpoint__exclude_from_loading": "model.output",
    }
    hf = {**given, "checkpoint__initial_load_path": trained / "hf", "checkpoint__initial_load_in_hf": True}
    resume = {"training__steps": 3, "checkpoint__load_step": 3, "lr_scheduler__total_steps": 20}
    commands = [
        arguments(tmp_path, "a", **given),
        arguments(tmp_path, "b", **hf),
        arguments(tmp_path, "new", training__steps=2),
        arguments(tmp_path, "c", **{**given, "checkpoint__exclude_from_loading": "model.output,model.outputs.*"}),
        arguments(tmp_path, "d", **{**hf, "checkpoint__exclude_from_loading": "lr_scheduler"}),
        arguments(tmp_path, **resume, checkpoint__exclude_from_loading="optimizer"),
        arguments(tmp_path, **resume, checkpoint__exclude_from_loading="optimiser"),
    ]
    a, b, new, c, d, without_optimizer, misspelt = run_ranks(launch_each, 1, commands)[0]
    assert step_0_loss(a) == step_0_loss(b) != step_0_loss(new)
    assert "model.outputs.* doesn't. Leave it out, or use patterns of" in c
    assert "checkpoint.initial_load_path" in d
    assert "lr_scheduler doesn't" in d
    assert without_optimizer.ending is Ending.COMPLETED
    assert "optimiser doesn't" in misspelt
    assert "optimizer.layers.*" in misspelt


def problems_of(folder: Path, name: str = "run", **changes: Any) -> str:
    return "\n".join(check_launch(load_config(arguments(folder, name, **changes)).config, 1)[1])


def test_weights_of_another_model_are_refused_before_any_process_group(trained: Path, tmp_path: Path) -> None:
    ours = trained / "plain" / "checkpoint" / "step-6"
    for path, in_hf in ((ours, False), (trained / "hf", True)):
        given = {"checkpoint__initial_load_path": path, "checkpoint__initial_load_in_hf": in_hf}
        assert problems_of(tmp_path, **given) == ""
        problem = problems_of(tmp_path, **given, model__args__rope_theta=9.0, model__args__dim=64)
        assert "checkpoint.initial_load_path" in problem
        assert "model.args.rope_theta: 9.0 here, 500000.0 there" in problem
        assert "model.args.dim: 64 here, 32 there" in problem
    assert "no complete checkpoint there" in problems_of(tmp_path, checkpoint__initial_load_path=tmp_path)
    missing = problems_of(tmp_path, checkpoint__initial_load_path=tmp_path, checkpoint__initial_load_in_hf=True)
    assert "config.json: No such file" in missing


def test_the_end_of_a_run_takes_the_forms_asked_for(trained: Path, tmp_path: Path) -> None:
    folder = trained / "weights" / "checkpoint"
    assert list_checkpoints(folder) == ([3, 6], [])
    assert read_state(folder / "step-6")["weights_only"] is True
    with pytest.raises(ValueError, match=r"step-6 holds weights alone .*checkpoint\.load_step"):
        find_resume(load_config(arguments(trained, "weights")).config)
    assert find_resume(load_config(arguments(trained, "weights", checkpoint__load_step=3)).config).path
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "step-6-hf", dtype=torch.float32)
    plain, _ = load_plain_model(trained / "plain" / "checkpoint" / "step-6", torch.device("cpu"))
    rounded = {name: p.detach().bfloat16().float() for name, p in plain.named_parameters()}
    assert torch.equal(theirs.lm_head.weight, rounded["output.weight"])
    assert theirs.config.to_dict()["dtype"] in ("float32", torch.float32)
    weights, _ = load_plain_model(folder / "step-6", torch.device("cpu"), dtype=torch.float32)
    for name, p in weights.named_parameters():
        assert torch.equal(p, rounded[name])


def launch_by_the_clock(rank: int, argv: list[str]) -> Result:
    """Rank 1's clock runs ahead by a minute a step; what it asks for, all do."""

    def change(run: Run) -> None:
        if rank == 1:
            clock = time.monotonic
            time.monotonic = lambda: clock() + 60 * run.state.step

    try:
        clock = time.monotonic
        return launch_once(argv, change=change)
    finally:
        time.monotonic = clock


def test_saves_by_minutes_are_those_of_any_rank(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    command = arguments(tmp_path, training__steps=8, checkpoint__interval_minutes=2.5)
    assert run_ranks(launch_by_the_clock, 2, command)[0].ending is Ending.COMPLETED
    assert list_checkpoints(tmp_path / "run" / "checkpoint").complete == [4, 8]


def test_milestones_stay(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    settings = {"checkpoint__interval": 1, "checkpoint__keep_latest_k": 1, "checkpoint__keep_every": 4}
    run_ranks(launch_all, 1, [arguments(tmp_path, training__steps=9, **settings)])
    folder = tmp_path / "run" / "checkpoint"
    assert list_checkpoints(folder).complete == [4, 8, 9]
    remove_old(folder, 1, keep=8)  # just saved, by a run that went on from an older step
    assert list_checkpoints(folder).complete == [8, 9]
    remove_old(folder, 1)
    assert list_checkpoints(folder).complete == [9]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_flipped_byte_makes_a_resume_fall_back_and_goes_on_as_before(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    command = arguments(tmp_path, training__steps=6, checkpoint__interval=2, checkpoint__keep_latest_k=2)
    straight = arguments(tmp_path, "straight", training__steps=8)
    longer = [*command, "--training.steps=8"]
    run_ranks(launch_all, 2, [command, straight])
    folder = tmp_path / "run" / "checkpoint"
    flip(folder / "step-6" / "__1_0.distcp")
    ((asked, resumed), _) = run_ranks(launch_each, 2, [[*longer, "--checkpoint.load_step=6"], longer])
    assert "damaged" in asked
    assert "checkpoint.load_step" in asked
    assert any("damaged" in line and "Falling back to" in line and "step-4" in line for line in resumed.log)
    assert resumed.ending is Ending.COMPLETED
    assert read_numbers(tmp_path / "run") == read_numbers(tmp_path / "straight")
    # The damaged one no longer counts as the newest, so retention keeps whole ones.
    assert list_checkpoints(folder) == ([6, 8], [])
    assert (folder / "step-6.damaged-1").is_dir()

    flip(folder / "step-8" / "state.json")
    flip(folder / "step-6" / "__0_0.distcp")
    (only_damaged,) = run_ranks(launch_each, 1, [longer])[0]
    assert "damaged" in only_damaged, "never from new weights"


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"initial_load_in_hf": True}, "no effect without checkpoint.initial_load_path"),
    ({"export_dtype": "bfloat16"}, "no effect without"),
    ({"keep_every": 5, "keep_latest_k": 0}, "no effect where"),
    ({"enable": False, "initial_load_path": "x"}, "no effect with checkpoint.enable = false"),
    ({"folder": "s3://bucket/run"}, "remote storage isn't there yet"),
    ({"initial_load_path": "memory://run"}, "remote storage isn't there yet"),
]


@pytest.mark.parametrize(("settings", "part"), WRONG)
def test_settings_without_effect_are_refused(settings: dict[str, Any], part: str) -> None:
    changes = {f"checkpoint.{key}": value for key, value in ({"enable": True} | settings).items()}
    (problem,) = check_config(replace(Config(), changes), 1)
    assert part in problem
