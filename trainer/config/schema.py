"""The configuration tree: every setting, its default, unit, meaning, and half.

Owns the schema only: reading files and command lines is `load.py`, rules between settings are `check.py`.
Section and key names are torchtitan v0.2's where the feature exists there.

Each field belongs to one half. *Experiment* fields decide the numbers of a step; a checkpoint stores them, and a resume
with other values is refused. *Machine* fields decide where and how fast those numbers are computed, and may change at
any launch.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any


def _setting(
    default: Any,
    doc: str,
    *,
    half: str,
    unit: str = "",
    choices: tuple[Any, ...] = (),
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """Declare a setting. `minimum` and `maximum` are legal, `above` is not."""
    facts = {"unit": unit, "choices": choices, "minimum": minimum, "maximum": maximum, "above": above}
    return field(default=default, metadata={"half": half, "doc": doc, **facts})


experiment = functools.partial(_setting, half="experiment")
machine = functools.partial(_setting, half="machine")


CONVERTER = "float8"  # of linear layers


@dataclass(frozen=True)
class Job:
    dump_folder: str = machine("./outputs", "Folder that receives everything the run writes.", unit="path")
    description: str = machine("", "Free text, logged at start.")


@dataclass(frozen=True)
class ModelArgs:
    """Widths that replace those of the flavor; None keeps the flavor's."""

    dim: int | None = experiment(None, "Width of the residual stream.", unit="features", minimum=1)
    n_layers: int | None = experiment(None, "Number of transformer blocks.", unit="blocks", minimum=1, maximum=10_000)
    n_heads: int | None = experiment(None, "Number of query heads.", unit="heads", minimum=1)
    n_kv_heads: int | None = experiment(None, "Number of key/value heads; divides n_heads.", unit="heads", minimum=1)
    head_dim: int | None = experiment(None, "Width of one head; even. None: dim / n_heads.", unit="features", minimum=2)
    ffn_dim: int | None = experiment(None, "Width of the feed-forward layer.", unit="features", minimum=1)
    vocab_size: int | None = experiment(None, "Rows of the embedding; at least the tokenizer's.", unit="ids", minimum=1)
    norm_eps: float | None = experiment(None, "Added to the mean square in RMSNorm.", above=0)
    rope_theta: float | None = experiment(None, "Base of the rotary frequencies.", above=0)
    rope_scaling_factor: float | None = experiment(None, "Llama 3.1's frequency scaling; 1 is none.", minimum=1)
    rope_scaling_low_freq_factor: float | None = experiment(None, "Llama 3.1's low_freq_factor.", above=0)
    rope_scaling_high_freq_factor: float | None = experiment(None, "Llama 3.1's high_freq_factor.", above=0)
    rope_scaling_original_seq_len: int | None = experiment(
        None, "Context length the unscaled frequencies were trained for.", unit="tokens", minimum=1
    )
    tie_embeddings: bool | None = experiment(None, "Let the output projection be the embedding matrix.")


@dataclass(frozen=True)
class Model:
    name: str = experiment("llama3", "Model family.", choices=("llama2", "llama3"))
    flavor: str = experiment("debugmodel", "Size within the family, a key of trainer/models/llama/config.py.")
    tokenizer_path: str = machine(
        "",
        'Where the tokenizer lies: "bytes", a SentencePiece .model, a Hugging Face tokenizer.json, or a folder with '
        "one. Empty: trained from the embedded corpus. Its content, not its path, belongs to the experiment.",
        unit="path",
    )
    converters: tuple[str, ...] = experiment(
        (), "What the model is turned into before training; see quantize.linear.float8.", choices=(CONVERTER,)
    )
    args: ModelArgs = field(default_factory=ModelArgs)

    @property
    def is_float8(self) -> bool:
        """Whether linear layers compute in float8: those that quantize.linear.float8 chooses."""
        return CONVERTER in self.converters


@dataclass(frozen=True)
class Training:
    dataset: str = experiment(
        "stdlib",
        "Kind of data: the embedded corpus (the source code of Python's standard library), text files, or JSON lines. "
        "The tokens it yields, not its name, belong to the experiment.",
        choices=("stdlib", "text", "jsonl"),
    )
    dataset_path: str = machine("", "File, folder or glob of a text or jsonl dataset.", unit="path")
    cache_folder: str = machine(
        "", "Where prepared tokens are kept. Empty: fullgraph/ in the user's cache folder.", unit="path"
    )
    seq_len: int = experiment(2048, "Length of a row.", unit="tokens", minimum=1)
    global_batch_size: int = experiment(
        -1,
        "Rows of one step over all ranks. -1: local_batch_size x data ranks of the first launch, then stored.",
        unit="rows",
        minimum=-1,
    )
    local_batch_size: int = machine(8, "Rows of one microbatch on one data rank.", unit="rows", minimum=1)
    steps: int = machine(10000, "How far this launch goes, counted from step 0 of the run.", unit="steps", minimum=1)
    max_norm: float = experiment(1.0, "Gradients are scaled down to this norm over all parameters.", above=0)
    dtype: str = experiment("float32", "Parameters and optimizer state at rest.", choices=("float32", "bfloat16"))
    mixed_precision_param: str = experiment(
        "bfloat16", "Parameters as gathered and used in compute.", choices=("float32", "bfloat16")
    )
    mixed_precision_reduce: str = experiment(
        "float32", "Gradients while they are summed over data ranks.", choices=("float32", "bfloat16")
    )
    gc_freq: int = machine(50, "Python's garbage collector runs every so many steps only.", unit="steps", minimum=1)


@dataclass(frozen=True)
class Float8:
    """Used where model.converters has "float8"."""

    recipe_name: str = experiment(
        "tensorwise",
        "One scale for each matrix, or one for each row; rowwise_with_gw_hp has weight gradients in high precision.",
        choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"),
    )
    filter_fqns: tuple[str, ...] = experiment(
        ("output",),
        "Linear layers in whose names one of these patterns is found stay as they are; each must be found in one. "
        '"auto_filter_small_kn" stands for layers too small to gain.',
    )
    enable_fsdp_float8_all_gather: bool = machine(
        False, "Gather weights in float8: the shard is cast before it travels. Needs recipe tensorwise."
    )
    precompute_float8_dynamic_scale_for_fsdp: bool = machine(
        False, "Let ranks agree on the scales of all weights in one small collective, instead of one for each weight."
    )
    emulate: bool = machine(False, "Multiply the same values in the compute dtype, on devices without float8.")


@dataclass(frozen=True)
class QuantizeLinear:
    float8: Float8 = field(default_factory=Float8)


@dataclass(frozen=True)
class Quantize:
    linear: QuantizeLinear = field(default_factory=QuantizeLinear)


@dataclass(frozen=True)
class Optimizer:
    name: str = experiment("AdamW", "Update rule.", choices=("AdamW", "Adam", "SGD"))
    lr: float = experiment(8e-4, "Peak learning rate.", minimum=0)
    beta1: float = experiment(0.9, "Decay of Adam's first moment.", minimum=0, maximum=1)
    beta2: float = experiment(0.95, "Decay of Adam's second moment.", minimum=0, maximum=1)
    eps: float = experiment(1e-8, "Added to Adam's denominator.", minimum=0)
    momentum: float = experiment(0.0, "SGD's momentum.", minimum=0, maximum=1)
    weight_decay: float = experiment(0.1, "Decoupled for AdamW, added to the gradient for Adam and SGD.", minimum=0)
    no_decay: tuple[str, ...] = experiment(
        ("*norm*", "tok_embeddings.*"), "Patterns of parameter names that get no weight decay; each must match."
    )


@dataclass(frozen=True)
class LRScheduler:
    warmup_steps: int = experiment(
        200, "Linear warm-up; step 1 has lr/warmup_steps, step warmup_steps the peak.", unit="steps", minimum=0
    )
    decay_ratio: float | None = experiment(
        None, "Last part of the schedule that decays (WSD). None: all after warm-up.", minimum=0, maximum=1
    )
    decay_type: str = experiment("linear", "Shape of the decay.", choices=("linear", "sqrt", "cosine"))
    min_lr_factor: float = experiment(0.0, "Floor of the decay as a part of the peak.", minimum=0, maximum=1)
    total_steps: int | None = experiment(
        None, "Length of the schedule. None: training.steps of the first launch, then stored.", unit="steps", minimum=1
    )


@dataclass(frozen=True)
class Parallelism:
    data_parallel_replicate_degree: int = machine(
        1, "Data ranks that hold whole copies of what the shard axis divides.", unit="ranks", minimum=1
    )
    data_parallel_shard_degree: int = machine(
        -1, "Data ranks that divide parameters, gradients and moments. -1: all ranks left.", unit="ranks", minimum=-1
    )

    fsdp_reshard_after_forward: str = machine(
        "default",
        "Free a gathered parameter after its use and gather it again in backward. default: always without pipeline.",
        choices=("always", "never", "default"),
    )
    fsdp_gather_once: bool = machine(
        False,
        "Gather parameters before the first microbatch of a step and sum gradients after the last: a rank holds both "
        "whole, and communicates once a step.",
    )
    fsdp_separate_gather_group: bool | None = machine(
        None,
        "Gather on a process group of its own, so that gathers and sums of gradients can travel at once. None: with a "
        "compiled graph on CPUs.",
    )
    tensor_parallel_degree: int = machine(
        1, "Ranks that divide heads, features and, between layers, the sequence.", unit="ranks", minimum=1
    )
    disable_loss_parallel: bool = machine(
        False, "Under tensor parallelism, gather the logits instead of summing the softmax over ranks."
    )


@dataclass(frozen=True)
class ActivationCheckpoint:
    mode: str = machine(
        "none", "What blocks compute again in backward.", choices=("none", "selective", "full", "memory_budget")
    )
    selective_ac_option: str = machine(
        "op",
        'For mode selective: "op" keeps every second matmul and attention, a number n recomputes every n-th block.',
    )
    memory_budget: float = machine(
        0.5, "For mode memory_budget: part of the activation memory to use, 1 keeping all.", minimum=0, maximum=1
    )


@dataclass(frozen=True)
class Compile:
    enable: bool = machine(True, "Compile the model as one graph (fullgraph=True).")
    backend: str = machine("inductor", "What runs the graph.", choices=("inductor", "aot_eager"))
    components: tuple[str, ...] = machine(
        ("model", "loss"), 'What is inside the graph: ["model"] or ["model", "loss"].', choices=("model", "loss")
    )
    bucketing: str = machine(
        "block",
        "Which parameters' collectives are merged: none; block, those of a transformer block, of what comes before the "
        "blocks, and of what comes after; or auto, as hides most on the run's hardware, and never less than block.",
        choices=("none", "block", "auto"),
    )
    bucket_modules: tuple[str, ...] = machine(
        (),
        'Patterns of module names that share a bucket, instead of the blocks: ["layers.*", "norm+output"]; "*" gives '
        "each match a bucket, + joins. What no pattern matches stays alone.",
    )
    memory_limit_gib: float | None = machine(
        None,
        "For bucketing auto: what a step may hold on one device. None: nine tenths of the device's memory.",
        unit="GiB",
        above=0,
    )
    reorder: bool = machine(
        True, "Start gathers one bucket ahead of their use, and wait for sums of gradients one bucket later."
    )


@dataclass(frozen=True)
class Checkpoint:
    enable: bool = machine(False, "Save checkpoints, and resume from the newest complete one.")
    folder: str = machine("checkpoint", "Folder below job.dump_folder.", unit="path")
    interval: int = machine(500, "Save every so many steps, and after the last.", unit="steps", minimum=1)
    interval_minutes: float | None = machine(
        None, "Save also when so much time has passed since the last save.", unit="minutes", above=0
    )
    async_mode: str = machine(
        "disabled",
        "async: training goes on as soon as the state is copied to host memory, and the copy is written beside it. "
        "async_with_pinned_mem: a GPU goes on computing during the copy, too.",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    keep_latest_k: int = machine(10, "Complete checkpoints to keep; 0 keeps all.", unit="checkpoints", minimum=0)
    keep_every: int = machine(
        0, "Checkpoints of every so many steps are never removed; 0: none for that.", unit="steps", minimum=0
    )
    load_step: int = machine(-1, "Step to resume from; -1 is the newest complete one.", unit="step", minimum=-1)
    initial_load_path: str = machine(
        "",
        "Weights to start from, where the folder holds no checkpoint: a step-N folder or the one above it. Schedule, "
        "data and optimizer start anew.",
        unit="path",
    )
    initial_load_in_hf: bool = machine(False, "initial_load_path is a Hugging Face folder with safetensors.")
    exclude_from_loading: tuple[str, ...] = machine(
        (),
        'Patterns of checkpoint keys that are not loaded and keep their first values, e.g. ["optimizer"]; each must '
        "match.",
    )
    last_save_model_only: bool = machine(
        False, "After the last step save weights alone, in export_dtype: the run can't be resumed from it."
    )
    last_save_in_hf: bool = machine(
        False, "After the last step also write a Hugging Face folder, step-N-hf, in export_dtype."
    )
    export_dtype: str = machine(
        "float32", "What last_save_* round weights to.", choices=("float32", "bfloat16", "float16")
    )
    accept_changes: tuple[str, ...] = machine(
        (), 'Experiment settings that may differ from the checkpoint\'s, e.g. ["optimizer.lr"].'
    )


@dataclass(frozen=True)
class Metrics:
    log_freq: int = machine(10, "Log every so many steps, and step 1 and the last.", unit="steps", minimum=1)
    enable_tensorboard: bool = machine(False, "Write TensorBoard files.")
    save_tb_folder: str = machine("tb", "Folder of the TensorBoard files below job.dump_folder.", unit="path")
    disable_color_printing: bool = machine(False, "No colour even where the terminal takes it.")
    peak_tflops: float | None = machine(
        None, "Peak of one device for MFU. None: from a table, or measured.", unit="TFLOP/s", above=0
    )


@dataclass(frozen=True)
class Validation:
    enable: bool = machine(False, "Compute the loss on held-out rows.")
    freq: int = machine(100, "Validate every so many steps, and after the last.", unit="steps", minimum=1)
    max_rows: int = machine(0, "Held-out rows to use, over all ranks; 0 uses all.", unit="rows", minimum=0)


@dataclass(frozen=True)
class Sample:
    tokens: int = machine(0, "Length of the text generated after the last step; 0 generates none.", minimum=0)
    prompt: str = machine("def ", "Start of the generated text.")
    temperature: float = machine(0.8, "Divides the logits; 0 always takes the likeliest token.", minimum=0)
    top_k: int = machine(50, "Only the k likeliest tokens are drawn; 0 draws from all.", unit="tokens", minimum=0)


@dataclass(frozen=True)
class Comm:
    init_timeout_seconds: int = machine(300, "Limit of a collective until step 1 is done.", unit="seconds", minimum=1)
    train_timeout_seconds: int = machine(100, "Limit of a collective after step 1.", unit="seconds", minimum=1)


@dataclass(frozen=True)
class Debug:
    seed: int = experiment(0, "Decides the initial weights and the order of the data.", minimum=0)
    deterministic: bool = machine(False, "Use only deterministic kernels; slower on GPUs.")


@dataclass(frozen=True)
class Config:
    """All settings of one launch."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    quantize: Quantize = field(default_factory=Quantize)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    sample: Sample = field(default_factory=Sample)
    comm: Comm = field(default_factory=Comm)
    debug: Debug = field(default_factory=Debug)


def settings(section: Any, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Map dotted names ("model.args.dim") to the fields of `section` (a config class) and its subsections."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for f in dataclasses.fields(section):
        name = prefix + f.name
        factory = f.default_factory
        if isinstance(factory, type) and dataclasses.is_dataclass(factory):
            found |= settings(factory, name + ".")
        else:
            found[name] = f
    return found


def get(config: Config, name: str) -> Any:
    """Return the value of the dotted setting `name`."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def replace(config: Any, values: dict[str, Any]) -> Any:
    """Return a copy of `config` with the dotted settings of `values` replaced."""
    direct = {name: value for name, value in values.items() if "." not in name}
    for section in {name.split(".")[0] for name in values if "." in name}:
        inner = {n.split(".", 1)[1]: v for n, v in values.items() if n.startswith(section + ".")}
        direct[section] = replace(getattr(config, section), inner)
    return dataclasses.replace(config, **direct)


def experiment_half(config: Config) -> dict[str, Any]:
    """Return the dotted experiment settings and their values, as plain JSON values."""
    names = [name for name, f in settings(Config).items() if f.metadata["half"] == "experiment"]
    values = {name: get(config, name) for name in names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
