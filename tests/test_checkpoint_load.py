"""A checkpoint comes back bit for bit, on any number of ranks, or not at all."""

import json
import math
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from trainer.checkpoint.load import load_tensors
from trainer.checkpoint.manifest import read_manifest, seal_file
from trainer.checkpoint.metadata import read_metadata
from trainer.checkpoint.save import save_checkpoint
from trainer.checkpoint.state import read_state

MESHES = [(1,), (2,), (4,), (2, 2)]
STATE = {"step": 5, "loss": 0.1 + 0.2, "names": ["a", "b"]}
PLACED: dict[str, tuple[tuple[int, ...], torch.dtype, list[Placement]]] = {
    "uneven": ((257, 3), torch.float32, [Shard(0)]),
    "fewer_rows_than_ranks": ((3, 2), torch.float64, [Shard(0)]),
    "columns": ((2, 7), torch.bfloat16, [Shard(1)]),
    "replicated": ((4, 5), torch.float32, [Replicate()]),
    "no_rows": ((0, 4), torch.float32, [Shard(0)]),
    "scalar": ((), torch.float32, [Replicate()]),
}


def never(_: str) -> bool:
    return False


def is_random_state(key: str) -> bool:
    return key.startswith("rng/")


def full_values() -> dict[str, torch.Tensor]:
    """Return what every mesh must agree on, with the values that a careless copy changes."""
    generator = torch.Generator().manual_seed(1)
    values = {key: torch.randn(shape, generator=generator).to(dtype) for key, (shape, dtype, _) in PLACED.items()}
    values["uneven"][0] = torch.tensor([float("nan"), -0.0, float("inf")])
    values["plain"] = torch.arange(6)[::2]  # not contiguous
    return values


def place(values: dict[str, torch.Tensor], shape_of_mesh: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Return `values` as DTensors on a mesh of this shape; on a second axis their other dim is cut, too."""
    mesh = init_device_mesh("cpu", shape_of_mesh)
    placed = dict(values)
    for key, (_, _, placements) in PLACED.items():
        second = [Shard(1)] if placements == [Shard(0)] else [Replicate()]
        placed[key] = distribute_tensor(values[key], mesh, (placements + second)[: len(shape_of_mesh)])
    return placed


def random_states(rank: int, filler: Callable[[int], int]) -> dict[str, torch.Tensor]:
    return {f"rng/rank_{rank}/cpu": torch.full((5,), filler(rank), dtype=torch.uint8)}


def bits(tensor: torch.Tensor) -> tuple[Any, ...]:
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return tuple(full.shape), full.dtype, full.contiguous().flatten().view(torch.uint8).tolist()


def _save(rank: int, folder: Path, shape_of_mesh: tuple[int, ...]) -> None:
    tensors = place(full_values(), shape_of_mesh) | random_states(rank, lambda rank: rank + 1)
    save_checkpoint(folder, 5, tensors=tensors, state=STATE, attach=None, process_group=dist.group.WORLD)


def _load_each(rank: int, paths: list[Path], shape_of_mesh: tuple[int, ...]) -> list[tuple[dict[str, Any], list[int]]]:
    loaded = []
    for path in paths:
        zeros = {key: torch.zeros_like(value) for key, value in full_values().items()}
        random = random_states(rank, lambda _: 0)
        tensors = place(zeros, shape_of_mesh) | random
        tensors["uneven"].requires_grad_()
        load_tensors(
            path, tensors, allow_missing=is_random_state, allow_extra=is_random_state, process_group=dist.group.WORLD
        )
        loaded.append(({key: bits(tensors[key]) for key in zeros}, random[f"rng/rank_{rank}/cpu"].tolist()))
    return loaded


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], Path]:
    """Return a checkpoint of the same values for each mesh that wrote it."""
    paths = {}
    for shape in MESHES:
        folder = tmp_path_factory.mktemp("saved")
        run_ranks(_save, math.prod(shape), folder, shape)
        paths[shape] = folder / "step-5"
    return paths


@pytest.mark.parametrize("load_shape", MESHES)
def test_values_do_not_depend_on_the_meshes_of_save_and_load(
    saved: dict[tuple[int, ...], Path], load_shape: tuple[int, ...]
) -> None:
    expected = {key: bits(value) for key, value in full_values().items()}
    ranks = run_ranks(_load_each, math.prod(load_shape), list(saved.values()), load_shape)
    for rank, loaded in enumerate(ranks):
        for save_shape, (values, random) in zip(saved, loaded, strict=True):
            assert values == expected, f"saved on {save_shape}"
            assert random == [rank + 1 if rank < math.prod(save_shape) else 0] * 5


def test_one_process_loads_without_torch_distributed(saved: dict[tuple[int, ...], Path]) -> None:
    assert not dist.is_initialized()
    tensors = {key: torch.zeros_like(value) for key, value in full_values().items()}
    load_tensors(saved[2, 2], tensors, allow_missing=never, allow_extra=is_random_state, process_group=None)
    assert {key: bits(value) for key, value in tensors.items()} == {k: bits(v) for k, v in full_values().items()}
    assert read_state(saved[2, 2]) == STATE
    saved_keys = read_metadata(saved[2, 2], read_manifest(saved[2, 2])).state_dict_metadata.keys()
    assert saved_keys == tensors.keys() | {f"rng/rank_{rank}/cpu" for rank in range(4)}


def save_small(folder: Path) -> Path:
    tensors = {"a": torch.arange(4.0), "b": torch.ones(2, 3)}
    return save_checkpoint(folder, 1, tensors=tensors, state=STATE, attach=None, process_group=None)


def load_small(path: Path, tensors: dict[str, torch.Tensor], allow: Callable[[str], bool] = never) -> None:
    load_tensors(path, tensors, allow_missing=allow, allow_extra=allow, process_group=None)


def small_zeros() -> dict[str, torch.Tensor]:
    return {"a": torch.zeros(4), "b": torch.zeros(2, 3)}


def test_keys_shapes_and_dtypes_are_compared_before_anything_is_touched(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    a = torch.zeros(4)
    with pytest.raises(ValueError, match=r"not in the checkpoint: c; only in the checkpoint: b\."):
        load_small(path, {"a": a, "c": torch.zeros(1)})
    with pytest.raises(
        ValueError, match=r"b is torch.float32 \(2, 3\) in the checkpoint and torch.float32 \(3, 2\) here"
    ):
        load_small(path, {"a": a, "b": torch.zeros(3, 2)})
    with pytest.raises(
        ValueError, match=r"b is torch.float32 \(2, 3\) in the checkpoint and torch.int64 \(2, 3\) here"
    ):
        load_small(path, {"a": a, "b": torch.zeros(2, 3, dtype=torch.int64)})
    assert a.tolist() == [0, 0, 0, 0]
    load_small(path, {"a": a, "c": torch.zeros(1)}, allow=lambda key: key in "bc")
    assert a.tolist() == [0, 1, 2, 3]


def _load_other_keys_than_the_other_rank(rank: int, path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_tensors(
            path,
            {"a": torch.zeros(4)} if rank == 0 else {"c": torch.zeros(1)},
            allow_missing=never,
            allow_extra=never,
            process_group=dist.group.WORLD,
        )
    return str(caught.value)


def test_a_key_missing_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    first, second = run_ranks(_load_other_keys_than_the_other_rank, 2, save_small(tmp_path))
    assert first == second
    assert "not in the checkpoint: c; only in the checkpoint: b." in first


def read_all(path: Path) -> None:
    read_state(path)
    load_small(path, small_zeros())


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "state.json"])
def test_a_flipped_bit_is_found_in_every_file(tmp_path: Path, name: str) -> None:
    path = save_small(tmp_path)
    content = bytearray((path / name).read_bytes())
    content[len(content) // 2] ^= 1
    (path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: damaged.*checkpoint.load_step"):
        read_all(path)


def _load_damaged(rank: int, path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load_tensors(path, small_zeros(), allow_missing=never, allow_extra=never, process_group=dist.group.WORLD)
    return str(caught.value)


def test_damage_seen_by_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    (path / "__0_0.distcp").write_bytes(b"short")
    assert len(set(run_ranks(_load_damaged, 2, path))) == 1


class _TouchesFile:
    """A pickle that runs code when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def reseal(path: Path, name: str, content: bytes) -> None:
    """Replace a file of a checkpoint and make its manifest agree, as one who means harm would."""
    (path / name).write_bytes(content)
    manifest = json.loads((path / "manifest.json").read_text())
    seal = seal_file(path / name)
    manifest["files"][name] = {"bytes": seal.num_bytes, "sha256": seal.sha256}
    (path / "manifest.json").write_text(json.dumps(manifest))


def read_dcp_metadata(path: Path) -> Metadata:
    return pickle.loads((path / ".metadata").read_bytes())


def test_metadata_that_would_run_code_is_refused_unread(tmp_path: Path) -> None:
    path, touched = save_small(tmp_path), tmp_path / "touched"
    hostile = pickle.dumps(_TouchesFile(touched))
    pickle.loads(hostile)
    assert touched.exists()  # the weapon works
    touched.unlink()
    reseal(path, ".metadata", hostile)
    with pytest.raises(ValueError, match=r"\.metadata: refused, it is hostile"):
        load_small(path, small_zeros())
    assert not touched.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_entries_that_are_not_tensors_are_refused_unread(tmp_path: Path) -> None:
    path, touched = tmp_path / "step-1", tmp_path / "touched"
    save_small(tmp_path)
    entries = {"a": torch.arange(4.0), "b": _TouchesFile(touched)}
    torch.distributed.checkpoint.save(entries, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for file in (tmp_path / "dcp").iterdir():
        reseal(path, file.name, file.read_bytes())
    with pytest.raises(ValueError, match="'b' is not a tensor"):
        load_small(path, {"a": torch.zeros(4)}, allow=lambda key: key == "b")
    assert not touched.exists()


def test_a_data_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    path, touched = save_small(tmp_path), tmp_path / "touched"
    metadata = read_dcp_metadata(path)
    hostile = tmp_path / "hostile"
    torch.save(_TouchesFile(touched), hostile)
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, hostile.stat().st_size
    reseal(path, "__0_0.distcp", hostile.read_bytes())
    reseal(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(RuntimeError, match="Weights only load failed"):
        load_small(path, small_zeros())
    assert not touched.exists()


@pytest.mark.parametrize("place_of_file", ["/etc/passwd", "../outside", "sub/file", "unlisted"])
def test_data_outside_the_checkpoint_is_refused(tmp_path: Path, place_of_file: str) -> None:
    path = save_small(tmp_path)
    metadata = read_dcp_metadata(path)
    for info in metadata.storage_data.values():
        info.relative_path = place_of_file
    reseal(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(ValueError, match="not a file of this checkpoint"):
        load_small(path, small_zeros())


def test_a_tensor_of_which_a_part_is_missing_is_refused(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    metadata = read_dcp_metadata(path)
    metadata.state_dict_metadata["a"].chunks.clear()
    reseal(path, ".metadata", pickle.dumps(metadata))
    with pytest.raises(ValueError, match="parts of 'a' do not add up"):
        load_small(path, small_zeros())


def test_a_folder_without_manifest_is_not_loaded(tmp_path: Path) -> None:
    path = save_small(tmp_path)
    (path / "manifest.json").unlink()
    with pytest.raises(ValueError, match=r"there is no manifest\.json"):
        load_small(path, small_zeros())
    shutil.rmtree(path)
    with pytest.raises(ValueError, match=r"there is no manifest\.json"):
        read_state(path)
