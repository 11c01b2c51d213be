"""Float8 in whole runs: what the log says, checkpoints that float8 and plain runs share, values that are not finite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_run import Result, arguments, launch_all, launch_once, read_rows, write_dataset
from torch.distributed.tensor import DTensor

from trainer.build import Run
from trainer.config.load import ConfigError
from trainer.loop import Ending

SECTION = "quantize__linear__float8"
FLOAT8: dict[str, Any] = {
    "model__converters": "float8",
    "model__args__head_dim": 16,
    f"{SECTION}__enable_fsdp_float8_all_gather": True,
}
PLAIN = {"model__args__head_dim": 16}
ACCEPT = {"checkpoint__accept_changes": "model.converters"}


def test_a_run_goes_on_in_another_precision_from_the_same_checkpoint(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    commands = [
        arguments(tmp_path, training__steps=2, **FLOAT8),
        arguments(tmp_path, training__steps=3, **PLAIN, **ACCEPT),
        arguments(tmp_path, training__steps=4, **FLOAT8, **ACCEPT),
        arguments(tmp_path, "straight", training__steps=4, **PLAIN),
    ]
    (first, second, third, straight), _ = run_ranks(launch_all, 2, commands)
    assert all(not result.error for result in (first, second, third, straight))
    assert first.weights.keys() == straight.weights.keys()
    assert all(weight.dtype == torch.float32 for weight in third.weights.values())
    assert any("float8: 7 of 8 linear layers by tensorwise, weights gathered in float8" in line for line in first.log)
    assert any('filter_fqns has "output"' in line for line in first.log)
    assert any("step 2 is done" in line for line in second.log)
    losses, plain = ([row["loss"] for row in read_rows(tmp_path / name)] for name in ("run", "straight"))
    assert losses == pytest.approx(plain, rel=0.02)
    assert losses[:2] != plain[:2]


def refuse_other_recipes(rank: int, folder: Path) -> str:
    launch_once(arguments(folder, training__steps=2, **FLOAT8))
    other = {**FLOAT8, f"{SECTION}__enable_fsdp_float8_all_gather": False, f"{SECTION}__recipe_name": "rowwise"}
    try:
        launch_once(arguments(folder, training__steps=3, **other))
    except ConfigError as error:
        return str(error)
    return ""


def test_a_resume_with_another_recipe_is_refused_by_name(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    (refusal,) = run_ranks(refuse_other_recipes, 1, tmp_path)
    assert "quantize.linear.float8.recipe_name: 'rowwise' now, 'tensorwise' there" in refusal
    assert "gather" not in refusal


def spoil(run: Run) -> None:
    weight = dict(run.model.named_parameters())["layers.0.feed_forward.w2.weight"]
    assert isinstance(weight, DTensor)
    if run.place.rank == 1:
        weight.to_local().data[0, 0] = torch.inf


def spoiled(rank: int, folder: Path) -> Result:
    return launch_once(arguments(folder, training__steps=4, **FLOAT8), change=spoil)


def test_a_scale_that_is_not_finite_stops_the_run_and_is_named(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    results = run_ranks(spoiled, 2, tmp_path)
    assert all(result.ending is Ending.NOT_FINITE for result in results)
    log = "\n".join(results[0].log)
    assert "layers.0.feed_forward.w2.weight" in log
    assert "float8 scale" in log
