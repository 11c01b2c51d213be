"""Laws between settings: possible runs pass, impossible ones are named with the arithmetic and a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.config import Config, replace
from trainer.config_check import accumulation_steps, check_config, dp_degrees, resolve_global_batch_size

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
GLOBAL = "training.global_batch_size"
LOCAL = "training.local_batch_size"


def config_with(**changes: Any) -> Config:
    return replace(Config(), {name.replace("__", "."): value for name, value in changes.items()})


def problems_of(values: dict[str, Any], world_size: int = 1) -> list[str]:
    return check_config(replace(Config(), values), world_size)


def test_the_defaults_run_on_any_number_of_ranks() -> None:
    for world_size in (1, 2, 3, 8, 512):
        assert check_config(Config(), world_size) == []
        assert dp_degrees(Config(), world_size) == (1, world_size)
        assert resolve_global_batch_size(Config(), world_size) == 8 * world_size
        assert accumulation_steps(Config(), world_size) == 1


def test_a_mesh_passes_exactly_when_its_product_is_the_number_of_ranks() -> None:
    for world_size in range(1, 13):
        for replicate in range(1, 14):
            for shard in [-1, *range(1, 14)]:
                config = replace(Config(), {REPLICATE: replicate, SHARD: shard})
                possible = world_size % replicate == 0 if shard == -1 else replicate * shard == world_size
                assert (check_config(config, world_size) == []) is possible, (world_size, replicate, shard)
                if possible:
                    degrees = dp_degrees(config, world_size)
                    assert degrees[0] == replicate
                    assert degrees[0] * degrees[1] == world_size


def test_mesh_problems_print_the_product_and_the_legal_values() -> None:
    (problem,) = problems_of({REPLICATE: 2, SHARD: 3}, 8)
    assert "2 x 3 = 6" in problem
    assert "1 x 8, 2 x 4, 4 x 2, 8 x 1" in problem
    (problem,) = problems_of({REPLICATE: 3}, 8)
    assert "8 / 3" in problem
    assert "1, 2, 4, 8" in problem
    (problem,) = problems_of({SHARD: 0}, 4)
    assert "-1, 1, 2, 4" in problem


def test_a_batch_passes_exactly_when_microbatches_and_ranks_divide_it() -> None:
    for rows in range(1, 30):
        for local in (1, 2, 3, 4):
            for world_size in (1, 2, 4):
                config = replace(Config(), {GLOBAL: rows, LOCAL: local})
                possible = rows % (local * world_size) == 0
                assert (check_config(config, world_size) == []) is possible
                if possible:
                    assert resolve_global_batch_size(config, world_size) == rows
                    assert accumulation_steps(config, world_size) * local * world_size == rows


@pytest.mark.parametrize(("rows", "local", "world_size"), [(24, 4, 4), (20, 16, 2), (6, 4, 1), (100, 7, 5)])
def test_the_batches_that_a_problem_proposes_are_legal(rows: int, local: int, world_size: int) -> None:
    (problem,) = problems_of({GLOBAL: rows, LOCAL: local}, world_size)
    assert f"{local} x {world_size} = {local * world_size}" in problem
    for name, other in ((GLOBAL, {LOCAL: local}), (LOCAL, {GLOBAL: rows})):
        key = name.partition(".")[2]
        (proposed,) = re.findall(rf"Nearest legal {key}: ([^.]*)\.", problem)
        values = [int(value) for value in re.findall(r"\d+", proposed)]
        assert values
        for value in values:
            assert problems_of({name: value, **other}, world_size) == []


def test_a_batch_that_no_microbatch_divides_is_said_so() -> None:
    (problem,) = problems_of({GLOBAL: 10, LOCAL: 4}, 4)
    assert "Nearest legal global_batch_size: 16" in problem
    assert "No local_batch_size helps" in problem
    assert len(problems_of({GLOBAL: 0})) == 1


IMPOSSIBLE: list[tuple[dict[str, Any], list[str]]] = [
    ({"model.flavor": "8b"}, ["debugmodel, 1B, 3B, 8B, 70B and 405B", 'Did you mean "8B"?']),
    ({"model.name": "llama2", "model.flavor": "8B"}, ["7B"]),
    ({"model.args.dim": 100}, ["100 / 8", "model.args.head_dim"]),
    ({"model.args.n_heads": 6, "model.args.dim": 96}, ["6 / 4", "1, 2, 3, 6"]),
    ({"model.args.n_kv_heads": 3}, ["8 / 3", "1, 2, 4, 8"]),
    ({"model.args.head_dim": 33}, ["even", "34"]),
    ({"model.args.dim": 8, "model.args.n_heads": 8, "model.args.n_kv_heads": 1}, ["head_dim = 1", "even"]),
    (
        {"model.flavor": "8B", "model.args.rope_scaling_low_freq_factor": 4.0},
        ["rope_scaling_high_freq_factor = 4.0", "below"],
    ),
    ({"optimizer.momentum": 0.9}, ["no effect", '"AdamW"', "SGD"]),
    ({"optimizer.name": "SGD", "optimizer.beta1": 0.8}, ["no effect", "0.9"]),
    ({"optimizer.name": "SGD", "optimizer.eps": 1.0}, ["no effect", "1e-08"]),
    ({"optimizer.beta2": 1.0}, ["below 1"]),
    ({"training.steps": 100}, ["warmup_steps = 200", "at most 100", "total_steps"]),
    ({"training.steps": 100, "lr_scheduler.total_steps": 150}, ["total_steps = 150"]),
    ({"training.steps": 1000, "lr_scheduler.decay_ratio": 0.9}, ["200 + 0.9 x 1000 = 1100", "at most 100", "0.8"]),
    ({"lr_scheduler.total_steps": 1000}, ["training.steps = 10000", "9000"]),
    ({"training.dataset_path": "x"}, ["no effect", '"stdlib"']),
    ({"training.dataset": "text"}, ["dataset_path"]),
    ({"training.dataset": "jsonl"}, ["dataset_path"]),
    ({"compile.components": ("loss",)}, ['["model"]', "compile.enable = false"]),
    ({"compile.components": ()}, ["[]"]),
    ({"checkpoint.load_step": 3}, ["no effect", "checkpoint.enable = true"]),
    ({"checkpoint.accept_changes": ("optimizer.lr",)}, ["no effect"]),
    ({"checkpoint.enable": True, "checkpoint.accept_changes": ("optimizer.lrr",)}, ['Did you mean "optimizer.lr"?']),
    ({"checkpoint.enable": True, "checkpoint.accept_changes": ("training.steps",)}, ["may change at any launch"]),
]


@pytest.mark.parametrize(("values", "parts"), IMPOSSIBLE)
def test_an_impossible_combination_is_one_problem_with_a_way_out(values: dict[str, Any], parts: list[str]) -> None:
    problems = problems_of(values)
    assert len(problems) == 1, problems
    for part in parts:
        assert part in problems[0]


@pytest.mark.parametrize(
    "values",
    [
        {"model.args.dim": 100, "model.args.head_dim": 16},
        {"model.flavor": "405B"},
        {"model.args.rope_scaling_low_freq_factor": 9.0},
        {"optimizer.name": "SGD", "optimizer.momentum": 0.9},
        {"lr_scheduler.warmup_steps": 10000},
        {"training.steps": 10, "lr_scheduler.warmup_steps": 2, "lr_scheduler.decay_ratio": 0.8},
        {"training.steps": 10, "lr_scheduler.total_steps": 1000},
        {"training.dataset": "text", "training.dataset_path": "x"},
        {"compile.enable": False, "compile.components": (), "compile.backend": "aot_eager"},
        {"checkpoint.enable": True, "checkpoint.load_step": 3, "checkpoint.accept_changes": ("optimizer.lr",)},
    ],
)
def test_possible_combinations_pass(values: dict[str, Any]) -> None:
    assert problems_of(values) == []


def test_all_impossible_combinations_are_listed_at_once() -> None:
    assert len(problems_of({"model.flavor": "x", "optimizer.momentum": 0.5, "training.steps": 1, SHARD: 5})) == 4
