"""Laws of float8 settings: which layers they choose, and what is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.config.check import check_config
from trainer.config.check_float8 import SECTION, choose_float8, describe_choices
from trainer.config.load import load_config
from trainer.config.schema import Config, experiment_half, replace
from trainer.models.llama.config import build_llama_config, linear_layers

ON = {"model.converters": ("float8",)}
LAYERS = linear_layers(build_llama_config("llama3", "8B", {}))


def setting(**values: Any) -> dict[str, Any]:
    return {f"{SECTION}.{name}": value for name, value in values.items()}


def problems_of(values: dict[str, Any], world_size: int = 1) -> list[str]:
    return check_config(replace(Config(), ON | values), world_size)


def chosen(values: dict[str, Any]) -> dict[str, str]:
    config = replace(Config(), {"model.flavor": "8B"} | ON | values)
    return {choice.name: choice.reason for choice in choose_float8(config, LAYERS)}


def test_float8_is_off_by_default_and_then_chooses_nothing() -> None:
    assert not any(choice.is_chosen for choice in choose_float8(Config(), LAYERS))


def test_all_linear_layers_but_the_head_are_chosen_by_default() -> None:
    reasons = chosen({})
    assert len(reasons) == 32 * 7 + 1
    assert {name for name, reason in reasons.items() if reason} == {"output"}
    assert reasons["output"] == 'filter_fqns has "output"'


def test_a_pattern_is_found_anywhere_in_a_name() -> None:
    reasons = chosen(setting(filter_fqns=("attention.wk", "layers.1.*w2", "output")))
    skipped = {name for name, reason in reasons.items() if reason}
    assert skipped == {"output", "layers.1.feed_forward.w2", *(f"layers.{i}.attention.wk" for i in range(32))}
    assert not chosen(setting(filter_fqns=()))["output"]


def test_small_layers_are_left_out_where_asked() -> None:
    tensorwise = chosen(setting(filter_fqns=("auto_filter_small_kn",)))
    assert {name.rpartition(".")[2] for name, reason in tensorwise.items() if reason} == {"wk", "wv"}
    assert "at most 4096 -> 1024" in tensorwise["layers.0.attention.wk"]
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        rowwise = chosen(setting(filter_fqns=("auto_filter_small_kn",), recipe_name=recipe))
        assert {name.rpartition(".")[2] for name, reason in rowwise.items() if reason} == {"wk", "wv"}


@pytest.mark.parametrize(("dim", "ffn_dim", "left"), [(100, 257, 0), (96, 257, 4), (96, 256, 7)])
def test_widths_that_are_no_multiple_of_16_are_left_out(dim: int, ffn_dim: int, left: int) -> None:
    args = {"model.args.dim": dim, "model.args.ffn_dim": ffn_dim, "model.args.n_heads": 4, "model.args.head_dim": 16}
    config = replace(Config(), ON | args)
    c = build_llama_config("llama3", "debugmodel", vars(config.model.args))
    choices = choose_float8(config, linear_layers(c))
    assert sum(choice.is_chosen for choice in choices) == 6 * left
    problems = problems_of(args)
    assert len(problems) == (not left)
    assert all("No linear layer is left" in problem and "100: not a multiple of 16" in problem for problem in problems)


def test_the_table_says_how_many_and_why_not() -> None:
    config = replace(Config(), {"model.flavor": "8B"} | ON)
    title, *lines = describe_choices(choose_float8(config, LAYERS))
    assert title == "float8: 224 of 225 linear layers"
    assert len(lines) == 8
    assert "32 x layers.*.attention.wq" in lines[0]
    assert "4096 -> 4096" in lines[0]
    assert lines[-1].split() == ["1", "x", "output", "4096", "->", "128256", "filter_fqns", "has", '"output"']


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (setting(filter_fqns=("output", "atention")), ['"atention"', "layers.*.attention.wq"]),
        (
            setting(recipe_name="rowwise", enable_fsdp_float8_all_gather=True),
            ["enable_fsdp_float8_all_gather", 'recipe_name = "rowwise"', "tensorwise"],
        ),
        (
            setting(recipe_name="rowwise_with_gw_hp", precompute_float8_dynamic_scale_for_fsdp=True),
            ["precompute_float8_dynamic_scale_for_fsdp", "no effect"],
        ),
        (
            {**setting(precompute_float8_dynamic_scale_for_fsdp=True), "compile.enable": False},
            ["precompute_float8_dynamic_scale_for_fsdp", "compile.enable"],
        ),
        (
            {"training.local_batch_size": 1, "training.seq_len": 24},
            ["training.seq_len = 24", "multiples of 16: 24"],
        ),
        (setting(filter_fqns=("layers", "output")), ["No linear layer is left"]),
    ],
)
def test_what_can_not_be_or_has_no_effect_is_one_problem(values: dict[str, Any], parts: list[str]) -> None:
    (problem,) = problems_of(values)
    for part in parts:
        assert part in problem


def test_parts_that_kernels_do_not_take_are_refused_and_not_left_out() -> None:
    """Or the same experiment would have other float8 layers on another mesh."""
    mesh = {"parallelism.tensor_parallel_degree": 4, "model.args.ffn_dim": 96}
    (problem,) = problems_of(mesh, 4)
    assert "tensor_parallel_degree = 4" in problem
    assert "layers.*.feed_forward.w1 (96 / 4)" in problem
    assert "layers.*.attention.wq" not in problem
    assert problems_of(mesh | setting(filter_fqns=("feed_forward", "output")), 4) == []
    assert problems_of(mesh | setting(emulate=True), 4) == []
    assert problems_of({**mesh, "parallelism.tensor_parallel_degree": 2}, 2) == []


def test_tokens_are_free_where_no_float8_matmul_is_over_tokens() -> None:
    tokens = {"training.local_batch_size": 1, "training.seq_len": 24}
    assert problems_of(tokens | setting(recipe_name="rowwise_with_gw_hp")) == []
    assert problems_of(tokens | setting(emulate=True)) == []


@pytest.mark.parametrize(
    "values",
    [
        setting(recipe_name="rowwise"),
        setting(emulate=True),
        setting(filter_fqns=()),
        setting(enable_fsdp_float8_all_gather=True),
    ],
)
def test_a_float8_setting_without_the_converter_is_refused(values: dict[str, Any]) -> None:
    (problem,) = check_config(replace(Config(), values), 1)
    assert next(iter(values)) in problem
    assert 'model.converters = ["float8"]' in problem


def test_the_section_of_a_v02_file_is_let_be_where_it_asks_for_nothing(tmp_path: Path) -> None:
    file = tmp_path / "v02.toml"
    section = "enable_fsdp_float8_all_gather = false\nfilter_fqns = ['output']\n"
    for name in ("float8", "quantize.linear.float8"):
        file.write_text(f"[model]\nconverters = []\n[{name}]\n{section}", encoding="utf-8")
        assert check_config(load_config(["--config", str(file)]).config, 1) == []
    file.write_text(
        "[model]\nconverters = ['float8']\n[quantize.linear.float8]\nenable_fsdp_float8_all_gather = true\n"
        "precompute_float8_dynamic_scale_for_fsdp = true\nfilter_fqns = ['output']\n",
        encoding="utf-8",
    )
    config = load_config(["--config", str(file)]).config
    assert config.quantize.linear.float8.enable_fsdp_float8_all_gather
    assert check_config(config, 8) == []


def test_what_decides_the_numbers_belongs_to_the_experiment() -> None:
    half = experiment_half(replace(Config(), ON))
    assert half["model.converters"] == ["float8"]
    names = {name for name in half if name.startswith(SECTION)}
    assert names == {f"{SECTION}.recipe_name", f"{SECTION}.filter_fqns"}
