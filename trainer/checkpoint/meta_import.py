"""Reading Meta's original Llama files: `params.json` and one `consolidated.00.pth`, without running code from them."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from trainer.checkpoint.hf_export import Progress, find_tokenizer, state_of_weights, write_weights
from trainer.models.llama.config import parameter_names
from trainer.models.llama.hf import from_meta_config, from_meta_tensor

_UNUSED = "rope.freqs"  # follows from params.json


def import_meta(
    source: Path, folder: Path, *, name: str, dtype: torch.dtype, progress: Progress = lambda done, total: None
) -> Path:
    """Write the weights of Meta's folder as the checkpoint of step 0 in `folder`, and return its path.

    The file is mapped, and read by an unpickler that admits tensors only. Models split over several files are refused:
    Hugging Face has them whole. Raises ValueError.
    """
    files = sorted(source.glob("consolidated.*.pth"))
    if len(files) != 1:
        raise ValueError(
            f"{source}: {len(files)} files consolidated.*.pth, and only a model in one file is read. "
            "Use Meta's release in Hugging Face's format: convert.py from-hf"
        )
    try:
        params = json.loads((source / "params.json").read_bytes())
        tensors = torch.load(files[0], map_location="cpu", mmap=True, weights_only=True)
        tensors.pop(_UNUSED, None)
        widths = tensors["layers.0.feed_forward.w1.weight"].shape[0], tensors["tok_embeddings.weight"].shape[0]
        shape = from_meta_config(params, *widths)
    except Exception as error:  # bytes from a stranger can fail in any way
        raise ValueError(f"{source}: refused, it is hostile or not Meta's: {error}") from error
    if tensors.keys() != set(parameter_names(shape)):
        differing = sorted(tensors.keys() ^ set(parameter_names(shape)))
        raise ValueError(f"{files[0]}: its tensors are not those of params.json: {', '.join(differing[:20])}")
    return write_weights(
        folder,
        {f"model.{key}": torch.empty(value.shape, dtype=dtype, device="meta") for key, value in tensors.items()},
        lambda key: from_meta_tensor(shape, key, tensors[key.removeprefix("model.")]).to(dtype),
        state=state_of_weights(name, shape, dtype, int(params.get("max_seq_len", 2048))),
        tokenizer=find_tokenizer(source),
        progress=progress,
    )
