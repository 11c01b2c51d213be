"""Rules between settings: mesh, shape of the model, batch, schedule, and settings that would have no effect.

Pure arithmetic, so that an impossible run stops before any process group exists. What one setting may be on its own is
`config.py`; what needs the disk (tokenizer, data, checkpoints) is checked where that is opened.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from trainer.config import Config, get, settings
from trainer.config_values import list_words, nearest_hint, write_value
from trainer.models.llama.config import FLAVORS, LlamaConfig, build_llama_config

MOST_LISTED = 12


def check_config(config: Config, world_size: int) -> list[str]:
    """Return what makes the configuration impossible on `world_size` ranks; empty when nothing does."""
    mesh = list(_check_mesh(config, world_size))
    batch = [] if mesh else _check_batch(config, world_size)
    return [
        *mesh,
        *batch,
        *_check_model(config),
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
    degrees = (
        f"parallelism.data_parallel_replicate_degree = {replicate}, parallelism.data_parallel_shard_degree = {shard}, "
        f"parallelism.tensor_parallel_degree = {tp}"
    )
    ranks = _count(world_size, "rank")
    divisors = _divisors(world_size)
    if shard == 0:
        yield (
            f"{degrees}\nThe shard degree is a number of ranks, or -1 for all that are left. "
            f"Legal on {ranks}: -1, {_some(divisors)}."
        )
    elif shard == -1 and world_size % (replicate * tp):
        legal = [divisor for divisor in divisors if (world_size // divisor) % tp == 0] or divisors
        yield (
            f"{degrees}\n{ranks} can't be divided over replicate x tensor parallel = {replicate} x {tp} = "
            f"{replicate * tp} ranks: {world_size} / {replicate * tp} is not whole. "
            f"Legal tensor-parallel degrees on {ranks}: {_some(divisors)}; replicate degrees beside them: {_some(legal)}."
        )
    elif shard != -1 and replicate * shard * tp != world_size:
        products = [
            f"{divisor} x {world_size // divisor // tp} x {tp}"
            for divisor in divisors
            if world_size // divisor % tp == 0
        ]
        legal_products = f"Legal (replicate x shard x tensor parallel): {_some(products)}; or s" if products else "S"
        yield (
            f"{degrees}\nTheir product must be the number of ranks: {replicate} x {shard} x {tp} = "
            f"{replicate * shard * tp}, and there {'is' if world_size == 1 else 'are'} {ranks}. "
            f"{legal_products}et the shard degree to -1, which takes the ranks left."
        )


def _check_tensor_parallel(config: Config, c: LlamaConfig) -> Iterator[str]:
    """Heads and sequence are divided evenly; feed-forward and vocabulary may be uneven, but leave no rank without."""
    tp = config.parallelism.tensor_parallel_degree
    if tp == 1:
        if config.parallelism.disable_loss_parallel:
            yield (
                "parallelism.disable_loss_parallel = true, parallelism.tensor_parallel_degree = 1\n"
                "Without tensor parallelism there is no loss to take in parts. Remove it."
            )
        return
    given = f"parallelism.tensor_parallel_degree = {tp}"
    legal = [d for d in _divisors(c.n_kv_heads) if c.n_heads % d == 0 and config.training.seq_len % d == 0]
    for name, value in (("model.args.n_heads", c.n_heads), ("model.args.n_kv_heads", c.n_kv_heads)):
        if value % tp:
            yield (
                f"{given}, {name} = {value}\nEach rank has the same number of heads, and {value} / {tp} is not whole. "
                f"Legal tensor-parallel degrees for this model and sequence: {_some(legal)}."
            )
    if config.training.seq_len % tp:
        yield (
            f"{given}, training.seq_len = {config.training.seq_len}\nBetween layers each rank has the same part of the "
            f"sequence, and {config.training.seq_len} / {tp} is not whole. Legal tensor-parallel degrees for this model "
            f"and sequence: {_some(legal)}."
        )
    for name, value in (("model.args.ffn_dim", c.ffn_dim), ("model.args.vocab_size", c.vocab_size)):
        if -(-value // tp) * (tp - 1) >= value:
            yield (
                f"{given}, {name} = {value}\nEach rank takes {-(-value // tp)} of {value}, and none is left for the last. "
                "Use a smaller tensor-parallel degree."
            )


def _check_recompute(config: Config) -> Iterator[str]:
    settings = config.activation_checkpoint
    option = settings.selective_ac_option
    if settings.mode == "selective" and option != "op" and not (option.isdecimal() and int(option) > 0):
        yield (
            f"activation_checkpoint.selective_ac_option = {write_value(option)}\n"
            'It is "op", or a number n of at least 1 as text, which recomputes every n-th block. Example: "2".'
        )
    if settings.mode == "memory_budget" and not config.compile.enable:
        yield (
            'activation_checkpoint.mode = "memory_budget", compile.enable = false\n'
            "The budget is spent by the compiler. Set compile.enable = true, or another mode: "
            '"none", "selective", "full".'
        )


def _check_batch(config: Config, world_size: int) -> Iterator[str]:
    rows, local = config.training.global_batch_size, config.training.local_batch_size
    replicate, shard = dp_degrees(config, world_size)
    ranks = replicate * shard
    given = f"training.global_batch_size = {rows}, training.local_batch_size = {local}"
    at_once = local * ranks
    if rows == 0:
        yield f"{given}\nA step has at least 1 row. Use {at_once}, or -1 for {local} x {_count(ranks, 'data rank')}."
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
        return f"No local_batch_size helps: {_count(rows, 'row')} can't be divided over {_count(ranks, 'data rank')}."
    divisors = _divisors(rows // ranks)
    near = [max(d for d in divisors if d < local), min((d for d in divisors if d > local), default=0)]
    return f"Nearest legal local_batch_size: {list_words([str(d) for d in near if d], 'or')}."


def _check_model(config: Config) -> Iterator[str]:
    name, flavor = config.model.name, config.model.flavor
    if flavor not in FLAVORS[name]:
        yield (
            f"model.flavor = {write_value(flavor)}\n{name} has the flavors {list_words(FLAVORS[name])}."
            f"{nearest_hint(flavor, FLAVORS[name])}"
        )
        return
    c = build_llama_config(name, flavor, dataclasses.asdict(config.model.args))
    where = f"(model.flavor = {write_value(flavor)}, with what [model.args] changes)"
    if c.head_dim == 0:
        yield (
            f"model.args.dim = {c.dim}, model.args.n_heads = {c.n_heads} {where}\n"
            f"The width must be a multiple of the number of heads: {c.dim} / {c.n_heads} is not whole. "
            f"Heads that divide it: {_some(_divisors(c.dim))}; or set model.args.head_dim."
        )
    elif c.head_dim % 2:
        yield (
            f"model.args.head_dim = {c.head_dim} {where}\nRotary embeddings turn pairs, so the width of a head must be "
            f"even. Use {c.head_dim + 1}, or change model.args.n_heads."
        )
    if c.n_heads % c.n_kv_heads:
        yield (
            f"model.args.n_heads = {c.n_heads}, model.args.n_kv_heads = {c.n_kv_heads} {where}\n"
            f"Query heads share key/value heads evenly: {c.n_heads} / {c.n_kv_heads} is not whole. "
            f"Legal n_kv_heads: {_some(_divisors(c.n_heads))}."
        )
    yield from _check_rope(c)
    yield from _check_tensor_parallel(config, c)


def _check_rope(c: LlamaConfig) -> Iterator[str]:
    low, high = c.rope_scaling_low_freq_factor, c.rope_scaling_high_freq_factor
    if c.rope_scaling_factor > 1 and low >= high:
        yield (
            f"model.args.rope_scaling_low_freq_factor = {low}, model.args.rope_scaling_high_freq_factor = {high}\n"
            "The low factor must be below the high one. Llama 3.1 has 1 and 4."
        )


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


def _check_checkpoint(config: Config) -> Iterator[str]:
    checkpoint = config.checkpoint
    for key, off in (("load_step", -1), ("accept_changes", ())):
        value = getattr(checkpoint, key)
        if value != off and not checkpoint.enable:
            yield (
                f"checkpoint.{key} = {write_value(value)}\nIt has no effect with checkpoint.enable = false. "
                "Set checkpoint.enable = true, or leave it out."
            )
    experiment = [name for name, setting in settings(Config).items() if setting.metadata["half"] == "experiment"]
    for name in checkpoint.accept_changes:
        if name in experiment:
            continue
        given = f"checkpoint.accept_changes = {write_value(checkpoint.accept_changes)}\n"
        if name in settings(Config):
            yield f"{given}{write_value(name)} may change at any launch and needs no leave. Take it out of the list."
        else:
            yield f"{given}{write_value(name)} is not a setting.{nearest_hint(name, experiment)}"


def _divisors(number: int) -> list[int]:
    """Return the divisors in order; of absurdly large numbers only the smallest and largest, to answer at once."""
    small = [d for d in range(1, min(math.isqrt(number), 2**16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _some(values: list[int] | list[str]) -> str:
    """List values, the middle left out where there are many."""
    words = [str(value) for value in values]
    if len(words) > MOST_LISTED:
        words = [*words[: MOST_LISTED // 2], "...", *words[-MOST_LISTED // 2 :]]
    return ", ".join(words)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
