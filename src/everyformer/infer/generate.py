"""Generating: the next token, again and again.

The definition: the next token is drawn from softmax(logits / temperature) of the model on the last `context` tokens;
temperature 0 is the most likely one. The cache is a way of computing that, so cached and uncached runs agree. Once the
context is full the window slides, and as every position in it has moved it is read anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from everyformer.network.model import Network
from everyformer.network.past import Past


def sample(logits_BV: Tensor, temperature: float = 1.0, generator: torch.Generator | None = None) -> Tensor:
    """One token id for each row. The generator lives on the CPU, so a seed means the same on every device."""
    if temperature < 0:
        raise ValueError(f"temperature is {temperature}: give 0 (the most likely token) or more")
    if temperature == 0:
        return logits_BV.argmax(-1)
    share_BV = (logits_BV.double().cpu() / temperature).softmax(-1)
    return torch.multinomial(share_BV, 1, generator=generator)[:, 0].to(logits_BV.device)


@torch.no_grad()
def generate(
    network: Network,
    prompts: Sequence[Sequence[int]] | Tensor,
    tokens: int,
    *,
    temperature: float = 1.0,
    seed: int | None = None,
    context: int | None = None,
    cached: bool = True,
    **options: Any,
) -> list[list[int]]:
    """Each prompt with `tokens` more; prompts may differ in length. Options go to the network (`source=`, ...)."""
    token_BT, visible_BT = _pad(prompts, next(network.parameters()).device)
    context = context or network.limit or token_BT.shape[1] + tokens
    if network.limit is not None and context > network.limit:
        raise ValueError(f"a context of {context} is more than the {network.limit} positions that the model knows")
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    was_training = network.training
    network.eval()
    past, fed = Past(), 0
    for _ in range(tokens):
        visible = None if bool(visible_BT.all()) else visible_BT
        if cached and token_BT.shape[1] <= context:
            part = None if visible is None else visible[:, fed:]
            output = network(token_BT[:, fed:], visible=part, past=past, **options)
            past, fed = output.past or past, token_BT.shape[1]
        else:
            part = None if visible is None else visible[:, -context:]
            output = network(token_BT[:, -context:], visible=part, **options)
        new_B = sample(output.logits[:, -1], temperature, generator)
        token_BT = torch.cat((token_BT, new_B[:, None]), dim=1)
        visible_BT = torch.cat((visible_BT, visible_BT.new_ones(len(new_B), 1)), dim=1)
    network.train(was_training)
    return [row[seen].tolist() for row, seen in zip(token_BT, visible_BT, strict=True)]


def _pad(prompts: Sequence[Sequence[int]] | Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one batch, padded on the left so that all end together."""
    rows = [[int(token) for token in row] for row in prompts]
    if not rows or not all(rows):
        raise ValueError(
            "an empty prompt: the first token needs something before it; begin with a start token or a newline"
        )
    longest = max(map(len, rows))
    token_BT = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=device)
    visible_BT = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    return token_BT, visible_BT
