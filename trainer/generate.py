"""Text from a model, one token at a time.

The whole prefix is computed again for each token: simple, and enough to look at a model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


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
    model: nn.Module,
    prompt: Sequence[int],
    *,
    tokens: int,
    vocab_size: int,
    stop_id: int,
    device: torch.device,
    temperature: float,
    top_k: int,
    seed: int,
) -> list[int]:
    """Return `prompt` continued by at most `tokens` ids below `vocab_size`, ending before `stop_id`.

    Collective over the data axes where the model is sharded: every rank calls with the same arguments and draws
    the same ids. Has its own random generator, so it doesn't disturb training.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        logits_BTV = model(torch.tensor([ids], device=device))
        logits_V = logits_BTV[0, -1, :vocab_size].float().cpu()
        chosen = pick_token(logits_V, temperature=temperature, top_k=top_k, generator=generator)
        if chosen == stop_id:
            break
        ids.append(chosen)
    return ids
