"""Which cases are worth checking on a number of processes: a quick selection, or all that may interact, crossed.

A selection keeps the base's precision, recomputation and tied embeddings where the user chose the model; the tiny model
varies them too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from trainer.config.arithmetic import divisors
from trainer.config.check import check_config, resolve_global_batch_size
from trainer.config.schema import Config
from trainer.config.schema import replace as replace_settings
from trainer.parity.case import Case, case_of

# Odd widths, so that no division over ranks comes out even, and heads for four ranks of tensor parallelism.
TINY = {
    "model.args.dim": "32",
    "model.args.n_layers": "2",
    "model.args.n_heads": "8",
    "model.args.n_kv_heads": "4",
    "model.args.ffn_dim": "50",
    "model.args.vocab_size": "257",
    "training.seq_len": "16",
    "training.local_batch_size": "4",
    "training.mixed_precision_param": "float32",
    "training.max_norm": "0.3",
    "optimizer.lr": "1e-3",
    "optimizer.no_decay": "*norm*",
    "debug.deterministic": "true",
}
TINY_ARGUMENTS = [f"--{name}={value}" for name, value in TINY.items()]

STEPS = 20
RECOMPUTE = ("none", "full", "selective 2", "selective op", "memory_budget 0.3")


def settle(config: Config, processes: int) -> Config:
    """Return the base of all cases: the config without its mesh and schedule, its global batch a number."""
    base = replace_settings(
        config,
        {
            "parallelism.data_parallel_replicate_degree": 1,
            "parallelism.data_parallel_shard_degree": -1,
            "parallelism.tensor_parallel_degree": 1,
            "parallelism.disable_loss_parallel": False,
            "parallelism.fsdp_gather_once": False,
            "training.steps": STEPS,
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay_ratio": None,
            "lr_scheduler.total_steps": None,
        },
    )
    rows = resolve_global_batch_size(base, processes)
    return replace_settings(base, {"training.global_batch_size": rows})


def list_meshes(base: Config, processes: int) -> tuple[list[Case], list[str]]:
    """Return plain cases of every mesh over 1, 2 and all processes, and why the others can't be."""
    start, meshes, left_out = case_of(base), [], []
    for ranks in sorted({1, 2, processes} & set(divisors(processes))):
        for tp in divisors(ranks):
            for shard in reversed(divisors(ranks // tp)):
                case = replace(start, replicate=ranks // tp // shard, shard=shard, tp=tp)
                reason = find_obstacle(case, base)
                if reason:
                    left_out.append(f"{case.mesh}: {reason}")
                else:
                    meshes.append(case)
    return meshes, left_out


def find_obstacle(case: Case, base: Config) -> str | None:
    """Return why a case can't be, in a line, or None."""
    rows, parts = base.training.global_batch_size, case.data_ranks * case.microbatches
    if rows % parts:
        return f"training.global_batch_size = {rows} is not a multiple of {parts}"
    # What an optimizer ignores is not asked here, so that every case of a config may use each of them.
    problems = check_config(replace(case, optimizer=base.optimizer.name).configure(base), case.ranks)
    return problems[0].split("\n")[-1] if problems else None


def choose_quick(base: Config, processes: int, *, is_tiny: bool) -> list[Case]:
    """Return every mesh as it is, and every other choice once, on the mesh where it does most."""
    meshes, _ = list_meshes(base, processes)
    plain = [replace(mesh, optimizer="SGD", recompute="none") for mesh in meshes]
    sharded = max(plain, key=lambda case: (case.tp == case.replicate == 1, case.shard))
    small = min(plain, key=lambda case: (case.tp > 1 or case.replicate > 1, case.shard == 1, case.shard))
    mixed = max(plain, key=lambda case: (case.tp > 1, (case.replicate > 1) + (case.shard > 1), case.shard))
    compiled: dict[str, Any] = {"backend": "aot_eager", "optimizer": "AdamW"}
    cases = [
        *plain,
        replace(sharded, fsdp2=True, precision="float32", float8="", float8_gather=False),
        replace(small, optimizer="AdamW"),
        small,  # twice with the same seed
        replace(small, regather=False),
        replace(small, microbatches=2),
        replace(small, microbatches=4),
        replace(sharded, microbatches=2, gather_once=True),
        replace(mixed, optimizer="AdamW", loss_parallel=mixed.tp == 1),
        replace(small, **compiled, loss_inside=False, microbatches=2),
        replace(mixed, **compiled, regather=False),
        replace(sharded, backend="inductor"),
        replace(sharded, **compiled, bucketing="auto"),
        replace(small, **compiled, bucketing="none"),
        replace(mixed, **compiled, microbatches=2, gather_once=True),
    ]
    if is_tiny:
        cases += [
            *(replace(small, recompute=recompute) for recompute in RECOMPUTE[1:4]),
            replace(small, tied=True),
            replace(sharded, precision="bfloat16"),
            replace(mixed, precision="bfloat16", optimizer="AdamW"),
            replace(mixed, **compiled, tied=True, recompute="full"),
            replace(mixed, tied=True, microbatches=2, gather_once=True, precision="bfloat16"),
            replace(sharded, **compiled, recompute="memory_budget 0.3"),
            *choose_float8(sharded, small, mixed),
        ]
    else:
        cases.append(replace(sharded, **compiled, recompute=meshes[0].recompute))
    return list(_keep_possible(cases, base))


def choose_float8(sharded: Case, small: Case, mixed: Case) -> list[Case]:
    """Return each recipe, and the gather in float8 beside the one without, whose bits it must have."""
    compiled: dict[str, Any] = {"backend": "aot_eager", "optimizer": "AdamW"}
    return [
        replace(sharded, float8="tensorwise"),
        replace(sharded, float8="tensorwise", float8_gather=True),
        replace(mixed, float8="tensorwise", float8_gather=True),
        replace(small, float8="rowwise", microbatches=2),
        replace(mixed, float8="rowwise", optimizer="AdamW"),
        replace(mixed, float8="rowwise_with_gw_hp"),
        replace(mixed, **compiled, float8="tensorwise", float8_gather=True),
        replace(sharded, **compiled, float8="rowwise", recompute="selective op"),
    ]


def choose_full(base: Config, processes: int, *, is_tiny: bool) -> list[Case]:
    """Return all that may interact, crossed.

    On each mesh over all processes, eager and compiled: recomputation with re-gathering, in both precisions; and
    precision with tied embeddings and optimizer. What stands in one list does not meet all of the other.
    """
    meshes, _ = list_meshes(base, processes)
    optimizers = ("SGD", "AdamW")
    start = meshes[0]
    recompute = RECOMPUTE if is_tiny else sorted({"none", start.recompute})
    precisions = ("float32", "bfloat16") if is_tiny else (start.precision,)
    tied = (False, True) if is_tiny else (start.tied,)
    cases = choose_quick(base, processes, is_tiny=is_tiny)
    for mesh, backend in product([mesh for mesh in meshes if mesh.ranks == processes], ("eager", "aot_eager")):
        here = replace(mesh, backend=backend)
        for precision, is_tied, optimizer in product(precisions, tied, optimizers):
            cases.append(replace(here, recompute="none", precision=precision, tied=is_tied, optimizer=optimizer))
        for mode, regather, (number, precision) in product(recompute, (True, False), enumerate(precisions)):
            crossed = replace(here, recompute=mode, regather=regather, precision=precision)
            cases.append(replace(crossed, tied=tied[number % len(tied)], optimizer=optimizers[number % 2]))
        once = replace(here, microbatches=2, gather_once=True)
        cases += [replace(once, tied=is_tied, optimizer=optimizer) for is_tied, optimizer in product(tied, optimizers)]
        if backend != "eager":
            cases += [replace(here, bucketing=bucketing, tied=tied[-1]) for bucketing in ("none", "auto")]
    cases += [replace(mesh, backend="inductor", optimizer=optimizer) for mesh in meshes for optimizer in optimizers]
    return list(dict.fromkeys(_keep_possible(cases, base)))


def _keep_possible(cases: list[Case], base: Config) -> Iterator[Case]:
    for case in cases:
        uncompiled_budget = case.recompute.startswith("memory_budget") and case.backend == "eager"
        if not uncompiled_budget and find_obstacle(case, base) is None:
            yield case
