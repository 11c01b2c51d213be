"""A checkpoint of any mesh goes on on any other, on as many processes or not, as the run that never stopped."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny_run import arguments, launch_all, read_numbers, write_dataset

from trainer.loop import Ending

SAVED_AT, STEPS = 4, 14
TOLERANCE = 1e-5  # relative: float32 sums in another order
MESHES = {  # replicas, shards, tensor parallel
    "1": (1, 1, 1),
    "dp": (1, 2, 1),
    "tp": (1, 1, 2),
    "dp x tp": (1, 2, 2),
    "hsdp": (2, 2, 1),
    "hsdp x tp": (2, 2, 2),
}
NAMES = list(MESHES)
PAIRS = {(name, NAMES[(i + away) % len(NAMES)]) for i, name in enumerate(NAMES) for away in (0, 1, 3)}


def command(folder: Path, name: str, mesh: str, steps: int) -> list[str]:
    replicate, shard, tp = MESHES[mesh]
    degrees: dict[str, Any] = {
        "parallelism__data_parallel_replicate_degree": replicate,
        "parallelism__data_parallel_shard_degree": shard,
        "parallelism__tensor_parallel_degree": tp,
    }
    # Rows of a microbatch are a matter of the machine, too: four ranks of data leave one row to each.
    rows = 4 // (replicate * shard)
    return arguments(folder, name, **degrees, training__steps=steps, training__local_batch_size=rows)


@pytest.mark.slow
def test_the_next_ten_steps_do_not_depend_on_the_meshes_of_save_and_load(tmp_path: Path) -> None:
    """Each mesh is saved from, and loaded on, three times: how a mesh reads does not depend on which other wrote."""
    write_dataset(tmp_path)
    by_ranks: dict[int, list[str]] = {}
    for mesh, degrees in MESHES.items():
        by_ranks.setdefault(math.prod(degrees), []).append(mesh)
    for ranks, meshes in by_ranks.items():
        run_ranks(launch_all, ranks, [command(tmp_path, f"from {mesh}", mesh, SAVED_AT) for mesh in meshes])
    run_ranks(launch_all, 1, [command(tmp_path, "straight", "1", STEPS)])
    expected = read_numbers(tmp_path / "straight")
    assert [step for step, *_ in expected] == list(range(1, STEPS + 1))
    for ranks, meshes in by_ranks.items():
        pairs = [(saved, loaded) for saved in MESHES for loaded in meshes if (saved, loaded) in PAIRS]
        commands = []
        for saved, loaded in pairs:
            name = f"{saved} to {loaded}"
            shutil.copytree(tmp_path / f"from {saved}", tmp_path / name)
            commands.append(command(tmp_path, name, loaded, STEPS))
        results = run_ranks(launch_all, ranks, commands, timeout_seconds=600)[0]
        assert all(result.ending is Ending.COMPLETED for result in results)
        for saved, loaded in pairs:
            for actual, wanted in zip(read_numbers(tmp_path / f"{saved} to {loaded}"), expected, strict=True):
                assert actual == pytest.approx(wanted, rel=TOLERANCE), f"{saved} to {loaded}"
