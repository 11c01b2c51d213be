"""Generation continues a text the same way in training and from a checkpoint."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny_run import arguments, launch_all, write_dataset
from torch import Tensor, nn

from scripts import generate as door
from trainer.checkpoint.plain import load_plain_model
from trainer.generate import before_stop, build_next_logits, generate, pick_token

CPU = torch.device("cpu")


def draw(logits: list[float], temperature: float, top_k: int, seed: int = 0) -> int:
    generator = torch.Generator().manual_seed(seed)
    return pick_token(torch.tensor(logits), temperature=temperature, top_k=top_k, generator=generator)


def test_temperature_zero_and_one_candidate_take_the_likeliest() -> None:
    logits = [0.1, 0.4, 0.2]
    for seed in range(20):
        assert draw(logits, temperature=0, top_k=0, seed=seed) == 1
        assert draw(logits, temperature=5, top_k=1, seed=seed) == 1


def test_only_the_likeliest_k_are_drawn_and_all_of_them() -> None:
    drawn = {draw([3.0, 1.0, 2.0, 0.0], temperature=10, top_k=2, seed=seed) for seed in range(50)}
    assert drawn == {0, 2}
    assert {draw([3.0, 1.0, 2.0, 0.0], temperature=10, top_k=0, seed=seed) for seed in range(100)} == {0, 1, 2, 3}


def test_a_low_temperature_sharpens() -> None:
    logits = [1.0, 0.0]
    likelier = [sum(draw(logits, temperature, 0, seed) == 0 for seed in range(200)) for temperature in (0.2, 5.0)]
    assert likelier[0] > 190 > 130 > likelier[1]


class Next(nn.Module):
    """Predicts the id after the last one, and more likely still an id outside the vocabulary."""

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV = nn.functional.one_hot(tokens_BT + 1, 10).float()
        logits_BTV[..., 9] = 5.0
        return logits_BTV


def test_ids_stay_below_the_vocabulary_and_end_before_the_stop() -> None:
    ids = generate(build_next_logits(Next(), CPU), [0, 1], vocab_size=9, temperature=0, top_k=0, seed=0)
    assert before_stop(ids, stop_id=7) == [2, 3, 4, 5, 6]


def test_sampling_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    ids = generate(build_next_logits(Next(), CPU), [0], vocab_size=9, temperature=1.0, top_k=0, seed=0)
    list(itertools.islice(ids, 3))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("dtype", "tp"), [("float32", 1), ("bfloat16", 1), ("float32", 2)], ids=["float32", "bfloat16", "tp"]
)
def test_a_checkpoint_of_two_ranks_gives_the_sample_of_its_training(
    tmp_path: Path, dtype: str, tp: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under tp the text grows past odd lengths, and 259 ids don't divide evenly."""
    write_dataset(tmp_path)
    command = arguments(
        tmp_path,
        training__steps=12,
        training__mixed_precision_param=dtype,
        parallelism__tensor_parallel_degree=tp,
        model__args__vocab_size=259,
        sample__tokens=20,
        sample__prompt="Document 3",
        sample__temperature=0.9,
        sample__top_k=9,
    )
    ((result,), _) = run_ranks(launch_all, 2, [command])
    (sample,) = [line for line in result.log if "Sample after step 12:\n" in line]
    flags = ["--tokens=20", "--prompt=Document 3", "--temperature=0.9", "--top-k=9", "--seed=0"]
    folder = tmp_path / "run" / "checkpoint"
    (folder / "step-13.partial").mkdir()
    for checkpoint, told in (
        (folder, "step-13.partial is skipped: the save was not finished\n"),
        (folder / "step-12", ""),
    ):
        assert door.main([f"--checkpoint={checkpoint}", *flags]) == 0
        captured = capsys.readouterr()
        assert captured.out.rstrip("\n") == sample.partition(":\n")[2].rstrip("\n")
        assert captured.err == told
    model, _ = load_plain_model(checkpoint, CPU)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}, "what training computed in"
    assert door.main([f"--checkpoint={tmp_path}/nothing", *flags]) == 2
    assert "no complete checkpoint there" in capsys.readouterr().err
