"""A case: one way to run a config's experiment, as a mesh and a few settings that replace the config's.

How a case is trained is `train.py`, what it is compared with `verify.py`, which cases there are `choose.py`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.check_float8 import SECTION
from trainer.config.schema import CONVERTER, Config, Float8
from trainer.config.schema import replace as replace_settings
from trainer.launch import build_shape

# The tiny model's keys and values have heads too narrow to be split in two for float8.
TINY_FILTER = ("output", "attention.wk", "attention.wv")
SGD_LR_RATIO = 100  # SGD's learning rates are that much higher than AdamW's, or nothing would move


@dataclass(frozen=True)
class Case:
    """One way to run an experiment. `recompute` is a mode and, where there is one, its option: "selective op"."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    backend: str = "eager"
    optimizer: str = "AdamW"
    precision: str = "float32"
    recompute: str = "none"
    regather: bool = True
    gather_once: bool = False
    tied: bool = False
    microbatches: int = 1
    loss_inside: bool = True
    loss_parallel: bool = True
    bucketing: str = "block"
    fsdp2: bool = False
    float8: str = ""  # a recipe
    float8_gather: bool = False

    @property
    def data_ranks(self) -> int:
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        return self.data_ranks * self.tp

    @property
    def mesh(self) -> str:
        """The kind of mesh and its degrees, in the words people use."""
        parts = []
        if self.replicate > 1:
            parts.append(f"HSDP {self.replicate}x{self.shard}" if self.shard > 1 else f"DDP {self.replicate}")
        elif self.shard > 1:
            parts.append(f"FSDP {self.shard}")
        if self.tp > 1:
            parts.append(f"TP {self.tp}")
        return " + ".join(parts) or "1 process"

    def __str__(self) -> str:
        """What is always said, then whatever is not as usual."""
        unusual = {
            f"recompute {self.recompute}": self.recompute != "none",
            "reshard never": not self.regather,
            "gathered once": self.gather_once,
            "tied": self.tied,
            f"{self.microbatches} microbatches": self.microbatches > 1,
            "loss outside": not self.loss_inside,
            "logits gathered": not self.loss_parallel,
            f"{self.bucketing} buckets": self.bucketing != "block",
            f"float8 {self.float8}{' gathered' if self.float8_gather else ''}": bool(self.float8),
        }
        mesh = f"{self.mesh} by PyTorch's FSDP2" if self.fsdp2 else self.mesh
        precision = {"bfloat16": "bf16", "float32": "fp32"}[self.precision]
        return ", ".join([mesh, self.backend, self.optimizer, precision, *(text for text, so in unusual.items() if so)])

    def reference(self) -> Case:
        """Return the case to compare with: one process that does nothing but the arithmetic."""
        return Case(optimizer=self.optimizer, precision=self.precision, tied=self.tied, float8=self.float8)

    def twin(self) -> Case:
        """Return the case that this one must repeat bit by bit.

        Without a compiler, computing again changes nothing, and neither does the precision that weights travel in.
        """
        plain = replace(self, recompute="none", regather=True, float8_gather=False)
        return plain if self.backend == "eager" else self

    def configure(self, base: Config) -> Config:
        """Return `base`, whose global batch is settled, with this case's settings."""
        mode, _, option = self.recompute.partition(" ")
        settings: dict[str, Any] = {
            "parallelism.data_parallel_replicate_degree": self.replicate,
            "parallelism.data_parallel_shard_degree": self.shard,
            "parallelism.tensor_parallel_degree": self.tp,
            "parallelism.disable_loss_parallel": not self.loss_parallel,
            "parallelism.fsdp_reshard_after_forward": self._reshard,
            "parallelism.fsdp_gather_once": self.gather_once,
            "training.local_batch_size": base.training.global_batch_size // (self.data_ranks * self.microbatches),
            "training.mixed_precision_param": self.precision,
            "model.args.tie_embeddings": self.tied,
            "optimizer.name": self.optimizer,
            "compile.enable": self.backend != "eager",
            "compile.components": ("model", "loss") if self.loss_inside else ("model",),
            "activation_checkpoint.mode": mode,
        }
        if self.backend != "eager":
            settings["compile.backend"] = self.backend
            settings["compile.bucketing"] = self.bucketing
        if self.optimizer == "SGD" != base.optimizer.name:
            settings["optimizer.lr"] = base.optimizer.lr * SGD_LR_RATIO
        settings |= self._float8_settings(base)
        if mode == "selective":
            settings["activation_checkpoint.selective_ac_option"] = option
        if mode == "memory_budget":
            settings["activation_checkpoint.memory_budget"] = float(option)
        return replace_settings(base, settings)

    @property
    def _reshard(self) -> str:
        if self.gather_once:
            return "default"
        return "always" if self.regather else "never"

    def _float8_settings(self, base: Config) -> dict[str, Any]:
        """Return the settings of float8; those of the base where the user chose the layers."""
        options = Float8() if not self.float8 else base.quantize.linear.float8
        if self.float8 and not base.model.is_float8:
            options = Float8(filter_fqns=TINY_FILTER)
        is_compiled = self.backend != "eager"
        values = {
            **dataclasses.asdict(options),
            "recipe_name": self.float8 or options.recipe_name,
            "enable_fsdp_float8_all_gather": self.float8_gather,
            "precompute_float8_dynamic_scale_for_fsdp": self.float8_gather and is_compiled,
        }
        converters = {"model.converters": (CONVERTER,) if self.float8 else ()}
        return converters | {f"{SECTION}.{name}": value for name, value in values.items()}


def case_of(config: Config) -> Case:
    """Return the case of one process that computes in the precision of `config`, and recomputes as it does."""
    recompute = config.activation_checkpoint
    options = {"selective": f" {recompute.selective_ac_option}", "memory_budget": f" {recompute.memory_budget}"}
    return Case(
        optimizer=config.optimizer.name,
        precision=config.training.mixed_precision_param,
        recompute=recompute.mode + options.get(recompute.mode, ""),
        float8=config.quantize.linear.float8.recipe_name if config.model.is_float8 else "",
        float8_gather=config.quantize.linear.float8.enable_fsdp_float8_all_gather,
        tied=build_shape(config).tie_embeddings,
    )
