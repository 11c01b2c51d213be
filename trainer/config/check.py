"""Rules between settings: mesh, batch, optimizer, schedule, and settings that would have no effect.

Pure arithmetic, so that an impossible run stops before any process group exists. What one setting may be on its own is
`schema.py`, what the model's shape allows `check_model.py`; what needs the disk (tokenizer, data, checkpoints)
is checked where that is opened.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.config.arithmetic import count_of, divisors, list_some
from trainer.config.check_model import check_model
from trainer.config.schema import Config, get, settings
from trainer.config.values import list_words, nearest_hint, write_value


def check_config(config: Config, world_size: int) -> list[str]:
    """Return what makes the configuration impossible on `world_size` ranks; empty when nothing does."""
    mesh = list(_check_mesh(config, world_size))
    batch = [] if mesh else list(_check_batch(config, world_size))
    gathering = [] if mesh or batch else _check_gather_once(config, world_size)
    return [
        *mesh,
        *batch,
        *gathering,
        *check_model(config),
        *_check_optimizer(config),
        *_check_schedule(config),
        *_check_data(config),
        *_check_compile(config),
        *_check_recompute(config),
        *_check_checkpoint(config),
    ]


def dp_degrees(config: Config, world_size: int) -> tuple[int, int]:
    """Return the replicate and shard degrees, -1 resolved to the ranks left."""
    mesh = config.parallelism
    replicate, shard = mesh.data_parallel_replicate_degree, mesh.data_parallel_shard_degree
    return replicate, world_size // (replicate * mesh.tensor_parallel_degree) if shard == -1 else shard


def resolve_global_batch_size(config: Config, world_size: int) -> int:
    """Return the rows of one step; -1 is one microbatch on each data rank."""
    training = config.training
    return _rows_at_once(config, world_size) if training.global_batch_size == -1 else training.global_batch_size


def accumulation_steps(config: Config, world_size: int) -> int:
    """Return how many microbatches each data rank adds up in one step."""
    return resolve_global_batch_size(config, world_size) // _rows_at_once(config, world_size)


def _rows_at_once(config: Config, world_size: int) -> int:
    replicate, shard = dp_degrees(config, world_size)
    return config.training.local_batch_size * replicate * shard


def _check_mesh(config: Config, world_size: int) -> Iterator[str]:
    mesh = config.parallelism
    replicate, shard = mesh.data_parallel_replicate_degree, mesh.data_parallel_shard_degree
    tp = mesh.tensor_parallel_degree
    given = (
        f"parallelism.data_parallel_replicate_degree = {replicate}, parallelism.data_parallel_shard_degree = {shard}, "
        f"parallelism.tensor_parallel_degree = {tp}"
    )
    ranks = count_of(world_size, "rank")
    leaves_whole = world_size % (replicate * tp) == 0
    if shard == -1 and not leaves_whole:
        yield (
            f"{given}\nReplicate x tensor parallel must divide the number of ranks: {replicate} x {tp} = "
            f"{replicate * tp}, and {world_size} / {replicate * tp} is not whole. "
            f"{_degrees_beside(replicate, tp, world_size)}"
        )
    elif shard != -1 and replicate * shard * tp != world_size:
        rest = " Or set the shard degree to -1, which takes the ranks left." if leaves_whole else ""
        yield (
            f"{given}\nTheir product must be the number of ranks: {replicate} x {shard} x {tp} = "
            f"{replicate * shard * tp}, and there {'is' if world_size == 1 else 'are'} {ranks}. "
            f"{_whole_meshes(tp, world_size)}{rest}"
        )


def _degrees_beside(replicate: int, tp: int, world_size: int) -> str:
    """Name the legal values of either degree beside the other one, or of both."""
    legal = []
    if world_size % tp == 0:
        legal.append(f"replicate degrees beside tensor parallel {tp}: {list_some(divisors(world_size // tp))}")
    if world_size % replicate == 0:
        legal.append(
            f"tensor-parallel degrees beside replicate {replicate}: {list_some(divisors(world_size // replicate))}"
        )
    return f"Legal {'; '.join(legal or [f'products: {list_some(divisors(world_size))}'])}."


def _whole_meshes(tp: int, world_size: int) -> str:
    if world_size % tp:
        return f"Legal tensor-parallel degrees: {list_some(divisors(world_size))}."
    rest = world_size // tp
    meshes = [f"{replicate} x {rest // replicate} x {tp}" for replicate in divisors(rest)]
    return f"Legal (replicate x shard x tensor parallel): {list_some(meshes)}."


def _check_batch(config: Config, world_size: int) -> Iterator[str]:
    rows, local = config.training.global_batch_size, config.training.local_batch_size
    replicate, shard = dp_degrees(config, world_size)
    ranks = replicate * shard
    given = f"training.global_batch_size = {rows}, training.local_batch_size = {local}"
    at_once = local * ranks
    if rows == 0:
        yield f"{given}\nA step has at least 1 row. Use {at_once}, or -1 for {local} x {count_of(ranks, 'data rank')}."
    elif rows > 0 and rows % at_once:
        below, above = rows // at_once * at_once, (rows // at_once + 1) * at_once
        legal = f"{below} or {above}" if below else f"{above}"
        yield (
            f"{given}\nThe global batch must be a multiple of local_batch_size x data ranks = {local} x {ranks} = "
            f"{at_once}, and {rows} / {at_once} is not whole. "
            f"Nearest legal global_batch_size: {legal}. {_legal_local(rows, local, ranks)}"
        )


def _legal_local(rows: int, local: int, ranks: int) -> str:
    if rows % ranks:
        return (
            f"No local_batch_size helps: {count_of(rows, 'row')} can't be divided over {count_of(ranks, 'data rank')}."
        )
    legal = divisors(rows // ranks)
    near = [max(d for d in legal if d < local), min((d for d in legal if d > local), default=0)]
    return f"Nearest legal local_batch_size: {list_words([str(d) for d in near if d], 'or')}."


def _check_optimizer(config: Config) -> Iterator[str]:
    rule = config.optimizer.name
    unused = ("beta1", "beta2", "eps") if rule == "SGD" else ("momentum",)
    for key in unused:
        name = f"optimizer.{key}"
        value, default = get(config, name), settings(Config)[name].default
        if value != default:
            users = "AdamW and Adam use it" if rule == "SGD" else "SGD uses it"
            yield (
                f"{name} = {value}\nIt has no effect with optimizer.name = {write_value(rule)}; {users}. "
                f"Leave it out, or set it to {default}."
            )
    for key in ("beta1", "beta2"):
        if get(config, f"optimizer.{key}") == 1:
            yield f"optimizer.{key} = 1.0\nThe moment would never take in a gradient. Use a value below 1, such as 0.9."


def _check_schedule(config: Config) -> Iterator[str]:
    schedule, steps = config.lr_scheduler, config.training.steps
    total = steps if schedule.total_steps is None else schedule.total_steps
    length = "training.steps" if schedule.total_steps is None else "lr_scheduler.total_steps"
    warmup, ratio = schedule.warmup_steps, schedule.decay_ratio
    decay = 0 if ratio is None else round(ratio * total)
    longer = "" if schedule.total_steps else " or set lr_scheduler.total_steps to the length of the whole run,"
    if warmup > total:
        yield (
            f"lr_scheduler.warmup_steps = {warmup}, {length} = {total}\n"
            f"The warm-up must end within the schedule, or the peak is never reached. "
            f"Use at most {total} steps,{longer} or raise {length}."
        )
    elif warmup + decay > total:
        yield (
            f"lr_scheduler.warmup_steps = {warmup}, lr_scheduler.decay_ratio = {ratio}, {length} = {total}\n"
            f"Warm-up and decay must fit the schedule: {warmup} + {ratio} x {total} = {warmup + decay} steps. "
            f"Use a warm-up of at most {total - decay}, or a decay_ratio of at most {(total - warmup) / total:.4g}."
        )
    if steps > total:
        yield (
            f"training.steps = {steps}, lr_scheduler.total_steps = {total}\nThe schedule ends before the run does, and "
            f"leaves {steps - total} steps at the floor. Use at most {total} steps, or raise lr_scheduler.total_steps."
        )


def _check_data(config: Config) -> Iterator[str]:
    dataset, path = config.training.dataset, config.training.dataset_path
    if dataset == "stdlib" and path:
        yield (
            f'training.dataset_path = {write_value(path)}\nIt has no effect with training.dataset = "stdlib", which is '
            'the embedded corpus. Set training.dataset to "text" or "jsonl", or leave the path out.'
        )
    elif dataset != "stdlib" and not path:
        yield (
            f"training.dataset = {write_value(dataset)}\nIt needs training.dataset_path: a file, a folder or a glob. "
            'Set it, or use training.dataset = "stdlib", which needs no files.'
        )


def _check_compile(config: Config) -> Iterator[str]:
    if config.compile.enable and "model" not in config.compile.components:
        yield (
            f"compile.components = {write_value(config.compile.components)}\nThe graph holds at least the model. "
            'Use ["model"] or ["model", "loss"], or turn it off with compile.enable = false.'
        )
    if config.compile.bucket_modules and config.compile.bucketing != "block":
        yield (
            f"compile.bucket_modules = {write_value(config.compile.bucket_modules)}\nIt has no effect with "
            f'compile.bucketing = {write_value(config.compile.bucketing)}; "block" uses it. '
            'Leave it out, or use compile.bucketing = "block".'
        )
    if config.parallelism.fsdp_separate_gather_group and not config.compile.enable:
        yield (
            "parallelism.fsdp_separate_gather_group = true, compile.enable = false\nGathers are moved in the compiled "
            "graph. Turn compilation on, or leave it out."
        )
    if config.compile.bucketing == "auto":
        yield from _check_auto(config)
    elif config.compile.memory_limit_gib is not None:
        yield (
            f"compile.memory_limit_gib = {config.compile.memory_limit_gib}\nIt has no effect with "
            f'compile.bucketing = {write_value(config.compile.bucketing)}; "auto" uses it. '
            'Leave it out, or use compile.bucketing = "auto".'
        )


def _check_gather_once(config: Config, world_size: int) -> Iterator[str]:
    given, reshard = "parallelism.fsdp_gather_once = true", config.parallelism.fsdp_reshard_after_forward
    if not config.parallelism.fsdp_gather_once:
        return
    if accumulation_steps(config, world_size) == 1:
        yield (
            f"{given}, training.global_batch_size = {config.training.global_batch_size}, "
            f"training.local_batch_size = {config.training.local_batch_size}\nA step has 1 microbatch, whose gathers "
            "and sums are already those of the step, a block at a time. Leave it out, or accumulate more microbatches: "
            "a lower local_batch_size or a larger global_batch_size."
        )
    if reshard != "default":
        yield (
            f"{given}, parallelism.fsdp_reshard_after_forward = {write_value(reshard)}\nParameters are whole for the "
            "whole step, and nothing is gathered in between. Leave out one of the two."
        )
    if config.model.is_float8 and config.quantize.linear.float8.recipe_name == "tensorwise":
        yield (
            f'{given}, quantize.linear.float8.recipe_name = "tensorwise"\nA tensorwise weight is cast where it is '
            'gathered, with a scale that ranks agree on each time. Use recipe_name = "rowwise", or leave out '
            "fsdp_gather_once."
        )


def _check_auto(config: Config) -> Iterator[str]:
    given = 'compile.bucketing = "auto"'
    if not config.compile.enable:
        yield f"{given}, compile.enable = false\nThe plan is one for the compiled graph. Turn compilation on."
    if not config.compile.reorder:
        yield (
            f"{given}, compile.reorder = false\nThe plan hides communication behind computation, for which it must be "
            'reordered. Set compile.reorder = true, or use compile.bucketing = "block".'
        )


def _check_recompute(config: Config) -> Iterator[str]:
    recompute = config.activation_checkpoint
    given, default = (
        "activation_checkpoint.memory_budget",
        settings(Config)["activation_checkpoint.memory_budget"].default,
    )
    if recompute.mode != "memory_budget" and recompute.memory_budget != default:
        yield (
            f"{given} = {recompute.memory_budget}\nIt has no effect with activation_checkpoint.mode = "
            f'{write_value(recompute.mode)}; "memory_budget" uses it. Leave it out, or set it to {default}.'
        )
    if recompute.mode == "memory_budget" and not config.compile.enable:
        yield (
            'activation_checkpoint.mode = "memory_budget", compile.enable = false\n'
            "The compiler is what spends the budget. Set compile.enable = true, or another mode: "
            '"none", "selective" or "full".'
        )


def _check_checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    without_effect = {"load_step": -1, "accept_changes": (), "initial_load_path": "", "exclude_from_loading": ()}
    for key, off in without_effect.items():
        value = getattr(checkpoint, key)
        if value != off and not checkpoint.enable:
            yield (
                f"checkpoint.{key} = {write_value(value)}\nIt has no effect with checkpoint.enable = false. "
                "Set checkpoint.enable = true, or leave it out."
            )
    if checkpoint.initial_load_in_hf and not checkpoint.initial_load_path:
        yield (
            "checkpoint.initial_load_in_hf = true\nIt has no effect without checkpoint.initial_load_path. "
            "Name the Hugging Face folder there, or leave it out."
        )
    if checkpoint.export_dtype != "float32" and not (checkpoint.last_save_model_only or checkpoint.last_save_in_hf):
        yield (
            f"checkpoint.export_dtype = {write_value(checkpoint.export_dtype)}\nIt has no effect without "
            "checkpoint.last_save_model_only or checkpoint.last_save_in_hf. Set one of them, or leave it out."
        )
    if checkpoint.keep_every and not checkpoint.keep_latest_k:
        yield (
            f"checkpoint.keep_every = {checkpoint.keep_every}, checkpoint.keep_latest_k = 0\nIt has no effect where "
            "all checkpoints are kept. Leave it out, or set checkpoint.keep_latest_k."
        )
    for key in ("folder", "initial_load_path"):
        if "://" in getattr(checkpoint, key):
            yield (
                f"checkpoint.{key} = {write_value(getattr(checkpoint, key))}\nCheckpoints lie in folders of a file "
                "system; remote storage isn't there yet. Mount it, and give the path."
            )
    if "://" in config.job.dump_folder:
        yield (
            f"job.dump_folder = {write_value(config.job.dump_folder)}\nA run writes to folders of a file system; "
            "remote storage isn't there yet. Mount it, and give the path."
        )
    experiment = [name for name, setting in settings(Config).items() if setting.metadata["half"] == "experiment"]
    experiment.append("training.dataset")  # a checkpoint stores under this name what the tokens are
    for name in checkpoint.accept_changes:
        if name in experiment:
            continue
        given = f"checkpoint.accept_changes = {write_value(checkpoint.accept_changes)}\n"
        if name in settings(Config):
            yield f"{given}{write_value(name)} may change at any launch and needs no leave. Take it out of the list."
        else:
            yield f"{given}{write_value(name)} is not a setting.{nearest_hint(name, experiment)}"
