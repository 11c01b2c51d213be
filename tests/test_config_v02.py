"""Laws of v0.2's names: a v0.2 file runs, or is refused key by key with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config.check import check_config
from trainer.config.load import ConfigError, load_config
from trainer.config.names import NAMES
from trainer.config.schema import Config, get, settings
from trainer.config.v02 import INERT, RENAMED, UNSUPPORTED

# The shape of v0.2.0's 8B file: what it sets, section by section.
LLAMA3_8B = """
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"
print_config = false

[profiling]
enable_profiling = true
save_traces_folder = "profile_trace"
profile_freq = 100

[metrics]
log_freq = 10
enable_tensorboard = true
save_tb_folder = "tb"

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"
converters = []

[optimizer]
name = "AdamW"
lr = 3e-4
eps = 1e-8

[lr_scheduler]
warmup_steps = 200

[training]
local_batch_size = 1
seq_len = 8192
max_norm = 1.0
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[checkpoint]
enable = false
folder = "checkpoint"
interval = 500
last_save_model_only = true
export_dtype = "float32"
async_mode = "disabled"

[compile]
enable = false
components = ["model", "loss"]

[activation_checkpoint]
mode = "selective"
selective_ac_option = "op"

[quantize.linear.float8]
enable_fsdp_float8_all_gather = false
precompute_float8_dynamic_scale_for_fsdp = false
filter_fqns = ["output"]

[validation]
enable = false
dataset = "c4_validation"
freq = 500
steps = 1200
"""

# Keys of v0.1 and v0.2 that are not in the file above.
OTHER_KEYS = """
activation_checkpoint.debug activation_checkpoint.determinism_check activation_checkpoint.early_stop
activation_checkpoint.memory_budget activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
activation_checkpoint.preserve_rng_state activation_checkpoint.visualize_memory_budget_pareto
checkpoint.create_seed_checkpoint checkpoint.enable_checkpoint checkpoint.enable_first_step_checkpoint
checkpoint.exclude_from_loading checkpoint.initial_load_in_hf checkpoint.initial_load_in_hf_quantized
checkpoint.initial_load_model_only checkpoint.initial_load_path checkpoint.last_save_in_hf
checkpoint.last_save_model_weights_only checkpoint.load_only comm.mode comm.save_traces_folder comm.trace_buf_size
compile.graph_passes compile.model_backend_override debug.deterministic_warn_only debug.moe_force_load_balance
experimental.custom_args_module experimental.custom_import fault_tolerance.enable fault_tolerance.semi_sync_method
float8.enable_fsdp_float8_all_gather float8.recipe_name job.config_file job.custom_config_module job.print_args
job.save_config_file job.use_for_integration_test lr_scheduler.lr_min memory_estimation.enable
memory_estimation.enabled metrics.enable_wandb metrics.save_for_all_ranks model.print_after_conversion
mx.recipe_name optimizer.early_step_in_backward parallelism.context_parallel_rotate_method
parallelism.disable_loss_parallel parallelism.enable_async_tensor_parallel parallelism.enable_compiled_autograd
parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree parallelism.fsdp_reshard_after_forward
parallelism.module_fqns_per_model_part parallelism.pipeline_parallel_schedule
parallelism.pipeline_parallel_split_points profiling.enable_memory_snapshot profiling.profiler_active
quantize.grouped_mm.float8.fqns quantize.linear.mx.recipe_name training.compile
training.dataloader.num_workers training.dataloader.prefetch_factor training.debug_moe_force_load_balance
training.deterministic training.enable_cpu_offload training.gc_debug training.seed validation.dataloader.num_workers
validation.dataset_path validation.local_batch_size validation.seq_len
"""


def load(*argv: str) -> Config:
    return load_config(argv).config


def problems_of(*argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(argv)
    return caught.value.problems


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "llama3_8b.toml"
    path.write_text(LLAMA3_8B, encoding="utf-8")
    return str(path)


def test_a_v02_file_is_refused_key_by_key(file: str) -> None:
    refused = {problem.split(" = ")[0]: problem for problem in problems_of("--config", file)}
    assert set(refused) == {"profiling.enable_profiling", "training.dataset"}
    for problem in refused.values():
        assert "llama3_8b.toml:" in problem
    assert "jsonl" in refused["training.dataset"]


def test_a_v02_file_runs_once_the_command_line_turns_off_what_we_lack(file: str) -> None:
    argv = ["--profiling.no_enable_profiling", "--training.dataset=stdlib"]
    config = load("--config", file, *argv)
    assert config.model.flavor == "8B"
    assert config.model.tokenizer_path == "./assets/hf/Llama-3.1-8B"
    assert (config.training.seq_len, config.training.local_batch_size, config.optimizer.lr) == (8192, 1, 3e-4)
    assert not config.compile.enable
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option) == ("selective", "op")
    assert check_config(config, 64) == []


@pytest.mark.parametrize("option", ["op", "2"])
@pytest.mark.parametrize("mode", ["selective", "none", "full"])
def test_v02_files_may_keep_the_selective_option_whatever_the_mode(mode: str, option: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[activation_checkpoint]\nmode = "{mode}"\nselective_ac_option = "{option}"\n', encoding="utf-8")
    config = load("--config", str(file))
    assert (config.activation_checkpoint.mode, config.activation_checkpoint.selective_ac_option) == (mode, option)
    assert check_config(config, 1) == []


def test_what_has_no_effect_while_its_switch_is_off_is_refused_when_it_is_on(file: str) -> None:
    argv = ["--config", file, "--validation.enable", "--checkpoint.enable"]
    refused = {problem.split(" = ")[0] for problem in problems_of(*argv)}
    assert {"validation.steps", "validation.dataset"} <= refused


@pytest.mark.parametrize("name", OTHER_KEYS.split())
def test_every_other_key_is_known(name: str) -> None:
    assert name in NAMES


def test_the_tables_hold_no_setting_of_ours_and_lead_to_settings_of_ours() -> None:
    ours = settings(Config)
    assert not (RENAMED.keys() | UNSUPPORTED.keys() | INERT) & ours.keys()
    assert not RENAMED.keys() & UNSUPPORTED.keys()
    assert not UNSUPPORTED.keys() & INERT
    assert set(RENAMED.values()) <= ours.keys()
    for key in UNSUPPORTED.values():
        assert not key.switch or ours[key.switch].type == "bool"
        assert not key.same_as or key.same_as in ours


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_neutral_values_are_accepted_and_others_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    key = UNSUPPORTED[name]
    switch_on = [f"--{key.switch}"] if key.switch else []
    for neutral in key.neutral:
        text = ",".join(neutral) if isinstance(neutral, list) else str(neutral)
        if not name.startswith("job.print") and name != "job.config_file":  # flags, on a command line
            load(*switch_on, f"--{name}={text}")
            load(*switch_on, f"--{name.replace('_', '-')}={text.lower()}")
    if key.same_as:
        load(*switch_on, f"--{name}={get(Config(), key.same_as)}")
    file = tmp_path / "run.toml"
    section, _, last = name.rpartition(".")
    file.write_text(f"[{section}]\n{last} = 1234\n", encoding="utf-8")
    (problem,) = problems_of("--config", str(file), *switch_on)
    assert problem.startswith(f"{name} = 1234 (")
    assert key.reason in problem
    assert "Leave it out" in problem
    if key.switch:
        load("--config", str(file), f"--{key.switch}=false")


@pytest.mark.parametrize("name", RENAMED)
def test_old_names_mean_our_settings(name: str) -> None:
    setting = settings(Config)[RENAMED[name]]
    kind, words = setting.type, [*setting.metadata["choices"], "x"]
    text, value = {
        "bool": ("false", False),
        "int": ("3", 3),
        "float": ("0.5", 0.5),
        "str": (words[0], words[0]),
        "tuple[str, ...]": ("x,y", ("x", "y")),
    }[str(kind)]
    loaded = load_config([f"--{name}", text])
    assert get(loaded.config, RENAMED[name]) == value
    assert loaded.origins[RENAMED[name]] == "command line"
    if kind == "bool":
        assert get(load(f"--{name}"), RENAMED[name]) is True


def test_two_names_of_one_setting_may_not_disagree_within_a_layer_but_the_command_line_wins(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[training]\nseed = 1\n[debug]\nseed = 2\n", encoding="utf-8")
    (problem,) = problems_of("--config", str(file))
    assert "training.seed = 1" in problem
    assert "debug.seed = 2" in problem
    file.write_text("[training]\nseed = 1\n[debug]\nseed = 1\n", encoding="utf-8")
    assert load("--config", str(file)).debug.seed == 1
    assert load("--config", str(file), "--debug.seed=3").debug.seed == 3
    assert load("--training.seed=3", "--debug.seed=3").debug.seed == 3


@pytest.mark.parametrize("name", ["llama3_simple_fsdp", "simple_fsdp.llama3"])
def test_the_simple_fsdp_experiment_is_what_we_do_anyway(name: str) -> None:
    module = "torchtitan.experiments.simple_fsdp.job_config"
    assert load("--model.name", name, f"--job.custom_config_module={module}").model.name == "llama3"


def test_switches_that_we_lack_take_every_usual_form() -> None:
    for argv in (["--metrics.no_enable_wandb"], ["--metrics.no-enable-wandb"], ["--metrics.enable_wandb", "false"]):
        assert load(*argv) == Config()
    for argv in (["--metrics.enable_wandb"], ["--metrics.enable_wandb", "True"]):
        assert len(problems_of(*argv)) == 1
