"""Rules of the model's shape: alone, with tensor parallelism and recomputation, and of patterns of names in it.

Part of `check.py`, which has the other rules between settings.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from trainer.config.arithmetic import divisors, list_some
from trainer.config.check_float8 import check_float8
from trainer.config.schema import Config
from trainer.config.values import list_words, nearest_hint, write_value
from trainer.models.llama.config import FLAVORS, LlamaConfig, build_llama_config, parameter_names, weight_modules

BY_OPERATION = "op"


def check_model(config: Config) -> Iterator[str]:
    """Yield what makes the model's shape impossible, alone and with tensor parallelism and recomputation."""
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
            f"Heads that divide it: {list_some(divisors(c.dim))}; or set model.args.head_dim."
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
            f"Legal n_kv_heads: {list_some(divisors(c.n_heads))}."
        )
    yield from _check_rope(c)
    yield from _check_tensor_parallel(config, c)
    yield from _check_selected_blocks(config, c)
    yield from _check_patterns(config, c)
    yield from check_float8(config, c)


def _check_rope(c: LlamaConfig) -> Iterator[str]:
    low, high = c.rope_scaling_low_freq_factor, c.rope_scaling_high_freq_factor
    if c.rope_scaling_factor > 1 and low >= high:
        yield (
            f"model.args.rope_scaling_low_freq_factor = {low}, model.args.rope_scaling_high_freq_factor = {high}\n"
            "The low factor must be below the high one. Llama 3.1 has 1 and 4."
        )


def _check_tensor_parallel(config: Config, c: LlamaConfig) -> Iterator[str]:
    """Heads and sequence are divided evenly; feed-forward and vocabulary may be uneven, but leave no rank without."""
    tp, seq_len = config.parallelism.tensor_parallel_degree, config.training.seq_len
    given = f"parallelism.tensor_parallel_degree = {tp}"
    legal = [
        degree
        for degree in divisors(c.n_kv_heads)
        if c.n_heads % degree == 0
        and seq_len % degree == 0
        and not (_leaves_none(c.ffn_dim, degree) or _leaves_none(c.vocab_size, degree))
    ]
    way_out = f"Legal tensor-parallel degrees for this model and sequence: {list_some(legal)}."
    if tp == 1 and config.parallelism.disable_loss_parallel:
        yield (
            f"parallelism.disable_loss_parallel = true\nIt has no effect with {given}: no rank has only a part of the "
            "logits. Leave it out, or set a tensor-parallel degree above 1."
        )
    if heads := [f"{heads} / {tp}" for heads in (c.n_heads, c.n_kv_heads) if heads % tp]:
        yield (
            f"{given}, model.args.n_heads = {c.n_heads}, model.args.n_kv_heads = {c.n_kv_heads}\nEach rank has the "
            f"same number of query heads and of key/value heads: {list_words(heads)} {_not_whole(heads)}. {way_out}"
        )
    if seq_len % tp:
        yield (
            f"{given}, training.seq_len = {seq_len}\nBetween layers each rank has the same part of the sequence: "
            f"{seq_len} / {tp} is not whole. {way_out}"
        )
    for name, width in (("model.args.ffn_dim", c.ffn_dim), ("model.args.vocab_size", c.vocab_size)):
        if _leaves_none(width, tp):
            yield (
                f"{given}, {name} = {width}\nEach rank takes the next {-(-width // tp)} of {width}, and none is left "
                f"for the last. {way_out}"
            )

        elif width % tp and config.compile.bucketing == "auto":
            yield (
                f'{given}, {name} = {width}, compile.bucketing = "auto"\nEach rank plans for itself and must come to '
                f"the same, for which all must have the same sizes: {width} / {tp} is not whole. Use a degree that "
                'divides it, or compile.bucketing = "block".'
            )


def _leaves_none(width: int, ranks: int) -> bool:
    """Tell whether the last of `ranks` ranks gets nothing when each takes `width / ranks`, rounded up."""
    return -(-width // ranks) * (ranks - 1) >= width


def _not_whole(quotients: list[str]) -> str:
    return "is not whole" if len(quotients) == 1 else "are not whole"


def _check_selected_blocks(config: Config, c: LlamaConfig) -> Iterator[str]:
    option, mode = config.activation_checkpoint.selective_ac_option, config.activation_checkpoint.mode
    # With another mode the option has no effect, and is let be: v0.2's files keep it there.
    if mode != "selective" or option == BY_OPERATION:
        return
    is_number = option.isascii() and option.isdecimal() and len(option) < 9
    if not (is_number and 1 <= int(option) <= c.n_layers):
        yield (
            f"activation_checkpoint.selective_ac_option = {write_value(option)}, model.args.n_layers = {c.n_layers}\n"
            f'It is "op", or as text a number n of at most n_layers, so that every n-th block is recomputed. '
            f'Legal: "op", and "1" to "{c.n_layers}".'
        )


def _check_patterns(config: Config, c: LlamaConfig) -> Iterator[str]:
    """A pattern that matches nothing is a misspelt one."""
    names = parameter_names(c)
    no_decay = config.optimizer.no_decay
    if idle := [pattern for pattern in no_decay if not any(fnmatchcase(name, pattern) for name in names)]:
        yield _idle("optimizer.no_decay", no_decay, idle, "parameter", names)
    modules, buckets = weight_modules(c), config.compile.bucket_modules
    parts = [part for pattern in buckets for part in pattern.split("+")]
    if idle := [part for part in parts if not any(_holds(part, module) for module in modules)]:
        yield _idle("compile.bucket_modules", buckets, idle, "module with a weight", modules)


def _holds(pattern: str, module: str) -> bool:
    """Tell whether `pattern` names `module` or one around it, as `trainer/parallel/overlap/plan.py` reads it."""
    path, parts = module.split("."), pattern.split(".")
    return len(parts) <= len(path) and all(map(fnmatchcase, path, parts))


def _idle(setting: str, value: tuple[str, ...], idle: list[str], noun: str, names: Iterable[str]) -> str:
    known = sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})
    return (
        f"{setting} = {write_value(value)}\nEach pattern matches at least one {noun}, and "
        f"{list_words([write_value(pattern) for pattern in idle])} {'does' if len(idle) == 1 else 'do'} not. "
        f"Leave it out, or use patterns of {list_words(known)}."
    )
