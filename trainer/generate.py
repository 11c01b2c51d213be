"""Text from a model, one token at a time.

The whole prefix is computed again for each token: simple, and enough to look at a model.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

NextLogits = Callable[[Sequence[int]], Tensor]


def build_next_logits(model: nn.Module, device: torch.device) -> NextLogits:
    """Return f(ids) -> logits_V of the token after them, of a plain model."""
    return lambda ids: model(torch.tensor([ids], device=device))[0, -1]


def pick_token(logits_V: Tensor, *, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """Draw an id from float32 logits; temperature 0 takes the likeliest, top_k 0 leaves all ids in."""
    if temperature == 0:
        return int(logits_V.argmax().item())
    if 0 < top_k < logits_V.numel():
        floor = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < floor, -torch.inf)
    probabilities = torch.softmax(logits_V / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator).item())


@torch.no_grad()
def generate(
    next_logits: NextLogits,
    prompt: Sequence[int],
    *,
    vocab_size: int,
    temperature: float,
    top_k: int,
    seed: int,
) -> Iterator[int]:
    """Yield ids below `vocab_size` that continue `prompt`, without end.

    Where `next_logits` is collective, so is taking an id: every rank takes the same number of them, whatever they are.
    Has its own random generator, so it doesn't disturb training.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    while True:
        logits_V = next_logits(ids)[:vocab_size].float().cpu()
        ids.append(pick_token(logits_V, temperature=temperature, top_k=top_k, generator=generator))
        yield ids[-1]


def before_stop(ids: Iterable[int], stop_id: int) -> list[int]:
    """Return the ids before the first `stop_id`, taking no more than needed."""
    return list(itertools.takewhile(lambda id: id != stop_id, ids))
