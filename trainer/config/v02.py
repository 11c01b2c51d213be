"""torchtitan's v0.1 and v0.2 vocabulary, where it differs from ours: old names, and names of what we lack.

A file written for v0.2 runs here, or is refused key by key. `RENAMED` keys mean one of our settings. `UNSUPPORTED`
keys are refused unless they hold a neutral value, one that asks for nothing we lack. `INERT` keys only tune features
whose own switch is off or refused, or choose between ways that are one here, so any value is accepted.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import tomli

from trainer.config.schema import Config, get
from trainer.config.values import NONE, SWITCH_WORDS, Given, list_words, write_value

_FLOAT8_KEYS = (
    *("emulate", "enable_fsdp_float8_all_gather", "filter_fqns", "precompute_float8_dynamic_scale_for_fsdp"),
    "recipe_name",
)

RENAMED = {
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "checkpoint.last_save_model_weights_only": "checkpoint.last_save_model_only",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    "model.hf_assets_path": "model.tokenizer_path",
    "training.compile": "compile.enable",
    "training.deterministic": "debug.deterministic",
    "training.seed": "debug.seed",
    **{f"float8.{key}": f"quantize.linear.float8.{key}" for key in _FLOAT8_KEYS},
}

VALUE_ALIASES = {"model.name": {"llama3_simple_fsdp": "llama3", "simple_fsdp.llama3": "llama3"}}

_C4 = (
    "It is read as local files. Get some: hf download allenai/c4 --repo-type dataset "
    "--include 'en/c4-{split}.0000*.json.gz' --local-dir data/c4. Then: --training.dataset jsonl "
    "--training.dataset_path 'data/c4/en/*.json.gz'."
)
VALUE_HINTS = {
    "training.dataset": {
        "c4": _C4.format(split="train"),
        "c4_test": _C4.format(split="train"),
        "c4_validation": _C4.format(split="validation"),
    },
}


class Unsupported(NamedTuple):
    """A key we lack: the values that ask for nothing (text may be a pattern), and why others are refused.

    With `switch`, our setting of that name must be on for the key to matter. With `same_as`, the value of that setting
    is neutral too.
    """

    neutral: tuple[Any, ...]
    reason: str
    switch: str = ""
    same_as: str = ""


_NO_PIPELINE = "Pipeline parallelism is not there yet; use the data parallel degrees"
_NO_EXPERTS = "There are no models with experts"
_NO_PROFILER = "The profiler is not there yet"
_NO_PASSES = "Passes over the graph are chosen by compile.bucketing and compile.reorder"
_ROWS_ON_DEMAND = "Rows are read from memory-mapped files without workers"
_ONE_STREAM = "Held-out rows come from training.dataset"
_TRAINING_GRAPH = "Validation runs in the training graph, with the rows of training"
_MODULES = "Modules of other programs are not imported"

UNSUPPORTED = {
    "activation_checkpoint.debug": Unsupported((False,), "Recomputed values are not compared with the first ones"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": Unsupported(
        ([], ["moe.router.gate"]), "Which matmuls are recomputed can't be said by module"
    ),
    "activation_checkpoint.visualize_memory_budget_pareto": Unsupported(
        (False,), "Memory against time is not drawn; try values of activation_checkpoint.memory_budget"
    ),
    "checkpoint.create_seed_checkpoint": Unsupported(
        (False,), "It has no use: weights depend on debug.seed and not on the ranks", "checkpoint.enable"
    ),
    "checkpoint.enable_first_step_checkpoint": Unsupported(
        (False,), "The first step is not saved; use checkpoint.interval", "checkpoint.enable"
    ),
    "checkpoint.initial_load_in_hf_quantized": Unsupported(
        (False,), "Quantized weights are not read", "checkpoint.enable"
    ),
    "checkpoint.initial_load_model_only": Unsupported(
        (True,), "checkpoint.initial_load_path gives weights alone; to continue with all, resume", "checkpoint.enable"
    ),
    "checkpoint.initial_load_model_weights_only": Unsupported(
        (True,), "checkpoint.initial_load_path gives weights alone; to continue with all, resume", "checkpoint.enable"
    ),
    "checkpoint.load_only": Unsupported((False,), "Checkpoints are both loaded and saved", "checkpoint.enable"),
    "comm.mode": Unsupported(("default",), "Use --dry-run --world-size N"),
    "comm.trace_buf_size": Unsupported((0,), "Use PyTorch's environment variable TORCH_FR_BUFFER_SIZE"),
    "compile.graph_passes": Unsupported(("",), _NO_PASSES),
    "compile.model_backend_override": Unsupported(("",), f"{_NO_PASSES}; see compile.backend"),
    "debug.deterministic_warn_only": Unsupported((False,), "A kernel without a deterministic form is an error"),
    "experimental.custom_args_module": Unsupported(("", "*simple_fsdp*"), _MODULES),
    "experimental.custom_import": Unsupported(("", "*simple_fsdp*"), _MODULES),
    "fault_tolerance.enable": Unsupported((False,), "torchft is not supported; a restarted run resumes"),
    "float8.force_recompute_fp8_weight_in_bwd": Unsupported(
        (False,), "What is gathered and cast again in backward is said by parallelism.fsdp_reshard_after_forward"
    ),
    "job.config_file": Unsupported(("",), 'Use --config, or extends = "base.toml" at the top of the file'),
    "job.custom_config_module": Unsupported(("", "*simple_fsdp*"), _MODULES),
    "job.print_args": Unsupported((False,), "Use the flag --print-config"),
    "job.print_config": Unsupported((False,), "Use the flag --print-config"),
    "job.save_config_file": Unsupported(("",), "The resolved config is always saved as TOML in job.dump_folder"),
    "memory_estimation.enable": Unsupported((False,), "Use --dry-run --world-size N"),
    "memory_estimation.enabled": Unsupported((False,), "Use --dry-run --world-size N"),
    "metrics.enable_wandb": Unsupported((False,), "Weights & Biases is not there yet; see metrics.enable_tensorboard"),
    "metrics.save_for_all_ranks": Unsupported((False,), "Rank 0 writes the metrics, which are those of all ranks"),
    "optimizer.early_step_in_backward": Unsupported((False,), "Gradients are clipped before the step, after backward"),
    "optimizer.implementation": Unsupported(
        ("fused",), "Only the fused kernels can leave weights and moments as they are after a step that isn't finite"
    ),
    "parallelism.context_parallel_degree": Unsupported((1,), "Context parallelism is not there yet"),
    "parallelism.enable_async_tensor_parallel": Unsupported(
        (False,), "No supported backend overlaps the collectives of tensor parallelism with its matmuls yet"
    ),
    "parallelism.enable_compiled_autograd": Unsupported((False,), "The compiled graph holds the backward already"),
    "parallelism.expert_parallel_degree": Unsupported((1,), _NO_EXPERTS),
    "parallelism.expert_tensor_parallel_degree": Unsupported((1,), _NO_EXPERTS),
    "parallelism.pipeline_parallel_degree": Unsupported((1,), _NO_PIPELINE),
    "profiling.enable_memory_snapshot": Unsupported((False,), _NO_PROFILER),
    "profiling.enable_profiling": Unsupported((False,), _NO_PROFILER),
    "training.dataloader.num_workers": Unsupported((0,), _ROWS_ON_DEMAND),
    "training.dataloader.pin_memory": Unsupported((False,), _ROWS_ON_DEMAND),
    "training.enable_cpu_offload": Unsupported((False,), "Offloading is not there yet; use more shard ranks"),
    "training.gc_debug": Unsupported((False,), "Debugging of garbage collection is not there; see training.gc_freq"),
    "validation.dataloader.num_workers": Unsupported((0,), _ROWS_ON_DEMAND, "validation.enable"),
    "validation.dataloader.pin_memory": Unsupported((False,), _ROWS_ON_DEMAND, "validation.enable"),
    "validation.dataset": Unsupported((), _ONE_STREAM, "validation.enable", "training.dataset"),
    "validation.dataset_path": Unsupported(("",), _ONE_STREAM, "validation.enable", "training.dataset_path"),
    "validation.local_batch_size": Unsupported((), _TRAINING_GRAPH, "validation.enable", "training.local_batch_size"),
    "validation.seq_len": Unsupported((), _TRAINING_GRAPH, "validation.enable", "training.seq_len"),
    "validation.steps": Unsupported(
        (-1,), "A number of steps means other rows on other ranks; use validation.max_rows", "validation.enable"
    ),
}

_INERT_KEYS = {
    "activation_checkpoint": "determinism_check early_stop preserve_rng_state",
    "checkpoint": "enable_ft_dataloader_checkpoints",
    "comm": "save_traces_file_prefix save_traces_folder",
    "debug": "moe_force_load_balance",
    "fault_tolerance": """fragment_sync_delay fragment_update_alpha group_size min_replica_size num_fragments
        module_fqns_per_model_fragment process_group process_group_timeout_ms replica_id semi_sync_method
        should_quantize sync_steps""",
    "job": "use_for_integration_test",
    "memory_estimation": "disable_fake_mode",
    "model": "print_after_conversion",
    "mx": "filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name",
    "parallelism": """context_parallel_load_balancer context_parallel_rotate_method expert_parallel_comm_backend
        module_fqns_per_model_part
        pipeline_parallel_expert_parallel_overlap pipeline_parallel_first_stage_less_layers
        pipeline_parallel_last_stage_less_layers pipeline_parallel_layers_per_stage pipeline_parallel_microbatch_size
        pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_split_points""",
    "profiling": "profile_freq profiler_active profiler_warmup save_memory_snapshot_folder save_traces_folder",
    "quantize.grouped_mm.float8": "fqns",
    "quantize.grouped_mm.mx": "fqns recipe_name",
    "quantize.linear.mx": "filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name",
    "training": "debug_moe_force_load_balance",
    "training.dataloader": "persistent_workers prefetch_factor",
    "validation.dataloader": "persistent_workers prefetch_factor",
}
INERT = frozenset(f"{section}.{key}" for section, keys in _INERT_KEYS.items() for key in keys.split())


def find_refusal(given: Given, config: Config) -> str:
    """Return why an unsupported key is refused and a way out; empty when its value is neutral or has no effect."""
    key = UNSUPPORTED[given.name]
    if key.switch and not get(config, key.switch):
        return ""
    value = _plain(_guess(given.value))
    if key.same_as and value == _plain(get(config, key.same_as)):
        return ""
    if any(_is_same(value, _plain(neutral)) for neutral in key.neutral):
        return ""
    accepted = [write_value(neutral) for neutral in key.neutral if "*" not in str(neutral)]
    accepted += [f"the value of {key.same_as}"] if key.same_as else []
    return f"{key.reason}. Leave it out; only {list_words(accepted, 'or')} is accepted."


def _is_same(value: Any, neutral: Any) -> bool:
    if isinstance(value, str) and isinstance(neutral, str):
        return fnmatchcase(value, neutral)
    if isinstance(value, str) and isinstance(neutral, list):  # as a command line writes it
        return value == ",".join(neutral)
    return bool(value == neutral)


def _plain(value: Any) -> Any:
    """Make the several ways to say nothing one."""
    is_nothing = value in ("", [], ()) or (isinstance(value, str) and value.lower() == NONE)
    return None if is_nothing else value


def _guess(value: Any) -> Any:
    """Read text as the TOML value it looks like; a command line does not tell the type of a setting we lack."""
    if not isinstance(value, str):
        return value
    if value.lower() in SWITCH_WORDS and not value.isdecimal():
        return SWITCH_WORDS[value.lower()]
    try:
        return tomli.loads(f"value = {value}")["value"]
    except ValueError:
        return value
