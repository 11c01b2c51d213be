"""What stands in the way of a launch is found before any process group, all of it, with ways out."""

from __future__ import annotations

import dataclasses
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_run import arguments, launch_all, write_dataset

from trainer import fit, memory
from trainer.config.check import check_config
from trainer.config.load import ConfigError, load_config
from trainer.config.schema import Config, replace
from trainer.distributed import Place
from trainer.fit import check_memory, count_staging_bytes, estimate_launch
from trainer.launch import Launch, plan_launch
from trainer.memory import device_capacity_bytes, estimate_memory
from trainer.models.llama.config import weight_modules
from trainer.models.registry import FAMILIES
from trainer.parallel.overlap.plan import check_patterns
from trainer.resume import Resume, check_launch
from trainer.units import GIB

CPU = torch.device("cpu")


def place(world_size: int = 1) -> Place:
    return Place(rank=0, local_rank=0, world_size=world_size, local_world_size=world_size, device=CPU)


def plan(folder: Path, world_size: int = 1, **changes: Any) -> Launch:
    config = load_config(arguments(folder, **changes)).config
    resume, problems = check_launch(config, world_size)
    if problems:
        raise ConfigError(problems)
    return plan_launch(config, place(world_size), resume)


def problems_of(folder: Path, world_size: int = 1, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        plan(folder, world_size, **changes)
    return caught.value.problems


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of three steps, its batch size and schedule left to the first launch, which had two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    write_dataset(folder)
    command = arguments(folder, training__steps=3, training__global_batch_size=-1, lr_scheduler__warmup_steps=1)
    run_ranks(launch_all, 2, [[argument for argument in command if "total_steps" not in argument]])
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of that folder."""
    return Path(shutil.copytree(trained, tmp_path / "copy"))


LEFT_OPEN = {"training__global_batch_size": -1, "lr_scheduler__total_steps": "none", "lr_scheduler__warmup_steps": 1}


def test_settings_left_open_keep_what_the_first_launch_made_of_them(run: Path) -> None:
    launch = plan(run, world_size=1, training__steps=3, **LEFT_OPEN)
    assert launch.config.training.global_batch_size == 4
    assert launch.config.lr_scheduler.total_steps == 3
    assert launch.resume.path is not None
    assert launch.resume.path.name == "step-3"


def test_a_changed_experiment_is_refused_by_name_unless_accepted(run: Path) -> None:
    changed = {**LEFT_OPEN, "training__steps": 3, "optimizer__lr": 0.5, "optimizer__weight_decay": 0.0}
    (problem,) = problems_of(run, **changed)
    assert "optimizer.lr: 0.5 now, 0.01 there" in problem
    assert "optimizer.weight_decay: 0.0 now, 0.1 there" in problem
    assert "--checkpoint.accept_changes optimizer.lr,optimizer.weight_decay" in problem
    (problem,) = problems_of(run, **changed, checkpoint__accept_changes="optimizer.lr")
    assert "optimizer.lr:" not in problem
    assert plan(run, **changed, checkpoint__accept_changes="optimizer.lr,optimizer.weight_decay").resume.path


def test_a_changed_experiment_is_refused_before_the_data_is_encoded(run: Path) -> None:
    changed = {**LEFT_OPEN, "training__steps": 3, "optimizer__lr": 0.5, "training__cache_folder": run / "new"}
    (problem,) = problems_of(run, **changed, checkpoint__accept_changes="training.dataset")
    assert "--checkpoint.accept_changes optimizer.lr,training.dataset" in problem
    assert not (run / "new").exists()
    found = problems_of(run, **changed, model__args__n_kv_heads=3)
    assert len(found) == 2, "with what else is wrong between settings"


def test_changed_data_is_a_changed_experiment_and_moved_data_is_not(run: Path) -> None:
    settings = {**LEFT_OPEN, "training__steps": 3}
    moved = (run / "documents.jsonl").rename(run / "moved.jsonl")
    assert plan(run, **settings, training__dataset_path=moved).resume.path
    moved.write_text(moved.read_text().replace("Document 7", "Document 8"))
    (problem,) = problems_of(run, **settings, training__dataset_path=moved)
    assert "training.dataset: 'sha256 " in problem
    accepted = {"training__dataset_path": moved, "checkpoint__accept_changes": "training.dataset"}
    assert plan(run, **settings, **accepted).resume.path


def test_a_step_that_is_not_there_is_refused(run: Path) -> None:
    (problem,) = problems_of(run, **LEFT_OPEN, training__steps=3, checkpoint__load_step=2)
    assert "checkpoint.load_step = 2" in problem
    assert "complete: 3" in problem


def test_missing_tokenizer_missing_data_and_too_little_memory_are_told_at_once() -> None:
    config = load_config(["--config", "llama3_8b.toml"]).config
    with pytest.raises(ConfigError) as caught:
        plan_launch(config, place(), Resume())
    memory_problem, data, tokenizer = caught.value.problems
    assert "Use more ranks" in memory_problem
    assert (
        "hf download allenai/c4 --repo-type dataset --include 'en/c4-train.0000*.json.gz' --local-dir data/c4" in data
    )
    assert "hf download meta-llama/Llama-3.1-8B" in tokenizer
    assert "--local-dir assets/Llama-3.1-8B" in tokenizer
    assert '--training.dataset stdlib --training.dataset_path "" --model.tokenizer_path bytes' in tokenizer


def test_the_flags_that_run_without_files_do(tmp_path: Path) -> None:
    flags = ["--training.dataset", "stdlib", "--training.dataset_path", "", "--model.tokenizer_path", "bytes"]
    small = ["--model.flavor", "debugmodel", "--training.seq_len", "16", f"--job.dump_folder={tmp_path}"]
    config = load_config(["--config", "llama3_8b.toml", *flags, *small]).config
    assert plan_launch(config, place(), Resume()).prepared.tokenizer.vocab_size == 258


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__args__vocab_size": 257}, ["model.args.vocab_size = 257", "at least the tokenizer's 258 ids"]),
        ({"training__dataset_path": "nowhere/*.jsonl"}, ["training.dataset_path = 'nowhere/*.jsonl'", "stdlib"]),
        ({"model__tokenizer_path": "nowhere"}, ["model.tokenizer_path = 'nowhere'", "no such file", "bytes"]),
        (
            {"training__cache_folder": "/dev/null/x"},
            ["training.cache_folder = '/dev/null/x'", "Way out: --training.cache_folder"],
        ),
        ({"job__dump_folder": "/dev/null/x"}, ["job.dump_folder = '/dev/null/x'", "give another --job.dump_folder"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_problem_names_setting_rule_and_way_out(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    write_dataset(tmp_path)
    (problem,) = problems_of(tmp_path, **changes)
    for alternatives in words:
        assert any(word in problem for word in alternatives.split("|")), problem


def test_independent_problems_are_told_together(tmp_path: Path) -> None:
    found = problems_of(
        tmp_path,
        job__dump_folder="/dev/null/x",
        model__tokenizer_path="nowhere",
        model__args__vocab_size=10**10,
    )
    assert len(found) == 4  # the dump folder, memory, data, tokenizer


def test_nothing_is_encoded_for_a_launch_that_is_refused(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    problems_of(tmp_path, model__args__vocab_size=10**10)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "pattern",
    ["layers.*", "layers", "layers.0.attention", "*.*.*.wq", "norm+output", "x", "norm+x", "layers.6", "a.b.c"],
)
def test_settings_take_the_bucket_patterns_that_the_graph_passes_take(pattern: str) -> None:
    config = replace(Config(), {"compile.bucket_modules": (pattern,)})
    modules = weight_modules(FAMILIES["llama3"].build_config("llama3", "debugmodel", {}))
    try:
        check_patterns([pattern], modules)
    except ValueError:
        assert len(check_config(config, 1)) == 1
    else:
        assert check_config(config, 1) == []


def test_a_run_on_another_machine_keeps_its_settings_open(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    launch = plan(tmp_path, world_size=2)
    assert launch.config.parallelism == Config().parallelism


def estimate(**changes: Any) -> memory.MemoryEstimate:
    facts = {"parameters": 1000, "gathered_parameters": 300, "shards": 4, "moments": 2, "storage_bytes": 4}
    facts |= {"gathered_float8_parameters": 0, "compute_bytes": 2, "activations_bytes": 77}
    return estimate_memory(**(facts | changes))


def test_the_estimate_is_the_sum_of_what_a_rank_holds() -> None:
    whole = estimate()
    assert whole.parameters_bytes == whole.gradients_bytes == 250 * 4
    assert whole.moments_bytes == 2 * 250 * 4
    assert whole.gathered_bytes == 300 * 2
    assert whole.total_bytes == 1000 + 1000 + 2000 + 600 + 77
    assert estimate(shards=1, compute_bytes=4).gathered_bytes == 0
    assert str(estimate(parameters=GIB)).startswith("4.00 GiB per device (parameters 1.00 GiB + ")


def test_the_estimate_follows_what_is_divided_kept_and_recomputed() -> None:
    def of(world_size: int = 8, **changes: Any) -> memory.MemoryEstimate:
        settings = {"model.flavor": "8B", **{key.replace("__", "."): value for key, value in changes.items()}}
        return estimate_launch(replace(Config(), settings), world_size)

    plain, mode = of(), "activation_checkpoint__mode"
    assert of(world_size=16).parameters_bytes == plain.parameters_bytes // 2
    assert of(parallelism__data_parallel_replicate_degree=4).parameters_bytes == 4 * plain.parameters_bytes
    divided = of(parallelism__tensor_parallel_degree=2)
    assert divided.parameters_bytes == pytest.approx(plain.parameters_bytes, rel=1e-6)  # 2 x 4 ranks instead of 8
    assert divided.activations_bytes == plain.activations_bytes // 2
    assert of(parallelism__fsdp_reshard_after_forward="never").gathered_bytes > 4 * plain.gathered_bytes
    once = of(parallelism__fsdp_gather_once=True)
    assert once.gathered_bytes == of(parallelism__fsdp_reshard_after_forward="never").gathered_bytes
    assert once.gradients_bytes == plain.gradients_bytes + 8 * plain.gradients_bytes  # of 8 ranks' shares, in float32
    every_third = {mode: "selective", "activation_checkpoint__selective_ac_option": "3"}
    budget = {mode: "memory_budget", "activation_checkpoint__memory_budget": 0.1}
    kept = [
        of(**changes).activations_bytes for changes in ({}, every_third, {mode: "selective"}, budget, {mode: "full"})
    ]
    assert kept == sorted(set(kept), reverse=True)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("regather", ["default", "never"])
def test_weights_gathered_in_float8_are_a_byte_each(regather: str, tied: bool) -> None:
    def gathered_bytes(gather: bool, filter_fqns: tuple[str, ...]) -> int:
        values = {"model.flavor": "8B", "model.converters": ("float8",), "model.args.tie_embeddings": tied}
        values |= {"quantize.linear.float8.filter_fqns": filter_fqns, "parallelism.tensor_parallel_degree": 2}
        values |= {"quantize.linear.float8.enable_fsdp_float8_all_gather": gather}
        values["parallelism.fsdp_reshard_after_forward"] = regather
        return estimate_launch(replace(Config(), values), world_size=8).gathered_bytes

    block = 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    blocks = 32 if regather == "never" else 2
    head = 128256 * 4096
    saved = gathered_bytes(False, ("output",)) - gathered_bytes(True, ("output",))
    assert saved == blocks * block // 2  # tp 2, and one byte for two
    saved_by_head = gathered_bytes(True, ("output",)) - gathered_bytes(True, ())
    assert saved_by_head == (-head // 2 if tied else head // 2)  # a tied one is gathered for the embedding too


@pytest.mark.parametrize(
    ("name", "momentum", "moments"), [("AdamW", 0, 2), ("Adam", 0, 2), ("SGD", 0, 0), ("SGD", 0.9, 1)]
)
def test_moments_are_those_of_the_optimizer(name: str, momentum: float, moments: int) -> None:
    config = replace(Config(), {"optimizer.name": name, "optimizer.momentum": momentum})
    found = estimate_launch(config, world_size=2)
    assert found.moments_bytes == moments * found.parameters_bytes


def test_the_copy_of_an_asynchronous_save_counts_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"checkpoint.enable": True, "checkpoint.async_mode": "async", "training.seq_len": 8}
    config = replace(Config(), {**settings, "parallelism.data_parallel_replicate_degree": 2})
    needs = estimate_launch(config, 4)
    state = needs.parameters_bytes + needs.moments_bytes
    assert count_staging_bytes(config, 4) == state // 2, "replicas divide it"
    assert count_staging_bytes(replace(config, {"checkpoint.enable": False}), 4) == 0
    in_step = replace(config, {"checkpoint.async_mode": "disabled"})
    assert count_staging_bytes(in_step, 4) == 0

    def on(device: str, device_bytes: int, host_bytes: int, config: Config = config) -> str:
        capacities = {"cuda": device_bytes, "cpu": host_bytes}
        monkeypatch.setattr(fit, "device_capacity_bytes", lambda device, ranks: capacities[device.type])
        where = dataclasses.replace(place(4), device=torch.device(device))
        return "\n".join(check_memory(config, where))

    total = needs.total_bytes
    assert on("cpu", 0, total + state // 2) == on("cuda", total, state // 2) == on("cpu", 0, total, in_step) == ""
    refused = on("cpu", 0, total + state // 2 - 1)
    assert refused.startswith('checkpoint.async_mode = "async" on 4 ranks\n')
    assert f"beside the {memory.format_bytes(total)} of training" in refused
    assert "beside" not in on("cuda", total, state // 2 - 1)
    assert on("cuda", total, state // 2 - 1).startswith("checkpoint.async_mode")
    assert on("cuda", total - 1, state).startswith("model.flavor"), "the GPU's own memory has no copy"
    assert on("cpu", 0, total - 1).startswith("model.flavor"), "one problem, not two"


def write_group(folder: Path, limit: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")


def test_a_limit_of_any_enclosing_control_group_counts(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    mount = tmp_path / "sys/fs/cgroup"
    write_group(mount / "job/step", "max", 10, 0)
    assert memory._cgroup_available_bytes(tmp_path) == float("inf")
    write_group(mount / "job", "1000", 700, 200)
    assert memory._cgroup_available_bytes(tmp_path) == 500
    (tmp_path / "proc/self/cgroup").write_text("7:cpu,memory:/job\n")
    group = mount / "memory/job"
    group.mkdir(parents=True)
    for name, text in {"memory.limit_in_bytes": "90", "memory.usage_in_bytes": "50", "memory.stat": ""}.items():
        (group / name).write_text(text)
    assert memory._cgroup_available_bytes(tmp_path) == 40
    assert memory._cgroup_available_bytes(tmp_path / "no such") == float("inf")


def test_memory_is_known_without_proc_and_shared_by_the_ranks_of_a_host(tmp_path: Path) -> None:
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory._host_available_bytes(tmp_path / "no meminfo") == physical
    assert 0 < memory._host_available_bytes() <= physical
    alone = device_capacity_bytes(CPU, 1)
    assert device_capacity_bytes(CPU, 4) == pytest.approx(alone / 4, rel=0.2)
