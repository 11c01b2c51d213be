"""What a run says of itself before it begins."""

from __future__ import annotations

import re
from pathlib import Path

from ranks import run_ranks
from tiny_run import arguments, launch_all, write_dataset

from trainer.config.load import load_config
from trainer.describe import describe_dry_run
from trainer.distributed import fake_process_group


def test_placements_name_the_axes_they_are_over(tmp_path: Path) -> None:
    config = load_config(arguments(tmp_path, parallelism__tensor_parallel_degree=2)).config
    with fake_process_group(4):
        (line,) = [line for line in describe_dry_run(config, 4) if line.startswith("Mesh")]
    assert "dp_shard 2 x cp 1 x tp 2 = 4 ranks" in line
    placements = re.findall(r"\((?:\w+\(.*?\)(?:, )?)+\)", line)
    assert "(Replicate(), Shard(dim=0), Shard(dim=1))" in placements
    assert line.endswith(" over ('dp_replicate', 'dp_shard', 'tp')")
    assert {placement.count("(") - 1 for placement in placements} == {3}


def test_device_backend_and_compiler_are_told_once(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    ((result,),) = run_ranks(launch_all, 1, [arguments(tmp_path, training__steps=1)])
    (line,) = [line for line in result.log if "Device" in line]
    assert line == "INFO Device cpu, collectives by gloo, computation by eager"
