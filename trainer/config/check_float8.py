"""Which linear layers compute in float8, and what stands against the settings that say so.

The rule looks at whole layers, never at a rank's part, so that the same layers are float8 on every mesh. A mesh that
leaves parts which float8 kernels don't take is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from trainer.config.schema import CONVERTER, Config, Float8, get, settings
from trainer.config.values import list_words, write_value
from trainer.models.llama.config import LlamaConfig, linear_layers
from trainer.models.llama.plan import TENSOR_PARALLEL

SECTION = "quantize.linear.float8"
AUTO_FILTER = "auto_filter_small_kn"
MULTIPLE = 16  # of features and tokens, for float8 kernels: they read 16 bytes at once
SPLIT = {"rows": 0, "head": 0, "columns": 1}  # which of (output, input) features a role of tensor parallelism divides


class Choice(NamedTuple):
    """A linear layer and why it stays as it is; chosen for float8 where there is no reason."""

    name: str
    out_features: int
    in_features: int
    reason: str

    @property
    def is_chosen(self) -> bool:
        return not self.reason


def choose_float8(config: Config, layers: Mapping[str, tuple[int, int]]) -> list[Choice]:
    """Decide for each of `layers`, names and (output, input) features; all stay where the converter isn't there."""
    if not config.model.is_float8:
        return [Choice(name, *shape, f'model.converters has no "{CONVERTER}"') for name, shape in layers.items()]
    options = config.quantize.linear.float8
    return [Choice(name, *shape, _reason(options, name, *shape)) for name, shape in layers.items()]


def describe_choices(choices: list[Choice]) -> list[str]:
    """Return a table, equal layers of blocks in one line."""
    groups: dict[tuple[str, ...], int] = {}
    for name, out_features, in_features, reason in choices:
        key = (_of_any_block(name), f"{in_features} -> {out_features}", reason or "float8")
        groups[key] = groups.get(key, 0) + 1
    chosen = sum(choice.is_chosen for choice in choices)
    lines = [f"  {count:4} x {name:32} {shape:>16}  {what}" for (name, shape, what), count in groups.items()]
    return [f"float8: {chosen} of {len(choices)} linear layers", *lines]


def _reason(options: Float8, name: str, out_features: int, in_features: int) -> str:
    for pattern in options.filter_fqns:
        if pattern == AUTO_FILTER and (small := _find_too_small(options.recipe_name, out_features, in_features)):
            return f"{AUTO_FILTER}: {small}"
        if pattern != AUTO_FILTER and is_found(pattern, name):
            return f"filter_fqns has {write_value(pattern)}"
    if uneven := [str(features) for features in (out_features, in_features) if features % MULTIPLE]:
        return f"{list_words(uneven)}: not a multiple of {MULTIPLE}"
    return ""


def is_found(pattern: str, name: str) -> bool:
    """Tell whether a pattern is found anywhere in the name of a layer; plain text is found as in torchtitan v0.2."""
    return fnmatchcase(name, f"*{pattern}*")


def _find_too_small(recipe: str, n: int, k: int) -> str:
    """Return the limit that a layer of k -> n features is below, or nothing.

    The limits are torchao 0.18's, measured there on H100 (torchao/float8/float8_linear_utils.py); it has none for
    rowwise_with_gw_hp, which casts less than rowwise and has its limits here.
    """
    if recipe == "tensorwise":
        return "at most 4096 -> 1024" if k <= 4096 and n <= 1024 else ""
    if n <= 2048:
        return "at most 2048 outputs"
    if k <= 1024:
        return "at most 1024 inputs"
    return "at most 2048 -> 4096" if n <= 4096 and k <= 2048 else ""


def check_float8(config: Config, c: LlamaConfig) -> Iterator[str]:
    """Yield what is wrong with float8 settings, alone, for the model's shape, and with tensor parallelism."""
    if not config.model.is_float8:
        yield from _find_idle_settings(config)
        return
    choices = choose_float8(config, linear_layers(c))
    yield from _check_patterns(config, choices)
    yield from _check_recipe(config)
    chosen = [choice for choice in choices if choice.is_chosen]
    if not chosen:
        reasons = list(dict.fromkeys(choice.reason for choice in choices))
        yield (
            f"model.converters = {write_value(config.model.converters)}, {SECTION}.filter_fqns = "
            f"{write_value(config.quantize.linear.float8.filter_fqns)}\nNo linear layer is left for float8: "
            f"{'; '.join(reasons)}. Take a pattern out, change the model's widths, or leave the converter out."
        )
    if not config.quantize.linear.float8.emulate:  # an ordinary matmul takes any widths
        yield from _check_parts(config, chosen)
        yield from _check_tokens(config)


def _find_idle_settings(config: Config) -> Iterator[str]:
    for name, setting in settings(Config).items():
        if name.startswith(f"{SECTION}.") and (value := get(config, name)) != setting.default:
            yield (
                f"{name} = {write_value(value)}, model.converters = {write_value(config.model.converters)}\n"
                f'It has no effect without the converter. Set model.converters = ["{CONVERTER}"], or leave it out.'
            )


def _check_patterns(config: Config, choices: list[Choice]) -> Iterator[str]:
    patterns = [pattern for pattern in config.quantize.linear.float8.filter_fqns if pattern != AUTO_FILTER]
    idle = [pattern for pattern in patterns if not any(is_found(pattern, choice.name) for choice in choices)]
    if idle:
        known = sorted({_of_any_block(choice.name) for choice in choices})
        yield (
            f"{SECTION}.filter_fqns = {write_value(config.quantize.linear.float8.filter_fqns)}\nEach pattern is found "
            f"in the name of at least one linear layer, and {list_words([write_value(pattern) for pattern in idle])} "
            f"{'is' if len(idle) == 1 else 'are'} not. Leave it out, or use parts of {list_words(known)}, or "
            f"{write_value(AUTO_FILTER)}."
        )


def _check_recipe(config: Config) -> Iterator[str]:
    options = config.quantize.linear.float8
    given = f"{SECTION}.recipe_name = {write_value(options.recipe_name)}"
    if options.recipe_name != "tensorwise":
        if options.enable_fsdp_float8_all_gather:
            yield (
                f"{given}, {SECTION}.enable_fsdp_float8_all_gather = true\nThe weight is scaled along its inputs for "
                "the output and along its outputs for the gradient of the input, so one gather in float8 can't feed "
                'both matmuls. Use recipe_name = "tensorwise", or gather in training.mixed_precision_param.'
            )
        if options.precompute_float8_dynamic_scale_for_fsdp:
            yield (
                f"{given}, {SECTION}.precompute_float8_dynamic_scale_for_fsdp = true\nIt has no effect: the scales of "
                'rows are found where they are used, without a collective. Leave it out, or use "tensorwise".'
            )
    elif options.precompute_float8_dynamic_scale_for_fsdp and not config.compile.enable:
        yield (
            f"{SECTION}.precompute_float8_dynamic_scale_for_fsdp = true, compile.enable = false\nThe collectives are "
            "joined in the compiled graph. Turn compilation on, or leave it out."
        )


def _check_parts(config: Config, chosen: list[Choice]) -> Iterator[str]:
    tp = config.parallelism.tensor_parallel_degree
    bad: dict[str, str] = {}
    for name, *features, _ in chosen:
        dim = _split_dim(name)
        if dim is not None and features[dim] % (tp * MULTIPLE):
            bad[_of_any_block(name)] = f"{features[dim]} / {tp}"
    if bad:
        parts = list_words([f"{name} ({quotient})" for name, quotient in bad.items()])
        yield (
            f"parallelism.tensor_parallel_degree = {tp}, model.converters = {write_value(config.model.converters)}\n"
            f"Float8 kernels take features in multiples of {MULTIPLE}, on every rank, and so that the same layers are "
            f"float8 on every mesh none is left out for it: {parts} {'is' if len(bad) == 1 else 'are'} not such a "
            f"multiple. Use a smaller degree, name {'it' if len(bad) == 1 else 'them'} in {SECTION}.filter_fqns, or "
            "set emulate = true."
        )


def _split_dim(name: str) -> int | None:
    roles = (role for pattern, role in TENSOR_PARALLEL.items() if fnmatchcase(name, pattern))
    return next((SPLIT[role] for role in roles if role in SPLIT), None)


def _check_tokens(config: Config) -> Iterator[str]:
    """The gradient of a weight is contracted over tokens."""
    training, recipe = config.training, config.quantize.linear.float8.recipe_name
    tokens = training.local_batch_size * training.seq_len
    if recipe != "rowwise_with_gw_hp" and tokens % MULTIPLE:
        yield (
            f"training.local_batch_size = {training.local_batch_size}, training.seq_len = {training.seq_len}, "
            f"{SECTION}.recipe_name = {write_value(recipe)}\nFloat8 kernels take the tokens of a microbatch in "
            f"multiples of {MULTIPLE}: {tokens} is none. Change one of the two, or use "
            '"rowwise_with_gw_hp" or emulate = true.'
        )


def _of_any_block(name: str) -> str:
    return re.sub(r"\.\d+\.", ".*.", name)
