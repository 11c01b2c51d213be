"""Weights go to Hugging Face and back: transformers gives equal logits, and every bit returns, on any mesh."""

from __future__ import annotations

import dataclasses
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from test_llama_model import build_random
from torch import Tensor
from torch.distributed.tensor import DTensor

from trainer.checkpoint.hf_export import export_hf, import_hf, state_of_weights
from trainer.checkpoint.hf_load import load_hf_parameters
from trainer.checkpoint.load import load_tensors
from trainer.checkpoint.plain import load_plain_model
from trainer.checkpoint.save import save_checkpoint
from trainer.data.bytes_tokenizer import BytesTokenizer
from trainer.models.llama.config import LlamaConfig
from trainer.models.llama.hf import from_hf_config, from_meta_tensor, to_hf_config, to_hf_name
from trainer.models.llama.model import Llama
from trainer.parallel.mesh import build_mesh
from trainer.parallel.parallelize import Layout, initialize, parallelize

CONVERT = Path(__file__).resolve().parents[1] / "scripts" / "convert.py"
TINY = LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=56, vocab_size=258, rope_theta=10000.0)
SCALED = {"rope_theta": 500000.0, "rope_scaling_factor": 8.0, "rope_scaling_original_seq_len": 8}
SHAPES = {
    "gqa": TINY,
    "scaled": dataclasses.replace(TINY, **SCALED),
    "tied": dataclasses.replace(TINY, tie_embeddings=True, head_dim=16, **SCALED),
}
TOLERANCE = 1e-5  # float32 sums in another order
SMALL_SHARD = 40_000  # bytes: several files of the tiny model


def save_model(folder: Path, model: Llama) -> Path:
    """Save as a run does that has trained `model`, with the moments of an optimizer besides."""
    state = state_of_weights("llama3", model.config, torch.float32, 64)
    tensors = {f"model.{name}": p.detach() for name, p in model.named_parameters()}
    moments = {f"optimizer.{name}.exp_avg": p.detach() * 2 for name, p in model.named_parameters()}
    return save_checkpoint(
        folder,
        7,
        tensors=tensors | moments,
        state=state | {"step": 7},
        attach=lambda path: BytesTokenizer().save(path / "tokenizer"),
        process_group=None,
    )


def weights_of(path: Path, c: LlamaConfig) -> dict[str, Tensor]:
    weights = {f"model.{name}": torch.zeros_like(p) for name, p in Llama(c).named_parameters()}
    load_tensors(
        path, weights, allow_missing=lambda _: False, allow_extra=lambda key: key[:6] != "model.", process_group=None
    )
    return weights


@pytest.mark.parametrize("kind", SHAPES)
def test_transformers_gives_equal_logits_and_the_way_back_is_exact(tmp_path: Path, kind: str) -> None:
    c = SHAPES[kind]
    model = build_random(c)
    checkpoint = save_model(tmp_path / "ours", model)
    folder = tmp_path / "hf"
    export_hf(checkpoint, folder, dtype=torch.float32, shard_bytes=SMALL_SHARD)
    files = list(folder.glob("*.safetensors"))
    assert len(files) > 1
    assert {file.stat().st_mode for file in files} == {(folder / "config.json").stat().st_mode}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = torch.tensor(tokenizer("Grüße, world", add_special_tokens=False)["input_ids"]).unsqueeze(0)
    assert tokens[0].tolist() == BytesTokenizer().encode("Grüße, world")
    torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=TOLERANCE, atol=TOLERANCE)
    assert (theirs.config.bos_token_id, theirs.generation_config.eos_token_id) == (256, 257)

    back = import_hf(folder, tmp_path / "back", name="llama3", dtype=torch.float32)
    before, after = weights_of(checkpoint, c), weights_of(back, c)
    assert all(torch.equal(before[key], after[key]) for key in before)
    plain, _ = load_plain_model(back, torch.device("cpu"))
    torch.testing.assert_close(plain(tokens), model(tokens), rtol=0, atol=0)


def test_a_folder_that_transformers_wrote_is_read(tmp_path: Path) -> None:
    c = SHAPES["scaled"]
    config = transformers.LlamaConfig(**to_hf_config(c, 64))
    theirs = transformers.LlamaForCausalLM(config)
    theirs.save_pretrained(tmp_path / "hf")
    assert from_hf_config(json.loads((tmp_path / "hf" / "config.json").read_text())) == c
    path = import_hf(tmp_path / "hf", tmp_path / "ours", name="llama3", dtype=torch.float32)
    plain = Llama(c)
    plain.load_state_dict({key.removeprefix("model."): value for key, value in weights_of(path, c).items()})
    tokens = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(plain(tokens), theirs(tokens).logits, rtol=TOLERANCE, atol=TOLERANCE)


def test_the_older_way_to_write_rope_scaling_is_read() -> None:
    new = to_hf_config(SHAPES["scaled"], 64)
    rope = new.pop("rope_parameters")
    old = {**new, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert from_hf_config(old) == SHAPES["scaled"]
    with pytest.raises(ValueError, match="rope_type is 'yarn'"):
        from_hf_config({**old, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}})
    with pytest.raises(ValueError, match="attention_bias is True"):
        from_hf_config({**old, "attention_bias": True})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_export_is_rounded_once_to_its_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model = build_random(TINY)
    export_hf(save_model(tmp_path, model), tmp_path / "hf", dtype=dtype)
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    exported = load_file(file)
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    for name, p in model.named_parameters():
        assert torch.equal(exported[to_hf_name(name)], p.detach().to(dtype))


MESHES = {"1": (1, 1, 1), "dp": (1, 2, 1), "tp": (1, 1, 2), "hsdp+tp": (2, 1, 2)}


def load_on_mesh(rank: int, folder: Path, c: LlamaConfig, degrees: tuple[int, int, int]) -> dict[str, Any]:
    import torch.distributed as dist

    from trainer.checkpoint import hf_load
    from trainer.models.llama.plan import BLOCKS, TENSOR_PARALLEL
    from trainer.parallel.simple_fsdp import Precision

    replicate, shard, tp = degrees
    mesh = build_mesh(torch.device("cpu"), dp_replicate=replicate, dp_shard=shard, tp=tp)
    with torch.device("meta"):
        model = Llama(c)
    precision = Precision(torch.float32, torch.float32)
    parallelize(model, mesh, Layout(TENSOR_PARALLEL, BLOCKS, precision, "none", "op"))
    initialize(model, torch.device("cpu"), dict.fromkeys((n for n, _ in model.named_parameters()), 0.0), seed=0)
    read, elements = hf_load.HFFolder.read, []

    def count(source: Any, *part: Any) -> Tensor:
        tensor = read(source, *part)
        elements.append(tensor.numel())
        return tensor

    hf_load.HFFolder.read = count  # type: ignore[method-assign]
    parameters = {f"model.{name}": p for name, p in model.named_parameters()}
    load_hf_parameters(folder, parameters, to_hf_name, process_group=dist.group.WORLD)
    own = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    assert sum(elements) == own, "a rank reads its own parts alone"
    return {name: p.detach().full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("mesh", MESHES)
def test_each_rank_of_any_mesh_reads_its_own_part(tmp_path: Path, mesh: str) -> None:
    c, degrees = SHAPES["tied"], MESHES[mesh]
    model = build_random(c)
    export_hf(save_model(tmp_path, model), tmp_path / "hf", dtype=torch.float32, shard_bytes=SMALL_SHARD)
    ranks = degrees[0] * degrees[1] * degrees[2]
    for loaded in run_ranks(load_on_mesh, ranks, tmp_path / "hf", c, degrees):
        for name, p in model.named_parameters():
            assert torch.equal(loaded[name], p.detach()), name


def export_together(rank: int, checkpoint: Path, folder: Path) -> None:
    import torch.distributed as dist

    export_hf(checkpoint, folder, dtype=torch.float32, shard_bytes=SMALL_SHARD, process_group=dist.group.WORLD)


def test_ranks_share_the_files_of_an_export(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path, build_random(TINY))
    export_hf(checkpoint, tmp_path / "alone", dtype=torch.float32, shard_bytes=SMALL_SHARD)
    run_ranks(export_together, 2, checkpoint, tmp_path / "together")
    files = {path.name: path.read_bytes() for path in (tmp_path / "alone").iterdir()}
    assert {path.name: path.read_bytes() for path in (tmp_path / "together").iterdir()} == files


def test_what_does_not_fit_or_is_not_safe_is_refused(tmp_path: Path) -> None:
    model = build_random(TINY)
    checkpoint = save_model(tmp_path, model)
    export_hf(checkpoint, tmp_path / "hf", dtype=torch.float32, shard_bytes=SMALL_SHARD)
    with pytest.raises(ValueError, match="is there already"):
        export_hf(checkpoint, tmp_path / "hf", dtype=torch.float32)

    def load(c: LlamaConfig) -> None:
        other = Llama(c)
        parameters = {f"model.{name}": p for name, p in other.named_parameters()}
        load_hf_parameters(tmp_path / "hf", parameters, to_hf_name, process_group=None)

    with pytest.raises(ValueError, match=r"not there: model\.layers\.2"):
        load(dataclasses.replace(TINY, n_layers=3))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight is \(258, 32\) there and \(300, 32\) here"):
        load(dataclasses.replace(TINY, vocab_size=300))

    index = tmp_path / "hf" / "model.safetensors.index.json"
    honest = index.read_text()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../outside.safetensors"}}))
    with pytest.raises(ValueError, match="not a safetensors file of this folder"):
        load(TINY)
    index.write_text(honest)
    file = sorted((tmp_path / "hf").glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        load(TINY)
    for path in (tmp_path / "hf").glob("*.safetensors*"):
        path.unlink()
    (tmp_path / "hf" / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, which could run code"):
        load(TINY)


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    checkpoint = save_model(tmp_path, build_random(TINY))
    data = checkpoint / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(ValueError, match="damaged"):
        export_hf(checkpoint, tmp_path / "hf", dtype=torch.float32)
    assert not (tmp_path / "hf").exists()


def to_meta(c: LlamaConfig, name: str, ours: Tensor) -> Tensor:
    """Put rotary pairs side by side, as Meta's own code pairs them: the transpose of `from_meta_tensor`."""
    if "wq" not in name and "wk" not in name:
        return ours
    return ours.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).reshape(ours.shape).contiguous()


def test_metas_files_are_read_without_running_code(tmp_path: Path) -> None:
    c = dataclasses.replace(TINY, rope_theta=500000.0)
    model = build_random(c)
    theirs = {name: to_meta(c, name, p.detach()) for name, p in model.named_parameters()}
    # By the definition of a rotation of neighbouring features, element by element.
    wq, head = theirs["layers.0.attention.wq.weight"], c.head_dim
    assert torch.equal(from_meta_tensor(c, "layers.0.attention.wq.weight", wq)[1], wq[2])
    assert torch.equal(from_meta_tensor(c, "layers.0.attention.wq.weight", wq)[head // 2], wq[1])
    source = tmp_path / "meta"
    source.mkdir()
    params = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "rope_theta": 500000.0, "norm_eps": 1e-5}
    (source / "params.json").write_text(json.dumps(params))
    torch.save(theirs | {"rope.freqs": torch.ones(4)}, source / "consolidated.00.pth")
    BytesTokenizer().save(source)
    script = runpy.run_path(str(CONVERT))
    assert script["main"](["from-meta", str(source), str(tmp_path / "ours")]) == 0
    loaded, _ = load_plain_model(tmp_path / "ours" / "step-0", torch.device("cpu"))
    for (name, p), q in zip(model.named_parameters(), loaded.parameters(), strict=True):
        assert torch.equal(p, q), name

    class Touches:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "touched",)

    torch.save({"layers.0": Touches()}, source / "consolidated.00.pth")
    assert script["main"](["from-meta", str(source), str(tmp_path / "other")]) == 2
    assert not (tmp_path / "touched").exists()


def test_the_commands_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = save_model(tmp_path / "run", build_random(TINY))
    convert = runpy.run_path(str(CONVERT))["main"]
    assert convert(["to-hf", str(tmp_path / "run"), str(tmp_path / "hf"), "--dtype", "bfloat16"]) == 0
    assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    assert f"Wrote {tmp_path / 'back' / 'step-0'}" in capsys.readouterr().out
    before, after = weights_of(checkpoint, TINY), weights_of(tmp_path / "back" / "step-0", TINY)
    assert all(torch.equal(before[key].bfloat16().float(), after[key]) for key in before)
    assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "back")]) == 2
    assert convert(["to-hf", str(tmp_path / "nothing"), str(tmp_path / "hf2")]) == 2
    # An unknown tensor in the folder would be lost without a word.
    (file,) = (tmp_path / "hf").glob("*.safetensors")
    save_file(load_file(file) | {"model.extra.weight": torch.ones(1)}, file, metadata={"format": "pt"})
    assert convert(["from-hf", str(tmp_path / "hf"), str(tmp_path / "third")]) == 2
    assert "model.extra.weight" in capsys.readouterr().err
