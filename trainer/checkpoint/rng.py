"""The state of the random number generators of this process, as plain tensors that a checkpoint can hold.

Owns their layout. Which rank's state is which, and under which keys it is saved, is the caller's to decide.
"""

import random

import numpy as np
import torch

_PYTHON_VERSION = 3  # of the tuple of random.getstate, the same since Python 3.2


def seed_random(seed: int) -> None:
    """Seed every generator whose state a checkpoint holds, so that a run from its start is a function of the seed."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def random_state() -> dict[str, torch.Tensor]:
    """Return the states of torch on the CPU, of the current CUDA device if there is one, of `random` and of numpy."""
    _, words, normal = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    state = {
        "cpu": torch.get_rng_state(),
        "python": torch.tensor([*words, normal is not None]),
        "python_normal": torch.tensor([normal or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*of_numpy["state"]["key"].tolist(), of_numpy["state"]["pos"], of_numpy["has_gauss"]]),
        "numpy_normal": torch.tensor([of_numpy["gauss"]], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_random_state(state: dict[str, torch.Tensor]) -> None:
    """Set the generators of this process to what `random_state` returned. One without an entry stays as it is."""
    if "cpu" in state:
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    if "python" in state:
        *words, has_normal = state["python"].tolist()
        random.setstate((_PYTHON_VERSION, tuple(words), state["python_normal"].item() if has_normal else None))
    if "numpy" in state:
        *keys, position, has_normal = state["numpy"].tolist()
        words_of_numpy = np.array(keys, dtype=np.uint32)
        np.random.set_state(("MT19937", words_of_numpy, position, has_normal, state["numpy_normal"].item()))
