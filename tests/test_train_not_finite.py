"""A step that is not finite changes nothing: all ranks stop, name it, and keep the state of the step before."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_run import Result, arguments, assert_equal_weights, launch_once, read_numbers, write_dataset

from trainer.build import Run
from trainer.loop import Ending

PLANTED_ON = 1  # rank


def plant(run: Run, *, step: int, what: str) -> None:
    """Let `step` go wrong on one rank: the loss of its rows, or the gradient of its shard."""
    if run.place.rank != PLANTED_ON:
        return
    accumulate = run.accumulate

    def broken(microbatches: Sequence[Any], divisor: torch.Tensor) -> torch.Tensor:
        share = accumulate(microbatches, divisor)
        if run.state.step != step - 1:
            return share
        if what == "loss":
            return share * torch.nan
        gradient = next(iter(run.optimizer.parameters.values())).grad
        assert gradient is not None
        gradient.to_local()[0] = torch.inf
        return share

    run.accumulate = broken


def launch_planted(rank: int, launches: list[tuple[list[str], int, str]]) -> list[Result]:
    return [launch_once(argv, change=partial(plant, step=step, what=what)) for argv, step, what in launches]


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "alone": (4, {}),
    "with a save and a validation due": (4, {"checkpoint__interval": 4, "validation__freq": 4}),
    "after a save of the step before": (4, {"checkpoint__interval": 3}),
    "last": (6, {}),
    "first": (1, {}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("not_finite")
    write_dataset(folder)
    return folder


@pytest.fixture(scope="module")
def stopped(folder: Path) -> dict[str, list[Result]]:
    """What both ranks saw of a launch that went wrong, for each case; and of those that end in time, one step early."""

    def command(name: str, steps: int = 6, **changes: Any) -> list[str]:
        return arguments(folder, name, validation__enable=True, training__steps=steps, **changes)

    launches = [(command(name, **changes), step, "loss") for name, (step, changes) in CASES.items()]
    launches.append((command("gradient"), 4, "gradient"))
    launches.append((command("good"), 0, ""))
    launches += [(command(f"until {step - 1}", steps=step - 1), 0, "") for step in (4, 6)]
    launches += [(command(name, **changes), 0, "") for name, (_, changes) in CASES.items()]
    results = list(zip(*run_ranks(launch_planted, 2, launches), strict=True))
    names = [*CASES, "gradient", "good", "until 3", "until 5", *(f"{name}, resumed" for name in CASES)]
    return dict(zip(names, map(list, results), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_every_rank_stops_and_the_step_and_the_rank_are_named(stopped: dict[str, list[Result]], name: str) -> None:
    step, _ = CASES[name]
    assert [result.ending for result in stopped[name]] == [Ending.NOT_FINITE] * 2
    messages = "\n".join(stopped[name][0].log)
    assert f"Step {step} is not finite: loss nan" in messages
    assert f"Not finite is the loss of rank {PLANTED_ON}" in messages
    assert f"the weights are still those after step {step - 1}" in messages
    assert f"validate step: {step:2}" not in messages
    assert not any(line.startswith("ERROR") for line in stopped[name][1].log), "one rank tells it"


def test_a_gradient_that_is_not_finite_stops_the_run_too(stopped: dict[str, list[Result]]) -> None:
    messages = "\n".join(stopped["gradient"][0].log)
    assert "Step 4 is not finite: loss 5." in messages
    assert "Not finite is the gradient" in messages
    assert_equal_weights(stopped["gradient"][0].weights, stopped["until 3"][0].weights)


@pytest.mark.parametrize("name", [name for name, (step, _) in CASES.items() if step > 1])
def test_weights_and_checkpoint_are_those_of_the_step_before(
    folder: Path, stopped: dict[str, list[Result]], name: str
) -> None:
    step, _ = CASES[name]
    assert_equal_weights(stopped[name][0].weights, stopped[f"until {step - 1}"][0].weights)
    saved = folder / name / "checkpoint" / f"step-{step - 1}" / "state.json"
    state = json.loads(saved.read_text())
    assert state["step"] == step - 1
    assert state["tokens_seen"] == 64 * (step - 1)
    assert state["bad_step"] == step, "also where it was saved before anyone knew"


def test_a_first_step_that_is_not_finite_saves_nothing(folder: Path, stopped: dict[str, list[Result]]) -> None:
    assert "the weights are still those after step 0. " in "\n".join(stopped["first"][0].log)
    assert json.loads((folder / "first" / "checkpoint" / "step-6" / "state.json").read_text())["step"] == 6


@pytest.mark.parametrize("name", CASES)
def test_the_same_command_goes_on_when_the_cause_is_gone(
    folder: Path, stopped: dict[str, list[Result]], name: str
) -> None:
    assert read_numbers(folder / name) == read_numbers(folder / "good")
    assert_equal_weights(stopped[f"{name}, resumed"][0].weights, stopped["good"][0].weights)
