"""Laws between settings: possible runs pass, impossible ones are named with the arithmetic and a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.config.check import accumulation_steps, check_config, dp_degrees, resolve_global_batch_size
from trainer.config.schema import Config, replace

REPLICATE = "parallelism.data_parallel_replicate_degree"
SHARD = "parallelism.data_parallel_shard_degree"
TENSOR = "parallelism.tensor_parallel_degree"
GLOBAL = "training.global_batch_size"
LOCAL = "training.local_batch_size"
DIVISIBLE_BY_12 = {"model.args.dim": 288, "model.args.n_heads": 12, "model.args.n_kv_heads": 12, "training.seq_len": 12}
DIVISIBLE_BY_8 = {"model.args.n_kv_heads": 8}


def problems_of(values: dict[str, Any], world_size: int = 1) -> list[str]:
    return check_config(replace(Config(), values), world_size)


def test_the_defaults_run_on_any_number_of_ranks() -> None:
    for world_size in (1, 2, 3, 8, 512):
        assert check_config(Config(), world_size) == []
        assert dp_degrees(Config(), world_size) == (1, world_size)
        assert resolve_global_batch_size(Config(), world_size) == 8 * world_size
        assert accumulation_steps(Config(), world_size) == 1


def test_a_mesh_passes_exactly_when_its_product_is_the_number_of_ranks() -> None:
    for world_size in (1, 2, 3, 4, 6, 8, 12):
        for replicate in (1, 2, 3, 4, 5, 12):
            for shard in (-1, 0, 1, 2, 3, 4, 6, 12, 13):
                for tp in (1, 2, 3, 4, 6, 12):
                    mesh = {REPLICATE: replicate, SHARD: shard, TENSOR: tp}
                    config = replace(Config(), {**DIVISIBLE_BY_12, **mesh})
                    whole = world_size % (replicate * tp) == 0
                    possible = whole if shard == -1 else replicate * shard * tp == world_size
                    assert (check_config(config, world_size) == []) is possible, (world_size, mesh)
                    if possible:
                        degrees = dp_degrees(config, world_size)
                        assert degrees[0] == replicate
                        assert degrees[0] * degrees[1] * tp == world_size


def test_mesh_problems_print_the_product_and_the_legal_values() -> None:
    (problem,) = problems_of({REPLICATE: 2, SHARD: 3}, 8)
    assert "2 x 3 x 1 = 6" in problem
    assert "1 x 8 x 1, 2 x 4 x 1, 4 x 2 x 1, 8 x 1 x 1" in problem
    (problem,) = problems_of({REPLICATE: 2, SHARD: 2, TENSOR: 4}, 8)
    assert "2 x 2 x 4 = 16, and there are 8 ranks" in problem
    assert "1 x 2 x 4, 2 x 1 x 4" in problem
    (problem,) = problems_of({REPLICATE: 3}, 8)
    assert "8 / 3" in problem
    assert "beside tensor parallel 1: 1, 2, 4, 8" in problem
    (problem,) = problems_of({REPLICATE: 4, TENSOR: 4}, 8)
    assert "4 x 4 = 16, and 8 / 16 is not whole" in problem
    assert "replicate degrees beside tensor parallel 4: 1, 2;" in problem
    assert "tensor-parallel degrees beside replicate 4: 1, 2." in problem
    (problem,) = problems_of({SHARD: 0}, 4)
    assert "1 x 4 x 1, 2 x 2 x 1, 4 x 1 x 1" in problem
    assert "to -1" in problem


@pytest.mark.parametrize("mesh", [(2, 3, 1), (2, 4, 4), (1, 0, 2), (3, 1, 4), (1, 1, 3), (16, 1, 12)])
def test_the_meshes_that_a_problem_proposes_are_legal(mesh: tuple[int, int, int]) -> None:
    values = dict(zip((REPLICATE, SHARD, TENSOR), mesh, strict=True))
    (problem,) = problems_of({**DIVISIBLE_BY_12, **values}, 16)
    products = re.findall(r"(\d+) x (\d+) x (\d+)[,.]", problem)
    for product in products:
        assert problems_of(dict(zip(values, map(int, product), strict=True)), 16) == []
    degrees = re.findall(r"Legal tensor-parallel degrees: ([\d, ]*)\.", problem)
    assert bool(products) is (16 % mesh[2] == 0)
    assert bool(degrees) is (16 % mesh[2] != 0)
    for degree in degrees[0].split(", ") if degrees else []:
        assert 16 % int(degree) == 0
    if "to -1" in problem:
        assert problems_of({**DIVISIBLE_BY_12, **values, SHARD: -1}, 16) == []


@pytest.mark.parametrize(("replicate", "tp"), [(3, 1), (1, 3), (4, 4), (2, 3), (3, 12)])
def test_the_degrees_that_a_problem_proposes_beside_the_other_are_legal(replicate: int, tp: int) -> None:
    (problem,) = problems_of({**DIVISIBLE_BY_12, REPLICATE: replicate, TENSOR: tp}, 8)
    found = 0
    for pattern, other in (
        (rf"replicate degrees beside tensor parallel {tp}: ([\d, ]+)", {TENSOR: tp}),
        (rf"tensor-parallel degrees beside replicate {replicate}: ([\d, ]+)", {REPLICATE: replicate}),
    ):
        name = REPLICATE if TENSOR in other else TENSOR
        for degrees in re.findall(pattern, problem):
            for degree in degrees.split(", "):
                found += 1
                assert problems_of({**DIVISIBLE_BY_8, name: int(degree), **other}, 8) == []
    assert bool(found) is (8 % replicate == 0 or 8 % tp == 0)
    assert ("Legal products: 1, 2, 4, 8." in problem) is not bool(found)


def test_the_data_ranks_of_a_batch_leave_out_tensor_parallel_ranks() -> None:
    config = replace(Config(), {TENSOR: 4, GLOBAL: 64, LOCAL: 8})
    assert check_config(config, 16) == []
    assert dp_degrees(config, 16) == (1, 4)
    assert accumulation_steps(config, 16) == 2
    assert resolve_global_batch_size(replace(config, {GLOBAL: -1}), 16) == 32


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({TENSOR: 8}, ["n_heads = 8, model.args.n_kv_heads = 4", "4 / 8 is not whole", "sequence: 1, 2, 4."]),
        ({TENSOR: 16}, ["8 / 16 and 4 / 16 are not whole", "sequence: 1, 2, 4."]),
        ({TENSOR: 2, "training.seq_len": 1023}, ["training.seq_len = 1023", "1023 / 2 is not whole", "sequence: 1."]),
        ({TENSOR: 4, "training.seq_len": 6}, ["6 / 4 is not whole", "sequence: 1, 2."]),
        ({TENSOR: 4, "model.args.ffn_dim": 5}, ["ffn_dim = 5", "next 2 of 5", "sequence: 1, 2."]),
        ({TENSOR: 4, "model.args.vocab_size": 3}, ["vocab_size = 3", "next 1 of 3", "sequence: 1, 2."]),
    ],
)
def test_tensor_parallel_divides_heads_and_sequence_and_leaves_no_rank_empty(
    values: dict[str, Any], parts: list[str]
) -> None:
    (problem,) = problems_of(values, world_size=values[TENSOR])
    assert problem.startswith(f"{TENSOR} = {values[TENSOR]}, ")
    for part in parts:
        assert part in problem
    (legal,) = re.findall(r"for this model and sequence: ([\d, ]+)\.", problem)
    for degree in range(1, 2 * values[TENSOR]):
        possible = str(degree) in legal.split(", ")
        assert (problems_of({**values, TENSOR: degree}, world_size=degree) == []) is possible, degree


@pytest.mark.parametrize(
    "widths",
    [{"model.args.ffn_dim": 7}, {"model.args.vocab_size": 4095}, {"model.args.ffn_dim": 4}, {"model.args.ffn_dim": 10}],
)
def test_tensor_parallel_takes_uneven_widths_that_leave_every_rank_some(widths: dict[str, int]) -> None:
    assert problems_of({TENSOR: 4, **widths}, 4) == []


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
    (
        {"activation_checkpoint.mode": "memory_budget", "compile.enable": False},
        ["compile.enable = false", "compile.enable = true", '"none", "selective" or "full"'],
    ),
    ({"parallelism.fsdp_gather_once": True}, ["fsdp_gather_once = true", "1 microbatch,", "lower local_batch_size"]),
    (
        {"parallelism.fsdp_gather_once": True, "parallelism.fsdp_reshard_after_forward": "always", GLOBAL: 16},
        ["fsdp_gather_once = true", 'fsdp_reshard_after_forward = "always"', "Leave out one"],
    ),
    (
        {"parallelism.fsdp_gather_once": True, "model.converters": ("float8",), GLOBAL: 16},
        ["fsdp_gather_once = true", 'recipe_name = "tensorwise"', 'Use recipe_name = "rowwise"'],
    ),
    ({"activation_checkpoint.memory_budget": 0.3}, ["memory_budget = 0.3", "no effect", '"none"', "set it to 0.5"]),
    (
        {"activation_checkpoint.memory_budget": 0.3, "activation_checkpoint.mode": "full"},
        ["no effect", '"full"', '"memory_budget" uses it'],
    ),
    (
        {"optimizer.no_decay": ("*norm*", "foo")},
        ['["*norm*", "foo"]', '"foo" does not', "layers.*.attention.wq.weight"],
    ),
    ({"model.args.tie_embeddings": True, "optimizer.no_decay": ("output.*",)}, ['"output.*" does not']),
    (
        {"compile.bucket_modules": ("layers.*", "norn+out")},
        ['"norn" and "out" do not', "norm, output and tok_embeddings"],
    ),
    ({"compile.bucket_modules": ("layers.9",)}, ['"layers.9" does not']),
    ({"compile.bucket_modules": ("norm.weight",)}, ['"norm.weight" does not']),
    ({TENSOR: 1, "parallelism.disable_loss_parallel": True}, ["no effect", f"{TENSOR} = 1", "Leave it out"]),
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
        {"activation_checkpoint.mode": "memory_budget", "activation_checkpoint.memory_budget": 0.0},
        {"checkpoint.enable": True, "checkpoint.accept_changes": ("training.dataset",)},
        {"activation_checkpoint.mode": "full", "compile.enable": False},
        {"activation_checkpoint.mode": "full", "activation_checkpoint.selective_ac_option": "99"},
        {"activation_checkpoint.mode": "selective", "compile.enable": False},
        {"optimizer.no_decay": ("*norm*", "layers.5.*", "output.weight")},
        {"optimizer.no_decay": ()},
        {
            "compile.bucket_modules": ("layers.*.attention", "layers.5", "layers", "norm+output"),
            "compile.enable": False,
        },
        {"compile.bucket_modules": ("output",), "model.args.tie_embeddings": True},
        {"checkpoint.enable": True, "checkpoint.load_step": 3, "checkpoint.accept_changes": ("optimizer.lr",)},
    ],
)
def test_possible_combinations_pass(values: dict[str, Any]) -> None:
    assert problems_of(values) == []


def test_all_impossible_combinations_are_listed_at_once() -> None:
    assert len(problems_of({"model.flavor": "x", "optimizer.momentum": 0.5, "training.steps": 1, SHARD: 5})) == 4


@pytest.mark.parametrize("option", ["0", "7", "-1", "1.5", "ops", "", "\u0662", "9" * 5000])
def test_a_selective_option_is_op_or_a_number_of_blocks_that_there_are(option: str) -> None:
    values = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": option}
    (problem,) = problems_of(values)
    assert "selective_ac_option = " in problem
    assert "n_layers = 6" in problem
    assert 'Legal: "op", and "1" to "6".' in problem


def test_every_legal_selective_option_passes() -> None:
    for option in ("op", "1", "2", "3", "4", "5", "6"):
        values = {"activation_checkpoint.mode": "selective", "activation_checkpoint.selective_ac_option": option}
        assert problems_of(values) == []


def test_loss_parallel_can_be_off_compiled_or_not() -> None:
    for enable in (True, False):
        assert problems_of({TENSOR: 2, "parallelism.disable_loss_parallel": True, "compile.enable": enable}, 2) == []


def test_an_automatic_plan_needs_the_compiler_the_order_and_equal_sizes_on_all_ranks() -> None:
    auto = {"compile.bucketing": "auto"}
    assert problems_of(auto | {"compile.memory_limit_gib": 40.0}, 8) == []
    assert (
        problems_of(auto | {"model.args.vocab_size": 257}, 2) == []
    )  # shards may be uneven, not tensor parallel parts
    for name, value in (("compile.enable", False), ("compile.reorder", False)):
        (problem,) = problems_of(auto | {name: value}, 2)
        assert 'compile.bucketing = "auto"' in problem
        assert name in problem
    (problem,) = problems_of(auto | {TENSOR: 2, "model.args.vocab_size": 257}, 2)
    assert "257 / 2 is not whole" in problem
    assert problems_of({TENSOR: 2, "model.args.vocab_size": 257}, 2) == []
    (problem,) = problems_of({"compile.memory_limit_gib": 40.0}, 2)
    assert '"auto" uses it' in problem
